"""What a run may ask of its objective when it goes on: the same prediction and noise, and the rest with a word."""

import pytest

from bigdit.checkpoint import Checkpoint, check_objective
from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec


def trained_by(folder, objective, *without):
    saved = {key: value for key, value in objective.model_dump(mode="json").items() if key not in without}
    return Checkpoint(folder, {"run": {"objective": saved}})


def test_other_weights_and_times_are_said(tmp_path):
    before, now = DdpmSpec(prediction="v"), DdpmSpec(prediction="v", min_snr_gamma=5.0)
    assert check_objective(trained_by(tmp_path, before), now) == [
        f"{tmp_path} was trained with objective.min_snr_gamma None, and goes on with 5.0"
    ]
    assert check_objective(trained_by(tmp_path, now), now) == []
    times = check_objective(trained_by(tmp_path, FlowMatchingSpec()), FlowMatchingSpec(t_distribution="mode", shift=3))
    assert [line.partition(" was trained with ")[2] for line in times] == [
        "objective.t_distribution logit_normal, and goes on with mode",
        "objective.shift 1.0, and goes on with 3.0",
    ]


def test_a_key_that_came_later_had_its_default(tmp_path):
    assert check_objective(trained_by(tmp_path, DdpmSpec(), "snr_shift", "p2_k"), DdpmSpec()) == []
    with pytest.raises(UserError, match=r"objective\.snr_shift 1\.0, and the run asks for 3\.0"):
        check_objective(trained_by(tmp_path, DdpmSpec(), "snr_shift"), DdpmSpec(snr_shift=3.0))


def test_betas_that_were_of_no_use_may_be_left_out(tmp_path):
    """They were taken in silence once."""
    before = DdpmSpec(betas="squaredcos_cap_v2", beta_start=0.001)
    assert len(check_objective(trained_by(tmp_path, before), DdpmSpec(betas="squaredcos_cap_v2"))) == 1


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (
            DdpmSpec(prediction="v"),
            DdpmSpec(prediction="epsilon"),
            "objective.prediction v, and the run asks for epsilon",
        ),
        (FlowMatchingSpec(), DdpmSpec(), "objective.name flow_matching, and the run asks for ddpm"),
        (
            DdpmSpec(),
            DdpmSpec(betas="squaredcos_cap_v2", min_snr_gamma=5.0),
            "objective.betas linear, and the run asks for squaredcos_cap_v2; set objective.betas to linear, choose",
        ),
        (DdpmSpec(), DdpmSpec(beta_end=0.012), "objective.beta_end 0.02, and the run asks for 0.012"),
        (
            DdpmSpec(prediction="v"),
            DdpmSpec(prediction="v", zero_terminal_snr=True),
            "objective.zero_terminal_snr False, and the run asks for True",
        ),
    ],
)
def test_another_prediction_or_noise_is_refused(tmp_path, before, now, line):
    with pytest.raises(UserError) as refused:
        check_objective(trained_by(tmp_path, before), now)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
