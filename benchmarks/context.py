"""Context parallelism of each family that has it, over 2 and 4 processes beside one, as a table.

    python benchmarks/context.py > benchmarks/context.md

Differences are of tiny models in fp32 on the CPU (tests/engines/context.py): of the loss, of the gradients, and of the
weights after ten steps. Bytes are what two steps of the catalogue's model allocate at most on an emulated H100, one of
eight, with FSDP2 and nothing recomputed. A `ring` is of all processes that share a sample, `rings` are of two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bigdit import catalog
from bigdit.catalog.context import CONTEXTS, context_problems
from bigdit.config.strategy_text import parse_strategy
from bigdit.profile.attempt import request_for
from bigdit.profile.gpus import EmulatedGpus
from bigdit.report.tables import DASH
from bigdit.units import gib

ROOT = Path(__file__).parents[1]
SIZE: dict[str, int | tuple[int, int]] = {
    "qwen-image": 1024,
    "cogvideox-5b": (480, 704),
    "hunyuanvideo-1.5-480p": (480, 832),
}
"""Models for which no degree, or not 4, divides the tokens of their own size."""
MODELS = {
    "flux": "flux.1-dev",
    "flux2": "flux.2-klein-4b",
    "qwen-image": "qwen-image",
    "wan": "wan2.1-t2v-1.3b",
    "wan-i2v": "wan2.1-i2v-14b-480p",
    "ltx": "ltx-video-0.9",
    "pixart": "pixart-sigma-xl-2-1024",
    "dit": "dit-xl-2",
    "sd3": "sd3.5-medium",
    "cogvideox": "cogvideox-5b",
    "hunyuan-1.5": "hunyuanvideo-1.5-480p",
    "sana": "sana-1600m-4096",
}
"""By the names in tests/engines/context.py."""


WAYS = {"2": (2, 1), "2 ring": (2, 2), "4": (4, 1), "4 rings": (4, 2), "4 ring": (4, 4)}
"""cp and cp_ring, by context.py's names."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    script = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "4"]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    ran = subprocess.run(
        [*map(str, script), str(ROOT / "tests/engines/context.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    heads = ["model", "cp", "loss", "gradients", "weights", "allocated at the peak", "without cp"]
    print("# Context parallelism\n\n`python benchmarks/context.py`\n")
    print("cp alone is Ulysses; `ring` is one of all processes that share a sample, `rings` are of two.\n")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    with EmulatedGpus(catalog.gpu("h100-sxm"), 1) as gpus:
        for name, title in MODELS.items():
            alone = peak(gpus, title, 1)
            for cp, (shared, ring) in WAYS.items():
                if f"{name} {cp}" not in found:
                    continue
                each = found[f"{name} {cp}"]
                off = (f"{each[what]:.0e}" for what in ("loss", "gradients", "weights"))
                peaks = f"{peak(gpus, title, shared, ring)} | {alone}"
                print(f"| {title} | {cp} | {' | '.join(off)} | {peaks} |", flush=True)
    compiled = {name.split()[0]: found[name] for name in found if name.endswith(" compiled")}
    worst = max(each[what] for each in compiled.values() for what in ("gradients", "curve"))
    print(f"\nCompiled over 4 processes, {', '.join(compiled)}: at most {worst:.0e} of gradients and losses.")
    begins = [name for name in found if name.split()[0].endswith("-begins")]
    worst = max(found[name][what] for name in begins for what in ("gradients", "curve"))
    models = dict.fromkeys(name.split()[0] for name in begins)
    print(f"\nFrom given first frames, {', '.join(models)}: at most {worst:.0e} of gradients and losses.")
    named = {*MODELS, *models}
    ways = [name for name in found if name.split()[0] not in named and not name.endswith("wise")]
    worst = max(found[name][what] for name in ways for what in ("gradients", "curve"))
    print(f"\nQwen-Image over 2 of 4 processes, {', '.join(ways)}: at most {worst:.0e} of gradients and losses.")
    fp8 = max(found[name]["curve"] for name in ("tensorwise", "rowwise"))
    print(f"\nIn FP8, tensorwise and rowwise (compiled): at most {fp8:.0e} of losses, beside one process in FP8.")


def peak(gpus: EmulatedGpus, title: str, cp: int, ring: int = 1) -> str:
    model = catalog.model(title)
    assert model.spec.class_name in CONTEXTS
    if context_problems(model.spec, cp, ring):
        return DASH
    strategy = parse_strategy([f"fsdp2,world_size=8,cp={cp},cp_ring={ring}"])
    attempt = gpus.attempt(request_for(model, catalog.gpu("h100-sxm"), strategy, resolution=SIZE.get(title)))
    return f"{gib(attempt.peak_allocated_bytes)} ({attempt.peak_allocated_bytes:,})"


if __name__ == "__main__":
    main()
