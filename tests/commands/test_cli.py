"""The command line: quick to answer, and clear about what it was not asked well."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import BIN, DIGITS, bigdit, with_set
from running import until

from bigdit.cli import main

COMMANDS = ("plan", "extract", "train", "sample", "bench", "models", "gpus", "doctor")


def test_help_answers_at_once():
    """Under 0.3 s of a core, the best of five: what it waits for one is not its own on a busy machine."""
    took = []
    for _ in range(5):
        before = os.times()
        done = subprocess.run([BIN / "bigdit", "--help"], capture_output=True, text=True, check=True, timeout=60)
        after = os.times()
        took.append(sum(after[2:4]) - sum(before[2:4]))  # of children that have ended
    assert all(command in done.stdout for command in COMMANDS)
    assert min(took) < 0.3


def test_help_does_not_import_torch():
    code = "import sys, bigdit.app; sys.exit(any(name in sys.modules for name in ('torch', 'pydantic', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = bigdit(command, "--help")
    assert done.returncode == 0
    assert "Options:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--moel", "x"], "No such option: --moel"),
        (["plan", "--model", "sana-1600m"], "Missing option '--gpu'"),
        (["plann"], "No such command 'plann'"),
        (["train", "--config", "none.yaml"], "error: the config none.yaml does not exist"),
    ],
)
def test_a_wrong_call_ends_with_1(arguments, message):
    done = bigdit(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bug_ends_with_3_and_versions(monkeypatch, capsys):
    from bigdit.errors import EXIT_BUG, guard

    def broken():
        raise RuntimeError("unforeseen")

    assert guard(broken) == EXIT_BUG
    printed = capsys.readouterr().err
    assert "RuntimeError: unforeseen" in printed
    assert "versions: python=" in printed


def test_interrupted_ends_with_130(capsys, monkeypatch):
    """Within a command, by which it comes through all of its parsing."""

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("bigdit.catalog.gpus.gpus", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["gpus"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--model", "sana-600m", "--gpu", "a40", "--micro-batch", "7"),
        ("extract", "--config", DIGITS, "--set", "data.part_size=1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_ctrl_c_says_so_and_no_worker_of_the_command_says_more(arguments, pictures, tmp_path):
    """As a terminal sends it: to every process that the command has started."""
    places = with_set([f"data.images={pictures}", f"data.features={tmp_path / 'features'}"])
    with open(tmp_path / "said", "w") as said:
        command = subprocess.Popen(
            [BIN / "bigdit", *arguments, *(places if "--config" in arguments else ())],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=said,
            process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        until(lambda: len(in_group(command.pid)) > 1 or command.poll() is not None, within=120)
        time.sleep(1)  # its workers are importing
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(60) == 130
    said = (tmp_path / "said").read_text()
    assert said.endswith("interrupted\n")
    assert "Traceback" not in said
    until(lambda: not in_group(command.pid), within=30)


def in_group(pgid):
    """The processes of a process group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        found += [stat.parent.name] if int(group) == pgid and state != "Z" else []
    return found


def test_a_reader_that_has_seen_enough_ends_it_in_silence():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {BIN}/bigdit models --json | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[\n", "")


def test_version():
    from bigdit import __version__

    assert bigdit("--version").stdout == f"bigdit {__version__}\n"
