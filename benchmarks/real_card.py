"""The emulated card against the real one, event by event, on the same build of torch: under nine minutes on a GPU.

python benchmarks/real_card.py OUT [--instead GPU]

Run it with a python that has the CUDA build of torch, on a machine with a GPU and a C compiler. The most important
questions come first; what each said is printed and written to OUT/real_card.md at once, with both sides' events in
OUT. Without a GPU, `--instead GPU` puts a second emulated card of that kind in the real one's place: a dry run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from referee_rows import Row

from bigdit import catalog
from bigdit.bench.against_card import Against, Reserved, against
from bigdit.bench.referee import lines
from bigdit.catalog import Gpu
from bigdit.errors import UserError, guard
from bigdit.files import write_text
from bigdit.rehearse.card.client import worker_environment
from bigdit.rehearse.card.run import CardRun
from bigdit.rehearse.request import RehearsalRequest
from bigdit.units import MIB

SECONDS = 540
SANA, PIXART, DIT, SD35 = "sana-1600m-1024", "pixart-sigma-xl-2-1024", "dit-xl-2-paper", "sd3.5-medium"
QUESTIONS = (
    (SANA, "single", 0),
    (SANA, "fsdp2,world_size=1", 0),
    (SANA, "zero2,world_size=1,optimizer.name=adamw_8bit", 0),
    (SANA, "single,features=online", 2),  # convolutions of its VAE, with cuDNN's workspaces
    (PIXART, "single,features=online,micro_batch_size=2", 2),
    (SD35, "single,micro_batch_size=4", 2),
    (PIXART, "single,micro_batch_size=8,checkpointed_blocks=all", 0),
    (DIT, "single,precision=fp32,micro_batch_size=8", 0),
    (SANA, "single,precision=tf32,micro_batch_size=4", 2),
    (SD35, "single,lora.base=nf4,checkpointed_blocks=all", 2),
    (SANA, "zero3,world_size=1,optimizer.name=came", 2),
)
"""Models, strategies of one process, and blocks (0: whole)."""


def main(arguments: list[str]) -> int:
    match arguments:
        case [out]:
            return compare(Path(out), catalog.resolve_gpu(_gpu_at_hand()), None)
        case [out, "--instead", name]:
            gpu = catalog.resolve_gpu(name)
            return compare(Path(out), gpu, gpu)
    raise UserError("a folder is expected, and `--instead GPU` where there is no card")


def compare(out: Path, gpu: Gpu, instead: Gpu | None) -> int:
    """All questions that the time allows, each written down as it comes."""
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    title = f"# A real {gpu.title} beside an emulated one" if instead is None else f"# A dry run: {gpu.title} twice"
    parts, apart = [title], 0
    for number, (model, strategy, blocks) in enumerate(QUESTIONS):
        left = SECONDS - (time.perf_counter() - began)
        row = Row(model, gpu.name, strategy, blocks)
        parts.append(f"\n## {row.name}\n")
        if left < 30:
            parts.append("no time was left for it")
        else:
            found = _asked(out / f"{number:02}", row, instead, left)
            apart += not found.startswith("equal")
            parts.append(found)
        print(parts[-2].strip(), parts[-1], sep="\n", flush=True)
        write_text(out / "real_card.md", "\n".join(parts) + "\n")
    return int(apart > 0)


def _asked(stem: Path, row: Row, instead: Gpu | None, left: float) -> str:
    """What both cards did with one question; why not, where one of them did not answer."""
    try:
        request, gpu = row.question()
        real = _run(stem.with_suffix(".real.json"), request, instead, left / 2)
        emulated = _run(stem.with_suffix(".emulated.json"), request, gpu, left / 2)
    except (UserError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    counters = [
        Reserved(allocated_bytes=phase.peak_allocated_bytes, reserved_bytes=phase.peak_reserved_bytes)
        for phase in real.phases
    ]
    found = against(emulated.timeline, real.timeline, counters, gpu.usable_bytes)
    return "\n".join((_verdict(found), _beside(emulated, real), "```", *lines(found), "```"))


def _verdict(found: Against) -> str:
    """`rehearsed` in the table is the emulated card's side."""
    differ = [phase for phase in found.phases if phase.allocated_difference or phase.reserved_difference]
    if not differ:
        return "equal in every phase, allocated and reserved"
    return f"{len(differ)} of {len(found.phases)} phases differ; emulated first, then real, then their difference:"


def _beside(emulated: CardRun, real: CardRun) -> str:
    said = [f"{run.beside_bytes / MIB:,.1f} MiB" if run.beside_bytes is not None else "?" for run in (emulated, real)]
    return f"beside the allocator (context, NCCL, libraries): {said[0]} emulated, {said[1]} real; {real.seconds:.1f} s"


def _run(result: Path, request: RehearsalRequest, gpu: Gpu | None, timeout_s: float) -> CardRun:
    """Two steps in a process of its own, on an emulated `gpu`, or on the machine's own for None."""
    asked = result.with_suffix(".request")
    write_text(asked, request.model_dump_json())
    root = Path(__file__).parents[1]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bigdit.rehearse.card.worker", asked, result],
        env=own if gpu is None else worker_environment(gpu),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {' … '.join(done.stderr.splitlines()[-4:])}")
    return CardRun.model_validate_json(result.read_bytes())


def _gpu_at_hand() -> str:
    script = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    name = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stdout.strip()
    if not name:
        raise UserError("torch finds no GPU here; `--instead GPU` tries this out on an emulated card")
    return name


if __name__ == "__main__":
    sys.exit(guard(lambda: main(sys.argv[1:])))
