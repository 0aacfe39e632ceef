"""What would fit where nothing that was asked for does: each of these ran."""

import plans
import pytest
from gpus import SMALL

from bigdit.search.answer import make_plan
from bigdit.search.explain import _more_host
from bigdit.search.plan import Constraints, ResolvedRequest
from bigdit.search.resolve import resolve_request
from bigdit.units import GIB

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.slow
def test_ways_out_ran_on_gpus_of_their_kind():
    """More GPUs, adapters, and a larger GPU that computes the precision and goes at its own speed."""
    request = resolve_request(model="dit-s-8", gpu="rtx-3060-12g", reserve=0)
    gpu = request.gpu.model_copy(update={"usable_mib": 800})
    pins = Constraints(engine="single", optimizer="adamw", full=True)
    plan = make_plan(request.model_copy(update={"gpu": gpu, "host_memory_bytes": 64 * GIB, "constraints": pins}))
    assert plan.verdict == "DOES NOT FIT"
    reasons = [row.reason for row in plan.fixes]
    assert reasons[-1] == "a larger GPU"
    assert all(row.verdict == "FITS" and row.headroom_bytes >= 0 for row in plan.fixes)
    assert all(row.peak_reserved_bytes >= row.peak_allocated_bytes == max(row.phases.values()) for row in plan.fixes)


@pytest.mark.slow
def test_what_is_pinned_is_let_go():
    pins = Constraints(engine="single", optimizer="adamw", checkpointed_blocks=0, micro_batch_size=64, full=True)
    gpu = resolve_request(model="sana-1600m", gpu="a40").gpu.model_copy(update={"usable_mib": 8 * 1024})
    plan = make_plan(ResolvedRequest(model=SMALL, gpu=gpu, resolution=(1024, 1024), constraints=pins))
    assert plan.verdict == "DOES NOT FIT"
    first = plan.fixes[0]
    assert first.reason == "without what was fixed"
    assert first.strategy.micro_batch_size < 64


def test_with_more_host_memory_the_figures_stand():
    request = resolve_request(model="sana-1600m", gpu="a40", host_memory="64GiB")
    nearest = plans.made_plan().chosen.model_copy(update={"host_bytes": 100 * GIB, "verdict": "DOES NOT FIT"})
    (row,) = _more_host(request, nearest)
    assert (row.verdict, row.reason) == ("FITS", "100.00 GiB of CPU memory per machine, instead of 64.00 GiB")
