"""Flow matching: t is drawn, shifted and weighted as diffusers does it for SD3 and Flux."""

import math

import pytest
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from pydantic import ValidationError

from bigdit import objectives
from bigdit.errors import UserError
from bigdit.objective_spec import ExponentialShift, FlowMatchingSpec, SqrtShift

MANY = 4000


def drawn(objective, count=MANY, tokens=256):
    """t of so many samples, as the model gets it."""
    seen = []

    def predict(latents, t):
        seen.append(t)
        return torch.zeros_like(latents)

    objectives.loss(objective, predict, torch.zeros(count, 1, 1, 1), range(count), torch.float32, tokens)
    return seen[0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"t_distribution": "uniform"}, {"weighting_scheme": "none"}),
        (
            {"logit_mean": -0.5, "logit_std": 0.8},
            {"weighting_scheme": "logit_normal", "logit_mean": -0.5, "logit_std": 0.8},
        ),
        ({"t_distribution": "mode"}, {"weighting_scheme": "mode", "mode_scale": 1.29}),
        ({"t_distribution": "mode", "mode_scale": -0.5}, {"weighting_scheme": "mode", "mode_scale": -0.5}),
    ],
)
def test_t_is_distributed_as_diffusers_draws_it(ours, theirs):
    torch.manual_seed(0)
    expected = compute_density_for_timestep_sampling(batch_size=MANY, **theirs).sort().values
    found = drawn(FlowMatchingSpec(**ours)).sort().values
    assert found[0] > 0
    assert found[-1] < 1
    # the Kolmogorov-Smirnov distance of equal distributions exceeds 0.036 once in a hundred times
    ranks = torch.searchsorted(found, expected) / MANY
    assert (ranks - torch.arange(MANY) / MANY).abs().max() < 0.036
    if ours != {"t_distribution": "uniform"}:
        assert (found - torch.arange(MANY) / MANY).abs().max() > 0.05


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 5000])
def test_shifts_by_tokens_are_those_of_sd3_and_of_flux(tokens):
    t = drawn(FlowMatchingSpec(), 8)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    flux = scheduler.time_shift(calculate_shift(tokens), 1.0, t)
    assert torch.allclose(drawn(FlowMatchingSpec(shift=ExponentialShift()), 8, tokens), flux, rtol=1e-5)
    root = math.sqrt(tokens / 256)
    assert torch.allclose(drawn(FlowMatchingSpec(shift=SqrtShift()), 8, tokens), root * t / (1 + (root - 1) * t))
    assert torch.equal(drawn(FlowMatchingSpec(shift=3.0), 8, tokens), drawn(FlowMatchingSpec(shift=3.0), 8))


def test_a_larger_sample_is_shifted_by_its_own_tokens_when_it_is_drawn():
    seen = []

    def predict(latents, t):
        seen.append(round(t[0].item(), 4))
        return torch.zeros_like(latents)

    for shift in (1.0, SqrtShift(base_tokens=16)):
        objectives.sample(FlowMatchingSpec(shift=shift), "euler", predict, torch.zeros(1, 1, 8, 8), 3, 64)
    last = 2 * 0.001 / (1 + 0.001)  # of the shifted timesteps; the second of three steps starts in the middle
    middle = (1 + last) / 2
    assert (seen[:2], seen[3:5]) == ([1.0, 0.5005], [1.0, round(2 * middle / (1 + middle), 4)])


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_losses_are_weighed_as_diffusers_weighs_them(weighting):
    latents, seen = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0)), {}

    def predict(noisy, t):
        seen.update(noisy=noisy, t=t)
        return torch.zeros_like(noisy)

    loss = objectives.loss(FlowMatchingSpec(weighting=weighting), predict, latents, [5, 6, 7, 8], torch.float32, 9)
    t = seen["t"].view(-1, 1, 1, 1)
    velocity = (seen["noisy"] - latents) / t  # x_t = x + t (ε - x)
    weights = compute_loss_weighting_for_sd3(weighting, t)
    expected = (weights * F.mse_loss(torch.zeros_like(velocity), velocity, reduction="none")).mean()
    assert torch.allclose(loss, expected, rtol=1e-4)


@pytest.mark.parametrize("bounds", [(0.875, 1.0), (0.0, 0.875)])
def test_an_expert_sees_its_part_of_t_alone_as_often_as_a_whole_model_does(bounds):
    """Wan 2.2's experts: the distribution of t, shifted, within the bounds."""
    low, high = bounds
    whole = drawn(FlowMatchingSpec(shift=12.0), 20 * MANY)
    expected = whole[(low <= whole) & (whole <= high)].sort().values
    found = drawn(FlowMatchingSpec(shift=12.0, t_range=bounds)).sort().values
    assert (low <= found).all()
    assert (found <= high).all()
    ranks = torch.searchsorted(expected, found) / len(expected)
    assert (ranks - torch.arange(MANY) / MANY).abs().max() < 0.036


def test_a_range_of_t_that_nothing_can_come_into_is_refused():
    with pytest.raises(ValidationError, match=r"t_range is \[0.5, 0.5\], and its second bound must be 0.001 above"):
        FlowMatchingSpec(t_range=(0.5, 0.5))
    with pytest.raises(UserError, match=r"objective.t_range is \[0.999, 1\], and none of 100,000 draws of t is in it"):
        drawn(FlowMatchingSpec(logit_mean=-10, logit_std=0.01, t_range=(0.999, 1)), 1)
