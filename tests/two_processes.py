"""Scripts of tests that two processes run under torchrun, on the CPU."""

import json
from pathlib import Path
from typing import Any

from conftest import BIN, ROOT, run_command


def answer_of_two(script: str, folder: Path) -> Any:
    """What the first process leaves as JSON in the file sys.argv[2]; sys.argv[1] is the folder of the tests."""
    file, answer = folder / "two_processes.py", folder / "answer.json"
    file.write_text(script)
    done = run_command(
        *(BIN / "torchrun", "--standalone", "--nproc-per-node", 2, file, ROOT / "tests", answer),
        PYTHONPATH=str(ROOT),
        DS_ACCELERATOR="cpu",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(answer.read_text())
