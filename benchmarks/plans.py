"""Plans against the emulated card: writes benchmarks/plans.md.

python benchmarks/plans.py [PART OF A QUESTION]

Each question is planned, and then the recommended strategy is run on an emulated card as it stands, and the largest
micro-batches of the table, and one more of each. What is kept of plans and runs is not asked again, so that an
interrupted run goes on; of some questions alone nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigdit.errors import UserError, versions
from bigdit.files import write_text
from bigdit.rehearse.ask import request_for
from bigdit.rehearse.card.client import Card, cuda_build, cuda_python
from bigdit.rehearse.client import RehearsalError
from bigdit.search.answer import make_plan
from bigdit.search.ask import question_for
from bigdit.search.candidates import LARGEST_MICRO_BATCH, beside
from bigdit.search.plan import Plan
from bigdit.search.verdict import expected, process
from bigdit.spec import Strategy
from bigdit.units import gib

PAGE = Path(__file__).with_suffix(".md")
QUESTIONS = [
    *((model, gpu, 1) for model in ("sana-600m-1024", "sana-1600m-1024") for gpu in ("rtx-4090", "a40", "h100-sxm")),
    *(
        (model, "a40", 1)
        for model in ("pixart-sigma-xl-2-1024", "pixart-alpha-xl-2-512", "dit-xl-2", "hunyuandit-v1.2")
    ),
    *((model, "a100-80g-sxm", 1) for model in ("sd3-medium", "sd3.5-medium", "wan2.1-t2v-1.3b", "cogvideox-2b")),
    *((model, "h100-sxm", 1) for model in ("sd3.5-medium", "ltx-video-0.9", "lumina-image-2.0", "sana-video-2b-480p")),
    *((model, "rtx-4090", 1) for model in ("dit-b-4-paper", "dit-xl-2-paper", "pixart-sigma-xl-2-1024", "sd3-medium")),
    *((model, "rtx-3060-12g", 1) for model in ("dit-l-2", "pixart-alpha-xl-2-256", "sana-600m-512")),
    *((model, "a40", 8) for model in ("sana-600m-1024", "sana-1600m-1024", "pixart-sigma-xl-2-1024", "sd3.5-medium")),
    *((model, "h100-sxm", 8) for model in ("sana-1600m-1024", "sd3.5-large", "flux.1-dev", "wan2.1-t2v-1.3b")),
    *((model, "v100-32g", 8) for model in ("dit-xl-2", "pixart-sigma-xl-2-512", "sana-600m-512")),
    *((model, "a100-80g-sxm", 16) for model in ("sana-1600m-1024", "cogvideox-5b", "qwen-image", "wan2.1-t2v-14b")),
]
"""Model, card, and how many of them."""

HEAD = """# Plans against the emulated card

Made by `python benchmarks/plans.py`: each question is planned on the rehearsed device, and what the plan recommends
is run on an emulated card, by torch's own allocator with expandable segments. *none* and *all* are the largest
micro-batches with nothing and with all blocks recomputed: what the plan says, which is predicted from shallow siblings,
and what the card has, where both it and one more were run. *s* is what the plan took, on a machine that did other work
beside it."""

AWAY = 4
"""How far from the planned largest micro-batch the card's own is looked for."""


@dataclass
class Line:
    """One question's answers: the plan's, the card's, and what the table's largest micro-batches are there."""

    asked: str
    plan: Plan
    reserved: int | str
    largest: list[str]

    def cells(self) -> list[str]:
        chosen = self.plan.chosen
        if isinstance(self.reserved, str):
            card, off = self.reserved, ""
        else:
            card, off = gib(self.reserved), f"{(chosen.peak_reserved_bytes - self.reserved) / self.reserved:+.3%}"
        first = [self.asked, self.plan.verdict, chosen.title, gib(chosen.peak_reserved_bytes), card, off]
        return [*first, *self.largest, f"{self.plan.seconds:.0f}"]


def answered(model: str, gpu: str, gpus: int) -> Line:
    """The plan of a question beside its runs."""
    plan = make_plan(question_for(model, gpu, gpus=gpus, buckets="none", device="rehearsed"))
    with Card(plan.question.gpu, expandable_segments=True) as card:
        reserved = _reserved(card, plan, plan.chosen.strategy)
        limit = plan.buckets[0]
        wanted = {"0": limit.none, "all": limit.full}
        largest = [f"{most} / {_largest(card, plan, most, blocks)}" for blocks, most in wanted.items()]
    return Line(f"{model}, {gpus} × {gpu}", plan, reserved, largest)


def _reserved(card: Card, plan: Plan, strategy: Strategy) -> int | str:
    """What torch reserves on the card, or why there is no such number."""
    question = plan.question
    once = strategy.model_copy(update={"grad_accum_steps": min(strategy.grad_accum_steps, 2)})
    try:
        asked = request_for(question.model, question.gpu, once, resolution=question.resolution, frames=question.frames)
        return max(phase.peak_reserved_bytes for phase in card.run(asked, timeout_s=400).phases)
    except RehearsalError as error:
        if "OutOfMemoryError" in str(error):
            return "out of memory"
        raise
    except UserError as error:
        return str(error)


def _largest(card: Card, plan: Plan, most: int, blocks: str) -> str:
    """The largest micro-batch that fits on the card, near the planned one; `…` where it is farther away."""
    if most >= LARGEST_MICRO_BATCH:
        return "not looked for"

    def fits(size: int) -> bool | str:
        if size == 0:
            return True
        strategy = plan.chosen.strategy.settled(
            micro_batch_size=size, grad_accum_steps=1, checkpointed_blocks=blocks if blocks == "all" else 0
        )
        reserved = _reserved(card, plan, strategy)
        if isinstance(reserved, str):
            return False if reserved == "out of memory" else reserved
        taken = process(reserved, beside(plan.question, strategy), plan.band)
        return expected(taken, plan.question.gpu.usable_bytes) == "FITS"

    step = 1 if fits(most) is True else -1
    for size in range(most, most + step * AWAY, step):
        found = fits(size + (step > 0))
        if isinstance(found, str):
            return found
        if found is (step < 0):
            return str(size)
    return "…"


def page(lines: Sequence[Line]) -> str:
    """The page of what is answered so far."""
    heads = ["question", "verdict", "recommended", "reserved, planned", "on the card", "off", "none", "all", "s"]
    rows = [heads, ["---"] * len(heads), *(line.cells() for line in lines)]
    exact = [line for line in lines if line.reserved == line.plan.chosen.peak_reserved_bytes]
    found = [cell for line in lines for cell in line.largest if cell.split(" / ")[1].isdigit()]
    same = [cell for cell in found if len(set(cell.split(" / "))) == 1]
    return "\n".join(
        [
            HEAD,
            "",
            f"- {len(lines)} of {len(QUESTIONS)} questions are answered; {len(exact)} of the recommended strategies "
            "reserve on the card what was planned, to the byte",
            f"- of {len(found)} largest micro-batches {len(same)} are the card's own",
            f"- rehearsed with torch {versions()['torch']}; on the card torch {cuda_build(cuda_python())}",
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
        ]
    )


def main(wanted: str) -> int:
    lines = []
    for model, gpu, gpus in QUESTIONS:
        if wanted in f"{model} {gpu} {gpus}":
            lines.append(answered(model, gpu, gpus))
            print(" | ".join(lines[-1].cells()), flush=True)
            if not wanted:
                write_text(PAGE, page(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
