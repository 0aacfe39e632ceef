"""The interpreter with the CUDA build of torch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from bigdit.checkout import ROOT, in_checkout
from bigdit.errors import UserError


def cuda_python() -> Path:
    """The interpreter of an environment with the CUDA build of torch: BIGDIT_CUDA_PYTHON, or this one where it has it,
    or that of a checkout's `.venv-cuda`.

    Raises UserError where there is none.
    """
    chosen, own = os.environ.get("BIGDIT_CUDA_PYTHON"), Path(sys.executable)
    if not chosen and _has_cuda(own):
        return own
    python = Path(chosen or ROOT / ".venv-cuda" / "bin" / "python")
    if not python.exists():
        missing = f"{python} is no interpreter with" if chosen or in_checkout() else f"{own} is without"
        raise UserError(f"{missing} the CUDA build of torch; {_mends()}")
    return python


def _mends() -> str:
    """What sets up an interpreter with the CUDA build of torch."""
    if in_checkout():
        return "`make cuda` sets one up in .venv-cuda, and BIGDIT_CUDA_PYTHON names another"
    return (
        "`pip install --force-reinstall torch` with no index of CPU builds has it on Linux, and BIGDIT_CUDA_PYTHON "
        "names another interpreter that has it, and what bigdit needs"
    )


def _has_cuda(python: Path) -> bool:
    try:
        cuda_build(python)
    except UserError:
        return False
    return True


@functools.cache
def cuda_build(python: Path) -> str:
    """The version of the torch that `python` has, with the CUDA that it was built for, read without importing it."""
    script = (
        "import importlib.util as u, pathlib as p;"
        "print(p.Path(u.find_spec('torch').origin).with_name('version.py').read_text())"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    found: dict[str, str] = {}
    for name, given, text in (line.partition("=") for line in done.stdout.splitlines()):
        if given and name.split(":")[0].strip() in ("__version__", "cuda"):
            found[name.split(":")[0].strip()] = text.strip().strip("'")
    if found.get("cuda", "None").endswith("None"):
        raise UserError(f"{python} has torch {found.get('__version__', '(none)')}, which is no CUDA build; {_mends()}")
    return f"{found['__version__']} CUDA {found['cuda']}"
