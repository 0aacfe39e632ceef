"""Immutable values: model, shapes, optimizer, EMA, LoRA and ControlNet."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bigdit.documents import Count, Natural, NotNegative, Number, Positive, Share, Switch


class Strict(BaseModel):
    """An immutable value; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def digest(self) -> str:
        """Sixteen hex digits that identify this value."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class Section(Strict):
    """A section of a user's document. The reference and errors show the docstring under a field."""

    model_config = ConfigDict(defer_build=True)  # a command builds the few that it uses

    also: ClassVar[dict[str, str]] = {}
    """Keys that may replace a field, and their meaning."""


class ModelSpec(Strict):
    """A diffusion transformer: name, class and constructor arguments."""

    name: str
    class_name: str
    kwargs: dict[str, Any]


class BatchShape(Strict):
    """Shapes of one sample; other inputs follow from the model.

    `latents`: (channels, height, width), or (channels, frames, height, width) of a video, stored in `latents_dtype`.
    `text`: (tokens, dim). `references`: the number of images that the sample is an edit of; their latents have the
    shape `reference`, or that of `latents`. `first_frame`: whether it begins with a given image.
    """

    latents: tuple[Count, Count, Count] | tuple[Count, Count, Count, Count]
    text: tuple[Count, Count] | None = None
    latents_dtype: Literal["fp32", "bf16"] = "fp32"
    references: Annotated[int, Field(ge=0)] = 0
    reference: tuple[Count, Count, Count] | None = None
    first_frame: bool = False

    @property
    def grids(self) -> list[tuple[int, ...]]:
        """The shapes of latents that become tokens, each once."""
        return [self.latents, *([] if self.reference is None else [self.reference])]


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
    "prodigy",
    "adamw_schedulefree",
    "muon",
]

OPTIMIZERS: dict[OptimizerName, str] = {
    "adamw": "AdamW",
    "adamw_8bit": "8-bit AdamW",
    "paged_adamw_8bit": "paged 8-bit AdamW",
    "lion_8bit": "8-bit Lion",
    "adamw_8bit_ao": "8-bit AdamW (torchao)",
    "adamw_4bit_ao": "4-bit AdamW (torchao)",
    "adafactor": "Adafactor",
    "came": "CAME",
    "came_8bit": "8-bit CAME",
    "prodigy": "Prodigy",
    "adamw_schedulefree": "schedule-free AdamW",
    "muon": "Muon",
}
"""Their titles in plans and on pages."""

BITSANDBYTES: tuple[OptimizerName, ...] = ("adamw_8bit", "paged_adamw_8bit", "lion_8bit")
TORCHAO: tuple[OptimizerName, ...] = ("adamw_8bit_ao", "adamw_4bit_ao")
FACTORED: tuple[OptimizerName, ...] = ("adafactor", "came", "came_8bit")
PACKAGES: dict[OptimizerName, str] = {"prodigy": "prodigyopt", "adamw_schedulefree": "schedulefree"}
"""Optimizers whose packages are extras. Their state has numbers for all weights together, so a step needs all gradients
at once."""


