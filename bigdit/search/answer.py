"""The answer to a question: what is kept of it, or a plan that is made."""

from __future__ import annotations

from collections.abc import Callable

from bigdit.cache import Cache, digest_of, installed
from bigdit.catalog.names import revision
from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.profile.cards import SOURCES, Cards
from bigdit.search.plan import Plan
from bigdit.search.question import Question
from bigdit.search.receipts import own_receipts

PLANS = Cache("plans", Plan, "the plan", "the plan is made")

_SOURCES = ("search", "speed", "catalog", "config", *SOURCES)
"""Whose sources decide a plan."""


def make_plan(question: Question, *, progress: Callable[[str], None] | None = None) -> Plan:
    """The plan for `question`, from the cache where it was made before with the same versions, catalogue and receipts.

    `progress` is told what is going on, in a line. Raises UserError where the model cannot be planned.
    """
    own, notices = own_receipts(question)
    known = question.model_dump_json(), installed(), revision(), digest_of(*_SOURCES), cuda_build(cuda_python())
    decides = (*known, *(receipt.digest() for receipt in own))
    plan = PLANS.find(decides)
    if plan is None:
        with Cards(question.gpu) as cards:  # its libraries are imported while the search is
            from bigdit.search.making import made

            plan, lasts = made(question, own, cards, progress or (lambda line: None))
        if lasts:
            PLANS.keep(decides, plan)
    return plan.noted(notices)  # of files that decide nothing: they may be others the next time
