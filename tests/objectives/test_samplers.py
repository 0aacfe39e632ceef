"""Samples: a model that knows the picture leads every sampler to it, whatever it predicts."""

import pytest
import torch

from bigdit import objectives
from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec
from bigdit.objectives.schedule import alphas_cumprod

PICTURE = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def knowing(objective, asked, *, variance):
    """The output that follows from the picture and what it is fed, at the timestep that it is told."""

    def predict(latents, t):
        assert t.shape == (2,)
        timestep = t[0].item() * objective.timesteps
        assert float(torch.tensor(timestep, dtype=torch.float32)).is_integer()
        asked.append(round(timestep))
        signal = alphas_cumprod(objective)[round(timestep)]
        alpha, sigma = signal**0.5, (1 - signal) ** 0.5
        noise = (latents - alpha * PICTURE) / sigma
        known = {"epsilon": noise, "v": alpha * noise - sigma * PICTURE, "x0": PICTURE}[objective.prediction]
        return torch.cat([known, torch.full_like(known, 9.0)], dim=1) if variance else known

    return predict


@pytest.mark.parametrize("sampler", ["ddim", "dpmsolver++"])
@pytest.mark.parametrize(
    "objective",
    [
        DdpmSpec(),
        DdpmSpec(betas="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction="v"),
        DdpmSpec(betas="squaredcos_cap_v2", prediction="x0"),
        DdpmSpec(prediction="v", zero_terminal_snr=True),
        DdpmSpec(timesteps=100, beta_end=0.2),
    ],
    ids=repr,
)
def test_every_sampler_ends_at_the_picture(objective, sampler):
    for variance in (False, True):
        asked = []
        predict = knowing(objective, asked, variance=variance)
        found = objectives.sample(objective, sampler, predict, NOISE, 10, 16)
        assert torch.allclose(found, PICTURE, atol=2e-3)
        assert (asked[0], len(asked)) == (objective.timesteps - 1, 10)
        assert asked == sorted(asked, reverse=True)


def test_euler_ends_at_the_picture():
    found = objectives.sample(FlowMatchingSpec(), "euler", lambda latents, t: (latents - PICTURE) / t[0], NOISE, 5, 16)
    assert torch.allclose(found, PICTURE, atol=1e-3)


@pytest.mark.parametrize(
    ("objective", "sampler", "steps", "error"),
    [
        (DdpmSpec(), "euler", 5, "--sampler is euler, and a model trained by ddpm takes dpmsolver++ or ddim"),
        (FlowMatchingSpec(), "ddim", 5, "--sampler is ddim, and a model trained by flow_matching takes euler"),
        (
            DdpmSpec(timesteps=8),
            "ddim",
            9,
            "--steps is 9, and the model was trained on 8 timesteps; ask for fewer",
        ),
    ],
)
def test_what_does_not_go_together_is_said(objective, sampler, steps, error):
    with pytest.raises(UserError) as caught:
        objectives.sample(objective, sampler, lambda latents, t: latents, NOISE, steps, 16)
    assert caught.value.problems == (error,)
