"""Receipts of a card: where they lie, and which of them plans go by."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from bigdit import receipt
from bigdit.catalog import Gpu, gpu
from bigdit.checkout import ROOT, in_checkout
from bigdit.documents import read_json
from bigdit.errors import UserError
from bigdit.receipt import Receipt
from bigdit.search.question import Question

NEWEST = 8
"""So many receipts of a card are used: each is run again on an emulated GPU, which takes a second where it is new."""


def folders() -> list[Path]:
    """Where receipts are looked for: the repository's own, where bigdit runs from one, and the user's."""
    own = [ROOT / "benchmarks" / "receipts"] if in_checkout() else []
    return [*own, receipt.folder()]


def read(places: Iterable[Path]) -> tuple[list[Receipt], list[str]]:
    """All receipts of these folders, oldest first, and a line for each file that is none."""
    found, notices = [], []
    for path in sorted({path for place in places for path in place.glob("*.json")}):
        try:
            document = read_json(path)
            if not isinstance(document, dict):
                raise ValueError("no mapping of keys, such as model and strategy")
            found.append(Receipt.model_validate(document))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"]) or "the file"
            notices.append(f"{path} is no receipt and was passed over: {at}: {first['msg']}")
        except ValueError as error:
            notices.append(f"{path} is no receipt and was passed over: it is {error}")
        except OSError as error:
            notices.append(f"{path} cannot be read and was passed over: {error.strerror or error}")
    return sorted(found, key=lambda each: each.written), notices


def of_card(receipts: Iterable[Receipt], card: Gpu, *, emulated: bool = False) -> list[Receipt]:
    """The newest receipts of this card, or of emulated ones of its kind, whose steps all had one shape."""
    alike = [each for each in receipts if each.emulated == emulated and each.buckets == 1]
    return [each for each in alike if _is(each.device, card)][-NEWEST:]


def left_out(receipts: Iterable[Receipt], card: Gpu) -> list[str]:
    """A line where receipts are of emulated cards of this kind, from which plans learn nothing."""
    count = sum(each.emulated and _is(each.device, card) for each in receipts)
    if count == 0:
        return []
    said = "1 receipt of an emulated card is" if count == 1 else f"{count} receipts of emulated cards are"
    return [f"{said} left out: what the {card.title} takes is learnt from real ones alone"]


def own_receipts(question: Question) -> tuple[list[Receipt], list[str]]:
    """The receipts of the question's card, and lines for files that are none and for emulated cards."""
    places = folders() if question.receipts is None else [question.receipts]
    found, notices = read(places)
    return of_card(found, question.gpu), [*notices, *left_out(found, question.gpu)]


def _is(device: str, card: Gpu) -> bool:
    try:
        return gpu(device).name == card.name
    except UserError:
        return False
