"""What a model learns to predict, from which noise, and the weights of losses; bigdit/objectives computes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from bigdit.numbers import Count, Number, Positive, Switch
from bigdit.strategy import Strict

SamplerName = Literal["euler", "heun", "dpmsolver++", "unipc", "ddim"]
"""Samplers: `euler` and `heun` of flow matching, `ddim` of a DDPM, the others of both."""

SAMPLERS: dict[str, tuple[SamplerName, ...]] = {
    "flow_matching": ("euler", "heun", "dpmsolver++", "unipc"),
    "ddpm": ("dpmsolver++", "unipc", "ddim"),
}
"""Those of each objective; the first is the default."""

Logit = Annotated[Number, Field(ge=-10, le=10)]
"""The logit of a t from 4.5e-5 to 1 - 4.5e-5."""


_MOST_NOISE = 1000.0
"""Twice the sum of betas; DDPM's own come to 20. At e^-700 the image's share is no number any more."""


class SqrtShift(Strict):
    """A shift (`name`) of √(tokens / `base_tokens`), of a sample's own tokens (Esser et al., arXiv:2403.03206, equation
    23)."""

    name: Literal["sqrt"] = "sqrt"
    base_tokens: Count = 256


class ExponentialShift(Strict):
    """A shift (`name`) of exp μ, where μ is linear in a sample's own tokens, from `base_mu` at `base_tokens` to
    `max_mu` at `max_tokens` (Flux; its pipeline's `calculate_shift` in diffusers)."""

    name: Literal["exponential"] = "exponential"
    base_tokens: Count = 256
    max_tokens: Count = 4096
    base_mu: Logit = 0.5
    max_mu: Logit = 1.15

    @model_validator(mode="after")
    def _coherent(self) -> ExponentialShift:
        if self.max_tokens <= self.base_tokens:
            raise ValueError(f"max_tokens is {self.max_tokens}, and more than base_tokens {self.base_tokens} is needed")
        return self


NUMBER = "number"
"""The kind of a shift without a name."""


def _kind(shift: Any) -> Any:
    return shift.get("name") if isinstance(shift, dict) else getattr(shift, "name", NUMBER)


Shift = Annotated[
    Annotated[Positive, Tag(NUMBER)]
    | Annotated[SqrtShift, Tag("sqrt")]
    | Annotated[ExponentialShift, Tag("exponential")],
    Discriminator(_kind),
]


class FlowMatchingSpec(Strict):
    """Flow matching (`name`): the distribution of t, 1 = noise. `shift` above 1 moves t towards noise, as high
    resolutions need: a number, or by a sample's tokens.

    `t_distribution`: the sigmoid of a normal with `logit_mean` and `logit_std`; uniform; or `mode`, heavy in the middle
    by `mode_scale`. `weighting`: of a sample's loss by its t, as in diffusers' scripts for SD3.
    """

    name: Literal["flow_matching"] = "flow_matching"
    t_distribution: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    logit_mean: Logit = 0.0
    logit_std: Annotated[Positive, Field(le=10)] = 1.0
    mode_scale: Annotated[Number, Field(ge=-1, le=1.75)] = 1.29
    shift: Shift = 1.0
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"


class DdpmSpec(Strict):
    """A DDPM (`name`; Ho et al., arXiv:2006.11239): what is predicted (`prediction`), over how many `timesteps`, and
    which noise they have.

    `betas`: as diffusers names them; `beta_start` and `beta_end` are those of the linear ones. `snr_shift` divides the
    signal-to-noise ratio of every timestep (CogVideoX-2b's scheduler in diffusers: 3). `zero_terminal_snr`: the last
    timestep is noise alone (arXiv:2305.08891). `min_snr_gamma` (arXiv:2303.09556), or `p2_gamma` with `p2_k`
    (arXiv:2204.00227), weighs a sample's loss by its timestep. `learned_variance`: the output's second half of channels
    is trained to be the variance (arXiv:2102.09672); null: where the model has one.
    """

    name: Literal["ddpm"] = "ddpm"
    prediction: Literal["epsilon", "v", "x0"] = "epsilon"
    betas: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "linear"
    beta_start: Annotated[Number, Field(ge=1e-8, le=0.5)] = 1e-4
    beta_end: Annotated[Number, Field(ge=1e-8, le=0.5)] = 0.02
    timesteps: Annotated[Count, Field(ge=2, le=100_000)] = 1000
    snr_shift: Annotated[Number, Field(ge=1e-3, le=1e3)] = 1.0
    zero_terminal_snr: Switch = False
    min_snr_gamma: Positive | None = None
    p2_gamma: Positive | None = None
    p2_k: Positive = 1.0
    learned_variance: Switch | None = None

    @model_validator(mode="after")
    def _coherent(self) -> DdpmSpec:
        if self.beta_end < self.beta_start:
            raise ValueError(f"beta_end is {self.beta_end:g}, below beta_start {self.beta_start:g}; noise grows")
        if self.betas != "squaredcos_cap_v2" and self.timesteps * (self.beta_start + self.beta_end) > _MOST_NOISE:
            raise ValueError(
                f"{self.timesteps} timesteps with betas from {self.beta_start:g} to {self.beta_end:g} leave nothing of "
                "the image long before the last; set fewer timesteps, or a smaller beta_end"
            )
        if self.zero_terminal_snr and self.prediction == "epsilon":
            raise ValueError(
                "zero_terminal_snr leaves noise alone in the last timestep, which says nothing of the image where "
                "prediction is epsilon; set prediction to v"
            )
        if self.min_snr_gamma is not None and self.p2_gamma is not None:
            raise ValueError("min_snr_gamma and p2_gamma both weigh the loss; set one of them")
        return self


def _named(value: Any) -> Any:
    """Keys without a name mean flow matching."""
    return {"name": "flow_matching"} | value if isinstance(value, dict) else value


def learned(objective: FlowMatchingSpec | DdpmSpec) -> dict[str, Any]:
    """The keys that decide what a model learns to predict, and from which noise: with others its weights are useless.

    How t is drawn, shifted and weighed decides only where it learns more.
    """
    if isinstance(objective, FlowMatchingSpec):
        return {"name": objective.name}
    betas = () if objective.betas == "squaredcos_cap_v2" else ("beta_start", "beta_end")
    keys = ("name", "prediction", "timesteps", "betas", *betas, "snr_shift", "zero_terminal_snr")
    return {key: getattr(objective, key) for key in keys}


# What counts only where another key has one of these values; None: any but null.
_COUNTS_WITH: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "logit_mean": ("t_distribution", ("logit_normal",)),
    "logit_std": ("t_distribution", ("logit_normal",)),
    "mode_scale": ("t_distribution", ("mode",)),
    "beta_start": ("betas", ("linear", "scaled_linear")),
    "beta_end": ("betas", ("linear", "scaled_linear")),
    "p2_k": ("p2_gamma", None),
}


