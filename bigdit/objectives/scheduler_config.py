"""The configuration of a pipeline's own scheduler, so that diffusers samples along the noise that was trained on."""

from __future__ import annotations

import inspect
from typing import Any

from bigdit.objective_spec import DdpmSpec, ExponentialShift, FlowMatchingSpec, ObjectiveSpec
from bigdit.objectives.samplers import PREDICTIONS
from bigdit.objectives.schedule import shifted_betas


def scheduler_config(objective: ObjectiveSpec, class_name: str, said: dict[str, Any]) -> dict[str, Any] | str:
    """What the scheduler of that class in diffusers is configured by, with all else as it was `said`; or why it cannot
    follow the objective, for people."""
    import diffusers

    scheduler: Any = getattr(diffusers, class_name, None)
    if diffusers.SchedulerMixin not in getattr(scheduler, "__mro__", ()):
        return f"diffusers has no scheduler {class_name}"
    known = inspect.signature(scheduler.__init__).parameters
    found = _of_ddpm(objective, known) if isinstance(objective, DdpmSpec) else _of_flow(objective, known)
    if isinstance(found, str):
        return f"the pipeline's {class_name} {found}; `bigdit sample` draws with them"
    # Whole, as save_pretrained writes it: what it left out is what the class takes.
    config: dict[str, Any] = dict(scheduler.from_config(said | found).config)
    return {key: value for key, value in config.items() if key != "_use_default_values"} | {"_class_name": class_name}


def _of_flow(objective: FlowMatchingSpec, known: Any) -> dict[str, Any] | str:
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


def _of_ddpm(objective: DdpmSpec, known: Any) -> dict[str, Any] | str:
    if "beta_start" not in known:
        return "is of no DDPM, which the weights were trained by"
    found: dict[str, Any] = {
        "num_train_timesteps": objective.timesteps,
        "beta_schedule": objective.betas,
        "beta_start": objective.beta_start,
        "beta_end": objective.beta_end,
        "prediction_type": PREDICTIONS[objective.prediction],
    }
    found |= {"use_flow_sigmas": False} if "use_flow_sigmas" in known else {}
    if "rescale_betas_zero_snr" in known:
        found["rescale_betas_zero_snr"] = objective.zero_terminal_snr
    elif objective.zero_terminal_snr:
        return "knows no zero terminal SNR, which the weights were trained by"
    if objective.zero_terminal_snr:
        found["timestep_spacing"] = "trailing"  # or the last timestep is left out: arXiv:2305.08891, section 3.3
    if "snr_shift_scale" in known:
        found["snr_shift_scale"] = objective.snr_shift
    elif objective.snr_shift != 1.0:
        found["trained_betas"] = shifted_betas(objective)
    return found
