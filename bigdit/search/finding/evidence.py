"""What receipts of a card say about predictions for it; without any, what is assumed in their place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bigdit.catalog.families import FAMILIES
from bigdit.receipt import Receipt
from bigdit.rehearse.pool import Pool
from bigdit.search.finding import checked
from bigdit.search.finding.checked import Checked
from bigdit.search.finding.unproved import UNPROVED, UNPROVED_ROUTED
from bigdit.search.plan import Band
from bigdit.search.question import Question
from bigdit.spec import Strategy
from bigdit.speed.calibration import Calibration


@dataclass(frozen=True)
class Evidence:
    """Receipts of the card, each beside its own rehearsal; and whether the model's tokens are `routed` to experts."""

    checked: tuple[Checked, ...] = ()
    routed: bool = False

    @property
    def band(self) -> Band:
        """How far off the reserved peak may be."""
        found = checked.memory_band(self.checked)
        known = UNPROVED if found is None else Band(share=found[0], source=found[1])
        # receipts of other models say nothing of experts
        return max(known, UNPROVED_ROUTED, key=lambda band: band.share) if self.routed else known

    def calibration(self, strategy: Strategy) -> Calibration | None:
        """What was measured of steps like this strategy's; None where nothing was."""
        return checked.calibration(self.checked, strategy)

    def said(self, strategy: Strategy) -> str:
        """Where the seconds come from, in a sentence."""
        found = self.calibration(strategy)
        if found is None:
            return "a roofline with published efficiencies; no receipt of this card calibrates it"
        return found.source


def weighed(pool: Pool, question: Question, own: Iterable[Receipt]) -> tuple[Evidence, list[str]]:
    """What the card's `own` receipts say to a question, and a line for each that says nothing."""
    found, notices = checked.check(own, question.gpu, checked.one_by(pool))
    return Evidence(tuple(found), routed=FAMILIES[question.model.spec.class_name].routed), notices
