"""A plan's text, page and JSON agree: every number in the text and on the page is in the JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

import plans
import pytest
from quantities import leaves, quantities, reads, visible

from bigdit.report.how_to_run import PORT
from bigdit.report.page import page
from bigdit.report.plan import MOST_ROWS
from bigdit.search.plan import Plan
from bigdit.speed.seconds import Handed, Interval
from bigdit.units import GIB

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plan")]

FOLDER = Path("plans/sana")


def launched(plan: Plan) -> Plan:
    """The time that the CPU takes to launch a step's kernels."""
    handed = Handed(count=4338, counted=True, seconds=Interval(low=0.02, high=0.2), bound="possible")
    step = plan.chosen.step.model_copy(update={"launches": handed})
    return plan.model_copy(update={"chosen": plan.chosen.model_copy(update={"step": step})})


WAYS = {
    "fits": plans.made_plan,
    "bound by launches": lambda: launched(plans.made_plan()),
    "does not fit": plans.unfitting_plan,
    "32 GPUs": plans.sharded_plan,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_number_in_the_text_and_on_the_page_is_one_of_the_json(way):
    """Except sums, differences and shares of two numbers, each of which is named below."""
    plan = WAYS[way]()
    document = json.loads(plan.model_dump_json(exclude={"packed_timeline"}))
    numbers = {value for value in leaves(document) if not isinstance(value, str)} | set(_of_two(plan))
    printed = quantities(" ".join(value for value in leaves(document) if isinstance(value, str)))
    for shown, at_least in ((plans.shown(plan, FOLDER), 90), (visible(page(plan, FOLDER)), 105)):
        found = quantities(shown)
        assert len(found) >= at_least
        made_up = {each for each in found - printed - FIXED if not any(reads(value, *each) for value in numbers)}
        assert made_up == set()


FIXED = {("500.0", "M"), ("100.0", "%"), (str(PORT), ""), ("240", ""), ("00", "")}
"""DeepSpeed's default buckets, beside the chosen ones; the whole, in %; the port of machines and the seconds that they
wait for each other, in commands; and the minutes of a job's time, which is in whole hours."""


def test_a_number_that_is_not_the_plan_s_is_seen():
    """In each unit: the test above would notice the smallest change."""
    assert quantities("28.4–37.1 s: 2.99 GiB 8.2 % of 1,604 in 0.13–1.32 MiB") == {
        ("28.4", "s"), ("37.1", "s"), ("2.99", "GiB"), ("8.2", "%"), ("1,604", ""), ("0.13", "MiB"), ("1.32", "MiB")
    }  # fmt: skip
    assert reads(int(2.99 * GIB), "2.99", "GiB")
    assert not reads(int(2.99 * GIB), "2.98", "GiB")
    assert not reads(int(2.99 * GIB), "2.99", "MiB")
    assert reads(1_604_000_000, "1.604", "B")
    assert reads(102.6, "1.71", "min")
    assert reads(117_187, "117,187", "")
    assert not reads(117_187, "117,188", "")


def _of_two(plan: Plan) -> Iterator[float]:
    """A number that is not in the JSON, but follows from two of its numbers."""
    chosen, ledger, non_torch = plan.chosen, plan.ledger, plan.chosen.non_torch
    yield plan.request.gpu.usable_bytes  # the GPU's bytes as `usable_mib`
    yield chosen.process.high_bytes - non_torch.high_bytes - chosen.peak_reserved_bytes
    yield non_torch.high_bytes - non_torch.low_bytes
    yield chosen.peak_reserved_bytes - ledger.peak_allocated_bytes
    yield abs(chosen.headroom_bytes)
    yield 100 * plan.margin.share
    yield from (100 * nbytes / ledger.peak_allocated_bytes for nbytes in ledger.at_peak.values())
    if plan.request.cluster.gpus > 1:
        over_all = chosen.samples_per_second_per_gpu * plan.request.cluster.gpus
        yield from (over_all.low, over_all.high)
    yield len(plan.front) - MOST_ROWS  # rows that only the page shows
    yield from range(1, 1 + max(len(plan.front), len(plan.fixes)))  # rows, as the page counts them
