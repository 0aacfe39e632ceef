"""Writes the account of a process: its use of GPUs, and each time that memory ran out. emulation.py reads it."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any

from . import compiling, ending, engines, history, libraries, notices, parent, replay, steps

_ORDER = ("start", "forward", "backward", "step")
_LARGEST = 40
"""Groups of allocated tensors that are listed. The rest is summed up."""


def write(how: str, seconds: float) -> None:
    """Write the account, if this process used a GPU; and the hub's repository that it lacked."""
    absent = _absent_repository() if how == "exit" else None
    if absent is not None:
        parent.write_json(f"absent-{os.getpid()}.json", {"repository": absent})
    if not history.used():
        return
    history.fold(snapshot=f"snapshot-{ending.name}.pickle")
    parent.write_json(f"account-{ending.name}.json", _document(how, seconds))


def _document(how: str, seconds: float) -> dict[str, Any]:
    import torch

    error = _uncaught() if how == "exit" else None
    if error:
        compiling.explain(_chain())
    if steps.backwards and not steps.done:
        notices.add("backward ran and no optimizer stepped: optimizer state is missing from the peak")
    if how == "steps" and steps.done - steps.skipped < 2:
        notices.add("no backward pass ran with optimizer state, which may be the peak; run one step more")
    world = _world_size(torch)
    for name in libraries.refused():
        notices.add(f"{name} was called, and has no answer on an emulated GPU")
    return {
        "pid": os.getpid(),
        "rank": _place("RANK", "SLURM_PROCID"),
        "node": _place("NODE_RANK", "SLURM_NODEID") or 0,
        "world_size": world,
        "argv": [str(part) for part in sys.argv],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)},
        "ended": "exception" if error else how,
        "error": error,
        "seconds": seconds,
        "steps": steps.done,
        "skipped_steps": steps.skipped,
        "backwards": steps.backwards,
        "stepped_after_oom": steps.stepped_after_oom,
        "computed_after_oom": computed_since(),
        "loss_scaler": engines.scales_loss,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "gpus": [_gpu(torch, gpu) for gpu in range(torch.cuda.device_count()) if _was_used(gpu)],
        "out_of_memory": [_oom(at) for at in range(len(shortages))],
        "out_of_memory_count": shortage_count,
        "work": libraries.read_counts(),
        "work_by_step": libraries.by_step,
        "notices": notices.found(),
    }


def _was_used(gpu: int) -> bool:
    found = history.stats(gpu)
    return bool(found) and (found["reserved_bytes"]["all"]["peak"] > 0 or gpu in history.gpus)


