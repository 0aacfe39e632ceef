"""`bigdit setup`: install the CUDA build of torch for emulated GPUs in an environment of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bigdit import log
from bigdit.errors import UserError, versions
from bigdit.files import alone, commit_folder, filling

_DOWNLOAD, _DISK = "0.72 GB", "2.1 GB"
"""Sizes of torch 2.13.0 and its Triton, measured after installing them."""

_ANOTHER_INDEX = "set PIP_INDEX_URL to an index that has all builds of torch, and run `bigdit setup` again"

_PIP = (
    "import runpy, signal, sys; from bigdit.processes import end_with; "
    "end_with(int(sys.argv.pop(1)), signal.SIGKILL); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
"""Runs pip until the process ends whose id is the first argument."""


def run() -> None:
    """Install the CUDA build of torch that emulated GPUs need, in an environment of its own.

    It needs no GPU and no NVIDIA package. If torch already has CUDA, it installs nothing.
    """
    from bigdit.emulator import interpreter

    interpreter.check_machine()
    if found := interpreter.find_cuda_python():
        log.say(f"{found} has torch {interpreter.cuda_build(found)}: nothing to do")
        return
    torch, folder = versions()["torch"].partition("+")[0], interpreter.own_environment()
    if torch == "missing":
        raise UserError("torch is not installed; setup installs the CUDA build of its version: pip install torch")
    with alone(folder):
        log.notice(
            f"installing the CUDA build of torch {torch} into {folder}: {_DOWNLOAD} to download, {_DISK} on disk"
        )
        build = _make(folder, torch)
    log.say(f"{interpreter.python_of(folder)} has torch {build}: `bigdit plan` uses it from now on")


def _make(folder: Path, torch: str) -> str:
    """Make an environment with this torch and its Triton, which shares all else with the user's.

    Returns its build of torch. The folder appears when it is complete. Raises UserError if it cannot be made.
    """
    import venv

    from bigdit.emulator.interpreter import CUDA, cuda_build, python_of

    try:
        with filling(folder) as new:
            venv.create(new, symlinks=True)
            for script in (new / "bin").glob("[aA]ctivate*"):
                script.unlink()  # it names the temporary folder
            (packages,) = new.glob("lib/python*/site-packages")
            _install(f"torch==={torch}", packages)  # three equals signs: 2.13.0+cpu is none
            try:
                build = cuda_build(python_of(new))
            except UserError:
                raise UserError(f"pip found a torch {torch} for no CUDA {CUDA}; {_ANOTHER_INDEX}") from None
            for triton in _tritons(packages):
                _install(triton, packages)
            (packages / "zz_shared.pth").write_text(_shared())
            commit_folder(new, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    return build


def _install(requirement: str, packages: Path) -> None:
    """Install one package into a folder by pip, with progress on stderr. Raises UserError with pip's reason."""
    import os
    import subprocess
    import sys
    import tempfile

    command = [sys.executable, "-P", "-c", _PIP, str(os.getpid()), "install", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--target", str(packages), requirement]
    with tempfile.TemporaryDirectory(dir=packages) as workspace:  # removed with the folder
        environment = os.environ | {"PIP_CONSTRAINT": os.devnull, "TMPDIR": workspace}
        pip = subprocess.Popen(command, env=environment, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
        assert pip.stderr is not None
        lines = []
        try:
            for line in pip.stderr:
                lines.append(line.rstrip())
                if "Retrying (" in line:
                    log.notice(lines[-1])
            status = pip.wait()
        finally:
            pip.kill()
            pip.wait()
    if status:
        raise UserError(_why(requirement, lines, packages) or f"pip install {requirement} ended with status {status}")


def _why(requirement: str, lines: Sequence[str], packages: Path) -> str:
    """Why pip failed, and the fix, from its stderr; empty if that is empty."""
    import errno

    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    text = "\n".join(lines)
    if "No module named pip" in text:
        return "this environment has no pip, which `bigdit setup` needs: python -m ensurepip"
    if any(f"[Errno {number}]" in text for number in (errno.ENOSPC, errno.EDQUOT)):
        return f"the disk of {packages.parents[3]} is full, and {_DISK} are needed; free some, or set BIGDIT_CACHE"
    if "Retrying (" in text:
        return f"pip reached no index for {requirement}; run `bigdit setup` again with a network"
    if "No matching distribution" in text:
        return f"pip found no {requirement} ({errors[0]}); {_ANOTHER_INDEX}"
    return f"pip install {requirement}: {errors[0]}" if errors else ""


def _tritons(packages: Path) -> list[str]:
    """The Triton that the installed torch requires, such as `triton==3.7.1`."""
    import re
    from importlib.metadata import distributions

    required = [each for found in distributions(name="torch", path=[str(packages)]) for each in found.requires or ()]
    return [found[0] for each in required if (found := re.match(r"triton(?![\w-])[^;]*", each))]


def _shared() -> str:
    """A .pth file that adds the packages of this environment, with those of its own .pth files."""
    import site

    folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    return "".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders)
