"""Plans that are kept, and what decides them."""

from __future__ import annotations

from collections.abc import Iterable

from bigdit.catalog.revision import revision
from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.kept import Kept, digest_of, installed
from bigdit.profile.cards import SOURCES
from bigdit.receipt import Receipt
from bigdit.search.plan import Plan
from bigdit.search.question import Question

_KEPT = Kept("plans", Plan, "the plan", "the plan is made")

_SOURCES = ("search", "speed", "catalog", "config", *SOURCES)
"""Whose sources decide a plan."""


def find(question: Question, receipts: Iterable[Receipt]) -> Plan | None:
    """The plan that is kept for `question`."""
    return _KEPT.find(_decides(question, receipts))


def keep(question: Question, receipts: Iterable[Receipt], plan: Plan) -> None:
    """Keep a plan, in place of what was there."""
    _KEPT.keep(_decides(question, receipts), plan)


def _decides(question: Question, receipts: Iterable[Receipt]) -> tuple[str, ...]:
    known = question.model_dump_json(), installed(), revision(), digest_of(*_SOURCES), cuda_build(cuda_python())
    return (*known, *(receipt.digest() for receipt in receipts))
