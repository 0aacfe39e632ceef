"""What receipts of a card say about predictions for it; without any, what is assumed in their place."""

from __future__ import annotations

from dataclasses import dataclass

from bigdit.search import receipts
from bigdit.search.plan import Band
from bigdit.search.receipts import Checked
from bigdit.spec import Strategy
from bigdit.speed.calibration import Calibration

UNPROVED = Band(
    share=0.05,
    source="a margin of 5 % of what torch reserves: no receipt of this card has shown yet how far rehearsals are off",
)
"""Not a measured error: rehearsals equal real steps to the byte on a CPU, and what a card's libraries may take beyond
the rules in rehearse/scratch is not known before one has been measured."""


@dataclass(frozen=True)
class Evidence:
    """Receipts of the card, each beside its own rehearsal."""

    checked: tuple[Checked, ...] = ()

    @property
    def band(self) -> Band:
        """How far off the reserved peak may be."""
        found = receipts.memory_band(self.checked)
        return UNPROVED if found is None else Band(share=found[0], source=found[1])

    def calibration(self, strategy: Strategy) -> Calibration | None:
        """What was measured of steps like this strategy's; None where nothing was."""
        return receipts.calibration(self.checked, strategy)

    def said(self, strategy: Strategy) -> str:
        """Where the seconds come from, in a sentence."""
        found = self.calibration(strategy)
        if found is None:
            return "a roofline with published efficiencies; no receipt of this card calibrates it"
        return found.source
