"""`bigdit setup` with small wheels in place of torch's, and what commands say without the CUDA build of torch."""

import os
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import run_command
from disks import mounted
from running import ended, until
from wheels import wheel

import bigdit

TORCH = version("torch").partition("+")[0]
WITH_CUDA, WITH_CUDA_12, WITHOUT_CUDA = (
    f"__version__ = '{TORCH}+it'\ncuda: Optional[str] = {cuda}\n" for cuda in ("'13.0'", "'12.8'", None)
)
TRITON = "triton~=9.1; platform_system == 'Linux'"

MAIN = "from bigdit.cli import main; main()"
PIP_INSTALLED = f"import bigdit.processes as c, pathlib; c.ROOT = pathlib.Path('/absent'); {MAIN}"
"""bigdit without this checkout and its .venv-cuda."""


def torch_wheel(folder, text, *requires):
    required = [f"Requires-Dist: {each}" for each in requires]
    return wheel(folder, "torch", TORCH, {"torch/__init__.py": "", "torch/version.py": text}, *required)


@pytest.fixture
def wheels(tmp_path):
    folder = torch_wheel(tmp_path / "wheels", WITH_CUDA, "numpy", "triton-xpu==1", TRITON)
    return wheel(folder, "triton", "9.1.2", {"triton/__init__.py": ""})


def variables(cache, wheels, **more):
    """The environment of a user whose pip is restricted to CPU builds, and to these wheels."""
    constraint = wheels / "constraints.txt"
    constraint.write_text(f"torch=={version('torch')}\n")
    pip = {"NO_INDEX": 1, "FIND_LINKS": wheels, "CONSTRAINT": constraint, "CONFIG_FILE": os.devnull, "RETRIES": 1}
    own = {"BIGDIT_CUDA_PYTHON": "", "BIGDIT_CACHE": cache} | {f"PIP_{name}": value for name, value in pip.items()}
    return {name: str(value) for name, value in (own | more).items()}


def setup(cache, wheels, **more):
    return run_command(sys.executable, "-c", PIP_INSTALLED, "setup", timeout=60, **variables(cache, wheels, **more))


def test_setup_adds_torch_and_its_triton_to_what_is_there(tmp_path, wheels):
    made, again = (setup(tmp_path / "cache", wheels) for _ in range(2))
    assert made.returncode == again.returncode == 0, made.stderr
    (folder,) = (tmp_path / "cache/cuda").iterdir()
    found = f"{folder}/bin/python has torch {TORCH}+it CUDA 13.0: "
    assert made.stdout == f"{found}`bigdit plan` uses it from now on\n"
    assert (again.stdout, again.stderr) == (f"{found}nothing to do\n", "")
    code = "import torch, triton, bigdit; print(torch.__file__, triton.__file__, bigdit.__file__)"
    imported = subprocess.check_output([folder / "bin/python", "-P", "-c", code], text=True, cwd="/").split()
    packages = next(folder.glob("lib/*/site-packages"))
    assert imported == [f"{packages}/torch/__init__.py", f"{packages}/triton/__init__.py", bigdit.__file__]


