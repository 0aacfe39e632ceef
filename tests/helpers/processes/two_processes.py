"""Run scripts in two processes on the CPU, as torchrun starts them."""

import json
from pathlib import Path
from typing import Any

from commands import HELPERS, run_ranks


def run_two(script: Path, *arguments: object) -> str:
    """The stdout of two processes, which can import these helpers."""
    done = run_ranks(2, script, *arguments, PYTHONPATH=HELPERS, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def answer_of_two(script: str, folder: Path) -> Any:
    """The JSON that the first process writes into the file sys.argv[1]."""
    file, answer = folder / "two_processes.py", folder / "answer.json"
    file.write_text(script)
    run_two(file, answer)
    return json.loads(answer.read_text())
