"""Plans on disk: a file for each question, named by all that decides its answer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from bigdit import log
from bigdit.catalog.revision import revision
from bigdit.errors import UserError, versions
from bigdit.receipt import Receipt
from bigdit.rehearse import cache
from bigdit.sealed import read_sealed, write_sealed
from bigdit.search.plan import Plan
from bigdit.search.question import Question


def find(question: Question, receipts: Iterable[Receipt]) -> Plan | None:
    """The plan that is kept for `question`; None where there is none, and with a notice where it is damaged."""
    file = _file(question, receipts)
    try:
        return Plan.model_validate_json(read_sealed(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):  # pydantic's among them
        log.notice(f"{file} is damaged, and the plan is made anew")
        return None


def keep(question: Question, receipts: Iterable[Receipt], plan: Plan) -> None:
    """Keep a plan, in place of what was there; a cache that cannot be written is only noticed."""
    try:
        write_sealed(_file(question, receipts), plan.model_dump_json())
    except UserError as error:
        log.notice(f"the plan is not kept: {error}")


def _file(question: Question, receipts: Iterable[Receipt]) -> Path:
    decides = [
        question.model_dump_json(),
        json.dumps(versions(), sort_keys=True),
        revision(),
        cache.sources(),
        _sources(),
        *(receipt.digest() for receipt in receipts),
    ]
    name = hashlib.sha256("|".join(decides).encode()).hexdigest()[:32]
    return cache.folder().parent / "plans" / f"{name}.json"


@functools.cache
def _sources() -> str:
    """A digest of this layer and of what it takes models and cards from; cache.sources has the rest."""
    return cache.digest_of(("search", "speed", "catalog", "config"))
