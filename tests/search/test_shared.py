"""Plans whose GPUs share samples: if one sample is too much for a GPU, or the global batch has too few."""

from __future__ import annotations

import plans
import pytest
from gpus import of_blocks

from bigdit import catalog
from bigdit.profile.gpus import EmulatedGpus
from bigdit.report.page import page
from bigdit.search.answer import make_plan
from bigdit.search.calibration import Calibration
from bigdit.search.explore import explore, selective
from bigdit.search.plan import Constraints, Plan, ResolvedRequest, record
from bigdit.search.planner import Planner
from bigdit.search.space import proposals
from bigdit.speed.seconds import Cluster

SHORT = of_blocks(catalog.model("wan2.1-t2v-1.3b"), 3, "short-wan")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cache(own_cache: None) -> None:
    """Attempts that these tests share, from an empty cache."""


def asking(mib: int, **changes: object) -> ResolvedRequest:
    gpu = catalog.gpu("rtx-4090").model_copy(update={"usable_mib": mib})
    asked = ResolvedRequest(
        model=SHORT,
        gpu=gpu,
        cluster=Cluster(gpus=2),
        resolution=(480, 832),
        frames=81,
        constraints=Constraints(engine="fsdp2", optimizer="adamw", precision="bf16"),
    )
    return asked.model_copy(update=changes)


def planned(mib: int, **changes: object) -> Plan:
    return make_plan(asking(mib, **changes))


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


def test_a_degree_and_selective_checkpointing_are_predicted_from_few_attempts(record_property) -> None:  # type: ignore[no-untyped-def]
    asked = asking(20000, cluster=Cluster(gpus=4))
    ran: list[int] = []
    with EmulatedGpus(asked.gpu) as emulated:
        emulated.done = ran.append
        planner = Planner(asked, emulated, Calibration())
        for cp, attempts in ((1, 4), (2, 2), (4, 2)):
            assert explore(planner, [each for each in proposals(asked)[0] if each.strategy.cp == cp]) == {}
            assert len(ran) == attempts
            ran.clear()
        selective(planner, [*planner.options.values()][:1])
        assert len(ran) == 1
        off: list[float] = []
        for option in planner.options.values():
            for size, blocks in ((1, 1), (4, SHORT.block_count)):
                strategy = option.strategy.settled(
                    micro_batch_size=size, grad_accum_steps=1, checkpointed_blocks=blocks
                )
                found = emulated.attempt(planner.step_request(strategy))
                off.append(option.reserved(size, blocks) / found.peak_reserved_bytes - 1)
    assert len(off) == 8
    assert max(map(abs, off)) < 0.2
    record_property("found", f"shared samples: reserved bytes predicted {min(off):+.1%} to {max(off):+.1%} off")