def _gpu(torch: Any, gpu: int) -> dict[str, Any]:
    found = history.stats(gpu)
    properties = torch.cuda.get_device_properties(gpu)
    replayed = history.gpus.get(gpu, replay.Replay())
    peak = replay.Peak(replayed.peak.allocated_bytes, replayed.peak.reserved_bytes)
    highest = [found[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes")]
    peak.rise(*highest)
    reset = history.reset_peaks.get(gpu, replay.Peak())
    peak.rise(reset.allocated_bytes, reset.reserved_bytes)
    off = max(replayed.off_bytes, peak.allocated_bytes - replayed.peak.allocated_bytes)
    return {
        "index": gpu,
        "name": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "total_bytes": properties.total_memory,
        "peak_allocated_bytes": peak.allocated_bytes,
        "peak_reserved_bytes": peak.reserved_bytes,
        "peak_phase": replayed.peak_phase,
        "peak_event": replayed.peak_event,
        "retries": found["num_alloc_retries"],
        "phases": [
            {"phase": name, "peak_allocated_bytes": each.allocated_bytes, "peak_reserved_bytes": each.reserved_bytes}
            for name, each in sorted(replayed.phases.items(), key=lambda item: _ORDER.index(item[0]))
        ],
        "phases_off_bytes": off,
        "spans": [{"phase": phase, "start": start} for phase, start in replayed.spans[:_LONGEST]],
        "events": replayed.events,
        "curve": [list(point) for point in replay.thin(replayed.curve)],
        "tensors": _groups(replayed.at_peak, replayed),
    }


_LONGEST = 4000
"""Listed phases, more than a figure can show."""


def _oom(at: int) -> dict[str, Any]:
    """The `at`th time that memory ran out, with the tensors on its GPU at that time."""
    found = shortages[at]
    replayed = history.gpus.get(found["gpu"], replay.Replay())
    before = sum(each["gpu"] == found["gpu"] for each in shortages[:at])
    live = replayed.ooms[before] if before < len(replayed.ooms) else []
    return found | {"allocated_bytes": sum(tensor.nbytes for tensor in live), "tensors": _groups(live, replayed)}


def _groups(tensors: Iterable[replay.Tensor], replayed: replay.Replay) -> list[dict[str, Any]]:
    """Allocated tensors grouped by the lines that made them, the largest first. The last group is the rest."""
    groups: dict[Any, dict[str, Any]] = {}
    for tensor in tensors:
        phase = replayed.marks[tensor.mark].phase if tensor.mark >= 0 else "start"
        script, library = notices.places(notices.of_snapshot(tensor.frames))
        if script is None and tensor.mark >= 0:  # a thread of autograd has a C++ stack
            script = replayed.marks[tensor.mark].place
        key = (_key(script), _key(library), phase)
        group = groups.setdefault(key, {"script": script, "library": library, "phase": phase, "nbytes": 0, "count": 0})
        group["nbytes"] += tensor.nbytes
        group["count"] += 1
    largest = sorted(groups.values(), key=lambda group: -group["nbytes"])
    rest = largest[_LARGEST:]
    if rest:
        nbytes, count = (sum(group[name] for group in rest) for name in ("nbytes", "count"))
        largest[_LARGEST:] = [{"script": None, "library": None, "phase": None, "nbytes": nbytes, "count": count}]
    return largest


def _key(line: notices.LineDict | None) -> tuple[Any, ...] | None:
    return None if line is None else (line["file"], line["line"])


def _uncaught() -> dict[str, Any] | None:
    """The exception that ends this process."""
    import torch

    chain = _chain()
    if not chain:
        return None
    stack = [(step.filename, step.lineno or 0, step.name) for step in traceback.extract_tb(chain[0].__traceback__)]
    return {
        "type": type(chain[0]).__name__,
        "text": str(chain[0])[:2000],
        "out_of_memory": any(isinstance(each, torch.OutOfMemoryError) for each in chain),
        "frames": notices.shown(stack[::-1]),
    }


def _chain() -> list[BaseException]:
    """The uncaught exception that ends this process, and its causes."""
    error = getattr(sys, "last_value", None)
    chain: list[BaseException] = []
    at = None if isinstance(error, (SystemExit, KeyboardInterrupt)) else error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__ or getattr(at, "inner_exception", None)
    return chain


_LOADING = {"huggingface_hub", "transformers", "diffusers"}
_CALLED = ("repo_id", "path_or_repo_id", "pretrained_model_name_or_path", "pretrained_model_name")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def _absent_repository() -> str | None:
    """The repository of models whose absence ended the process. Errors do not name it, so the arguments of the
    libraries' functions are searched."""
    hub, chain = sys.modules.get("huggingface_hub.constants"), _chain()
    if hub is None or not any(
        isinstance(each, OSError) or _package(type(each).__module__) in _LOADING for each in chain
    ):
        return None
    calls = [call for error in chain for call, _ in traceback.walk_tb(error.__traceback__)]
    packages = [_package(call.f_globals.get("__name__")) for call in calls]
    if "datasets" in packages:
        return None
    for call, package in zip(calls, packages, strict=True):
        if package in _LOADING and call.f_locals.get("repo_type") in (None, "model"):
            for name in map(call.f_locals.get, _CALLED):
                if isinstance(name, str) and _REPOSITORY.fullmatch(name) and not _is_here(name, hub.HF_HUB_CACHE):
                    return name
    return None


def _is_here(name: str, cache: str) -> bool:
    """Whether a repository is a folder, or in the hub's cache."""
    return os.path.exists(name) or os.path.exists(os.path.join(cache, f"models--{name.replace('/', '--')}"))


def _package(module: object) -> str:
    return str(module).partition(".")[0]


def _world_size(torch: Any) -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return _place("WORLD_SIZE", "SLURM_NTASKS") or 1


def _place(name: str, of_slurm: str) -> int | None:
    """A number from the launcher's variable; else from SLURM's, if the emulated command started SLURM's tasks."""
    found = _number(name)
    return _number(of_slurm) if found is None and "BIGDIT_EMULATED_NODES" in os.environ else found


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


_MOST_SHORTAGES = 20
shortages: list[dict[str, Any]] = []
shortage_count = 0
_launched = 0  # before memory ran out last


def install(torch: Any) -> None:
    history.when_begun.append(lambda: torch._C._cuda_attach_out_of_memory_observer(observe))


def observe(gpu: int, asked: int, total: int, free: int) -> None:
    """Record an out-of-memory error. The allocator calls this before it raises."""
    global shortage_count, _launched
    shortage_count += 1
    _launched = _launches()
    steps.stepped_after_oom = False
    if len(shortages) >= _MOST_SHORTAGES:
        return
    here = notices.of_stack(sys._getframe().f_back)
    main = notices.of_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    if notices.places(here)[0] is None:  # a thread of autograd, for which the script waits
        here += main
    shortages.append(
        {
            "gpu": gpu,
            "asked_bytes": asked,
            "free_bytes": free,
            "total_bytes": total,
            "phase": steps.phase(),
            "steps": steps.done,
            "frames": notices.shown(here),
        }
    )


def computed_since() -> bool:
    """Whether kernels were launched after memory last ran out."""
    return shortage_count > 0 and _launches() > _launched


def forget() -> None:
    global shortage_count
    shortages.clear()
    shortage_count = 0


def _launches() -> int:
    counted = libraries.read_counts()
    return counted["launches"] + counted["library_calls"]
