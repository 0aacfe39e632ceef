"""Runs with Prodigy, schedule-free AdamW and Muon: resumed, validated, exported."""

import pytest
import torch
from training import exported, run_to

from bigdit.checkpoint.restore import load_tensors
from bigdit.errors import UserError
from bigdit.train.monitor.metrics import read_metrics

NAMES = ("prodigy", "adamw_schedulefree", "muon")
CONSTANT = "train.lr_schedule=constant"
OFTEN = "validation={samples: 24, every: 1, times: [0.5]}"
ONCE = "validation={samples: 24, every: 99, times: [0.5]}"


def chosen(name):
    return (f"strategy.optimizer={{name: {name}, weight_decay: 0.1}}", "train.checkpoint_every=2", CONSTANT)


def tensors(found):
    """All tensors of a checkpoint."""
    saved = {}
    for kind in ("master", "state.z", "state.s", "state.momentum_buffer"):
        wanted = {f"{kind}.{name}": torch.empty(shape) for name, shape in found.state["parameters"].items()}
        try:
            load_tensors(found, wanted)
        except UserError:  # another optimizer's
            continue
        saved |= wanted
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_stopped_is_the_same_to_the_bit(features, tmp_path, name):
    """Also if it is validated after every step, which changes weights, and changes them back."""
    straight = run_to(4, tmp_path / "straight", features, *chosen(name), OFTEN)
    run_to(2, tmp_path / "stopped", features, *chosen(name), ONCE)
    stopped = run_to(4, tmp_path / "stopped", features, *chosen(name), ONCE)
    for held in (tensors, lambda found: exported(found, "transformer")):
        one, other = held(straight), held(stopped)
        assert one
        assert all(torch.equal(one[key], other[key]) for key in one)
    rows = [read_metrics(tmp_path / each / "metrics.jsonl") for each in ("straight", "stopped")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert rows[0][-1]["validation_loss"] == rows[1][-1]["validation_loss"]
    rates = [row["lr"] for row in rows[0]]
    assert rates == [row["lr"] for row in rows[1]]
    if name == "prodigy":  # its estimate, from 1e-6 on
        assert 0 < rates[0] < rates[-1] < 0.1


@pytest.mark.slow
def test_schedule_free_validates_and_exports_its_average(features, tmp_path):
    found = run_to(3, tmp_path / "run", features, *chosen("adamw_schedulefree"), ONCE)
    saved, average = tensors(found), exported(found, "transformer")
    for key, value in average.items():
        trained, z = saved[f"master.{key}"], saved[f"state.z.{key}"]
        assert torch.equal(value, trained.lerp(z, 1 - 1 / 0.9))
    assert any(not torch.equal(value, saved[f"master.{key}"]) for key, value in average.items())
    # A run that starts from the checkpoint has that average, and hardly moves it.
    init = f"model.init_from={found.folder}"
    run_to(2, tmp_path / "from", features, init, ONCE, CONSTANT, "strategy.optimizer.lr=1e-12")
    losses = [read_metrics(tmp_path / each / "metrics.jsonl")[-1]["validation_loss"] for each in ("run", "from")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_rate_that_prodigy_is_not_meant_to_have_is_a_note(features, tmp_path, capsys):
    run_to(2, tmp_path, features, "strategy.optimizer={name: prodigy, lr: 1.0e-4}")
    note = (
        "note: strategy.optimizer.lr is 0.0001, and prodigy multiplies it by its own estimate of the rate: 1 is usual"
    )
    assert note in " ".join(capsys.readouterr().err.split())
