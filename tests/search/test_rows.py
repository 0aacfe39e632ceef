"""A plan's alternatives: those with the recommended optimizer's numbers come first, whatever others take."""

from __future__ import annotations

import pytest
from gpus import A40, SMALL

from bigdit.search.answer import make_plan
from bigdit.search.plan import Constraints, ResolvedRequest
from bigdit.search.rows import MOST_ROWS

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.slow
def test_lossless_alternatives_come_first_and_are_not_driven_out_by_lossy_ones() -> None:
    gpu = A40.model_copy(update={"usable_mib": 6 * 1024})
    plan = make_plan(
        ResolvedRequest(model=SMALL, gpu=gpu, resolution=(1024, 1024), constraints=Constraints(engine="single"))
    )
    assert plan.chosen.lossless
    assert len(plan.front) <= MOST_ROWS + 1
    own, others = ([row for row in plan.front if row.lossless == wanted] for wanted in (True, False))
    assert (*own, *others) == plan.front
    assert any(row.process.high_bytes < plan.chosen.process.high_bytes for row in own if row != plan.chosen)
    for rows in (own, others):
        speeds = [row.samples_per_second_per_gpu.middle for row in rows]
        assert speeds == sorted(speeds, reverse=True)
    for row in others:  # otherwise it changes numbers for nothing
        better = [
            each
            for each in own
            if each.process.high_bytes <= row.process.high_bytes
            and each.samples_per_second_per_gpu.middle >= row.samples_per_second_per_gpu.middle
        ]
        assert better == [], (row.title, better)
