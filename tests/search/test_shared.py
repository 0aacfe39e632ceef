"""Plans whose GPUs share samples: if one sample is too much for a GPU, or the global batch has too few."""

from __future__ import annotations

import plans
import pytest
from gpus import of_blocks

from bigdit import catalog
from bigdit.report.page import page
from bigdit.search.answer import make_plan
from bigdit.search.plan import Constraints, Plan, ResolvedRequest, record
from bigdit.speed.seconds import Cluster

SHORT = of_blocks(catalog.model("wan2.1-t2v-1.3b"), 3, "short-wan")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cache(own_cache: None) -> None:
    """Attempts that these tests share, from an empty cache."""


def planned(mib: int, **changes: object) -> Plan:
    gpu = catalog.gpu("rtx-4090").model_copy(update={"usable_mib": mib})
    asked = ResolvedRequest(
        model=SHORT,
        gpu=gpu,
        cluster=Cluster(gpus=2),
        resolution=(480, 832),
        frames=81,
        constraints=Constraints(engine="fsdp2", optimizer="adamw", precision="bf16"),
    )
    return make_plan(asked.model_copy(update=changes))


def test_what_fits_no_gpu_alone_is_shared() -> None:
    plan = planned(6500)
    assert (plan.verdict, plan.chosen.strategy.cp, plan.chosen.strategy.engine) == ("FITS", 2, "fsdp2")
    assert "cp 2" in plan.chosen.title
    assert "collectives" in plan.chosen.step.parts
    assert record(plan).strategy.cp == 2
    for shown in (plans.shown(plan, width=200), page(plan)):
        assert "2 GPUs / cp 2 = 1 a step" in shown
        assert "over 2 GPUs (context parallelism)" in shown


def test_a_sample_that_fits_is_not_shared_unless_the_global_batch_has_fewer() -> None:
    roomy = planned(20000)
    assert (roomy.verdict, roomy.chosen.strategy.cp) == ("FITS", 1)
    assert any("choose it with --cp 2" in each.reason for each in roomy.rejected)
    one = planned(20000, global_batch_size=1)
    assert (one.verdict, one.chosen.strategy.cp, one.chosen.strategy.global_batch_size) == ("FITS", 2, 1)


def test_samples_that_are_shared_anyway_may_be_shared_by_more() -> None:
    plan = planned(20000, cluster=Cluster(gpus=4), global_batch_size=2)
    assert (plan.verdict, plan.chosen.strategy.cp) == ("FITS", 2)
    assert not any("choose it with --cp" in each.reason for each in plan.rejected)


def test_heads_that_do_not_divide_are_shared_by_a_ring() -> None:
    plan = planned(20000, cluster=Cluster(gpus=8), global_batch_size=1)
    assert (plan.verdict, plan.chosen.strategy.cp, plan.chosen.strategy.cp_ring) == ("FITS", 8, 2)
    for shown in (plans.shown(plan, width=200), page(plan)):
        assert "over 8 GPUs (context parallelism, a ring of 2: 8 does not divide 12 heads)" in shown