def meaningless(objective: FlowMatchingSpec | DdpmSpec) -> list[str]:
    """Keys that are set and change nothing, a line each."""
    found = []
    for key in _idle(objective):
        if key not in objective.model_fields_set:
            continue
        (deciding, values), own = _COUNTS_WITH[key], getattr(objective, key)
        decided = getattr(objective, deciding)
        if values is None:
            found.append(
                f"objective.{key} is {own:g}, and objective.{deciding} is missing, which it belongs to; set both"
            )
        else:
            of = " and ".join(values)
            found.append(
                f"objective.{key} is {own:g}, and objective.{deciding} is {decided}; it is for {of}: leave it out"
            )
    return found


def counting(objective: FlowMatchingSpec | DdpmSpec) -> dict[str, Any]:
    """The objective as JSON, without keys that have no effect."""
    return objective.model_dump(mode="json", exclude=set(_idle(objective)))


def _idle(objective: FlowMatchingSpec | DdpmSpec) -> list[str]:
    """The keys that change nothing, because of another key."""
    found = []
    for key in type(objective).model_fields:
        if key in _COUNTS_WITH:
            deciding, values = _COUNTS_WITH[key]
            decided = getattr(objective, deciding)
            if decided is None if values is None else decided not in values:
                found.append(key)
    return found


ObjectiveSpec = Annotated[FlowMatchingSpec | DdpmSpec, Field(discriminator="name"), BeforeValidator(_named)]
