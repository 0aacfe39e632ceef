"""The learning rate of a step, in warm-up and after it, beside torch's schedulers and the papers."""

import pytest
import torch
from commands import DIGITS
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from bigdit.config.stages import load_run
from bigdit.train.loop import learning_rate

DIGITS_RUN = load_run(DIGITS)
STRATEGY = DIGITS_RUN.strategy


def run(lr, **train):
    return DIGITS_RUN.model_copy(
        update={
            "strategy": STRATEGY.model_copy(update={"optimizer": STRATEGY.optimizer.model_copy(update={"lr": lr})}),
            "train": DIGITS_RUN.train.model_copy(update={"min_lr": 0.0, "decay_steps": None, **train}),
        }
    )


def rates(chosen):
    return [learning_rate(chosen, step) for step in range(chosen.train.steps)]


@st.composite
def schedules(draw):
    """Every schedule that a config allows, with few steps."""
    kind = draw(st.sampled_from(["constant", "cosine", "wsd"]))
    steps = draw(st.integers(1, 60))
    decay = draw(st.integers(1, steps)) if kind == "wsd" else None
    lr = draw(st.floats(1e-6, 1.0))
    return run(
        lr,
        steps=steps,
        lr_schedule=kind,
        decay_steps=decay,
        warmup_steps=draw(st.integers(0, steps - (decay or 0))),
        min_lr=0.0 if kind == "constant" else draw(st.floats(0, lr)),
    )


@given(schedules())
def test_a_rate_rises_to_the_peak_stays_and_falls_towards_the_least(chosen):
    train, peak, found = chosen.train, chosen.strategy.optimizer.lr, rates(chosen)
    warm, after = found[: train.warmup_steps], found[train.warmup_steps :]
    assert warm == sorted(warm)
    assert after == sorted(after, reverse=True)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in found)
    assert all(rate >= train.min_lr * (1 - 1e-12) for rate in after)
    assert found[train.warmup_steps - 1 if warm else 0] == pytest.approx(peak)


@given(schedules(), st.integers(1, 60))
def test_a_longer_course_has_the_same_rates_until_its_fall(chosen, more):
    """The purpose of wsd: a run resumes with more steps from before the fall, as if it had never been shorter."""
    train = chosen.train
    fall = {"constant": 0, "cosine": train.steps - train.warmup_steps, "wsd": train.decay_steps}[train.lr_schedule]
    longer = chosen.model_copy(update={"train": train.model_copy(update={"steps": train.steps + more})})
    stable = train.steps - fall
    assert rates(longer)[:stable] == rates(chosen)[:stable]


@pytest.mark.parametrize("min_lr", [0.0, 2e-5])
def test_cosine_is_torch_s(min_lr):
    chosen = run(1e-3, steps=50, warmup_steps=10, lr_schedule="cosine", min_lr=min_lr)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    theirs = lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=1 / 10, total_iters=9),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=min_lr),
        ],
        milestones=[10],
    )
    for rate in rates(chosen):
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_wsd_falls_as_one_minus_the_root_in_the_last_steps():
    """arXiv:2405.18392: a quarter through its fall it has lost half."""
    chosen = run(1e-3, steps=100, warmup_steps=10, lr_schedule="wsd", decay_steps=16, min_lr=1e-4)
    found = rates(chosen)
    assert found[9:85] == [1e-3] * 76  # the fall begins at the last of them
    assert found[88] == pytest.approx(1e-4 + 9e-4 * 1 / 2)
    assert found[93] == pytest.approx(1e-4 + 9e-4 * 1 / 4)
    assert found[99] == pytest.approx(1e-4 + 9e-4 * (1 - (15 / 16) ** 0.5))
