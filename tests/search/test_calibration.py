"""The margin that a plan keeps free: no measured GPU has needed more."""

import pytest
from on_gpu.page import measured
from on_gpu.points import POINTS
from on_gpu.predicted import REPLAYED, Predictions

from bigdit import catalog
from bigdit.catalog.families import FAMILIES
from bigdit.search.calibration import UNPROVED, UNPROVED_ROUTED, Calibration

TAKEN = {each.name: max(phase.reserved for phase in each.phases) for each in measured() if each.phases}
POINTS_SAID = Predictions.model_validate_json(REPLAYED.read_bytes()).points
SAID = {each.name: each.emulated.reserved for each in POINTS_SAID if not isinstance(each.emulated, str)}


def is_routed(point):
    return FAMILIES[catalog.find_model(point.name.split(" ")[0]).spec.class_name].routed


@pytest.mark.parametrize("routed", [False, True])
def test_no_measured_step_reserved_more_than_was_kept_free(routed):
    points = [point for point in POINTS if point.name in TAKEN and is_routed(point) is routed]
    assert points
    for point in points:
        assert TAKEN[point.name] <= SAID[point.name] * (1 + Calibration(routed=routed).margin.share), point.name


def test_without_a_receipt_experts_that_values_choose_keep_more_free():
    assert Calibration().margin == UNPROVED
    assert Calibration(routed=True).margin == UNPROVED_ROUTED
    (point,) = (point for point in POINTS if point.name in TAKEN and is_routed(point))
    assert TAKEN[point.name] > SAID[point.name] * (1 + UNPROVED.share)  # why it has its own band
