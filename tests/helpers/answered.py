"""Questions that a process of their own answers: with a fake device registered, an interpreter cannot go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from commands import ROOT

TIME_LIMIT_S = 300


def answered(script: str, questions: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `script` leaves as JSON in the file sys.argv[2] for the questions in the file sys.argv[1]."""
    asked, found = folder / "asked.json", folder / "found.json"
    asked.write_text(json.dumps(questions))
    command = [sys.executable, "-c", script, str(asked), str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(found.read_text())
    return answers
