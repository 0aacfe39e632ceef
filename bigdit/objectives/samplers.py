"""Sampling from noise with diffusers' schedulers. Flow: Euler, Heun, DPM-Solver++, UniPC. DDPM: DDIM, DPM-Solver++,
UniPC.

Source: Karras et al., arXiv:2206.00364 (Heun's, algorithm 1); Lu et al., arXiv:2211.01095 (DPM-Solver++) and Zhao et
al., arXiv:2302.04867 (UniPC), both of second order; Song et al., arXiv:2010.02502 (DDIM); of a DDPM from the last
timestep on: Lin et al., arXiv:2305.08891, section 3.3.

`scheduler_config` configures a pipeline's own scheduler, so that diffusers samples along the same noise.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from bigdit.errors import UserError
from bigdit.objective_spec import SAMPLERS, DdpmSpec, ExponentialShift, FlowMatchingSpec, ObjectiveSpec, SamplerName
from bigdit.objectives.ddpm import shifted_betas
from bigdit.objectives.flow_matching import shift_of
from bigdit.objectives.prediction import Predict, of_latents

PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}
"""Names of predictions in diffusers' schedulers."""


def default_sampler(objective: ObjectiveSpec) -> SamplerName:
    """The default: Euler for flow matching, DPM-Solver++ for a DDPM."""
    return SAMPLERS[objective.name][0]


def check_sampler(objective: ObjectiveSpec, sampler: SamplerName) -> None:
    """Raise UserError for a sampler of another objective."""
    *others, last = known = SAMPLERS[objective.name]
    if sampler not in known:
        raise UserError(
            f"--sampler is {sampler}, and a model trained by {objective.name} takes {', '.join(others)} or {last}"
        )


def sample(
    objective: ObjectiveSpec, sampler: SamplerName, predict: Predict, noise: torch.Tensor, steps: int, tokens: int
) -> torch.Tensor:
    """Samples of the shape of `noise` [B, C, …]; each has `tokens`. A learned variance is not used.

    A step is one call of `predict`, or two for Heun's, except in its last step. Raises UserError for a sampler of
    another objective, and for more steps than timesteps.
    """
    scheduler = _scheduler(objective, sampler, tokens)
    trained = scheduler.config.num_train_timesteps
    if steps > trained:
        raise UserError(f"--steps is {steps}, and the model was trained on {trained} timesteps; ask for fewer")
    scheduler.set_timesteps(steps, device=noise.device)
    ddpm = isinstance(objective, DdpmSpec)  # whose t are in fp64: see `ddpm.model_time`
    times = scheduler.timesteps.double() / trained if ddpm else _times_of_flow(scheduler, sampler)
    latents = noise
    for timestep, t in zip(scheduler.timesteps, times.to(noise.device), strict=True):
        prediction = of_latents(predict(latents, t.expand(latents.shape[0])), latents.shape[1])
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents


def _times_of_flow(scheduler: Any, sampler: SamplerName) -> torch.Tensor:
    """The t of each call: the sigmas, which begin with 1.

    Multistep schedulers round their timesteps to integers, which may repeat. So the model gets sigmas instead, and the
    scheduler counts its steps.
    """
    scheduler.set_begin_index(0)
    if sampler == "dpmsolver++":
        scheduler.sigmas[0] = 1.0  # diffusers' is for 1 - 1/1000, but samples begin as pure noise
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
    options: dict[str, Any] = {"use_flow_sigmas": True, "flow_shift": shift, "prediction_type": "flow_prediction"}
    if sampler == "unipc":
        return diffusers.UniPCMultistepScheduler(**options)
    return diffusers.DPMSolverMultistepScheduler(**options)


def _schedule(objective: DdpmSpec) -> dict[str, Any]:
    return {
        "num_train_timesteps": objective.timesteps,
        "beta_schedule": objective.betas,
        "beta_start": objective.beta_start,
        "beta_end": objective.beta_end,
        "prediction_type": PREDICTIONS[objective.prediction],
    }


def _of_ddpm(objective: DdpmSpec, sampler: SamplerName) -> Any:
    import diffusers

    options: dict[str, Any] = {
        **_schedule(objective),
        "rescale_betas_zero_snr": objective.zero_terminal_snr,
        "timestep_spacing": "trailing",
    }
    if objective.snr_shift != 1.0:
        options["trained_betas"] = shifted_betas(objective)
    if sampler == "ddim":
        return diffusers.DDIMScheduler(**options, clip_sample=False)
    if sampler == "unipc":
        return diffusers.UniPCMultistepScheduler(**options)
    return diffusers.DPMSolverMultistepScheduler(**options)


def scheduler_config(objective: ObjectiveSpec, class_name: str, given: dict[str, Any]) -> dict[str, Any] | str:
    """The configuration of diffusers' scheduler `class_name` for the objective, other values as `given`.

    Returns the reason as text if the scheduler cannot follow the objective.
    """
    import diffusers

    scheduler: Any = getattr(diffusers, class_name, None)
    if diffusers.SchedulerMixin not in getattr(scheduler, "__mro__", ()):
        return f"diffusers has no scheduler {class_name}"
    known = inspect.signature(scheduler.__init__).parameters
    found = _config_of_ddpm(objective, known) if isinstance(objective, DdpmSpec) else _config_of_flow(objective, known)
    if isinstance(found, str):
        return f"the pipeline's {class_name} {found}; `bigdit sample` generates with them"
    # Whole, as save_pretrained writes it, with the class's defaults.
    config: dict[str, Any] = dict(scheduler.from_config(given | found).config)
    return {key: value for key, value in config.items() if key != "_use_default_values"} | {"_class_name": class_name}


def _config_of_flow(objective: FlowMatchingSpec, known: Any) -> dict[str, Any] | str:
    shift = objective.shift
    if isinstance(shift, ExponentialShift) and {"base_shift", "max_shift"} <= known.keys():
        return {
            "use_dynamic_shifting": True,
            "base_image_seq_len": shift.base_tokens,
            "max_image_seq_len": shift.max_tokens,
            "base_shift": shift.base_mu,
            "max_shift": shift.max_mu,
        }
    if not isinstance(shift, float):
        return f"has no objective.shift of {shift.name}, which the weights were trained by"
    fixed = {"use_dynamic_shifting": False} if "use_dynamic_shifting" in known else {}
    if "flow_shift" in known:
        return {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift, **fixed}
    if "shift" in known and "beta_start" not in known:
        return {"shift": shift, **fixed}
    return "is of no flow, which the weights were trained by"


def _config_of_ddpm(objective: DdpmSpec, known: Any) -> dict[str, Any] | str:
    if "beta_start" not in known:
        return "is of no DDPM, which the weights were trained by"
    found = _schedule(objective)
    found |= {"use_flow_sigmas": False} if "use_flow_sigmas" in known else {}
    if "rescale_betas_zero_snr" in known:
        found["rescale_betas_zero_snr"] = objective.zero_terminal_snr
    elif objective.zero_terminal_snr:
        return "knows no zero terminal SNR, which the weights were trained by"
    if objective.zero_terminal_snr:
        found["timestep_spacing"] = "trailing"  # else the last timestep is left out: arXiv:2305.08891, section 3.3
    if "snr_shift_scale" in known:
        found["snr_shift_scale"] = objective.snr_shift
    elif objective.snr_shift != 1.0:
        found["trained_betas"] = shifted_betas(objective)
    return found
