"""How long plans take: cold, with an empty cache, and again; and what a cold one takes of processors, all processes
together, which says more where other work is beside it.

python benchmarks/plan_speed.py [PART OF A MODEL'S NAME]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h."""

SMALL_S, LARGE_S, WARM_S = 12.0, 25.0, 0.5
"""Limits on two idle cores: of models of 1 to 2 B parameters on a card, of 12 to 14 B or on eight cards and more, of
the same question again."""

CASES = [
    ("--model sana-1600m --gpu a40", SMALL_S),
    (
        "--model sana-1600m --gpu a40 --gpus 8 --resolution 1024 --global-batch 256 --images 30M --epochs 1",
        LARGE_S,
    ),
    ("--model pixart-sigma-xl-2-1024 --gpu v100-32g-sxm2 --gpus 32 --images 30M", LARGE_S),
    ("--model flux.1-dev --gpu rtx-4090 --full", LARGE_S),
    ("--model flux.1-dev --gpu h100-sxm --gpus 8", LARGE_S),
    ("--model wan2.1-t2v-14b --gpu h100-sxm --gpus 8", LARGE_S),
]


def main(wanted: str) -> int:
    """One line a question, and under it what was missed; 1 where something was."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print("| bigdit plan | cold s (limit) | processors s | again s (limit) | load before | verdict | chosen |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    slow = False
    for arguments, limit in CASES:
        if wanted not in arguments:
            continue
        with tempfile.TemporaryDirectory() as cache:
            load = os.getloadavg()[0]
            (cold, taken, plan), (warm, _, _) = (_ask(arguments, cache) for _ in range(2))
        slow |= cold > limit or warm > WARM_S
        times = f"{_held(cold, limit, '.1f')} | {taken:.1f} | {_held(warm, WARM_S, '.2f')} | {load:.1f}"
        print(f"| `{arguments}` | {times} | {plan['verdict']} | {plan['chosen']['title']} |", flush=True)
    return int(slow)


def _held(seconds: float, limit: float, digits: str) -> str:
    return f"{seconds:{digits}} ({limit:g}{'' if seconds <= limit else ', missed'})"


def _ask(arguments: str, cache: str) -> tuple[float, float, dict[str, Any]]:
    """Seconds of the clock, those of processors, and the plan."""
    before, began = _processors(), time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).parent / "bigdit"), "plan", *arguments.split(), "--json"],
        env=os.environ | {"BIGDIT_CACHE": cache},
        stdout=subprocess.PIPE,
        check=False,
    )
    took = time.perf_counter() - began
    with contextlib.suppress(ChildProcessError):
        while True:  # forks whose parent has ended are this process's, as its subreaper
            os.wait()
    return took, _processors() - before, json.loads(done.stdout)


def _processors() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="?", default="", metavar="PART OF A MODEL'S NAME")
    sys.exit(main(parser.parse_args().wanted))
