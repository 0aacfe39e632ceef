"""Odd environments: output that cannot be written, no home, no more processes, little memory. Each ends in one line."""

import os
import signal
import sys

import pytest
from commands import BIN, DIGITS, ROOT, SINGLE, TINY, run_command, with_set
from running import running

from bigdit.errors import EXIT_USER, UserError, guard

BIGDIT = BIN / "bigdit"
TRAIN = ROOT / "launch/train.py"


def shell(line, *command, **environment):
    """Run a command in a line of the shell, where it is "$@"."""
    return run_command("sh", "-c", line, "sh", *command, **environment)


def one_line(done, status=EXIT_USER):
    """The text after `error: `, if that line is the whole output."""
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("error: ").strip()


def test_characters_that_the_output_cannot_write_are_replaced():
    done = shell('exec "$@"', BIGDIT, "models", PYTHONIOENCODING="ascii")
    assert "Traceback" not in done.stderr
    assert done.stdout.isascii()
    assert "4x128x128" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [(("gpus",), ""), (("gpus", "--json"), "1"), (("--help",), "")], ids=str
)
def test_a_report_on_a_full_disk_is_an_error(arguments, unbuffered):
    done = shell('"$@" > /dev/full', BIGDIT, *arguments, PYTHONUNBUFFERED=unbuffered)
    assert one_line(done) == "output: No space left on device"


def test_an_error_that_nobody_can_read_has_its_status():
    assert shell('"$@" 2> /dev/full', BIGDIT, "none").returncode == EXIT_USER


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_errors(closed):
    done = shell(f'"$@" {closed}', BIGDIT, "gpus")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_run_that_trains_whole_ends_well_without_its_output(features, tmp_path):
    settings = with_set([*TINY, *SINGLE, f"data.features={features}", f"output={tmp_path / 'run'}"])
    assert shell('"$@" >&- 2>/dev/full', sys.executable, TRAIN, "--config", DIGITS, *settings).returncode == 0
    assert (tmp_path / "run/receipt.json").exists()


@pytest.mark.slow
def test_a_signal_keeps_its_status_where_stdout_is_closed(features, tmp_path):
    command = ("sh", "-c", 'exec "$@" >&-', "sh", sys.executable, TRAIN)
    with running(command, features, tmp_path / "run", *SINGLE) as run:
        run.until_it_trains().process.send_signal(signal.SIGTERM)
        assert run.ends() == 128 + signal.SIGTERM
        assert run.saved()


_WITHOUT = """
import os, pwd, subprocess, sys, threading
from bigdit.cli import main

def refuse(*_, **__):
    raise {error}

{place} = refuse
os.environ.pop("HOME", None)
main(["plan", "--model", "dit-b-2", "--gpu", "a40"])
"""


def plan_without(place, error, **environment):
    return run_command(sys.executable, "-c", _WITHOUT.format(place=place, error=error), **environment)


def test_a_user_without_a_home():
    done = plan_without("pwd.getpwuid", "KeyError('no entry')", BIGDIT_CACHE="", XDG_CACHE_HOME="", XDG_DATA_HOME="")
    assert one_line(done) == (
        f"HOME is not set, and user {os.getuid()} has no home folder; set HOME to a folder it can write"
    )


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("threading.Thread.start", 'RuntimeError("can\'t start new thread")'),
        ("subprocess.Popen.__init__", "BlockingIOError(11, os.strerror(11))"),
    ],
    ids=["thread", "process"],
)
def test_a_system_that_starts_no_more(tmp_path, place, error):
    done = plan_without(place, error, HOME=str(tmp_path), BIGDIT_CACHE=str(tmp_path), XDG_DATA_HOME=str(tmp_path))
    done.stderr = done.stderr.removeprefix("planning the training of dit-b-2: which engines and settings fit\n")
    assert one_line(done).startswith("the system starts no more processes or threads for this process: ")


def test_the_cause_is_printed_where_what_follows_hides_it(capfd):
    def fail():
        try:
            raise RuntimeError("can't start new thread")
        finally:
            raise RuntimeError("cannot join thread before it is started")

    assert guard(fail) == EXIT_USER
    assert capfd.readouterr().err.startswith("error: the system starts no more processes or threads")

    def reported():
        raise UserError("nothing else")

    assert guard(reported) == EXIT_USER
    assert capfd.readouterr().err == "error: nothing else\n"


@pytest.mark.parametrize(
    ("kib", "printed"), [(400_000, "gives no more memory"), (1_000_000, "0.95 GiB of address space")]
)
def test_too_little_address_space_is_an_error_before_anything_starts(features, tmp_path, kib, printed):
    settings = with_set([*TINY, f"data.features={features}", f"output={tmp_path / 'run'}"])
    command = (BIGDIT, "train", "--config", DIGITS, *settings)
    line = one_line(shell(f'ulimit -v {kib}; exec "$@"', *command))
    assert printed in line
    assert "ulimit -v" in line
