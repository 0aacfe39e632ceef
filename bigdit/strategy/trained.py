"""What steps the weights, what is averaged of them, and what is trained beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bigdit.numbers import Count, NotNegative, Number, Positive, Share, Switch
from bigdit.strategy.values import Section

OptimizerName = Literal[
    "adamw",
    "adamw_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "adamw_8bit_ao",
    "adamw_4bit_ao",
    "adafactor",
    "came",
    "came_8bit",
]

BITSANDBYTES: tuple[OptimizerName, ...] = ("adamw_8bit", "paged_adamw_8bit", "lion_8bit")
TORCHAO: tuple[OptimizerName, ...] = ("adamw_8bit_ao", "adamw_4bit_ao")
FACTORED: tuple[OptimizerName, ...] = ("adafactor", "came", "came_8bit")


class OptimizerSpec(Section):
    """An optimizer of bigdit/optim and its constants, as papers have them (Loshchilov & Hutter, arXiv:1711.05101)."""

    name: OptimizerName = "adamw"
    """Which optimizer."""
    lr: Positive = 1e-4
    """The learning rate after the warm-up; train.lr_schedule lowers it."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """The decays of both moments."""
    beta3: Share = 0.9999
    """The decay of CAME's confidence (Luo et al., arXiv:2307.02047)."""
    eps: Positive = 1e-8
    """What is added to the denominator."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    decayed: Literal["all", "matrices"] = "all"
    """Which parameters decay: all, or the weights of linear layers and convolutions alone. Then norms, biases, tables
    and embeddings are a group of their own."""
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    """How torch's adamw runs. The others have one way."""

    @model_validator(mode="after")
    def _coherent(self) -> OptimizerSpec:
        if self.name != "adamw" and self.implementation != "fused":
            raise ValueError(f"implementation is of the optimizer adamw, and name is {self.name}")
        return self


Width = Annotated[Number, Field(gt=0.0, lt=0.288)]
"""Of a power function's profile over the steps, as a share of them: 1/√12 is that of all alike."""

Widths = Annotated[tuple[Width, ...], Field(min_length=2)]

PROFILES = ("decay", "power", "widths")
"""Keys of an average of which one says how steps count."""


class EmaSpec(Section):
    """A moving average of the weights in fp32, sharded as the masters are."""

    decay: Annotated[Number, Field(gt=0.0, lt=1)] | None = None
    """The share that each step keeps, in an exponential average: 0.9999 where no profile is said. Step t keeps at most
    (1 + t) / (10 + t)."""
    power: Width | None = None
    """An average that grows with the run: its profile over the steps is a power function, whose width is this share of
    them, σ_rel (Karras et al., arXiv:2312.02696, §3.1). 0.05 to 0.2 as a rule; at 0.2887 all steps count alike."""
    widths: Widths | None = None
    """Two such averages or more, each as large as the weights. Samples and validation take the first. With
    train.snapshot_every, averages of other widths are made of them after the run (ibid., §3.2)."""
    device: Literal["gpu", "cpu"] = "gpu"
    """Which memory holds the average."""

    @model_validator(mode="before")
    @classmethod
    def _exponential(cls, said: Any) -> Any:
        """Without a word of its profile it is exponential."""
        if isinstance(said, dict) and all(said.get(key) is None for key in PROFILES):
            return said | {"decay": 0.9999}
        return said

    @model_validator(mode="after")
    def _coherent(self) -> EmaSpec:
        said = [f"ema.{key} is {_plain(getattr(self, key))}" for key in PROFILES if getattr(self, key) is not None]
        if len(said) > 1:
            raise ValueError(f"{', and '.join(said)}; leave all but one of them out")
        if self.widths is not None and len(set(self.widths)) < len(self.widths):
            raise ValueError(f"ema.widths is {_plain(self.widths)}; each is an average of its own, so let them differ")
        return self

    @property
    def powers(self) -> tuple[float, ...]:
        """The widths of averages by power functions, in the order they are kept; none of an exponential one."""
        return self.widths or (() if self.power is None else (self.power,))

    @property
    def count(self) -> int:
        """How many averages are kept."""
        return len(self.powers) or 1

    @property
    def profile(self) -> str:
        """What decides how steps count, for people: `ema.widths [0.05, 0.1]`. A decay may change on the way."""
        said = {key: getattr(self, key) for key in ("power", "widths")}
        return next((f"ema.{key} {_plain(value)}" for key, value in said.items() if value is not None), "ema.decay")


def _plain(value: float | tuple[float, ...]) -> str:
    """As YAML has it: `0.05`, `[0.05, 0.1]`."""
    return f"[{', '.join(map(_plain, value))}]" if isinstance(value, tuple) else f"{value:g}"


LoraBase = Literal["bf16", "int8", "nf4"]


class LoraSpec(Section):
    """Low-rank adapters (Hu et al., arXiv:2106.09685) over frozen weights."""

    rank: Count = 16
    """The rank of each adapter."""
    alpha: Positive = 16.0
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers, matched by their last parts as peft does. None: those of attention."""
    base: LoraBase = "bf16"
    """How the frozen weights are kept."""
    dora: Switch = False
    """Train a magnitude for each row of a weight too (Liu et al., arXiv:2402.09353)."""
