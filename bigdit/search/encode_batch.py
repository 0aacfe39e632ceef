"""How many pictures, and captions, a card encodes at once: from the rehearsed encode phase."""

from __future__ import annotations

from bigdit.catalog import Gpu, batch_shape, find_model
from bigdit.config.run import RunConfig, VaeCodec
from bigdit.errors import UserError
from bigdit.memory.process import cuda_context
from bigdit.rehearse import RehearsalRequest, rehearse
from bigdit.search.dataset import encoding_request
from bigdit.search.question import Question

MOST = 256
"""Beyond that an encoder gains nothing more: its matrix products fill any card."""

_PROBED = (2, 8)  # samples at once that are rehearsed: what they take grows evenly with their number
_KEPT_FREE = 0.1  # of the card: for the pieces between allocations


def encode_batch_size(run: RunConfig, gpu: Gpu) -> int | None:
    """The largest power of two that `gpu` has room for, in the largest of the run's buckets; at most MOST.

    None where the catalogue does not have the model of the run, or its encoders. 1 where not even one fits.
    """
    request = _request(run, gpu)
    if request is None:
        return None
    few, many = (size.ledger.phase("encode").peak_bytes for size in rehearse(request).sizes)
    sample_bytes = max((many - few) / (_PROBED[1] - _PROBED[0]), 1)
    room = gpu.usable_bytes * (1 - _KEPT_FREE) - cuda_context(gpu.compute_capability).high_bytes
    fitting = int((room - (few - _PROBED[0] * sample_bytes)) / sample_bytes)
    return min(1 << max(fitting.bit_length() - 1, 0), MOST) if fitting > 0 else 1


def _request(run: RunConfig, gpu: Gpu) -> RehearsalRequest | None:
    """The encode phase of extraction, in the dtypes of the run."""
    if run.model.name is None or not isinstance(run.encoders.image, VaeCodec):
        return None
    model = find_model(run.model.name)
    largest = max(run.data.buckets, key=lambda sides: sides[0] * sides[1])
    frames = 1 if model.video else None
    try:
        batch = batch_shape(model, largest, frames)
    except UserError:
        return None
    found = encoding_request(Question(model=model, gpu=gpu, resolution=largest, frames=frames), batch)
    if found is None or found.encoders is None:
        return None
    text = tuple(encoder.model_copy(update={"dtype": run.encoders.text.dtype}) for encoder in found.encoders.text)
    vae = found.encoders.vae.model_copy(update={"dtype": run.encoders.image.dtype})
    encoders = found.encoders.model_copy(update={"vae": vae, "text": text})
    return found.model_copy(update={"encoders": encoders, "micro_batch_sizes": _PROBED})
