"""The loss at a given time, for all samples, with the noise of their seeds."""

import pytest
import torch

from bigdit import objectives
from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec

LATENTS = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
SEEDS = (5, 6, 7)


def fed(objective, at):
    """The inputs of a model that predicts zeros, and the loss."""
    seen = []

    def predict(noisy, t):
        seen.append((noisy, t))
        return torch.zeros_like(noisy)

    loss = objectives.loss(objective, predict, LATENTS, SEEDS, torch.float32, 16, at)
    return *seen[0], loss


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_matching_noises_to_the_very_time(shift):
    noise = objectives.draw_noise(LATENTS, SEEDS)
    noisy, t, loss = fed(FlowMatchingSpec(shift=shift), 0.3)
    assert torch.equal(t, torch.full((3,), 0.3))
    torch.testing.assert_close(noisy, 0.7 * LATENTS + 0.3 * noise)
    assert float(loss) == pytest.approx(float((noise - LATENTS).pow(2).mean()))


@pytest.mark.parametrize(("at", "timestep"), [(0.29, 290), (0.57, 570), (0.0001, 0), (0.99999, 999)])
def test_ddpm_takes_the_nearest_timestep(at, timestep):
    noise = objectives.draw_noise(LATENTS, SEEDS)
    noisy, t, loss = fed(DdpmSpec(), at)
    assert t.tolist() == [timestep / 1000] * 3
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    alpha = float((1 - betas).cumprod(0)[timestep])
    torch.testing.assert_close(noisy, alpha**0.5 * LATENTS + (1 - alpha) ** 0.5 * noise)
    assert float(loss) == pytest.approx(float(noise.pow(2).mean()))
