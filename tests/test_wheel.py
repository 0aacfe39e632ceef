"""The wheel as pip installs it, away from the checkout, has every file that the commands read."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import ROOT
from gpus import empty_cache
from wheels import wheel

from bigdit.emulator.interpreter import cuda_python

ASKED = ("--model", "dit-s-2-paper", "--gpu", "a40", "--engine", "single", "--optimizer", "adamw")
ON_GPU = "import torch; print(torch.zeros(1 << 20, device='cuda').device)"


def git(*words):
    """The output of a git command in this repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The tracked files, the sdist and the wheel of them, and what building printed."""
    source = tmp_path_factory.mktemp("built")
    ours = [name for name in git("ls-files").splitlines() if not name.startswith(".")]
    for name in ours:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b; b.build_sdist('out'); b.build_wheel('out')"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=240, check=False
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return ours, *sorted((source / "out").iterdir(), key=lambda file: file.suffix), printed


@pytest.fixture(scope="module")
def installed(tmp_path_factory, built):
    """Run commands away from the checkout with the `bigdit` of a fresh environment that has the wheel and this one's
    packages. `bigdit setup` has run there."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    links = wheel(
        folder / "links", "torch", version("torch").partition("+")[0], {"a_torch.pth": f"{_cuda_packages()}\n"}
    )
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "80"}
    plain |= {"BIGDIT_CUDA_PYTHON": "", "BIGDIT_CACHE": str(empty_cache(folder / "cache"))}
    plain |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)}

    def run(*command, **variables):
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env=plain | variables,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _, _, ours, _ = built
    run(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", ours)
    # Folders in a .pth file come after the environment's own. Their .pth files, such as that of an editable checkout,
    # are not read.
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    own = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    (Path(own) / "shared.pth").write_text("\n".join(shared) + "\n")
    found = run(python, "-c", "import bigdit; print(bigdit.__file__)").strip()
    assert Path(found).is_relative_to(own)
    run(environment / "bin/bigdit", "setup")
    return run, environment / "bin/bigdit"


def _cuda_packages():
    """The folder with this checkout's CUDA build of torch."""
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    return Path(subprocess.check_output([cuda_python(), "-P", "-c", code], text=True)).parents[1]


@pytest.mark.slow
def test_the_sdist_is_the_whole_project_and_wheels_lose_no_package(built):
    ours, sdist, wheel, printed = built
    assert "would be ignored" not in printed
    with tarfile.open(sdist) as packed:
        source = {name.partition("/")[2] for name in packed.getnames()}
    assert [name for name in ours if name not in source] == []
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = packed.read(metadata).decode().partition("\n\n")[2]
    relative = re.compile(r"\]\((?![a-z]+:)([^)#]+)")
    assert relative.findall(described) == []
    assert set(relative.findall((ROOT / "README.md").read_text())) <= source & set(re.findall(r"[\w./-]+", described))
    assert [name for name in ours if name.startswith("bigdit/") and name not in names] == []
    assert not any("__pycache__" in name for name in names)


@pytest.mark.slow
def test_commands_answer_and_what_a_plan_prints_is_there_without_a_checkout(installed, tmp_path):
    """A launcher starts the module, which prints its options. Receipts are the user's own."""
    run, bigdit = installed
    python = bigdit.parent / "python"
    assert run(bigdit, "--version").startswith("bigdit ")
    assert "sana-1600m-a40" in run(bigdit, "recipe", "list")
    printed = run(bigdit, "plan", *ASKED, "--out", tmp_path / "plan")
    assert "FITS" in printed
    assert "python -m bigdit.launch " in printed
    assert "<html" in (tmp_path / "plan/report.html").read_text()
    launcher = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1)
    assert "usage: launch.py" in run(*launcher, "-m", "bigdit.launch", "--help")
    folders = "from bigdit.search.calibration import folders; print(*folders(), sep='\\n')"
    assert run(python, "-c", folders, BIGDIT_RECEIPTS=str(tmp_path)).splitlines() == [str(tmp_path)]


@pytest.mark.slow
def test_doctor_shows_the_environment_of_setup(installed):
    run, bigdit = installed
    emulated = json.loads(run(bigdit, "doctor", "--json"))["emulated"]
    assert emulated["torch"].startswith(version("torch").partition("+")[0])
    assert Path(emulated["python"]).parents[2] == Path(emulated["cache"]).with_name("cuda")


@pytest.mark.slow
def test_a_wheel_has_the_emulated_gpu(installed, tmp_path):
    run, bigdit = installed
    path = f"{cuda_python().parent}{os.pathsep}{os.environ['PATH']}"
    command = (bigdit, "emulate", "--gpu", "a40", "--", "python", "-c", ON_GPU)
    assert "cuda:0" in run(*command, PATH=path, BIGDIT_CACHE=str(tmp_path / "cache"))
