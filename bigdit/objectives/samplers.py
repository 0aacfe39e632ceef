"""Samples from noise, along the schedulers of diffusers: Euler's of a flow; DDIM and DPM-Solver++ of a DDPM.

Source: Song et al., arXiv:2010.02502 (DDIM); Lu et al., arXiv:2211.01095 (DPM-Solver++), of second order; from
the last timestep on: Lin et al., arXiv:2305.08891, section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch

from bigdit.errors import UserError
from bigdit.objective_spec import DdpmSpec, ObjectiveSpec, SamplerName
from bigdit.objectives.output import Predict, of_latents
from bigdit.objectives.times import shift_of

_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}


def default_sampler(objective: ObjectiveSpec) -> SamplerName:
    """Of flow matching Euler's, of a DDPM DPM-Solver++."""
    return "dpmsolver++" if isinstance(objective, DdpmSpec) else "euler"


def sample(
    objective: ObjectiveSpec, sampler: SamplerName, predict: Predict, noise: torch.Tensor, steps: int, tokens: int
) -> torch.Tensor:
    """Samples of the shape of `noise` [B, C, …] by so many steps; each is of `tokens`. A learned variance is not used.

    Raises UserError for a sampler that is not of this objective, and for more steps than there are timesteps.
    """
    scheduler = _scheduler(objective, sampler, tokens)
    trained = scheduler.config.num_train_timesteps
    if steps > trained:
        raise UserError(f"--steps is {steps}, and the model was trained on {trained} timesteps; ask for fewer")
    scheduler.set_timesteps(steps, device=noise.device)
    latents = noise
    for timestep in scheduler.timesteps:
        whole = not timestep.is_floating_point()  # see ddpm.model_time
        t = ((timestep.double() if whole else timestep) / trained).expand(latents.shape[0])
        prediction = of_latents(predict(latents, t), latents.shape[1])
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents


def _scheduler(objective: ObjectiveSpec, sampler: SamplerName, tokens: int) -> Any:
    known = ("dpmsolver++", "ddim") if isinstance(objective, DdpmSpec) else ("euler",)
    if sampler not in known:
        raise UserError(f"--sampler is {sampler}, and a model trained by {objective.name} takes {' or '.join(known)}")
    if not isinstance(objective, DdpmSpec):
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=shift_of(objective, tokens))
    from diffusers import DDIMScheduler, DPMSolverMultistepScheduler

    said: dict[str, Any] = {
        "num_train_timesteps": objective.timesteps,
        "beta_schedule": objective.betas,
        "beta_start": objective.beta_start,
        "beta_end": objective.beta_end,
        "prediction_type": _PREDICTIONS[objective.prediction],
        "rescale_betas_zero_snr": objective.zero_terminal_snr,
        "timestep_spacing": "trailing",
    }
    if sampler == "ddim":
        return DDIMScheduler.from_config(said | {"clip_sample": False})
    return DPMSolverMultistepScheduler.from_config(said)
