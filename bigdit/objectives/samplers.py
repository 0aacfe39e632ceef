"""Samples from noise, along the schedulers of diffusers: Euler's, Heun's, DPM-Solver++ and UniPC of a flow; DDIM,
DPM-Solver++ and UniPC of a DDPM.

Source: Karras et al., arXiv:2206.00364 (Heun's, algorithm 1); Lu et al., arXiv:2211.01095 (DPM-Solver++) and Zhao et
al., arXiv:2302.04867 (UniPC), both of second order; Song et al., arXiv:2010.02502 (DDIM); of a DDPM from the last
timestep on: Lin et al., arXiv:2305.08891, section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch

from bigdit.errors import UserError
from bigdit.objective_spec import SAMPLERS, DdpmSpec, FlowMatchingSpec, ObjectiveSpec, SamplerName
from bigdit.objectives.output import Predict, of_latents
from bigdit.objectives.schedule import shifted_betas
from bigdit.objectives.times import shift_of

PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}
"""As diffusers' schedulers call them."""


def default_sampler(objective: ObjectiveSpec) -> SamplerName:
    """Of flow matching Euler's, of a DDPM DPM-Solver++."""
    return SAMPLERS[objective.name][0]


def check_sampler(objective: ObjectiveSpec, sampler: SamplerName) -> None:
    """Raise UserError for a sampler that is not of this objective."""
    *others, last = known = SAMPLERS[objective.name]
    if sampler not in known:
        raise UserError(
            f"--sampler is {sampler}, and a model trained by {objective.name} takes {', '.join(others)} or {last}"
        )


def sample(
    objective: ObjectiveSpec, sampler: SamplerName, predict: Predict, noise: torch.Tensor, steps: int, tokens: int
) -> torch.Tensor:
    """Samples of the shape of `noise` [B, C, …] by so many steps; each is of `tokens`. A learned variance is not used.

    A step is one call of `predict`, and of Heun's two, but the last. Raises UserError for a sampler that is not of this
    objective, and for more steps than there are timesteps.
    """
    scheduler = _scheduler(objective, sampler, tokens)
    trained = scheduler.config.num_train_timesteps
    if steps > trained:
        raise UserError(f"--steps is {steps}, and the model was trained on {trained} timesteps; ask for fewer")
    scheduler.set_timesteps(steps, device=noise.device)
    times = _times_of_ddpm(scheduler) if isinstance(objective, DdpmSpec) else _times_of_flow(scheduler, sampler)
    latents = noise
    for timestep, t in zip(scheduler.timesteps, times.to(noise.device), strict=True):
        prediction = of_latents(predict(latents, t.expand(latents.shape[0])), latents.shape[1])
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents


def _times_of_ddpm(scheduler: Any) -> torch.Tensor:
    """The t of every call, in fp64: see `ddpm.model_time`."""
    return torch.as_tensor(scheduler.timesteps.double() / scheduler.config.num_train_timesteps)


def _times_of_flow(scheduler: Any, sampler: SamplerName) -> torch.Tensor:
    """The t of every call, which are the sigmas, from 1 on.

    The multistep schedulers cut their timesteps to whole ones, which may repeat: the model is told nothing of them, nor
    is the first step found by its own.
    """
    scheduler.set_begin_index(0)
    if sampler == "dpmsolver++":
        scheduler.sigmas[0] = 1.0  # diffusers' is of 1 - 1/1000, and the samples begin as noise alone
    return torch.as_tensor(scheduler.sigmas[:-1])


def _scheduler(objective: ObjectiveSpec, sampler: SamplerName, tokens: int) -> Any:
    check_sampler(objective, sampler)
    if isinstance(objective, DdpmSpec):
        return _of_ddpm(objective, sampler)
    return _of_flow(objective, sampler, tokens)


def _of_flow(objective: FlowMatchingSpec, sampler: SamplerName, tokens: int) -> Any:
    import diffusers

    shift = shift_of(objective, tokens)
    if sampler == "euler":
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    if sampler == "heun":
        return diffusers.FlowMatchHeunDiscreteScheduler(shift=shift)
    said: dict[str, Any] = {"use_flow_sigmas": True, "flow_shift": shift, "prediction_type": "flow_prediction"}
    if sampler == "unipc":
        return diffusers.UniPCMultistepScheduler(**said)
    return diffusers.DPMSolverMultistepScheduler(**said)


def _of_ddpm(objective: DdpmSpec, sampler: SamplerName) -> Any:
    import diffusers

    said: dict[str, Any] = {
        "num_train_timesteps": objective.timesteps,
        "beta_schedule": objective.betas,
        "beta_start": objective.beta_start,
        "beta_end": objective.beta_end,
        "prediction_type": PREDICTIONS[objective.prediction],
        "rescale_betas_zero_snr": objective.zero_terminal_snr,
        "timestep_spacing": "trailing",
    }
    if objective.snr_shift != 1.0:
        said["trained_betas"] = shifted_betas(objective)
    if sampler == "ddim":
        return diffusers.DDIMScheduler(**said, clip_sample=False)
    if sampler == "unipc":
        return diffusers.UniPCMultistepScheduler(**said)
    return diffusers.DPMSolverMultistepScheduler(**said)
