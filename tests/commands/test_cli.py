"""The command line: quick to answer, and clear about what it was not asked well."""

import os
import subprocess
import sys

import pytest
from commands import BIN, bigdit

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
    code = "import sys, bigdit.cli; sys.exit(any(name in sys.modules for name in ('torch', 'pydantic', 'matplotlib')))"
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


def test_interrupted_ends_with_130(capsys):
    from bigdit.errors import guard

    def interrupted():
        raise KeyboardInterrupt

    assert guard(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_version():
    from bigdit import __version__

    assert bigdit("--version").stdout == f"bigdit {__version__}\n"
