"""Chooses encoders.batch_size if a run does not: the most that fits this machine's GPUs, tried on emulated ones."""

from __future__ import annotations

import math
from typing import NamedTuple

from bigdit import log
from bigdit.catalog import Gpu, find_model, found_gpus
from bigdit.catalog.encoders import OnlineEncoders
from bigdit.config.data import VaeCodec, frames_of
from bigdit.config.run import RunConfig
from bigdit.encoders.host_bytes import text_bytes
from bigdit.errors import UserError
from bigdit.machine import memory_bytes
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.pool import WorkerError
from bigdit.search.dataset import KEPT_FREE, EncodersNeed, Way, encoders_need, encoding_requests, room
from bigdit.search.plan import ResolvedRequest
from bigdit.units import gib

MOST = 256
"""Larger batches are not faster, since the matrix products of an encoder already fill any GPU."""

_PROBED = 8
"""One sample and so many are tried. Memory grows linearly with the number."""


class EncodeBatch(NamedTuple):
    """`size` for encoders.batch_size. `way`: how encoders are on the GPU with it; None if not even 1 fits."""

    size: int
    way: Way | None
    need: EncodersNeed


def with_batch_size(run: RunConfig, workers: int) -> RunConfig:
    """The run with encoders.batch_size chosen, if it is auto, for this machine's GPUs, which `workers` share.

    The run does not change if encoders run on the CPU or there is no GPU. If the catalogue lacks the encoders, or no
    emulated GPU can run them, the default stays, with a notice.
    """
    if run.encoders.batch_size != "auto" or run.encoders.device == "cpu":
        return run
    try:
        gpus = found_gpus()
    except UserError:
        return run
    least, processes = min(gpus, key=lambda gpu: gpu.usable_bytes), -(-workers // len(gpus))
    try:
        found = encode_batch(run, least, processes)
    except (UserError, WorkerError) as error:
        log.notice(f"encoders.batch_size stays at its default: {str(error).splitlines()[0]}")
        return run
    if found is None:
        log.notice("encoders.batch_size stays at its default: the catalogue does not have these encoders")
        return run
    log.notice(f"encoders.batch_size: {found.size}, {_explanation(found, run, least, workers, processes)}")
    return run.model_copy(update={"encoders": run.encoders.model_copy(update={"batch_size": found.size})})


def encode_batch(run: RunConfig, gpu: Gpu, processes: int = 1) -> EncodeBatch | None:
    """The largest batch, a power of two up to MOST, that fits on `gpu` in each of `processes`.

    It counts images or frames of the run's largest bucket, and captions. None if the catalogue lacks the model of the
    run, or its encoders. Raises UserError without an emulated GPU.
    """
    requests = _requests(run, gpu)
    if not requests:
        return None
    text = run.encoders.text
    with EmulatedGpus(gpu, 1) as gpus:
        encoding = {samples: gpus.attempt(request) for samples, request in requests.items()}
    need = encoders_need(encoding, None if text is None else text_bytes(text), frames_of(_largest(run)))
    way = need.way(gpu, processes)
    available = room(gpu, processes, KEPT_FREE)
    sizes = (1 << power for power in reversed(range(MOST.bit_length())))
    fitting = 1 if way is None else next((size for size in sizes if need.taken(way, size) <= available), 1)
    return EncodeBatch(fitting, way, need)


def _explanation(found: EncodeBatch, run: RunConfig, gpu: Gpu, workers: int, processes: int) -> str:
    """How the batch fits, or what does not fit, and the fix. Each GPU has `processes` of all `workers`."""
    fits = f"which fits the {gpu.title} (emulated)"
    if found.way == "together":
        return fits
    if found.way == "in turns":
        waiting = _explain_waiting(found.need, run, workers, memory_bytes())
        return f"{fits} where text encoders and VAE take turns; {waiting}"
    name, nbytes = found.need.larger
    share = "" if processes == 1 else f" of each of {processes} workers"
    return (
        f"and even that does not fit the {gpu.title} (emulated): {gib(nbytes)} are needed for the {name}{share}, "
        f"and {gib(max(room(gpu, processes), 0))} are free; {_fix(name, run, processes)}"
    )


def _explain_waiting(need: EncodersNeed, run: RunConfig, workers: int, host: int) -> str:
    """How much waits in CPU memory of `host` bytes, and the fix if that is too much."""
    nbytes = need.waiting * workers
    weights = f"{gib(nbytes)} of weights{'' if workers == 1 else f' of {workers} workers'}"
    if nbytes <= host:
        return f"{weights} wait in CPU memory"
    text = run.encoders.text
    half = "encoders.text.dtype: bf16 takes half" if text is not None and text.dtype == "fp32" else "swap may hold them"
    return (
        f"{weights} have to wait in CPU memory, which is {gib(host)}, so that extraction may be killed; "
        f"{'fewer data.workers take less' if workers > 1 else half}"
    )


def _fix(name: str, run: RunConfig, processes: int) -> str:
    """What to change in a run whose encoders do not fit."""
    if processes > 1:
        return "fewer data.workers"
    text, image = run.encoders.text, run.encoders.image
    if name == "VAE":
        half = "encoders.image.dtype: bf16, " if isinstance(image, VaeCodec) and image.dtype == "fp32" else ""
        return f"{half}encoders.image.tiling or smaller data.buckets take less"
    if text is not None and text.dtype == "fp32":
        return "encoders.text.dtype: bf16 takes half"
    return "encoders.device: cpu takes nothing of a GPU"


def _largest(run: RunConfig) -> tuple[int, ...]:
    return max(run.data.all_buckets, key=math.prod)


def _requests(run: RunConfig, gpu: Gpu) -> dict[int, StepRequest]:
    """The encode phase of extraction, in the run's dtypes, by number of samples; empty if the catalogue lacks it."""
    image = run.encoders.image
    if run.model.name is None or not isinstance(image, VaeCodec):
        return {}
    model = find_model(run.model.name)
    largest = _largest(run)
    size, frames = (largest[-2], largest[-1]), frames_of(largest) if model.video else None
    found = encoding_requests(ResolvedRequest(model=model, gpu=gpu, resolution=size, frames=frames), _PROBED)
    dtype = run.encoders.text and run.encoders.text.dtype

    def in_dtypes(encoders: OnlineEncoders) -> OnlineEncoders:
        text = tuple(encoder.model_copy(update={"dtype": dtype}) for encoder in encoders.text)
        vae = encoders.vae.model_copy(update={"dtype": image.dtype, "tiling": image.tiling})
        return encoders.model_copy(update={"vae": vae, "text": text})

    return {
        samples: each.model_copy(update={"encoders": in_dtypes(each.encoders)})
        for samples, each in found.items()
        if each.encoders is not None
    }
