"""What a resumed run may change: not prediction and noise; all else with a log line."""

import pytest
from commands import DIGITS

from bigdit.checkpoint import Checkpoint, changed_since, check_objective
from bigdit.checkpoint.restore import UNTRAINED
from bigdit.config.stages import load_run
from bigdit.documents import at
from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec
from bigdit.strategy import EmaSpec


def trained_by(folder, objective, *without, run=None):
    saved = {key: value for key, value in objective.model_dump(mode="json").items() if key not in without}
    document = {} if run is None else run.model_dump(mode="json")
    return Checkpoint(folder, {"run": document | {"objective": saved}, "strategy": {}})


def changed(folder, before, now, *overrides):
    """The log of a run that resumes with another objective and other settings, without its beginning."""
    run = load_run(DIGITS)
    found = changed_since(
        trained_by(folder, before, run=run), load_run(DIGITS, overrides).model_copy(update={"objective": now})
    )
    assert all(line.startswith(f"{folder} was trained with ") for line in found)
    return [line.partition(" was trained with ")[2] for line in found]


def test_other_weights_and_times_are_reported(tmp_path):
    before, now = DdpmSpec(prediction="v"), DdpmSpec(prediction="v", min_snr_gamma=5.0)
    assert changed(tmp_path, before, now) == ["objective.min_snr_gamma null, and resumes with 5.0"]
    assert changed(tmp_path, now, now) == []
    assert changed(tmp_path, FlowMatchingSpec(), FlowMatchingSpec(t_distribution="mode", shift=3)) == [
        "objective.shift 1.0, and resumes with 3.0",
        "objective.t_distribution logit_normal, and resumes with mode",
    ]


def test_all_that_is_trained_otherwise_is_reported(tmp_path):
    """The recipe's rate falls, so that its length counts."""
    objective = FlowMatchingSpec()
    printed = {
        "data.caption_dropout=0.3": "data.caption_dropout 0.1, and resumes with 0.3",
        "strategy.gradient_clipping=null": "strategy.gradient_clipping 1.0, and resumes with null",
        "strategy.optimizer.betas=[0.9, 0.9]": "strategy.optimizer.betas [0.9, 0.99], and resumes with [0.9, 0.9]",
        "train.steps=900": "train.steps 800, and resumes with 900",
    }
    assert changed(tmp_path, objective, objective, *printed) == list(printed.values())
    constant = load_run(DIGITS, ["train.lr_schedule=constant"])
    longer = load_run(DIGITS, ["train.lr_schedule=constant", "train.steps=900"])
    found = trained_by(tmp_path, objective, run=constant)
    assert changed_since(found, longer.model_copy(update={"objective": objective})) == []


def test_what_changes_nothing_that_is_trained_is_not_reported(tmp_path):
    objective, run = FlowMatchingSpec(), load_run(DIGITS).model_dump()
    run["strategy"]["ema"] = EmaSpec().model_dump()
    for key in UNTRAINED:  # each is one
        assert at(run, key.split(".")[:-1]).keys() >= {key.split(".")[-1]}
    others = (
        "strategy.engine=fsdp2",
        "strategy.ds_config=null",
        "strategy.micro_batch_size=8",
        "data.workers=1",
        "output=else",
        "samples=null",
    )
    assert changed(tmp_path, objective, objective, *others, "train.checkpoint_every=7") == []


def test_a_key_that_came_later_had_its_default(tmp_path):
    check_objective(trained_by(tmp_path, DdpmSpec(), "snr_shift", "p2_k"), DdpmSpec())
    with pytest.raises(UserError, match=r"objective\.snr_shift 1\.0, and the run asks for 3\.0"):
        check_objective(trained_by(tmp_path, DdpmSpec(), "snr_shift"), DdpmSpec(snr_shift=3.0))


def test_betas_that_were_of_no_use_may_be_left_out(tmp_path):
    """Before, they were accepted and ignored."""
    before = DdpmSpec(betas="squaredcos_cap_v2", beta_start=0.001)
    check_objective(trained_by(tmp_path, before), DdpmSpec(betas="squaredcos_cap_v2"))


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
            "objective.betas linear, and the run asks for squaredcos_cap_v2; set objective.betas to linear, or choose",
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
