"""What tests share: the digits as images, a feature store of some of them, and tiny runs."""

import fcntl
import gc
import os
import signal
import sys
import tempfile

import pytest
import warm

# A thread more for each of two workers and their processes is more than there are cores: torch's threads then wait for
# each other, for seconds a step.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Runs take the cores that they find: their threads wait for each other asleep, not by spinning on a core that another
# process has, which took up to a hundred times the work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Receipts of runs that tests take, or make up, are none that the user's own plans are to learn from; and what programs
# leave behind in TMPDIR, as torchrun does a folder of logs, ends with the tests.
os.environ.pop("BIGDIT_RECEIPTS", None)
if "PYTEST_XDIST_WORKER" not in os.environ:
    OWN = tempfile.TemporaryDirectory(prefix="bigdit-")  # short: Ray's sockets lie in it
    os.environ |= {"TMPDIR": OWN.name, "XDG_DATA_HOME": f"{OWN.name}/data"}
# A shell has what it starts in the background ignore Ctrl-C, and so all that tests start: they are to hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from commands import BIN, DIGITS, ROOT, SINGLE, TINY, bigdit, run_ranks, with_set
from hypothesis import settings

# Whatever tests start finds the environment's own programs first.
os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"

# Tests, and what they start, import what an earlier process compiled, whatever the shell says: to compile bigdit again
# took a third of a short run's time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes is this machine's business: other work on it must not fail a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure(config):
    """What tests start is there at once; pytest's own workers are started as ever."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses"):
        warm.take_place()


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Has a folder made by the first of pytest's workers that wants it: none of their tests changes it."""
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
    """Of a module that asks for it nothing is kept from before, and nothing afterwards."""
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
    """One worker runs the tests that share what their module makes, else both would make it. The longest come first, so
    that no worker is left with one of them when the others have ended: tests of the whole, these groups, slow ones."""
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
    gc.disable()  # what is imported is no garbage: to look through it time and again takes a third of the time


def pytest_collection_finish():
    gc.freeze()  # the collections of all tests pass over what was imported
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """What tests recorded as `found` is said at the end: how far predictions are off, where they hold too."""
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
