"""What bigdit says that a run saves is what a real run's output holds, and as many bytes as on an emulated GPU."""

import os
import subprocess

import pytest
from commands import DIGITS, ROOT, SINGLE, TINY, bigdit, with_set
from gpus import A40, TIME_LIMIT_S
from tried.saved import saved

from bigdit.catalog.resolve import model_spec
from bigdit.checkpoint import latest
from bigdit.config.stages import load_run, load_stages
from bigdit.emulator import emulated_environment
from bigdit.emulator.interpreter import cuda_python
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.strategy import BatchShape

SAVING = ("train.checkpoint_every=2", "train.keep_checkpoints=2", "train.keep_every=4", "train.export_every=4")
SETTINGS = (*TINY, *SINGLE, *SAVING, "train.steps=7", "strategy.ema.decay=0.5")


@pytest.fixture(scope="module")
def settings(features):
    return [*SETTINGS, f"data.features={features}"]


@pytest.fixture(scope="module")
def output(settings, tmp_path_factory):
    """The output of a run that saved at steps 2, 4, 6 and 7, and exported at 4 and 7."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    done = bigdit("train", "--config", DIGITS, *with_set([*settings, f"output={folder}"]))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def found(settings, output):
    return saved(latest(output)[0], output, load_stages(DIGITS, settings))


def nbytes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def test_it_is_what_lies_there(output, found):
    checkpoints = sorted(path for path in (output / "checkpoints").iterdir() if path.is_dir())
    assert [path.name for path in checkpoints] == ["step-00000004", "step-00000006", "step-00000007"]
    assert found.checkpoints == 3
    assert found.checkpoints_at_once == 1 + 2  # 4 and 6, while 7 is written
    assert {nbytes(path) for path in checkpoints} == {found.checkpoint_bytes}
    exports = list((output / "exports").iterdir())
    assert found.exports == len(exports) == 2
    assert {nbytes(path) for path in exports} == {found.export_bytes}
    beside = sum(file.stat().st_size for file in (output / "checkpoints").rglob("*.json"))
    assert beside < 3 * 64 * 1024


@pytest.mark.slow
def test_it_is_what_a_profile_says_that_is_copied(settings, found):
    """Tensors, and each file's header."""
    run = load_run(DIGITS, settings)
    spec, strategy = model_spec(run.model), run.strategy
    shape = BatchShape(latents=(4, 4, 6), text=(32, 64))
    asked = StepRequest(model=spec, batch=shape, strategy=strategy)
    tensors = found.weights_bytes + found.optimizer_bytes + found.ema_bytes
    with EmulatedGpus(A40, 1) as gpus:
        assert gpus.profile(asked).checkpoint_bytes == tensors
    assert found.ema_bytes == found.weights_bytes  # in fp32, as masters are
    assert 0 < found.checkpoint_bytes - tensors < 64 * 1024


@pytest.mark.slow
def test_on_an_emulated_gpu_it_is_as_many_bytes(settings, found, tmp_path):
    chosen = with_set([*settings, f"output={tmp_path / 'run'}"])
    command = [str(cuda_python()), "-W", "ignore", "-c", "from bigdit.cli import main; main()", "train"]
    done = subprocess.run(
        [*command, "--config", str(DIGITS), *chosen],
        env=os.environ | emulated_environment(A40),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    stages = load_stages(DIGITS, settings)
    assert saved(latest(tmp_path / "run")[0], tmp_path / "run", stages) == found