class OptimizerSpec(Section):
    """An optimizer and its hyperparameters, as in papers (Loshchilov & Hutter, arXiv:1711.05101)."""

    name: OptimizerName = "adamw"
    """The name of the optimizer."""
    lr: Positive = 1e-4
    """The learning rate after the warm-up; train.lr_schedule lowers it. For prodigy it is a factor of its own estimate,
    1 by default."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """The decays of both moments."""
    beta3: Share = 0.9999
    """The decay of CAME's confidence (Luo et al., arXiv:2307.02047)."""
    eps: Positive = 1e-8
    """The number added to the denominator."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    decayed: Literal["all", "matrices"] = "all"
    """The parameters with weight decay: all, or matrices (weights of linear layers and convolutions). Norms, biases,
    embeddings and a block's shifts and scales are then a separate group."""
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    """The implementation of torch's adamw; other optimizers have only one."""
    d_coef: Positive = 1.0
    """A factor of Prodigy's estimate of the learning rate (Mishchenko & Defazio, arXiv:2306.06101)."""
    safeguard_warmup: Switch = False
    """Keep Prodigy's estimate from growing too large during train.warmup_steps."""
    use_bias_correction: Switch = False
    """Adam's bias correction in Prodigy."""

    @model_validator(mode="before")
    @classmethod
    def _rate(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("name") == "prodigy":
            return {"lr": 1.0} | given
        return given

    @model_validator(mode="after")
    def _coherent(self) -> OptimizerSpec:
        for key, name in _OWN.items():
            if self.name != name and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for the optimizer {name}, and name is {self.name}")
        if self.name == "adamw_schedulefree" and not self.betas[0]:
            raise ValueError("betas has 0 first, by which adamw_schedulefree divides; 0.9 is usual")
        return self

    @property
    def missing_package(self) -> str | None:
        """The error if the optimizer's package is not installed."""
        package = PACKAGES.get(self.name)
        if package is None or importlib.util.find_spec(package) is not None:
            return None
        return f"{self.name} needs {package}, which is missing; pip install 'bigdit[{package}]'"


_OWN: dict[str, OptimizerName] = {
    "implementation": "adamw",
    "d_coef": "prodigy",
    "safeguard_warmup": "prodigy",
    "use_bias_correction": "prodigy",
}
"""Keys that only one optimizer has."""


Width = Annotated[Number, Field(gt=0.0, lt=0.288)]
"""The width of a power function's profile, as a share of the steps; 1/√12 if all steps have the same weight."""

Widths = Annotated[tuple[Width, ...], Field(min_length=2)]

PROFILES = ("decay", "power", "widths")
"""Keys of an EMA's profile; one of them is set."""


class EmaSpec(Section):
    """An EMA of the weights in fp32, sharded like the master weights."""

    decay: Annotated[Number, Field(gt=0.0, lt=1)] | None = None
    """The share of the EMA that each step keeps. Default: 0.9999, unless power or widths is set. Step t keeps at most
    (1 + t) / (10 + t)."""
    power: Width | None = None
    """An EMA that grows with the run. Its profile is a power function with this width, as a share of the steps: σ_rel
    (Karras et al., arXiv:2312.02696, §3.1). Usually 0.05 to 0.2; at 0.2887 all steps have the same weight."""
    widths: Widths | None = None
    """Widths of two or more such EMAs, each as large as the weights. Samples and validation use the first. With
    train.snapshot_every, EMAs of other widths can be computed after the run (ibid., §3.2)."""
    device: Literal["gpu", "cpu"] = "gpu"
    """The memory that holds the EMA."""

    @model_validator(mode="before")
    @classmethod
    def _exponential(cls, given: Any) -> Any:
        """Without a profile it is exponential."""
        if isinstance(given, dict) and all(given.get(key) is None for key in PROFILES):
            return given | {"decay": 0.9999}
        return given

    @model_validator(mode="after")
    def _coherent(self) -> EmaSpec:
        profiles = [f"ema.{key} is {_plain(getattr(self, key))}" for key in PROFILES if getattr(self, key) is not None]
        if len(profiles) > 1:
            raise ValueError(f"{', and '.join(profiles)}; leave all but one of them out")
        if self.widths is not None and len(set(self.widths)) < len(self.widths):
            raise ValueError(f"ema.widths is {_plain(self.widths)}; each must differ")
        return self

    @property
    def powers(self) -> tuple[float, ...]:
        """The widths of EMAs by power functions, in order; empty for an exponential one."""
        return self.widths or (() if self.power is None else (self.power,))

    @property
    def count(self) -> int:
        """The number of EMAs."""
        return len(self.powers) or 1

    @property
    def profile(self) -> str:
        """The key that weighs the steps: `ema.widths [0.05, 0.1]`. A decay may change during a run."""
        profiles = {key: getattr(self, key) for key in ("power", "widths")}
        return next((f"ema.{key} {_plain(value)}" for key, value in profiles.items() if value is not None), "ema.decay")


def _plain(value: float | tuple[float, ...]) -> str:
    """`0.05` or `[0.05, 0.1]`, as in YAML."""
    return f"[{', '.join(map(_plain, value))}]" if isinstance(value, tuple) else f"{value:g}"


class SegmentSpec(Section):
    """How checkpointed blocks are grouped: the first `blocks` of every `every` ones are recomputed as one."""

    blocks: Count = 1
    """Consecutive blocks that are recomputed at once. Only the input of the first is kept."""
    every: Count | None = None
    """Blocks from the start of one segment to the next; blocks between segments keep their activations. null: `blocks`,
    so that all are recomputed."""

    @property
    def stride(self) -> int:
        """Blocks from the start of one segment to the next."""
        return self.every or self.blocks

    def count(self, first: int) -> int:
        """How many of the `first` blocks are recomputed."""
        return first // self.stride * self.blocks + min(first % self.stride, self.blocks)

    @property
    def described(self) -> str:
        """`2 of every 4 at once`."""
        every = f" of every {self.stride}" if self.stride > self.blocks else ""
        return f"{self.blocks}{every}{' at once' if self.blocks > 1 else ''}"

    @model_validator(mode="after")
    def _coherent(self) -> SegmentSpec:
        if self.stride < self.blocks:
            raise ValueError(
                f"every is {self.every}, and segments have {self.blocks} blocks; set it to as many or more"
            )
        return self


MOST_RANK = 8192
"""The largest rank of adapters: no layer here is wider, and a larger rank adds nothing."""
Rank = Annotated[Count, Field(le=MOST_RANK)]

LoraBase = Literal["bf16", "int8", "fp8", "nf4"]
AdapterKind = Literal["lora", "lokr", "loha"]

ADAPTERS: dict[AdapterKind, str] = {"lora": "LoRA", "lokr": "LoKr", "loha": "LoHa"}
"""Their titles."""


class LoraSpec(Section):
    """Low-rank adapters over frozen weights."""

    kind: AdapterKind = "lora"
    """LoRA (Hu et al., arXiv:2106.09685), or the Kronecker or Hadamard products of LyCORIS: lokr, loha (Yeh et al.,
    arXiv:2309.14859)."""
    rank: Rank = 16
    """The rank of each adapter."""
    ranks: dict[str, Rank] = {}
    """Other ranks for some layers, by the rules of `targets`; the first that matches counts. alpha / rank is the same
    for all layers; with rslora alpha is."""
    alpha: Positive = 16.0
    """Adapters are scaled by alpha / rank."""
    rslora: Switch = False
    """Scale by alpha / √rank (Kalajdzievski, arXiv:2312.03732)."""
    targets: tuple[str, ...] = ()
    """Linear layers: names, matched by their last parts as in peft, or patterns of whole names, such as
    `transformer_blocks.*.ff.*`. Empty: those of attention."""
    base: LoraBase = "bf16"
    """The dtype of the frozen weights of the blocks' linear layers; fp8 is e4m3."""
    dora: Switch = False
    """DoRA: also train a magnitude for each row of a weight (Liu et al., arXiv:2402.09353)."""
    pissa: Switch = False
    """Start from the principal singular vectors of each weight, and freeze the rest of it (Meng et al.,
    arXiv:2404.02948). Exports have twice the rank, and fit the original weights."""
    text_encoders: Switch = False
    """Also train adapters of the CLIP text encoders of SD3 and Flux.1, in the linear layers of their attention, with
    `rank` and `alpha`. It needs features online."""
    text_encoder_lr: Positive | None = None
    """The learning rate of the text encoders' adapters, which follows the same schedule. null: the optimizer's."""

    @model_validator(mode="after")
    def _coherent(self) -> LoraSpec:
        if self.text_encoder_lr is not None and not self.text_encoders:
            raise ValueError("text_encoder_lr is set, and text_encoders is false; set it to true")
        if self.text_encoders and (self.pissa or self.dora or self.kind != "lora"):
            other = "pissa is true" if self.pissa else f"{self.title} is trained"
            raise ValueError(f"text_encoders is for LoRA, and {other}; set text_encoders to false")
        if self.pissa and (self.dora or self.kind != "lora"):
            other = "dora is true" if self.dora else f"kind is {self.kind}"
            raise ValueError(f"pissa is for LoRA, and {other}; set one of them to its default")
        if self.kind == "lora":
            return self
        if self.dora:
            raise ValueError(f"dora is for LoRA, and kind is {self.kind}; set one of them to its default")
        if self.rslora:
            raise ValueError(f"rslora is for LoRA, and kind is {self.kind}; set alpha")
        if self.base == "nf4":
            raise ValueError(f"base nf4 packs weights to another shape, which {self.kind} reads; use int8 or fp8")
        return self

    @property
    def title(self) -> str:
        """`LoRA`, `DoRA`, `LoKr`."""
        return "DoRA" if self.dora else ADAPTERS[self.kind]

    def rank_of(self, layer: str) -> int:
        """The rank of a layer's adapter."""
        return next((rank for rule, rank in self.ranks.items() if fits(layer, rule)), self.rank)

    def alpha_of(self, rank: int) -> float:
        """The alpha of an adapter of that rank."""
        return self.alpha if self.rslora else self.alpha * rank / self.rank

    def scale(self, rank: int) -> float:
        """What the product of an adapter of that rank is multiplied by."""
        return self.alpha / (math.sqrt(rank) if self.rslora else self.rank)


def untrained_text(class_name: str) -> str | None:
    """Why adapters of the text encoders cannot be trained for this transformer class; None if they can."""
    if class_name in ("SD3Transformer2DModel", "FluxTransformer2DModel"):
        return None
    return (
        f"strategy.lora.text_encoders is for the CLIP encoders of SD3 and Flux.1, and the model is a {class_name}; "
        "leave it out"
    )


class ControlNetSpec(Section):
    """A ControlNet for frozen weights (Zhang et al., arXiv:2302.05543). It takes the sample's reference image, and
    starts as a copy of the transformer's first blocks with projections of zeros."""

    layers: Count = 4
    """The number of its blocks."""
    single_layers: Natural = 0
    """The number of its single-stream blocks, for Flux."""
    base: LoraBase = "bf16"
    """The dtype of the frozen weights of the model's linear layers in blocks; fp8 is e4m3. bf16 leaves them in the
    dtype of the precision."""

    @property
    def blocks(self) -> int:
        """The number of all its blocks."""
        return self.layers + self.single_layers


def fits(layer: str, rule: str) -> bool:
    """Whether a layer's full name matches a rule: a pattern of the whole name, or its last parts."""
    if any(each in rule for each in "*?["):
        return fnmatch.fnmatchcase(layer, rule)
    return layer == rule or layer.endswith(f".{rule}")
