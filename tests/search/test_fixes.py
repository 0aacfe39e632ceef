"""What would fit where nothing that was asked for does: each of these ran."""

import plans
import pytest
from gpus import SMALL

from bigdit.search.answer import make_plan
from bigdit.search.explain import _more_host
from bigdit.search.plan import Constraints, ResolvedRequest
from bigdit.search.resolve import resolve_request
from bigdit.units import GIB


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
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
