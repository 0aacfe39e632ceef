"""A model that knows the image leads every sampler to it, whatever it predicts. Each sampler equals diffusers' own."""

import diffusers
import pytest
import torch

from bigdit import objectives
from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec
from bigdit.objectives.ddpm import alphas_cumprod

IMAGE = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))


FLOWS = ["euler", "heun", "dpmsolver++", "unipc"]


def knowing(objective, asked, *, variance):
    """The output that follows from the image and the input, at the given timestep."""

    def predict(latents, t):
        assert t.shape == (2,)
        timestep = t[0].item() * objective.timesteps
        assert float(torch.tensor(timestep, dtype=torch.float32)).is_integer()
        asked.append(round(timestep))
        signal = alphas_cumprod(objective)[round(timestep)]
        alpha, sigma = signal**0.5, (1 - signal) ** 0.5
        noise = (latents - alpha * IMAGE) / sigma
        known = {"epsilon": noise, "v": alpha * noise - sigma * IMAGE, "x0": IMAGE}[objective.prediction]
        return torch.cat([known, torch.full_like(known, 9.0)], dim=1) if variance else known

    return predict


@pytest.mark.parametrize("sampler", ["ddim", "dpmsolver++", "unipc"])
@pytest.mark.parametrize(
    "objective",
    [
        DdpmSpec(),
        DdpmSpec(betas="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction="v"),
        DdpmSpec(betas="squaredcos_cap_v2", prediction="x0"),
        DdpmSpec(prediction="v", zero_terminal_snr=True),
        DdpmSpec(prediction="v", snr_shift=3.0, zero_terminal_snr=True),
        DdpmSpec(timesteps=100, beta_end=0.2),
    ],
    ids=repr,
)
def test_every_sampler_ends_at_the_image(objective, sampler):
    for variance in (False, True):
        asked = []
        predict = knowing(objective, asked, variance=variance)
        found = objectives.sample(objective, sampler, predict, NOISE, 10, 16)
        assert torch.allclose(found, IMAGE, atol=2e-3)
        assert (asked[0], len(asked)) == (objective.timesteps - 1, 10)
        assert asked == sorted(asked, reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 5, 1000])
@pytest.mark.parametrize("shift", [0.5, 1.0, 12.0])
@pytest.mark.parametrize("sampler", FLOWS)
def test_every_sampler_of_a_flow_ends_at_the_image(sampler, shift, steps):
    asked = []

    def predict(latents, t):
        asked.append(t[0].item())
        return (latents - IMAGE) / t[0]

    found = objectives.sample(FlowMatchingSpec(shift=shift), sampler, predict, NOISE, steps, 16)
    assert torch.allclose(found, IMAGE, atol=1e-3)
    assert asked[0] == (pytest.approx(1, abs=2e-6) if sampler == "unipc" else 1)  # diffusers' own starts 1e-6 below
    assert asked == sorted(asked, reverse=True)
    assert len(asked) == (2 * steps - 1 if sampler == "heun" else steps)


def curved(latents, t):
    """An arbitrary model."""
    shape = (-1, 1, 1, 1)
    return torch.sin(3 * latents) + t.to(torch.float32).reshape(shape) * latents.flip(1)


def by_hand(scheduler, times):
    latents = NOISE
    for timestep, t in zip(scheduler.timesteps, times, strict=True):
        latents = scheduler.step(curved(latents, t.expand(2)), timestep, latents).prev_sample
    return latents


FLOW = {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}


@pytest.mark.parametrize("steps", [3, 20])
@pytest.mark.parametrize(
    ("sampler", "scheduler"),
    [
        ("euler", lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)),
        ("heun", lambda: diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0)),
        ("dpmsolver++", lambda: diffusers.DPMSolverMultistepScheduler(**FLOW)),
        ("unipc", lambda: diffusers.UniPCMultistepScheduler(**FLOW)),
    ],
)
def test_a_flow_follows_its_scheduler_to_the_bit(sampler, scheduler, steps):
    driven = scheduler()
    driven.set_timesteps(steps)
    if sampler == "dpmsolver++":
        driven.sigmas[0] = 1.0
    found = objectives.sample(FlowMatchingSpec(shift=3.0), sampler, curved, NOISE, steps, 16)
    assert torch.equal(found, by_hand(driven, driven.sigmas[:-1]))


@pytest.mark.parametrize(
    ("sampler", "scheduler"),
    [
        ("ddim", lambda **printed: diffusers.DDIMScheduler(clip_sample=False, **printed)),
        ("dpmsolver++", diffusers.DPMSolverMultistepScheduler),
        ("unipc", diffusers.UniPCMultistepScheduler),
    ],
)
def test_a_ddpm_follows_its_scheduler_to_the_bit(sampler, scheduler):
    driven = scheduler(prediction_type="v_prediction", timestep_spacing="trailing")
    driven.set_timesteps(20)
    found = objectives.sample(DdpmSpec(prediction="v"), sampler, curved, NOISE, 20, 16)
    assert torch.equal(found, by_hand(driven, driven.timesteps / 1000))


def error_of(sampler, calls):
    """The error of samples from a normal distribution with known mean and deviation, by its exact velocity, in so
    many calls."""
    mean, deviation = 0.7, 0.5

    def velocity(latents, t):
        t = t[0]
        variance = ((1 - t) * deviation) ** 2 + t**2
        return (t - (1 - t) * deviation**2) / variance * (latents - (1 - t) * mean) - mean

    steps = (calls + 1) // 2 if sampler == "heun" else calls
    found = objectives.sample(FlowMatchingSpec(), sampler, velocity, NOISE, steps, 16)
    return (found - (mean + deviation * NOISE)).abs().max().item()


def test_samplers_of_second_order_come_nearer_than_euler_in_as_many_calls():
    euler = {calls: error_of("euler", calls) for calls in (9, 19, 79, 159)}
    assert euler[79] / euler[159] == pytest.approx(2, rel=0.05)
    for sampler in ("heun", "dpmsolver++", "unipc"):
        found = {calls: error_of(sampler, calls) for calls in euler}
        assert all(found[calls] < euler[calls] / 4 for calls in euler), (sampler, found, euler)
        assert found[79] / found[159] > 3, (sampler, found)


@pytest.mark.parametrize(
    ("objective", "sampler", "steps", "error"),
    [
        (DdpmSpec(), "euler", 5, "--sampler is euler, and a model trained by ddpm takes dpmsolver++, unipc or ddim"),
        (
            FlowMatchingSpec(),
            "ddim",
            5,
            "--sampler is ddim, and a model trained by flow_matching takes euler, heun, dpmsolver++ or unipc",
        ),
        (
            DdpmSpec(timesteps=8),
            "ddim",
            9,
            "--steps is 9, and the model was trained on 8 timesteps; ask for fewer",
        ),
    ],
)
def test_what_does_not_go_together_is_reported(objective, sampler, steps, error):
    with pytest.raises(UserError) as caught:
        objectives.sample(objective, sampler, lambda latents, t: latents, NOISE, steps, 16)
    assert caught.value.problems == (error,)
