"""The terminal's text, the page and the JSON of a plan are one object: every number of the first two is the third's."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import plans
import pytest

from bigdit.report import words
from bigdit.report.page import page
from bigdit.report.plan import MOST_ROWS
from bigdit.search.plan import Plan
from bigdit.speed.interval import Interval
from bigdit.speed.launches import Handed
from bigdit.units import GIB, KIB, MIB, count

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plan")]

BYTES = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}
SECONDS = {"days": 86_400, "h": 3_600, "min": 60, "s": 1, "ms": 1e-3}
COUNTS = {"B": 1e9, "M": 1e6, "k": 1e3}

UNITS = "|".join(sorted(BYTES | SECONDS | COUNTS | {"%": 1}, key=len, reverse=True))
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
QUANTITY = re.compile(rf"({NUMBER})(?:–({NUMBER}))?(?: ({UNITS})(?!\w))?")
FOLDER = Path("plans/sana")

Quantity = tuple[str, str]
"""A number as it is shown, and its unit: of bytes, of time, of a count, a share; or none."""


def launched(plan: Plan) -> Plan:
    """With the time that the host takes to hand a step's kernels over."""
    handed = Handed(count=4338, counted=True, seconds=Interval(low=0.02, high=0.2), bound="possible")
    step = plan.chosen.step.model_copy(update={"launches": handed})
    return plan.model_copy(update={"chosen": plan.chosen.model_copy(update={"step": step})})


WAYS = {
    "fits": plans.made_plan,
    "bound by launches": lambda: launched(plans.made_plan()),
    "does not fit": plans.unfitting_plan,
    "32 cards": plans.sharded_plan,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_number_in_the_text_and_on_the_page_is_one_of_the_json(way):
    """But for sums, differences and shares of two of them, each of which is named below."""
    plan = WAYS[way]()
    document = json.loads(plan.model_dump_json(exclude={"packed_timeline"}))
    numbers = {value for value in _leaves(document) if not isinstance(value, str)} | set(_of_two(plan))
    said = _quantities(" ".join(value for value in _leaves(document) if isinstance(value, str)))
    for shown, at_least in ((plans.shown(plan, FOLDER), 90), (_visible(page(plan, FOLDER)), 105)):
        found = _quantities(shown)
        assert len(found) >= at_least
        made_up = {each for each in found - said - FIXED if not any(_reads(value, *each) for value in numbers)}
        assert made_up == set()


FIXED = {("500.0", "M"), ("100.0", "%")}
"""DeepSpeed's own buckets, beside those that were chosen; and the whole, in %."""


def test_a_number_that_is_not_the_plan_s_is_seen():
    """Each in its unit: what the test above holds would notice the least of changes."""
    assert _quantities("28.4–37.1 s: 2.99 GiB 8.2 % of 1,604 in 0.13–1.32 MiB") == {
        ("28.4", "s"), ("37.1", "s"), ("2.99", "GiB"), ("8.2", "%"), ("1,604", ""), ("0.13", "MiB"), ("1.32", "MiB")
    }  # fmt: skip
    assert _reads(int(2.99 * GIB), "2.99", "GiB")
    assert not _reads(int(2.99 * GIB), "2.98", "GiB")
    assert not _reads(int(2.99 * GIB), "2.99", "MiB")
    assert _reads(1_604_000_000, "1.604", "B")
    assert _reads(102.6, "1.71", "min")
    assert _reads(117_187, "117,187", "")
    assert not _reads(117_187, "117,188", "")


def _of_two(plan: Plan) -> Iterator[float]:
    """What is shown and is not in the JSON: what two of its numbers come to."""
    chosen, ledger, beside = plan.chosen, plan.ledger, plan.footprint.beside
    yield plan.question.gpu.usable_bytes  # the card's bytes as `usable_mib`
    yield chosen.process.high_bytes - beside.high_bytes - chosen.peak_reserved_bytes
    yield beside.high_bytes - beside.low_bytes
    yield plan.footprint.segments.wanted_bytes - chosen.peak_reserved_bytes
    yield chosen.peak_reserved_bytes - ledger.peak_allocated_bytes
    yield abs(chosen.headroom_bytes)
    yield 100 * plan.band.share
    yield from (100 * nbytes / ledger.peak_allocated_bytes for nbytes in ledger.at_peak.values())
    if plan.question.cluster.gpus > 1:
        over_all = chosen.images_per_second_per_card * plan.question.cluster.gpus
        yield from (over_all.low, over_all.high)
    yield len(plan.front) - MOST_ROWS  # rows that the terminal leaves to the page
    yield from range(1, 1 + max(len(plan.front), len(plan.fixes)))  # rows, as the page counts them


def _leaves(value: object) -> Iterator[str | float]:
    """All numbers and texts of a JSON document, and its keys."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    if isinstance(value, dict):
        yield from value
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


def _quantities(text: str) -> set[Quantity]:
    """The numbers of a text with their units; both ends of a range."""
    found = [match.groups() for match in QUANTITY.finditer(text)]
    return {(number, unit or "") for first, last, unit in found for number in (first, last) if number}


def _visible(text: str) -> str:
    """What a page shows but for its pictures, which have scales of their own."""
    text = re.sub(r"<(svg|style|script).*?</\1>", "", text, flags=re.DOTALL)
    return html.unescape(re.sub("<[^>]+>", " ", text))


def _reads(value: float, number: str, unit: str) -> bool:
    """Whether `value` is shown as this number with this unit."""
    if unit == "%":
        return number in (f"{value:.1f}", f"{value:.2g}")
    if unit in COUNTS and count(value) == f"{number} {unit}":
        return True
    if unit in BYTES:
        shown = value / BYTES[unit]
        return number in (f"{shown:,.2f}", f"{shown:,.0f}")
    return number in (words.number(value / SECONDS.get(unit, 1)), f"{value:,}", f"{value:g}")
