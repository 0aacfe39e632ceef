"""What a model learns to predict, from which noise, and the weights of losses; bigdit/objectives computes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from bigdit.documents import Count, Number, Positive, Switch
from bigdit.strategy import Section

SamplerName = Literal["euler", "heun", "dpmsolver++", "unipc", "ddim"]
"""Samplers: `euler` and `heun` of flow matching, `ddim` of a DDPM, the others of both."""

SAMPLERS: dict[str, tuple[SamplerName, ...]] = {
    "flow_matching": ("euler", "heun", "dpmsolver++", "unipc"),
    "ddpm": ("dpmsolver++", "unipc", "ddim"),
}
"""Those of each objective; the first is the default."""

Logit = Annotated[Number, Field(ge=-10, le=10)]
"""The logit of a t from 4.5e-5 to 1 - 4.5e-5."""

Noise = Annotated[Number, Field(ge=0, le=1)]
"""A t: 0 is the image, 1 is noise."""

NARROWEST = 0.001
"""Of a t_range: one of the thousand timesteps of diffusers' schedulers."""

_MOST_NOISE = 1000.0
"""Twice the sum of betas; DDPM's own come to 20. At e^-700 the image's share is no number any more."""


class SqrtShift(Section):
    """A shift of √(tokens / base_tokens), by a sample's own tokens (Esser et al., arXiv:2403.03206, equation 23)."""

    name: Literal["sqrt"] = "sqrt"
    """sqrt selects this shift."""
    base_tokens: Count = 256
    """The tokens at which the shift is 1."""


class ExponentialShift(Section):
    """A shift of exp μ. μ is linear in a sample's own tokens (Flux; `calculate_shift` of its pipeline in diffusers)."""

    name: Literal["exponential"] = "exponential"
    """exponential selects this shift."""
    base_tokens: Count = 256
    """The tokens at which μ is base_mu."""
    max_tokens: Count = 4096
    """The tokens at which μ is max_mu."""
    base_mu: Logit = 0.5
    """μ at base_tokens."""
    max_mu: Logit = 1.15
    """μ at max_tokens."""

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


class FlowMatchingSpec(Section):
    """Flow matching. t is from 0, the image, to 1, noise."""

    name: Literal["flow_matching"] = "flow_matching"
    """flow_matching selects this objective."""
    t_distribution: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    """The distribution of t: the sigmoid of a normal; uniform; or mode, which prefers the middle. As in SD3."""
    logit_mean: Logit = 0.0
    """The mean of the normal of logit_normal."""
    logit_std: Annotated[Positive, Field(le=10)] = 1.0
    """The standard deviation of the normal of logit_normal."""
    mode_scale: Annotated[Number, Field(ge=-1, le=1.75)] = 1.29
    """How much mode prefers the middle."""
    shift: Shift = 1.0
    """Above 1 it moves t towards noise, as high resolutions need: a number, or by a sample's tokens."""
    t_range: tuple[Noise, Noise] = (0.0, 1.0)
    """Only t within these bounds is drawn, after the shift: an expert of Wan 2.2 sees [0.875, 1] or [0, 0.875]."""
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """The weight of a sample's loss by its t, as in diffusers' scripts for SD3."""

    @model_validator(mode="after")
    def _ordered(self) -> FlowMatchingSpec:
        low, high = self.t_range
        if high - low < NARROWEST:
            raise ValueError(
                f"t_range is [{low:g}, {high:g}], and its second bound must be {NARROWEST} above its first, or more"
            )
        return self


class DdpmSpec(Section):
    """A DDPM (Ho et al., arXiv:2006.11239)."""

    name: Literal["ddpm"] = "ddpm"
    """ddpm selects this objective."""
    prediction: Literal["epsilon", "v", "x0"] = "epsilon"
    """What the model predicts: the noise, the velocity or the image."""
    betas: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "linear"
    """The noise schedule, by diffusers' name."""
    beta_start: Annotated[Number, Field(ge=1e-8, le=0.5)] = 1e-4
    """The first beta of the linear schedules."""
    beta_end: Annotated[Number, Field(ge=1e-8, le=0.5)] = 0.02
    """The last beta of the linear schedules."""
    timesteps: Annotated[Count, Field(ge=2, le=100_000)] = 1000
    """The number of timesteps."""
    snr_shift: Annotated[Number, Field(ge=1e-3, le=1e3)] = 1.0
    """It divides the signal-to-noise ratio of every timestep (CogVideoX-2b's scheduler in diffusers: 3)."""
    zero_terminal_snr: Switch = False
    """Make the last timestep pure noise (arXiv:2305.08891)."""
    min_snr_gamma: Positive | None = None
    """Weigh losses by min-SNR (arXiv:2303.09556)."""
    p2_gamma: Positive | None = None
    """Weigh losses by P2 (arXiv:2204.00227)."""
    p2_k: Positive = 1.0
    """The k of P2."""
    learned_variance: Switch | None = None
    """Train the second half of the output's channels as the variance (arXiv:2102.09672). null: if the model has one."""

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


def partial(objective: FlowMatchingSpec | DdpmSpec) -> str | None:
    """Why a model that learns this generates no image by itself; None where it does."""
    if isinstance(objective, DdpmSpec) or objective.t_range == (0.0, 1.0):
        return None
    low, high = objective.t_range
    return (
        f"objective.t_range is [{low:g}, {high:g}], and a model of a part of the way from noise to image generates "
        "none by itself; `bigdit export` writes it for diffusers' pipeline"
    )


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
