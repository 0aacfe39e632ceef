"""Pipelines' schedulers, set to what was trained: diffusers then samples along the same noise."""

import diffusers
import pytest
import torch

from bigdit.objective_spec import DdpmSpec, ExponentialShift, FlowMatchingSpec, SqrtShift
from bigdit.objectives import scheduler_config
from bigdit.objectives.ddpm import alphas_cumprod


def made(objective, class_name, **printed):
    config = scheduler_config(objective, class_name, printed)
    assert isinstance(config, dict), config
    return getattr(diffusers, class_name).from_config(config)


@pytest.mark.parametrize(
    "objective",
    [
        DdpmSpec(),
        DdpmSpec(prediction="v", betas="scaled_linear", beta_start=0.00085, beta_end=0.018, zero_terminal_snr=True),
        DdpmSpec(prediction="x0", betas="squaredcos_cap_v2", timesteps=500),
        DdpmSpec(prediction="v", betas="scaled_linear", beta_start=0.00085, beta_end=0.012, snr_shift=3.0),
    ],
)
@pytest.mark.parametrize("class_name", ["DDIMScheduler", "DPMSolverMultistepScheduler", "CogVideoXDDIMScheduler"])
def test_the_noise_of_a_ddpm_is_that_of_training(objective, class_name):
    scheduler = made(objective, class_name, beta_start=0.1, beta_end=0.3, timestep_spacing="leading")
    expected = torch.tensor(alphas_cumprod(objective))
    # DPM-Solver++ keeps the last timestep of a zero terminal SNR above 0, because it divides by it
    torch.testing.assert_close(scheduler.alphas_cumprod.float(), expected.float(), rtol=1e-4, atol=1e-6)
    assert scheduler.config.timestep_spacing == ("trailing" if objective.zero_terminal_snr else "leading")


@pytest.mark.parametrize("class_name", ["FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"])
def test_a_flow_is_shifted_as_it_was_trained(class_name):
    scheduler = made(FlowMatchingSpec(shift=3.0), class_name, use_dynamic_shifting=True)
    scheduler.set_timesteps(4)
    config = scheduler.config
    assert (config.get("flow_shift", config.get("shift")), config.use_dynamic_shifting) == (3.0, False)


def test_flux_is_shifted_by_its_tokens():
    config = made(FlowMatchingSpec(shift=ExponentialShift(max_mu=1.3)), "FlowMatchEulerDiscreteScheduler").config
    assert (config.use_dynamic_shifting, config.base_shift, config.max_shift) == (True, 0.5, 1.3)


@pytest.mark.parametrize(
    ("objective", "class_name", "line"),
    [
        (FlowMatchingSpec(), "DDIMScheduler", "DDIMScheduler is of no flow, which the weights were trained by; "),
        (DdpmSpec(), "FlowMatchEulerDiscreteScheduler", "Scheduler is of no DDPM, which the weights were trained by; "),
        (FlowMatchingSpec(shift=SqrtShift()), "FlowMatchEulerDiscreteScheduler", "has no objective.shift of sqrt, "),
        (
            DdpmSpec(prediction="v", zero_terminal_snr=True),
            "DEISMultistepScheduler",
            "knows no zero terminal SNR, which the weights were trained by; `bigdit sample` generates with them",
        ),
    ],
)
def test_what_a_scheduler_cannot_follow_is_reported(objective, class_name, line):
    assert line in scheduler_config(objective, class_name, {})
