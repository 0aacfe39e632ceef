"""DDPM: schedules, targets and weights equal diffusers', and the bound of a learned variance equals its definition."""

import random

import pytest
import torch
import torch.nn.functional as F
from diffusers import CogVideoXDDIMScheduler, DDIMScheduler, DDPMScheduler
from diffusers.training_utils import compute_snr
from torch.distributions import Normal, kl_divergence

from bigdit import objectives
from bigdit.catalog import FAMILIES
from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec
from bigdit.objectives.ddpm import alphas_cumprod

SEEDS = (3, 4, 5, 6)
LATENTS = torch.randn(4, 2, 3, 5, generator=torch.Generator().manual_seed(0))
BETAS = {
    "linear": {},
    "scaled_linear": {"beta_start": 0.00085, "beta_end": 0.012},
    "squaredcos_cap_v2": {},
}

COGVIDEOX = {"betas": "scaled_linear", **BETAS["scaled_linear"]}


class Answers:
    """A model that always returns the same random output, and records its inputs."""

    def __init__(self, channels):
        self.output = torch.randn(4, channels, 3, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def __call__(self, noisy, t):
        self.noisy, self.timesteps = noisy, (t * 1000).long()
        assert torch.equal((t * 1000).float(), self.timesteps.float())  # whole numbers, as in published models
        return self.output

    def loss(self, objective, seeds=SEEDS):
        return objectives.loss(objective, self, LATENTS, seeds, torch.float32, 15)


def scheduler_of(objective, kind=DDPMScheduler):
    return kind(
        beta_schedule=objective.betas,
        beta_start=objective.beta_start,
        beta_end=objective.beta_end,
        rescale_betas_zero_snr=objective.zero_terminal_snr,
        clip_sample=False,
    )


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
def test_noise_and_targets_are_those_of_diffusers(betas, zero, prediction):
    if zero and prediction == "epsilon":
        return  # is refused
    objective = DdpmSpec(prediction=prediction, betas=betas, zero_terminal_snr=zero, **BETAS[betas])
    model, noise = Answers(2), objectives.draw_noise(LATENTS, SEEDS)
    loss = model.loss(objective)
    for kind in (DDPMScheduler, DDIMScheduler):
        scheduler = scheduler_of(objective, kind)
        assert torch.allclose(model.noisy, scheduler.add_noise(LATENTS, noise, model.timesteps), atol=2e-4)
        velocity = scheduler.get_velocity(LATENTS, noise, model.timesteps)
        target = {"epsilon": noise, "v": velocity, "x0": LATENTS}[prediction]
        assert torch.allclose(loss, F.mse_loss(model.output, target), rtol=2e-4)


def test_the_last_timestep_of_zero_terminal_snr_is_noise_alone():
    last = next(seed for seed in range(10_000) if random.Random(seed).randrange(1000) == 999)
    model = Answers(2)
    for zero in (True, False):
        model.loss(DdpmSpec(prediction="v", zero_terminal_snr=zero), [last] * 4)
        assert torch.equal(model.noisy, objectives.draw_noise(LATENTS, [last] * 4)) is zero


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
def test_signal_to_noise_is_shifted_as_cogvideox_has_it(shift, zero):
    objective = DdpmSpec(prediction="v", snr_shift=shift, zero_terminal_snr=zero, **COGVIDEOX)
    scheduler = CogVideoXDDIMScheduler(rescale_betas_zero_snr=zero, snr_shift_scale=shift)
    found = torch.tensor(alphas_cumprod(objective), dtype=torch.float64)
    assert torch.allclose(found, scheduler.alphas_cumprod.double(), rtol=1e-6, atol=1e-12)


def test_cogview3_learns_v_by_the_schedule_that_its_weights_are_published_with():
    """Its scheduler's settings, as diffusers' scripts/convert_cogview3_to_diffusers.py writes them."""
    objective = FAMILIES["CogView3PlusTransformer2DModel"].objective
    settings = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    settings |= {"snr_shift_scale": 4.0, "rescale_betas_zero_snr": True}
    published = CogVideoXDDIMScheduler(**settings).alphas_cumprod.double()
    assert torch.allclose(
        torch.tensor(alphas_cumprod(objective), dtype=torch.float64), published, rtol=1e-6, atol=1e-12
    )
    assert objective.prediction == "v"


def test_timesteps_are_drawn_evenly_from_seeds():
    seen = []
    for start in range(0, 4000, 4):
        model = Answers(2)
        model.loss(DdpmSpec(), range(start, start + 4))
        seen.append(model.timesteps)
    found = torch.cat(seen)
    assert (found.min() < 5) & (found.max() > 994)
    assert torch.histc(found.float(), bins=4).sub(1000).abs().max() < 120  # four deviations


@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
def test_weights_are_min_snr_and_p2(prediction):
    model = Answers(2)
    plain = DdpmSpec(prediction=prediction)
    model.loss(plain)
    snr = compute_snr(scheduler_of(plain), model.timesteps)
    noise = objectives.draw_noise(LATENTS, SEEDS)
    velocity = scheduler_of(plain).get_velocity(LATENTS, noise, model.timesteps)
    target = {"epsilon": noise, "v": velocity, "x0": LATENTS}[prediction]
    errors = (model.output - target).square().mean((1, 2, 3))
    # diffusers' scripts divide the smaller of SNR and γ; for x itself the weight is that one
    clipped = snr.clamp(max=5.0) / {"epsilon": snr, "v": snr + 1, "x0": 1.0}[prediction]
    found = model.loss(plain.model_copy(update={"min_snr_gamma": 5.0}))
    assert torch.allclose(found, (clipped * errors).mean(), rtol=1e-3)
    # P2's own weight is for ε: the error of ε that follows from this prediction
    of_epsilon = errors * {"epsilon": 1.0, "v": snr / (snr + 1), "x0": snr}[prediction]
    found = model.loss(plain.model_copy(update={"p2_gamma": 0.5, "p2_k": 2.0}))
    assert torch.allclose(found, (of_epsilon / (2.0 + snr) ** 0.5).mean(), rtol=1e-3)


@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
@pytest.mark.parametrize("timesteps", [1000, 100])
def test_a_variance_is_learned_by_the_bound(prediction, timesteps):
    """Beside the normal distributions themselves: posterior means by both coefficients, and bins for the first step."""
    objective = DdpmSpec(prediction=prediction, timesteps=timesteps, beta_end=0.02 * 1000 / timesteps)
    first = next(seed for seed in range(10_000) if random.Random(seed).randrange(timesteps) == 0)
    seeds = (first, *SEEDS[1:])
    model = Answers(4)
    loss = model.loss(objective, seeds)
    steps = torch.tensor([random.Random(seed).randrange(timesteps) for seed in seeds])
    assert (steps == 0).tolist() == [True, False, False, False]

    scheduler = DDPMScheduler(num_train_timesteps=timesteps, beta_end=objective.beta_end, clip_sample=False)
    signal = (1 - scheduler.betas.double()).cumprod(0)  # in fp32 the first β is off by 2e-4 of itself
    before = torch.cat([torch.ones(1).double(), signal])[steps].view(-1, 1, 1, 1)
    a, beta = signal[steps].view(-1, 1, 1, 1), scheduler.betas.double()[steps].view(-1, 1, 1, 1)
    noisy, noise = model.noisy.double(), objectives.draw_noise(LATENTS, seeds).double()
    prediction_half, share = model.output.detach().double().chunk(2, dim=1)
    x = {
        "epsilon": (noisy - (1 - a).sqrt() * prediction_half) / a.sqrt(),
        "v": a.sqrt() * noisy - (1 - a).sqrt() * prediction_half,
        "x0": prediction_half,
    }[prediction]
    of_x, of_noisy = before.sqrt() * beta / (1 - a), (1 - beta).sqrt() * (1 - before) / (1 - a)
    least = beta * (1 - before) / (1 - a)
    least[0] = scheduler.betas[1].double() * (1 - signal[0]) / (1 - signal[1])
    spread = ((share + 1) / 2 * beta.log() + (1 - share) / 2 * least.log()).exp().sqrt()
    ours = Normal(of_x * x + of_noisy * noisy, spread)
    theirs = Normal(of_x * LATENTS.double() + of_noisy * noisy, least.sqrt().expand_as(spread))
    nats = kl_divergence(theirs, ours).mean((1, 2, 3))
    below, above = (ours.cdf(LATENTS.double() + side / 255) for side in (-1, 1))
    above, below = above.where(LATENTS <= 0.999, 1.0), below.where(LATENTS >= -0.999, 0.0)
    nats[0] = -(above - below).clamp(min=1e-12).log()[0].mean()

    velocity = a.sqrt() * noise - (1 - a).sqrt() * LATENTS
    target = {"epsilon": noise, "v": velocity, "x0": LATENTS.double()}[prediction]
    squared = F.mse_loss(prediction_half, target)
    bits = nats.mean() / torch.tensor(2.0).log()
    assert torch.allclose(loss.double(), squared + bits * timesteps / 1000, rtol=1e-3)

    (gradient,) = torch.autograd.grad(loss, model.output)
    (alone,) = torch.autograd.grad(
        model.loss(objective.model_copy(update={"learned_variance": False}), seeds), model.output
    )
    assert torch.equal(gradient[:, :2], alone[:, :2])  # the bound does not depend on the mean
    assert not alone[:, 2:].any()
    assert gradient[1:, 2:].abs().min() > 0


def test_a_model_without_a_variance_learns_none():
    model = Answers(2)
    expected = F.mse_loss(model.output, objectives.draw_noise(LATENTS, SEEDS))
    assert torch.equal(model.loss(DdpmSpec()), expected)
    with pytest.raises(UserError) as caught:
        model.loss(DdpmSpec(learned_variance=True))
    assert caught.value.problems == (
        "objective.learned_variance is true, and the model predicts 2 channels of latents with 2, no variance after "
        "them; set it to false, or model.kwargs.out_channels to 4",
    )
