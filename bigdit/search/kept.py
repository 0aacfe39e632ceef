"""Plans that are kept, and what decides them."""

from __future__ import annotations

from collections.abc import Iterable

from bigdit.catalog.revision import revision
from bigdit.kept import Kept, digest_of, installed
from bigdit.receipt import Receipt
from bigdit.rehearse import cache
from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.search.plan import Plan
from bigdit.search.question import Question

_KEPT = Kept("plans", Plan, "the plan", "the plan is made")

# This layer's, and those of what it takes models and cards from; rehearsals' own are beside them.
_SOURCES = ("search", "speed", "catalog", "config", "emulator")


def find(question: Question, receipts: Iterable[Receipt]) -> Plan | None:
    """The plan that is kept for `question`."""
    return _KEPT.find(_decides(question, receipts))


def keep(question: Question, receipts: Iterable[Receipt], plan: Plan) -> None:
    """Keep a plan, in place of what was there."""
    _KEPT.keep(_decides(question, receipts), plan)


def _decides(question: Question, receipts: Iterable[Receipt]) -> tuple[str, ...]:
    known = question.model_dump_json(), installed(), revision(), cache.sources(), digest_of(*_SOURCES)
    ran = (cuda_build(cuda_python()),) if question.device == "emulated" else ()
    return (*known, *ran, *(receipt.digest() for receipt in receipts))
