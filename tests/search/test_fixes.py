"""What would fit if nothing requested does. tests/commands/test_plan.py runs what fits."""

import plans

from bigdit.search import explain
from bigdit.search.calibration import Calibration
from bigdit.search.planner import Planner
from bigdit.search.resolve import resolve_request
from bigdit.units import GIB


def test_with_more_host_memory_the_figures_stand(monkeypatch):
    monkeypatch.setattr(explain, "_best", lambda planner: None)  # neither more GPUs nor adapters
    request = resolve_request(model="sana-1600m", gpu="a40", host_memory="64GiB")
    nearest = plans.made_plan().chosen.model_copy(update={"host_bytes": 100 * GIB, "verdict": "DOES NOT FIT"})
    (row,) = explain.fixes(Planner(request, None, Calibration()), nearest)
    assert (row.verdict, row.reason) == ("FITS", "100.00 GiB of CPU memory per machine, instead of 64.00 GiB")
