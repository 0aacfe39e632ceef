"""What steps the weights, what is averaged of them, and what is trained beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bigdit.numbers import Count, NotNegative, Number, Positive, Share, Switch
from bigdit.spec.values import Strict

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


class OptimizerSpec(Strict):
    """An optimizer of bigdit/optim by its `name`, and its constants as papers have them (Loshchilov & Hutter,
    arXiv:1711.05101): `lr`, the learning rate; `betas`, the decays of both moments; `eps`; `weight_decay`, decoupled.
    `decayed`: all parameters, or matrices alone, the weights of linear layers and convolutions: then norms, biases,
    tables and embeddings are a group of their own.

    `implementation`: how torch's adamw runs; the others have one. `beta3`: CAME's decay of the confidence
    (Luo et al., arXiv:2307.02047).
    """

    name: OptimizerName = "adamw"
    lr: Positive = 1e-4
    betas: tuple[Share, Share] = (0.9, 0.999)
    beta3: Share = 0.9999
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    decayed: Literal["all", "matrices"] = "all"
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"

    @model_validator(mode="after")
    def _coherent(self) -> OptimizerSpec:
        if self.name != "adamw" and self.implementation != "fused":
            raise ValueError(f"optimizer.implementation is of optimizer.name adamw, and it is {self.name}")
        return self


Width = Annotated[Number, Field(gt=0.0, lt=0.288)]
"""Of a power function's profile over the steps, as a share of them: 1/√12 is that of all alike."""

Widths = Annotated[tuple[Width, ...], Field(min_length=2)]

PROFILES = ("decay", "power", "widths")
"""Keys of an average of which one says how steps count."""


class EmaSpec(Strict):
    """A moving average of the weights in fp32, on the GPU or on the host (`device`); sharded as the masters are.

    It is exponential: each step keeps `decay` of it (0.9999), and step t at most (1 + t) / (10 + t). Or it grows with
    the run: with `power` its profile over the steps is a power function, whose width is this share of them, σ_rel
    (Karras et al., arXiv:2312.02696, §3.1): 0.05 to 0.2 as a rule; at 0.2887 all steps would count alike. `widths` are
    two such averages or more, each as large as the weights; the first is what samples and validation take, and of all,
    with train.snapshot_every, averages of other widths are made after the run (ibid., §3.2).
    """

    decay: Annotated[Number, Field(gt=0.0, lt=1)] | None = None
    power: Width | None = None
    widths: Widths | None = None
    device: Literal["gpu", "cpu"] = "gpu"

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


class LoraSpec(Strict):
    """Low-rank adapters (Hu et al., arXiv:2106.09685) of rank `rank`, scaled by `alpha` / `rank`, over a frozen base,
    which is kept in `base`. `dora`: with a trained magnitude for each row of a weight (Liu et al., arXiv:2402.09353).

    `targets`: names of linear layers, matched by their last parts as peft does; none: those of attention.
    """

    rank: Count = 16
    alpha: Positive = 16.0
    targets: tuple[str, ...] = ()
    base: LoraBase = "bf16"
    dora: Switch = False
