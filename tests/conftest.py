"""Fixtures that all tests share: the digits as images, a cache of their features, and a finished tiny run."""

import fcntl
import gc
import os
import signal
import sys
import tempfile

import pytest
import warm

# The workers and their processes fill the cores. With more threads, torch's threads wait for each other, seconds a
# step.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Waiting threads sleep. Threads that spin on a core that another process has took up to a hundred times the work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Plans of the user must not learn from receipts that tests take or make up. What programs leave in TMPDIR, as torchrun
# leaves a folder of logs, is deleted with the tests.
os.environ.pop("BIGDIT_RECEIPTS", None)
if "PYTEST_XDIST_WORKER" not in os.environ:
    OWN = tempfile.TemporaryDirectory(prefix="bigdit-")  # short: Ray's sockets lie in it
    os.environ |= {"TMPDIR": OWN.name, "XDG_DATA_HOME": f"{OWN.name}/data"}
# A shell lets its background processes ignore Ctrl-C. Tests, and what they start, must receive it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from commands import BIN, DIGITS, ROOT, SINGLE, TINY, bigdit, run_ranks, with_set
from hypothesis import settings

# What tests start finds this environment's programs first.
os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"

# Tests and what they start import bytecode that is already there. To compile bigdit again took a third of a short run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# An example may take as long as it needs: other work on this machine must not fail a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure(config):
    """Let what tests start be cloned from a warm process. pytest's own workers start as usual."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses"):
        warm.take_place()


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """A folder that the first worker to ask for it makes. No test changes it."""
    own = tmp_path_factory.getbasetemp()
    base = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def made(name, make):
        whole = base / f"{name}.made"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                make(base / name)
                whole.touch()
        return base / name

    return made


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """An empty plan cache for the modules that ask for it."""
    from gpus import empty_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGDIT_CACHE", str(empty_cache(tmp_path_factory.mktemp("cache"))))
        yield


@pytest.fixture(scope="session")
def images(once):
    """A folder with 240 real digits and their captions."""
    import digits

    def make(folder):
        digits.write_digits(folder)
        for file in folder.iterdir():
            if int(file.stem) >= 240:
                file.unlink()

    return once("digits", make)


@pytest.fixture(scope="session")
def features(once, images):
    """The digits' feature store, made by `bigdit extract`."""

    def make(folder):
        done = bigdit("extract", "--config", DIGITS, *with_set([f"data.images={images}", f"data.features={folder}"]))
        assert done.returncode == 0, done.stderr

    return once("features", make)


@pytest.fixture(scope="session")
def trained(once, features):
    """The output of a finished tiny run, not to be changed."""

    def make(output):
        overrides = [*TINY, *SINGLE, f"data.features={features}", f"output={output}"]
        done = run_ranks(1, "-m", "bigdit.train", "--config", DIGITS, *with_set(overrides))
        assert done.returncode == 0, done.stderr

    return once("trained", make)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Group the tests of a module whose fixture they share, so that one worker makes it. Put the longest tests first,
    so that no worker still runs one when the others have ended."""
    for item in items:
        made = [each for found in item._fixtureinfo.name2fixturedefs.values() for each in found]
        if any(each.scope == "module" for each in made) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(ROOT)))
    items.sort(
        key=lambda item: (
            item.path.parent != ROOT / "tests",
            item.get_closest_marker("xdist_group") is None,
            item.get_closest_marker("slow") is None,
        )
    )


def pytest_collectstart():
    gc.disable()  # imports leave no garbage: looking for it takes a third of the time


def pytest_collection_finish():
    gc.freeze()  # later collections skip what was imported
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Print what tests recorded as `found`, such as the errors of predictions."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    printed = [value for report in reports for name, value in report.user_properties if name == "found"]
    if printed:
        terminalreporter.section("found")
        for line in sorted(printed):
            terminalreporter.write_line(line)


def pytest_addoption(parser):
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite golden files instead of comparing")


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
