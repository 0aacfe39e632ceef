"""Plans by both devices side by side: writes benchmarks/plans.md.

python benchmarks/plans.py [PART OF A QUESTION]

Each question is planned by rehearsals alone, and then on emulated cards too. What is kept of plans, rehearsals and
attempts is not asked again, so that an interrupted run goes on; of some questions alone nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.errors import versions
from bigdit.files import write_text
from bigdit.search.answer import make_plan
from bigdit.search.asking.ask import question_for
from bigdit.search.plan import Plan
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
    *((model, "v100-32g-sxm2", 8) for model in ("dit-xl-2", "pixart-sigma-xl-2-512", "sana-600m-512")),
    *((model, "a100-80g-sxm", 16) for model in ("sana-1600m-1024", "cogvideox-5b", "qwen-image", "wan2.1-t2v-14b")),
]
"""Model, card, and how many of them."""

HEAD = """# Plans by rehearsals and on emulated cards

Made by `python benchmarks/plans.py`: each question is planned by rehearsals alone (`--device rehearsed`), and then on
emulated cards (`--device emulated`). *reserved* is torch's, of the recommended strategy; *none* and *all* are the
largest micro-batches with nothing and with all blocks recomputed: rehearsals predict them from shallow siblings, and on
emulated cards so many ran and one more did not. *s* is what the first plan took, with nothing kept, and what the second
one took more, which finds the first one's rehearsals; on two cores, beside other work. All are of one version."""

DIFFERENCES = """## What differs

- Strategies and reserved bytes: nothing. What did, over several cards, had four reasons. Attempts ended by torch's own
  limit (`set_per_process_memory_fraction`), which adds a block's whole size to what is reserved where an expandable
  segment has some of its pages already: of two blocks of SD3.5-L with 460 MiB left, what FSDP2's reduce-scatter sends,
  519 MiB of which 360 had no page, looked for room. In the most bytes that torch may have they ended before that, since
  the card took a context and NCCL's buffers as they are at most: SD3.5-L's at 77.2 GiB of 78.7. A candidate that looked
  for room told no more than that it wants more, and the search went half way to what fits, past Flux.1-dev's and
  CogVideoX-5B's. And replays without a limit had addresses without end: torch takes the smallest block that is large
  enough, counted with the addresses behind it, of which there are 9/8 of a card.
- Of the largest micro-batches with nothing recomputed none; of those with all blocks eight are 1 to 3 too high and
  ten 1 to 4 too low, 2.5 % at most but for 20 of 21 of Flux.1-dev and 33 of 34 of SD3 on an RTX 4090: a deeper model
  leaves other pieces than its siblings.
  Those of small pictures were 5 to 31 % too low while scratch of reductions was continued from micro-batches
  of 2 and 4, which stops growing once its blocks fill the card; and Lumina's 38 % too high while most moments of its
  backward pass were not found in a step of more samples, which it embeds one by one. A recommended strategy is always
  rehearsed whole, and on emulated cards the sizes ran.
"""


@dataclass(frozen=True)
class Line:
    """One question's two answers."""

    asked: str
    rehearsed: Plan
    emulated: Plan

    @property
    def same(self) -> bool:
        """Whether verdict, strategy and reserved bytes are the same."""
        return _said(self.rehearsed) == _said(self.emulated)

    @property
    def limits(self) -> list[tuple[int, int]]:
        """The largest micro-batches, rehearsed and run."""
        both = zip(self.rehearsed.buckets, self.emulated.buckets, strict=True)  # none where the host is short
        return [pair for one, other in both if other.ran for pair in ((one.none, other.none), (one.full, other.full))]

    def cells(self) -> list[str]:
        one, other = self.rehearsed, self.emulated
        reserved = [plan.chosen.peak_reserved_bytes for plan in (one, other)]
        return [
            self.asked,
            f"{one.verdict}: {one.chosen.title}",
            _same(f"{one.verdict}: {one.chosen.title}", f"{other.verdict}: {other.chosen.title}"),
            f"{gib(reserved[0])}, {_same(*map(gib, reserved)) if reserved[0] != reserved[1] else 'the same'}",
            *([f"{one}, {_same(one, other)}" for one, other in self.limits] or ["not run"] * 2),
            f"{one.seconds:.0f} + {other.seconds:.0f}",
        ]


def _said(plan: Plan) -> tuple[str, str, int]:
    return plan.verdict, plan.chosen.title, plan.chosen.peak_reserved_bytes


def _same(one: object, other: object) -> str:
    return "the same" if one == other else str(other)


def answered(model: str, gpu: str, gpus: int) -> Line:
    """The question by both devices."""
    rehearsed, emulated = (
        make_plan(question_for(model, gpu, gpus=gpus, buckets="none", device=device))
        for device in ("rehearsed", "emulated")
    )
    return Line(f"{model}, {gpus} × {gpu}", rehearsed, emulated)


def page(lines: Sequence[Line]) -> str:
    """The page of what is answered so far."""
    heads = ["question", "by rehearsals", "on emulated cards", "reserved", "none", "all", "s"]
    rows = [heads, ["---"] * len(heads), *(line.cells() for line in lines)]
    limits = [limit for line in lines for limit in line.limits]
    return "\n".join(
        [
            HEAD,
            "",
            f"- {len(lines)} of {len(QUESTIONS)} questions are answered; in {sum(line.same for line in lines)} of them "
            "verdict, strategy and reserved bytes are the same",
            f"- of {len(limits)} largest micro-batches {sum(one == other for one, other in limits)} were predicted as "
            "they ran",
            f"- rehearsed with torch {versions()['torch']}; on emulated cards torch {cuda_build(cuda_python())}",
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            DIFFERENCES,
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="PART OF A QUESTION")
    sys.exit(main(" ".join(parser.parse_args().wanted)))
