"""What tests share: the digits as pictures, a feature store of some of them, and tiny runs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is this machine's business: other work on it must not fail a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "launch/recipes/digits.yaml"
sys.path.insert(0, str(ROOT / "launch"))
BIN = Path(sys.executable).parent

# A smaller sibling of the demo's model: two narrow blocks.
TINY = (
    "model.kwargs.num_layers=2",
    "model.kwargs.num_attention_heads=4",
    "model.kwargs.attention_head_dim=8",
    "model.kwargs.num_cross_attention_heads=4",
    "model.kwargs.cross_attention_head_dim=8",
    "model.kwargs.cross_attention_dim=32",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
    "train.warmup_steps=2",
    "train.steps=8",
)

SINGLE = ("engine.name=single", "engine.processes=1", "engine.ds_config=null")


def run_command(*command, timeout=300, **environment):
    """Run a real command from the repository's root; stdout, stderr and returncode, never more than `timeout` s."""
    threads = {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | threads | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def bigdit(*arguments, **options):
    """The command line tool, as a user starts it."""
    return run_command(BIN / "bigdit", *arguments, **options)


def with_set(overrides):
    """`--set` for each override."""
    return [part for override in overrides for part in ("--set", override)]


@pytest.fixture(scope="module", autouse=True)
def shared_memory():
    """What killed processes with DeepSpeed's collectives of CPUs left there, 66 MiB each, is taken away."""
    yield
    left = [
        file
        for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*")
        if time.time() - file.stat().st_mtime > 5  # a process that starts has not mapped it yet
    ]
    if left:
        maps = "".join(_read(file) for file in Path("/proc").glob("[0-9]*/maps"))
        for file in left:
            if str(file) not in maps:
                file.unlink(missing_ok=True)


def _read(file):
    try:
        return file.read_text()
    except OSError:  # the process has ended, or is another user's
        return ""


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """A folder with 240 real digits and their captions."""
    import digits

    folder = tmp_path_factory.mktemp("digits")
    digits.write_digits(folder)
    for file in folder.iterdir():
        if int(file.stem) >= 240:
            file.unlink()
    return folder


@pytest.fixture(scope="session")
def features(tmp_path_factory, pictures):
    """The digits' feature store, made by `bigdit extract`."""
    folder = tmp_path_factory.mktemp("store") / "features"
    done = bigdit("extract", "--config", DIGITS, *with_set([f"data.images={pictures}", f"data.features={folder}"]))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory, features):
    """The output of a finished tiny run, not to be changed."""
    output = tmp_path_factory.mktemp("trained") / "run"
    overrides = [*TINY, *SINGLE, f"data.features={features}", f"output={output}"]
    done = bigdit("train", "--config", DIGITS, *with_set(overrides))
    assert done.returncode == 0, done.stderr
    return output


def pytest_addoption(parser):
    parser.addoption("--rewrite-golden", action="store_true", help="write golden files anew instead of comparing")


@pytest.fixture
def golden(request):
    """Compare a text with the golden file of that name; `--rewrite-golden` writes it instead."""

    def compare(name, text):
        file = ROOT / "tests/golden" / name
        if request.config.getoption("--rewrite-golden"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert text == file.read_text()

    return compare
