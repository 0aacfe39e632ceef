"""Scripts of tests that two processes run as torchrun starts them, on the CPU."""

import json
from pathlib import Path
from typing import Any

from commands import HELPERS, run_ranks


def run_two(script: Path, *arguments: object) -> str:
    """What two processes print on stdout; what they import of these helpers is found."""
    done = run_ranks(2, script, *arguments, PYTHONPATH=HELPERS, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def answer_of_two(script: str, folder: Path) -> Any:
    """What the first process leaves as JSON in the file sys.argv[1]."""
    file, answer = folder / "two_processes.py", folder / "answer.json"
    file.write_text(script)
    run_two(file, answer)
    return json.loads(answer.read_text())
