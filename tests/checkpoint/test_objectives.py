"""What a run may ask of its objective when it goes on: the same prediction, and the rest with a word."""

import pytest

from bigdit.checkpoint import Checkpoint, check_objective
from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec


def trained_by(folder, objective, *without):
    saved = {key: value for key, value in objective.model_dump(mode="json").items() if key not in without}
    return Checkpoint(folder, {"run": {"objective": saved}})


def test_another_noise_is_said(tmp_path):
    before, now = DdpmSpec(prediction="v"), DdpmSpec(prediction="v", snr_shift=3.0)
    assert check_objective(trained_by(tmp_path, before), now) == [
        f"{tmp_path} was trained with objective.snr_shift 1.0, and goes on with 3.0"
    ]
    assert check_objective(trained_by(tmp_path, now), now) == []


def test_a_key_that_came_later_had_its_default(tmp_path):
    assert check_objective(trained_by(tmp_path, DdpmSpec(), "snr_shift"), DdpmSpec()) == []
    assert len(check_objective(trained_by(tmp_path, DdpmSpec(), "snr_shift"), DdpmSpec(snr_shift=3.0))) == 1


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (
            DdpmSpec(prediction="v"),
            DdpmSpec(prediction="epsilon"),
            "objective.prediction v, and the run asks for epsilon",
        ),
        (FlowMatchingSpec(), DdpmSpec(), "objective.name flow_matching, and the run asks for ddpm"),
    ],
)
def test_another_prediction_is_refused(tmp_path, before, now, line):
    with pytest.raises(UserError) as refused:
        check_objective(trained_by(tmp_path, before), now)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
