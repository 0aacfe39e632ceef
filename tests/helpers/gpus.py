"""Run scripts on emulated GPUs, in the environment with the CUDA build of torch."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import BIN, ROOT, bigdit

from bigdit import catalog
from bigdit.catalog import CatalogModel
from bigdit.config.strategy_text import parse_strategy
from bigdit.emulator import build, emulated_environment, shared_state
from bigdit.emulator.interpreter import cuda_python
from bigdit.profile.attempt import Attempt, Profile, StepRequest, request_for
from bigdit.profile.gpus import EmulatedGpus

TIME_LIMIT_S = 240

_DEPTHS = ("num_layers", "n_layers", "num_refiner_layers", "n_refiner_layers", "num_single_layers")


def of_blocks(model: CatalogModel, blocks: int, name: str = "") -> CatalogModel:
    """The model with this many blocks in each of its lists."""
    written = [argument for argument in _DEPTHS if argument in model.spec.kwargs]
    depths = written or ("num_layers", "num_single_layers")[: len(model.block_lists)]  # Flux's class sets them
    kwargs = model.spec.kwargs | dict.fromkeys(depths, blocks)
    spec = model.spec.model_copy(update={"kwargs": kwargs, "name": name or model.spec.name})
    lists = tuple((path, blocks) for path, _ in model.block_lists)
    return model.model_copy(update={"spec": spec, "params": None, "block_lists": lists})


A40 = catalog.gpu("a40")
SANA = catalog.model("sana-1600m")
SMALL = of_blocks(SANA, 3, "short-sana")

_LIBRARIES = build.cache_folder()
"""The user's own folder, even where a test moves its cache."""


def empty_cache(folder: Path) -> Path:
    """A cache that holds nothing but the emulated GPU's libraries, which are built once for all tests."""
    _LIBRARIES.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    (folder / _LIBRARIES.name).symlink_to(_LIBRARIES)
    return folder


def request(strategy: str, micro_batch_size: int = 2, model: CatalogModel = SMALL) -> StepRequest:
    """Two steps of a SANA of three blocks, or of another model, on an A40 at 1024 × 1024."""
    asked = parse_strategy(strategy.split(",")).with_micro_batch_size(micro_batch_size)
    return request_for(model, A40, asked, resolution=(1024, 1024))


def memory(attempt: Attempt) -> tuple[int, int, int, dict[str, int]]:
    """Equal for two attempts that need the same memory."""
    return attempt.retries, attempt.peak_allocated_bytes, attempt.peak_reserved_bytes, attempt.peaks


def recorded_as_attempted(requests: Mapping[str, StepRequest], folder: Path) -> dict[str, Profile]:
    """Record each request. Checks that the record and a bare attempt take the same bytes in each phase, and that the
    categories sum to them."""
    with pytest.MonkeyPatch.context() as patch, EmulatedGpus(A40, 2) as gpus, ThreadPoolExecutor(2) as aside:
        patch.setenv("BIGDIT_CACHE", str(empty_cache(folder)))
        attempts = dict(zip(requests, aside.map(gpus.attempt, requests.values()), strict=True))
        profiles = dict(zip(requests, aside.map(gpus.profile, requests.values()), strict=True))
    for name, found in profiles.items():
        bare = {phase: each.peak_bytes for phase, each in attempts[name].phases.items()}
        assert {each.phase: each.peak_bytes for each in found.ledger.phases} == bare, name
        assert found.peak_reserved_bytes == attempts[name].peak_reserved_bytes, name
        assert all(sum(each.at_peak.values()) == each.peak_bytes for each in found.ledger.phases), name
    return profiles


def on_gpu(gpu: str, script: str, gpus: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process with emulated GPUs."""
    environment = os.environ | emulated_environment(catalog.resolve_gpu(gpu), gpus) | variables
    command = [str(cuda_python()), "-W", "ignore", "-c", textwrap.dedent(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S)


def answers(gpu: str, script: str, gpus: int = 1, **variables: str) -> Any:
    """Parse the script's last line as JSON. A failing script fails the test with its output."""
    done = on_gpu(gpu, script, gpus, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def on_gpus(gpu: str, folder: Path, script: str, *arguments: str, processes: int = 2) -> list[Any]:
    """Run Python code under torchrun with a GPU a process. Returns what each rank passed to `leave(value)`, by rank."""
    file = folder / "script.py"
    file.write_text(_LEAVE + textwrap.dedent(script))
    with shared_state() as state:
        environment = os.environ | emulated_environment(catalog.resolve_gpu(gpu), processes, state)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [str(cuda_python()), "-W", "ignore", *launcher, str(file), *arguments]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


_LEAVE = """
import json, os
def leave(value):
    with open(f"rank{os.environ['RANK']}.json", "w") as file:
        json.dump(value, file)
"""


def benched(*options: object, **environment: str) -> tuple[dict[str, Any], str]:
    """The receipt of three steps of `bigdit bench step` on an emulated A40, and the printed text."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "receipt.json"
        line = [str(cuda_python()), "-W", "ignore", "-c", "from bigdit.cli import main; main()", "bench", "step"]
        done = subprocess.run(
            [*line, *map(str, options), "--steps", "3", "--out", str(out)],
            env=os.environ | emulated_environment(A40) | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(out.read_text()), done.stdout


@dataclass
class Done:
    """A finished `bigdit emulate`."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.stdout)

    @property
    def account(self) -> dict[str, Any]:
        return self.report["runs"][0]["accounts"][0]


def emulate(*arguments: object, timeout: float = 120, **environment: str) -> Done:
    """Run `bigdit emulate` with the CUDA build's programs first in PATH."""
    path = f"{cuda_python().parent}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    done = bigdit("emulate", *arguments, timeout=timeout, PATH=path, **environment)
    return Done(done.returncode, done.stdout, done.stderr)


def script(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(text)
    return file
