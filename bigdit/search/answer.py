"""The answer to a question: what is kept of it, or a plan that is made."""

from __future__ import annotations

from collections.abc import Callable

from bigdit.profile.cards import Cards
from bigdit.search import kept
from bigdit.search.finding.receipts import own_receipts
from bigdit.search.plan import Plan
from bigdit.search.question import Question

Progress = Callable[[str], None]


def make_plan(question: Question, *, progress: Progress | None = None) -> Plan:
    """The plan for `question`, from the cache where it was made before with the same versions, catalogue and receipts.

    `progress` is told what is going on, in a line. Raises UserError where the model cannot be planned.
    """
    own, notices = own_receipts(question)
    plan = kept.find(question, own)
    if plan is None:
        with Cards(question.gpu) as cards:  # its libraries are imported while the search is
            from bigdit.search.making import made

            plan, lasts = made(question, own, cards, progress or (lambda line: None))
        if lasts:
            kept.keep(question, own, plan)
    return plan.noted(notices)  # of files that decide nothing: they may be others the next time
