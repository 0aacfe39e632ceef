"""Compilation by Inductor and Triton, which is real. Autotuners time nothing: their first candidate is taken.

A compilation that fails for a reason outside the script gets a notice with the fix.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from . import imports, notices, values
from .imports import replacing

_UNTIMED = "an autotuner took its first candidate: nothing runs here that it could time"


def install(torch: Any) -> None:
    """Replace the benchmarks of Triton and Inductor when they are imported."""
    imports.after("triton.runtime.autotuner", _tune_triton)
    imports.after("torch._inductor.runtime.triton_heuristics", _tune_kernels)
    imports.after("torch._inductor.select_algorithm", _tune_algorithms)
    imports.after("torch._inductor.runtime.benchmarking", _benchmark)
    imports.after("torch._inductor.compile_fx", _note_max_autotune)
    imports.after("torch._dynamo.trace_rules", _keep_out)


def _keep_out(module: Any) -> None:
    """Dynamo would compile the functions that compute values, wherever it runs a part of a script as it is."""
    for part in _COMPUTING:
        module.add(f"{__package__}.{part}")


_COMPUTING = ("values", "host", "sparse", "notices")


def _tune_triton(module: Any) -> None:
    """Candidates that need too much shared memory fail to load, as on a real GPU."""
    never = [float("inf")] * 3
    tuned: Any = None

    @replacing(module.Autotuner, "_bench")
    def bench(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal tuned
        if tuned is self.nargs:  # made by each run
            return never
        self._do_bench = _once
        found = original(self, *args, **kwargs)
        if found != never:
            tuned = self.nargs
            notices.add(_UNTIMED)
        return found


def _once(run: Callable[[], Any], **_: Any) -> list[float]:
    run()
    return [1.0] * 3


def _tune_kernels(module: Any) -> None:
    def first(self: Any, *_: Any, **__: Any) -> dict[Any, float]:
        return {launcher: float(i) for i, launcher in enumerate(self.launchers)}

    @replacing(module.CachingAutotuner, "run")
    def run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        named = zip(self.fn.arg_names, args, strict=False)
        values.unknown([each for name, each in named if name.startswith(("out_ptr", "in_out_ptr"))])
        return result

    module.CachingAutotuner.benchmark_all_configs = first
    module.CachingAutotuner.coordinate_descent_tuning = lambda self, launcher, *args, **kwargs: launcher


def _tune_algorithms(module: Any) -> None:
    """An operator's own kernel comes before Triton's, as in Inductor's deterministic mode."""

    @replacing(module.AlgorithmSelectorCache, "__call__")
    def choose(original: Any, self: Any, name: str, choices: Any, *args: Any, **kwargs: Any) -> Any:
        if len(choices) > 1:
            own = [choice for choice in choices if isinstance(choice, module.ExternKernelCaller)]
            choices = (own or choices)[:1]
        return original(self, name, choices, *args, **kwargs)


def _benchmark(module: Any) -> None:
    """All else that Inductor times, such as fusions, runs once."""

    def once(self: Any, run: Callable[[], Any], *_: Any, **__: Any) -> float:
        run()
        return 1.0

    for benchmarker in ("Benchmarker", "TritonBenchmarker", "InductorBenchmarker", "TorchProfilerBenchmarker"):
        if hasattr(module, benchmarker):
            getattr(module, benchmarker).benchmark_gpu = once


def _note_max_autotune(module: Any) -> None:
    """Add a notice that max-autotune did not tune, also if the graphs come from the cache."""

    @replacing(module, "compile_fx")
    def compile_fx(original: Any, *args: Any, **kwargs: Any) -> Any:
        patches = kwargs.get("config_patches") or {}
        if patches.get("max_autotune", module.config.max_autotune):
            notices.add(_UNTIMED)
        return original(*args, **kwargs)


_COMPILERS = ("torch._inductor", "torch._dynamo", "triton")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLDER = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def explain(chain: Sequence[BaseException]) -> None:
    """Add a notice if these errors, which end the process, are of a compilation that failed outside the script."""
    for error in chain:
        calls = [str(call.f_globals.get("__name__")) for call, _ in traceback.walk_tb(error.__traceback__)]
        if any(call.startswith(_COMPILERS) for call in calls) and (reason := _reason(error)):
            return notices.add(reason)
    return None


def _reason(error: BaseException) -> str:
    """What failed outside the script, and the nearest fix; empty if nothing did."""
    name, text = type(error).__name__, " ".join(str(error).split())
    if name == "TritonMissing":
        return "torch.compile found no Triton, which torch for CUDA requires: pip install it in the version of torch"
    if "PTXASError" in name + text or "PTXAS error" in text:
        return "Triton's assembler ptxas failed; leave TRITON_PTXAS_PATH unset to use Triton's own"
    if isinstance(error, subprocess.CalledProcessError):
        command = error.cmd if isinstance(error.cmd, str) else error.cmd[0]
        return f"the compiler {command} ended with status {error.returncode}; name another in CC"
    if isinstance(error, OSError) and error.errno in _NO_FOLDER:
        folders = (os.environ.get(name, "") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))
        sizes = ((shutil.disk_usage(folder).free, folder) for folder in folders if os.path.isdir(folder))
        free, folder = min(sizes, default=(0, None))
        why = f"{error.strerror}, {free:,} bytes free" if error.errno in _FULL else error.strerror
        return (
            f"the compile cache cannot be written: {error.filename or folder}: {why}; set BIGDIT_CACHE, or "
            "TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR, to another folder"
        )
    return ""