@pytest.mark.parametrize(
    ("more", "printed"),
    [
        ({"PIP_FIND_LINKS": "/absent"}, f"pip found no torch==={TORCH} (Could not find a version"),
        (
            {"PIP_NO_INDEX": 0, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_FIND_LINKS": ""},
            f"pip reached no index for torch==={TORCH}; run",
        ),
        ({"PIP_REQUIRE_HASHES": 1}, f"pip install torch==={TORCH}: Hashes are required"),
        ({"BIGDIT_CACHE": "/dev/null"}, "BIGDIT_CACHE: cannot write /dev/null/emulator: Not a directory"),
    ],
)
def test_setup_says_why_pip_failed_and_leaves_nothing(tmp_path, wheels, more, printed):
    failed(setup(tmp_path / "cache", wheels, **more), printed, tmp_path / "cache")


@pytest.mark.parametrize(
    ("torch", "printed"),
    [
        (WITHOUT_CUDA, f"pip found a torch {TORCH} for no CUDA 13; set PIP_INDEX_URL to"),
        (WITH_CUDA_12, f"pip found a torch {TORCH} for no CUDA 13; set PIP_INDEX_URL to"),
        (WITH_CUDA, "pip found no triton~=9.1 (Could not find a version"),
    ],
    ids=["CPU", "CUDA 12", "Triton"],
)
def test_setup_takes_no_other_build_and_no_torch_without_its_triton(tmp_path, torch, printed):
    failed(setup(tmp_path / "cache", torch_wheel(tmp_path / "wheels", torch, TRITON)), printed, tmp_path / "cache")


def test_setup_on_a_full_disk(tmp_path, wheels):
    torch_wheel(wheels, WITH_CUDA + "#" * 2**21)
    with mounted(tmp_path / "cache", "size=1536k") as cache:
        failed(setup(cache, wheels), f"the disk of {cache}/cuda is full", cache)


def failed(done, printed, cache):
    """It ended with this error, and left nothing installed."""
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {printed}"), done.stderr
    assert [*cache.glob("cuda/*")] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_one_setup_at_a_time_and_an_interrupted_one_ends_with_its_pip(tmp_path, wheels, number, status):
    cache = tmp_path / "cache"
    with socket.create_server(("127.0.0.1", 0)) as index:  # which never answers
        silent = variables(cache, wheels, PIP_NO_INDEX=0, PIP_INDEX_URL=f"http://127.0.0.1:{index.getsockname()[1]}/")
        first = subprocess.Popen(
            [sys.executable, "-c", PIP_INSTALLED, "setup"], env=os.environ | silent, stderr=subprocess.PIPE, text=True
        )
        index.accept()
        started = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        failed(setup(cache, wheels), f"another process is writing {cache}/cuda/torch-{TORCH}-", tmp_path / "none")
        first.send_signal(number)
        _, printed = first.communicate(timeout=30)
        until(lambda: ended(started))
    assert first.returncode == status
    if number == signal.SIGINT:
        assert printed.splitlines()[-1] == "interrupted"
        assert [*(cache / "cuda").iterdir()] == []
    assert setup(cache, wheels).returncode == 0
    assert len([*(cache / "cuda").iterdir()]) == 1


ASKED = {
    "plan": ("--model", "dit-s-2-paper", "--gpu", "a40"),
    "profile": ("--model", "dit-s-2-paper"),
    "bench memory": ("--model", "dit-s-2-paper", "--gpu", "a40"),
    "emulate": ("--gpu", "a40", "--", "true"),
    "setup": (),
}
RUNS = ("plan", "profile", "bench memory")
OTHER_SYSTEM = f"import platform; platform.system, platform.machine = lambda: 'Darwin', lambda: 'arm64'; {MAIN}"
LACKS = f"{sys.executable} has torch {version('torch')}, not its build for CUDA 13"


@pytest.mark.parametrize(
    ("program", "lacking", "commands", "printed"),
    [
        (PIP_INSTALLED, {}, RUNS, f"emulated GPUs need torch for CUDA 13, and {LACKS}; run `bigdit setup` once"),
        (OTHER_SYSTEM, {}, ASKED, "emulated GPUs run on Linux on x86-64 only, and this is Darwin on arm64"),
        (MAIN, {"CC": "no-such-cc"}, ASKED, "no C compiler: no-such-cc is not found"),
        (MAIN, {"BIGDIT_CUDA_PYTHON": sys.executable}, (*RUNS, "setup"), f"BIGDIT_CUDA_PYTHON: {LACKS}; name another"),
        (MAIN, {"BIGDIT_CUDA_PYTHON": "/absent"}, RUNS, "BIGDIT_CUDA_PYTHON: /absent cannot be run; name another"),
    ],
    ids=["torch", "system", "compiler", "named", "absent"],
)
def test_what_emulated_gpus_lack_is_the_only_line(tmp_path, program, lacking, commands, printed):
    for command in commands:
        words = (*command.split(), *ASKED[command])
        own = {"BIGDIT_CUDA_PYTHON": "", "BIGDIT_CACHE": str(tmp_path / "cache")} | lacking
        done = run_command(sys.executable, "-c", program, *words, timeout=60, **own)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {printed}"), done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "cache").exists()
