"""How long plans take: with an empty cache, the same again, and another request about the same model.

Plans of compiled blocks are also timed with nothing but their code kept.

    python benchmarks/plan_speed.py [PART OF A REQUEST]

Processor seconds are those of all processes together. They tell more if other work runs on the machine. The exit
status is 1 if a limit is missed. Limits are for two idle cores with the emulated GPU's libraries built. A line says
if the machine is busy.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h."""

SMALL_S, LARGE_S, LONG_S = 10.0, 25.0, 40.0
"""Limits of cold plans: models of 1 to 2 B parameters on one GPU; LoRA, models of 12 to 14 B, or at least eight GPUs;
encoders that run in each step, or EMA on eight GPUs."""

WARM_S, ANOTHER_SHARE = 0.5, 0.6
"""Limits of the same request again, and of another one about the same model, as a share of the first."""

ANOTHER = "--checkpointed-blocks all"
"""Options that another request adds to the first."""

IDLE_LOAD = 0.5
"""A machine with a higher load is busy."""

CASES = [
    ("--model sana-1600m --gpu a40", SMALL_S),
    ("--model pixart-sigma-xl-2-1024 --gpu a40", SMALL_S),
    ("--model sd3.5-medium --gpu rtx-4090 --lora 16", LARGE_S),
    ("--model flux.1-dev --gpu rtx-4090 --lora 16", LARGE_S),
    ("--model qwen-image --gpu rtx-5090 --lora 16", LARGE_S),
    ("--model flux.1-dev --gpu rtx-4090 --full", LARGE_S),
    ("--model flux.1-dev --gpu h100-sxm --gpus 8", LARGE_S),
    ("--model wan2.1-t2v-14b --gpu h100-sxm --gpus 8", LARGE_S),
    ("--model sana-1600m --gpu a40 --gpus 8 --resolution 1024 --global-batch 256 --images 30M --epochs 1", LARGE_S),
    ("--model pixart-sigma-xl-2-1024 --gpu v100-32g-sxm2 --gpus 32 --images 30M", LARGE_S),
    ("--model sana-1600m --gpu a40 --features online", LONG_S),
    ("--model sana-1600m --gpu a40 --gpus 8 --ema auto", LONG_S),
]

COMPILED = [("--model flux.1-dev --gpu h100 --compile --fp8 tensorwise", LARGE_S)]
"""Their limits hold where the code is kept."""


def main(wanted: str) -> int:
    """Print a line a request. Returns 1 if a limit is missed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    load, cores = os.getloadavg()[0], os.cpu_count()
    if load > IDLE_LOAD:
        print(f"this machine is busy (load {load:.1f} on {cores} cores): seconds are longer than on an idle one\n")
    print("| bigdit plan | cold s (limit) | processors s | again s (limit) | another s (limit) | load | chosen |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    slow, built = False, Path(tempfile.mkdtemp())
    _ask("--model dit-s-8 --gpu a40 --buckets none", str(built))  # builds the emulated GPU's libraries
    for arguments, limit in CASES:
        if wanted not in arguments:
            continue
        with tempfile.TemporaryDirectory() as cache:
            shutil.copytree(built / "emulator", Path(cache, "emulator"))
            load = os.getloadavg()[0]
            cold, taken, plan = _ask(arguments, cache)
            warm, _, _ = _ask(arguments, cache)
            another, _, _ = _ask(f"{arguments} {ANOTHER}", cache)
        slow |= cold > limit or warm > WARM_S or another > ANOTHER_SHARE * cold
        times = [_held(cold, limit, ".1f"), f"{taken:.1f}", _held(warm, WARM_S, ".2f")]
        times.append(_held(another, round(ANOTHER_SHARE * cold, 1), ".1f"))
        said = f"{plan['verdict']}: {plan['chosen']['title']}"
        print(f"| `{arguments}` | {' | '.join(times)} | {load:.1f} | {said} |", flush=True)
    for arguments, limit in COMPILED:
        slow |= wanted in arguments and _slow_compiled(arguments, limit, built)
    shutil.rmtree(built)
    return int(slow)


def _slow_compiled(arguments: str, limit: float, built: Path) -> bool:
    with tempfile.TemporaryDirectory() as cache:
        shutil.copytree(built / "emulator", Path(cache, "emulator"))
        cold, taken, _ = _ask(arguments, cache)
        for answers in ("attempts", "plans", "profiles"):
            shutil.rmtree(Path(cache, answers))
        load = os.getloadavg()[0]
        kept, taken_kept, plan = _ask(arguments, cache)
    print("\n| bigdit plan | cold s | processors s | code kept s (limit) | processors s | load | chosen |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    times = f"{cold:.1f} | {taken:.1f} | {_held(kept, limit, '.1f')} | {taken_kept:.1f}"
    print(f"| `{arguments}` | {times} | {load:.1f} | {plan['verdict']}: {plan['chosen']['title']} |", flush=True)
    return kept > limit


def _held(seconds: float, limit: float, digits: str) -> str:
    return f"{seconds:{digits}} ({limit:g}{'' if seconds <= limit else ', missed'})"


def _ask(arguments: str, cache: str) -> tuple[float, float, dict[str, Any]]:
    """Seconds of the clock, seconds of processors, and the plan."""
    before, began = _processors(), time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).parent / "bigdit"), "plan", *arguments.split(), "--json"],
        # Bytecode is kept, as a user's Python keeps it.
        env=os.environ | {"BIGDIT_CACHE": cache, "PYTHONDONTWRITEBYTECODE": ""},
        stdout=subprocess.PIPE,
        check=False,
    )
    took = time.perf_counter() - began
    with contextlib.suppress(ChildProcessError):
        while True:  # children whose parent has ended are adopted by this process, a subreaper
            os.wait()
    return took, _processors() - before, json.loads(done.stdout)


def _processors() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="?", default="", metavar="PART OF A REQUEST")
    sys.exit(main(parser.parse_args().wanted))
