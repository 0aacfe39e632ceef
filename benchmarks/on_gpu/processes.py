"""Processes that each run one point of the matrix. They start ahead: they import while another point runs its steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from bigdit.files import write_text
from on_gpu.points import Point

_AHEAD = 3
_ROOT = Path(__file__).parents[2]


class Ahead:
    """The processes of `points`. A few wait with everything imported."""

    def __init__(self, points: Sequence[Point], out: Path, steps: int) -> None:
        self._points, self._out, self._steps = deque(points), out, steps
        self._waiting: deque[tuple[Point, subprocess.Popen[str]]] = deque()

    def __enter__(self) -> Ahead:
        self._fill()
        return self

    def __exit__(self, *error: object) -> None:
        for _, process in self._waiting:
            process.kill()
            process.communicate()

    def run(self, point: Point, timeout_s: float) -> str | None:
        """Let the process of `point`, the next one, run. Returns its output if it wrote no answer."""
        expected, process = self._waiting.popleft()
        assert expected == point
        self._fill()
        try:
            _, said = process.communicate("go\n", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"not ready after {timeout_s:.0f} s"
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        lines = said.splitlines()
        return None if process.returncode == 0 else f"status {process.returncode}: {' … '.join(lines[-3:])}"

    def _fill(self) -> None:
        while self._points and len(self._waiting) < _AHEAD:
            point = self._points.popleft()
            self._waiting.append((point, self._start(point)))

    def _start(self, point: Point) -> subprocess.Popen[str]:
        asked, answered = (self._out / f"{point.key}.{kind}" for kind in ("request", "json"))
        write_text(asked, point.asked()[0].model_dump_json())
        steps = 0 if point.blocks else self._steps  # a few blocks' speed says nothing
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        allocator = f"expandable_segments:{point.expandable_segments}"
        script = Path(__file__).with_name("one_point.py")
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", script, asked, answered, str(steps)],
            env=os.environ | {"PYTHONPATH": path, "PYTORCH_ALLOC_CONF": allocator, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
