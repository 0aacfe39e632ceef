"""encoders.batch_size where a run leaves it open: how much fits this machine's GPUs, as emulated ones say."""

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
"""Beyond that an encoder gains nothing more: its matrix products fill any GPU."""

_PROBED = 8
"""Samples at once that are tried besides one: what they take grows evenly with their number."""


class EncodeBatch(NamedTuple):
    """`size` for encoders.batch_size, and how encoders are on the GPU with it: None where not even 1 has room."""

    size: int
    way: Way | None
    need: EncodersNeed


def with_batch_size(run: RunConfig, workers: int) -> RunConfig:
    """The run with encoders.batch_size chosen for this machine's GPUs, which `workers` share, where it is auto.

    Unchanged where encoders run on the CPU or there is no GPU. It stays at its default, with a notice, where the
    catalogue lacks the encoders, or no emulated GPU can run them.
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
    log.notice(f"encoders.batch_size: {found.size}, {_fit(found, run, least, workers, processes)}")
    return run.model_copy(update={"encoders": run.encoders.model_copy(update={"batch_size": found.size})})


def encode_batch(run: RunConfig, gpu: Gpu, processes: int = 1) -> EncodeBatch | None:
    """The largest power of two of images, or of frames, and of captions, that each of `processes` has room for on
    `gpu`, in the run's largest bucket; at most MOST.

    None where the catalogue does not have the model of the run, or its encoders. Raises UserError where there is no
    emulated GPU.
    """
    requests = _requests(run, gpu)
    if not requests:
        return None
    text = run.encoders.text
    with EmulatedGpus(gpu, 1) as gpus:
        encoding = {samples: gpus.attempt(request) for samples, request in requests.items()}
    need = encoders_need(encoding, None if text is None else text_bytes(text), frames_of(_largest(run)))
    way = need.way(gpu, processes)
    within = room(gpu, processes, KEPT_FREE)
    sizes = (1 << power for power in reversed(range(MOST.bit_length())))
    fitting = 1 if way is None else next((size for size in sizes if need.taken(way, size) <= within), 1)
    return EncodeBatch(fitting, way, need)


def _fit(found: EncodeBatch, run: RunConfig, gpu: Gpu, workers: int, processes: int) -> str:
    """How many fit, and how; or what has no room, and what takes less. Of all `workers` each GPU has `processes`."""
    fits = f"which fits the {gpu.title} (emulated)"
    if found.way == "together":
        return fits
    if found.way == "in turns":
        return f"{fits} where text encoders and VAE take turns; {_waiting(found.need, run, workers, memory_bytes())}"
    name, nbytes = found.need.larger
    share = "" if processes == 1 else f" of each of {processes} workers"
    return (
        f"and even that does not fit the {gpu.title} (emulated): {gib(nbytes)} are needed for the {name}{share}, "
        f"and {gib(max(room(gpu, processes), 0))} are free; {_less(name, run, processes)}"
    )


def _waiting(need: EncodersNeed, run: RunConfig, workers: int, host: int) -> str:
    """What waits on a host of so many bytes; and, where that is more than it has, what takes less."""
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


def _less(name: str, run: RunConfig, processes: int) -> str:
    """What of a run to change for encoders that have no room."""
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
    """The encode phase of extraction, in the dtypes of the run; empty where the catalogue does not have it."""
    image = run.encoders.image
    if run.model.name is None or not isinstance(image, VaeCodec):
        return {}
    model = find_model(run.model.name)
    largest = _largest(run)
    size, frames = (largest[-2], largest[-1]), frames_of(largest) if model.video else None
    found = encoding_requests(ResolvedRequest(model=model, gpu=gpu, resolution=size, frames=frames), _PROBED)
    dtype = run.encoders.text and run.encoders.text.dtype

    def own(encoders: OnlineEncoders) -> OnlineEncoders:
        text = tuple(encoder.model_copy(update={"dtype": dtype}) for encoder in encoders.text)
        vae = encoders.vae.model_copy(update={"dtype": image.dtype, "tiling": image.tiling})
        return encoders.model_copy(update={"vae": vae, "text": text})

    return {
        samples: each.model_copy(update={"encoders": own(each.encoders)})
        for samples, each in found.items()
        if each.encoders is not None
    }
