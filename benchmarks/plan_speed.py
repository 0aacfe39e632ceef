"""How long plans take: cold, with an empty cache, and again.

python benchmarks/plan_speed.py [PART OF A MODEL'S NAME]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL_S, LARGE_S, WARM_S = 30.0, 60.0, 1.0
"""Limits: of models of 1 to 2 B parameters, of 12 to 14 B, of the same question again."""

CASES = [
    ("--model sana-1600m --gpu a40", SMALL_S),
    (
        "--model sana-1600m --gpu a40 --gpus 8 --resolution 1024 --global-batch 256 --images 30M --epochs 1",
        SMALL_S,
    ),
    ("--model pixart-sigma-xl-2-1024 --gpu v100-32g --gpus 32 --images 30M", SMALL_S),
    ("--model flux.1-dev --gpu rtx-4090 --full", LARGE_S),
    ("--model flux.1-dev --gpu h100-80g --gpus 8", LARGE_S),
    ("--model wan2.1-t2v-14b --gpu h100-80g --gpus 8", LARGE_S),
]


def main(wanted: str) -> int:
    """One line a question; 1 where one took more than its limit."""
    print("| bigdit plan | cold s | again s | verdict | chosen |")
    print("| --- | --- | --- | --- | --- |")
    slow = False
    for arguments, limit in CASES:
        if wanted not in arguments:
            continue
        with tempfile.TemporaryDirectory() as cache:
            (cold, plan), (warm, _) = (_ask(arguments, cache) for _ in range(2))
        slow |= cold > limit or warm > WARM_S
        chosen = plan["chosen"]["title"]
        print(f"| `{arguments}` | {cold:.1f} | {warm:.2f} | {plan['verdict']} | {chosen} |", flush=True)
    return int(slow)


def _ask(arguments: str, cache: str) -> tuple[float, dict[str, dict[str, str]]]:
    began = time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).parent / "bigdit"), "plan", *arguments.split(), "--json"],
        env=os.environ | {"BIGDIT_CACHE": cache},
        stdout=subprocess.PIPE,
        check=False,
    )
    return time.perf_counter() - began, json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
