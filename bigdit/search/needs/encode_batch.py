"""How many pictures, and captions, a card encodes at once: from the rehearsed encode phase."""

from __future__ import annotations

import math

from bigdit import log
from bigdit.catalog import Gpu, batch_shape, find_model, found_gpus
from bigdit.config.encoders import VaeCodec
from bigdit.config.run import RunConfig
from bigdit.errors import UserError
from bigdit.memory.process import cuda_context
from bigdit.rehearse import RehearsalRequest, rehearse
from bigdit.search.needs.dataset import encoding_request
from bigdit.search.question import Question

MOST = 256
"""Beyond that an encoder gains nothing more: its matrix products fill any card."""

_PROBED = (2, 8)  # samples at once that are rehearsed: what they take grows evenly with their number
_KEPT_FREE = 0.1  # of the card: for the pieces between allocations


def with_batch_size(run: RunConfig, workers: int) -> RunConfig:
    """The run with encoders.batch_size chosen for this machine's cards, which `workers` share, where it is auto.

    Unchanged where encoders run on the host or there are no cards, and, with a notice, where the catalogue cannot say.
    """
    if run.encoders.batch_size != "auto" or run.encoders.device == "cpu":
        return run
    try:
        cards = found_gpus()
    except UserError:
        return run
    least = min(cards, key=lambda card: card.usable_bytes)
    size = encode_batch_size(run, least, -(-workers // len(cards)))
    if size is None:
        log.notice("encoders.batch_size: the catalogue cannot say what these encoders take; it stays at its default")
        return run
    log.notice(f"encoders.batch_size: {size}, of which the rehearsed encode phase fits the {least.title}")
    return run.model_copy(update={"encoders": run.encoders.model_copy(update={"batch_size": size})})


def encode_batch_size(run: RunConfig, gpu: Gpu, processes: int = 1) -> int | None:
    """The largest power of two of pictures, or of frames, that each of `processes` has room for on `gpu`, in the run's
    largest bucket; at most MOST.

    None where the catalogue does not have the model of the run, or its encoders. 1 where not even one fits.
    """
    request = _request(run, gpu)
    if request is None:
        return None
    few, many = (size.ledger.phase("encode").peak_bytes for size in rehearse(request).sizes)
    sample_bytes = max((many - few) / (_PROBED[1] - _PROBED[0]), 1)
    context = cuda_context(gpu.compute_capability, gpu.multiprocessors)
    room = gpu.usable_bytes * (1 - _KEPT_FREE) / processes - context.high_bytes
    fitting = int((room - (few - _PROBED[0] * sample_bytes)) / sample_bytes)
    return min(1 << max(fitting.bit_length() - 1, 0), MOST) if fitting > 0 else 1


def _request(run: RunConfig, gpu: Gpu) -> RehearsalRequest | None:
    """The encode phase of extraction, in the dtypes of the run."""
    if run.model.name is None or not isinstance(run.encoders.image, VaeCodec):
        return None
    model = find_model(run.model.name)
    height, width = max((bucket[-2:] for bucket in run.data.buckets), key=math.prod)
    largest = height, width
    frames = 1 if model.video else None
    try:
        batch = batch_shape(model, largest, frames)
    except UserError:
        return None
    found = encoding_request(Question(model=model, gpu=gpu, resolution=largest, frames=frames), batch)
    if found is None or found.encoders is None:
        return None
    dtype = run.encoders.text and run.encoders.text.dtype
    text = tuple(encoder.model_copy(update={"dtype": dtype}) for encoder in found.encoders.text)
    vae = found.encoders.vae.model_copy(update={"dtype": run.encoders.image.dtype})
    encoders = found.encoders.model_copy(update={"vae": vae, "text": text})
    return found.model_copy(update={"encoders": encoders, "micro_batch_sizes": _PROBED})
