"""Finds the interpreter for emulated GPUs, which has the CUDA build of torch. Torch is not imported here."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from bigdit.cache import cache_root
from bigdit.emulator.build import check_cache, compiler
from bigdit.errors import UserError, versions
from bigdit.processes import ROOT

CUDA = "13"
"""The major version of CUDA that the stub libraries implement."""


def cuda_python() -> Path:
    """The interpreter that `find_cuda_python` finds.

    Raises UserError if emulated GPUs cannot run, with the command that fixes it.
    """
    check_machine()
    return needed_python()


def needed_python() -> Path:
    """As `cuda_python`, without a look at the machine."""
    found = find_cuda_python()
    if found is None:
        raise UserError(
            f"emulated GPUs need torch for CUDA {CUDA}, and {_without(Path(sys.executable))}; run `bigdit setup` once"
        )
    return found


def check_machine() -> None:
    """Raise UserError unless this is Linux on x86-64 with a C compiler, and a cache for what that compiles."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise UserError(f"emulated GPUs run on Linux on x86-64 only, and this is {system} on {machine}")
    compiler()
    check_cache()


def find_cuda_python() -> Path | None:
    """The interpreter in BIGDIT_CUDA_PYTHON. If unset, the first with the CUDA build of torch among this one, a
    checkout's `.venv-cuda` and that of `bigdit setup`; None if none has it.

    Raises UserError if the one in BIGDIT_CUDA_PYTHON does not have it.
    """
    if chosen := os.environ.get("BIGDIT_CUDA_PYTHON"):
        if not _suits(Path(chosen)):
            problem = f"BIGDIT_CUDA_PYTHON: {_without(Path(chosen))}"
            raise UserError(f"{problem}; name another, or unset it and run `bigdit setup`")
        return Path(chosen)
    places = (Path(sys.executable), python_of(ROOT / ".venv-cuda"), python_of(own_environment()))
    return next((each for each in places if _suits(each)), None)


def cuda_build(python: Path) -> str:
    """The versions of torch in `python`, and of its CUDA. Raises UserError if it has none, or another build."""
    if not _suits(python):
        raise UserError(_without(python))
    return " CUDA ".join(_torch_of(python))


def _suits(python: Path) -> bool:
    return _torch_of(python)[1].partition(".")[0] == CUDA


def _without(python: Path) -> str:
    torch, _ = _torch_of(python)
    if not torch:
        return f"{python} has no torch" if shutil.which(python) else f"{python} cannot be run"
    return f"{python} has torch {torch}, not its build for CUDA {CUDA}"


@functools.cache
def _torch_of(python: Path) -> tuple[str, str]:
    """The versions of torch and its CUDA, empty if missing. Torch is not imported."""
    found: dict[str, str] = {}
    for name, _, text in (line.partition("=") for line in _version_of_torch(python).splitlines()):
        found.setdefault(name.split(":")[0].strip(), text.strip().strip("'"))
    return found.get("__version__", ""), found.get("cuda", "").removesuffix("None")


def _version_of_torch(python: Path) -> str:
    """The text of torch's version.py, empty if missing. A virtual environment shows it; other interpreters are asked,
    which takes as long as their start."""
    environment = python.parent.parent
    found = [*environment.glob("lib/python*/site-packages/torch/version.py")]
    if len(found) == 1 and (environment / "pyvenv.cfg").exists() and os.access(python, os.X_OK):
        return found[0].read_text()
    script = (
        "import importlib.util as u, pathlib as p;"
        "print(p.Path(u.find_spec('torch').origin).with_name('version.py').read_text())"
    )
    try:
        return subprocess.run([python, "-P", "-c", script], capture_output=True, text=True, check=False).stdout
    except BlockingIOError:  # the system's limit of processes
        raise
    except OSError:
        return ""


def own_environment() -> Path:
    """The folder of the environment that `bigdit setup` makes for this one.

    It has another build of the same torch, and shares everything else. So its name has torch, Python and this
    environment.
    """
    torch, (major, minor) = versions()["torch"].partition("+")[0], sys.version_info[:2]
    digest = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    return cache_root() / "cuda" / f"torch-{torch}-py{major}.{minor}-{digest}"


def python_of(environment: Path) -> Path:
    """The interpreter of a virtual environment."""
    return environment / "bin" / "python"
