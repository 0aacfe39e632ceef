"""What receipts of a card say about predictions for it; without any, what is assumed in their place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bigdit.catalog.families import FAMILIES
from bigdit.receipt import Receipt
from bigdit.rehearse.pool import Pool
from bigdit.search.finding import receipts
from bigdit.search.finding.receipts import Checked
from bigdit.search.plan import Band
from bigdit.search.question import Question
from bigdit.spec import Strategy
from bigdit.speed.calibration import Calibration

UNPROVED = Band(
    share=0.003,
    source="so far were rehearsals below emulated cards, and these below real ones",
)
"""Where no receipt of the card says more. Rehearsals are below emulated cards in 3 of 375 rows, by 0.25 % of what is
reserved at most (benchmarks/referee.md). Emulated cards are below an A100 by 0.02 % at most in seventeen configurations
of cogvideox-factory's own scripts, since they take cuDNN's workspace for patches; 0.9 % before (benchmarks/peers.md,
which tells of an eighteenth, whose blocks addresses decide in torch's default allocator). Of bigdit's own steps, with
expandable segments, a real H100 reserved what the emulated one did to the byte, but for a mixture of experts
(benchmarks/gpu_matrix.md).

cuDNN's other workspaces are not in it: torch takes the next algorithm where one of them is too much for the card.
Source: try_configs in aten/src/ATen/native/cudnn/Conv_v8.cpp, torch 2.13, which catches OutOfMemoryError.
"""

UNPROVED_ROUTED = Band(
    share=0.029,
    source="a real H100 took so much more than an emulated one where experts are chosen by values",
)
"""The same of a mixture of experts: nothing without values knows how many tokens each expert has. HiDream-I1 of two
blocks allocated 2.9 % more on an H100 than on an emulated one, and reserved 1.0 % more (benchmarks/gpu_matrix.md)."""


@dataclass(frozen=True)
class Evidence:
    """Receipts of the card, each beside its own rehearsal; and whether the model's tokens are `routed` to experts."""

    checked: tuple[Checked, ...] = ()
    routed: bool = False

    @property
    def band(self) -> Band:
        """How far off the reserved peak may be."""
        found = receipts.memory_band(self.checked)
        known = UNPROVED if found is None else Band(share=found[0], source=found[1])
        # receipts of other models say nothing of experts
        return max(known, UNPROVED_ROUTED, key=lambda band: band.share) if self.routed else known

    def calibration(self, strategy: Strategy) -> Calibration | None:
        """What was measured of steps like this strategy's; None where nothing was."""
        return receipts.calibration(self.checked, strategy)

    def said(self, strategy: Strategy) -> str:
        """Where the seconds come from, in a sentence."""
        found = self.calibration(strategy)
        if found is None:
            return "a roofline with published efficiencies; no receipt of this card calibrates it"
        return found.source


def weighed(pool: Pool, question: Question, own: Iterable[Receipt]) -> tuple[Evidence, list[str]]:
    """What the card's `own` receipts say to a question, and a line for each that says nothing."""
    checked, notices = receipts.check(own, question.gpu, receipts.one_by(pool))
    return Evidence(tuple(checked), routed=FAMILIES[question.model.spec.class_name].routed), notices


def own_receipts(question: Question) -> tuple[list[Receipt], list[str]]:
    """The receipts of the question's card, and lines for files that are none and for emulated cards."""
    places = receipts.folders() if question.receipts is None else [question.receipts]
    found, notices = receipts.read(places)
    return receipts.of_card(found, question.gpu), [*notices, *receipts.left_out(found, question.gpu)]
