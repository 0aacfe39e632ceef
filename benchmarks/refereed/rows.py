"""The questions of the referee: every model of the catalogue, and every way to train it, on each kind of card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigdit.search.predict.sibling import depths, sibling

from bigdit import catalog
from bigdit.catalog import Gpu
from bigdit.catalog.models import models
from bigdit.config.strategy import parse_strategy
from bigdit.profile.request import StepRequest, request_for


@dataclass(frozen=True)
class Row:
    """A model of the catalogue with at most `blocks` of each list of blocks (0: all of them), a card, a strategy.

    With `ranks`, every process of the strategy runs, each on a card; else the first of them, by a group without peers.
    """

    model: str
    gpu: str
    strategy: str
    blocks: int = 2
    ranks: bool = False

    @property
    def name(self) -> str:
        depth = f"{self.blocks} blocks" if self.blocks else "whole"
        return f"{self.model} ({depth}) · {self.gpu} · {self.strategy}{' · every rank' if self.ranks else ''}"

    def question(self) -> tuple[StepRequest, Gpu]:
        """What both sides are asked. Raises UserError for what the catalogue does not know, or cannot be rehearsed."""
        gpu, model = catalog.resolve_gpu(self.gpu), catalog.find_model(self.model)
        if self.blocks:
            model = sibling(model, {name: min(self.blocks, length) for name, length in depths(model).items()})
        return request_for(model, gpu, parse_strategy([self.strategy])), gpu


CARDS = ("a40", "a100-80g-sxm", "l40s", "h100-sxm", "rtx-pro-6000")
"""Compute capabilities 8.6, 8.0, 8.9, 9.0 and 12.0."""

SANA, PIXART, SD35, FLUX, WAN = (
    *("sana-1600m-1024", "pixart-sigma-xl-2-1024", "sd3.5-medium", "flux.1-dev", "wan2.1-t2v-1.3b"),
)

LARGE = dict.fromkeys(
    ("hunyuanvideo-t2v", "hunyuanvideo-1.5-480p", "hunyuanvideo-1.5-720p", "kandinsky-5-t2v-pro"), "h200-sxm"
)
"""Models whose one sample needs the card with most memory, however few blocks there are."""
ALONE = ("hunyuanvideo-1.5-720p",)
"""Of these, those whose masks of two samples it does not hold."""

OPTIMIZERS = (
    *("adamw", "adamw_8bit", "paged_adamw_8bit", "lion_8bit", "adamw_8bit_ao", "adamw_4bit_ao"),
    *("adafactor", "came", "came_8bit"),
)

ENGINES = (
    *("zero0,world_size=8", "zero1,world_size=8", "zero2,world_size=8", "zero3,world_size=8"),
    *("zero2-offload,world_size=8", "zero3-offload,world_size=8", "zero3-offload-all,world_size=8"),
    *("fsdp2,world_size=8", "fsdp2,world_size=8,reshard_after_forward=false", "fsdp2-offload,world_size=8"),
    "fsdp2,world_size=16,dp_replicate=2",
)

POLICIES = (
    *("checkpointed_blocks=1", "checkpointed_blocks=all", "checkpointed_blocks=1,checkpointing=selective"),
    *("checkpointed_blocks=all,checkpointing=selective", "offload_activations=true"),
    *("checkpointed_blocks=all,offload_activations=true", "optimizer_in_backward=true,gradient_clipping=null"),
    *("grad_accum_steps=2", "gradient_clipping=null", "micro_batch_size=4", "micro_batch_size=16"),
    *("ema.device=gpu", "ema.device=cpu"),
    *("lora.rank=16", "lora.base=int8", "lora.base=nf4", "lora.base=nf4,checkpointed_blocks=all"),
    *("optimizer.implementation=foreach", "optimizer.implementation=for_loop"),
)

PRECISIONS = ("fp32", "tf32", "bf16", "bf16_sr", "fp16")

WHOLE = (
    Row(SANA, "a40", "single", 0),
    Row(SANA, "h100-sxm", "single,micro_batch_size=8,checkpointed_blocks=all", 0),
    Row(SANA, "a100-80g-sxm", "zero2,world_size=8,micro_batch_size=4", 0),
    Row(SANA, "l40s", "fsdp2,world_size=8,micro_batch_size=2", 0),
    Row(SANA, "rtx-pro-6000", "single,optimizer.name=adamw_8bit,micro_batch_size=5", 0),
    Row(PIXART, "a40", "single,micro_batch_size=4", 0),
    Row(PIXART, "rtx-pro-6000", "zero1,world_size=8,micro_batch_size=8", 0),
    Row(PIXART, "a100-80g-sxm", "single,micro_batch_size=16,checkpointed_blocks=all,ema.device=gpu", 0),
    Row(SD35, "a100-80g-sxm", "single,checkpointed_blocks=all", 0),
    Row(SD35, "h100-sxm", "zero3,world_size=8,micro_batch_size=2", 0),
    Row(FLUX, "h100-sxm", "single,lora.rank=16,checkpointed_blocks=all", 0),
    Row(FLUX, "a40", "single,lora.base=nf4,checkpointed_blocks=all", 0),
    Row(FLUX, "rtx-pro-6000", "fsdp2,world_size=8,checkpointed_blocks=all", 0),
    Row(WAN, "l40s", "single,checkpointed_blocks=all,optimizer.name=adamw_8bit", 0),
    Row(WAN, "a100-80g-sxm", "fsdp2,world_size=8,checkpointed_blocks=all", 0),
)

RANKS = tuple(
    Row(model, CARDS[i % len(CARDS)], strategy, ranks=True)
    for i, (model, strategy) in enumerate(
        (
            *((SANA, f"zero{stage},world_size=2") for stage in range(4)),
            *((SANA, f"{engine},world_size=2") for engine in ("zero2-offload", "zero3-offload", "zero3-offload-all")),
            (SANA, "zero2,world_size=2,precision=fp16,grad_accum_steps=2"),
            (PIXART, "zero2,world_size=2,optimizer.name=came"),
            (PIXART, "zero3,world_size=2,micro_batch_size=2,checkpointed_blocks=all,ema.device=gpu"),
            (SD35, "zero1,world_size=2,lora.rank=16"),
            (SANA, "fsdp2,world_size=2"),
            (SANA, "fsdp2-offload,world_size=2"),
            (PIXART, "fsdp2,world_size=2,optimizer.name=adamw_8bit_ao,reshard_after_forward=false"),
            (WAN, "fsdp2,world_size=2,checkpointed_blocks=all,grad_accum_steps=2"),
            (FLUX, "fsdp2,world_size=2,lora.rank=16"),
            (SANA, "fsdp2,world_size=4,dp_replicate=2"),
            (PIXART, "fsdp2,world_size=4,dp_replicate=2,ema.device=gpu"),
        )
    )
)

IN_BACKWARD = "precision=bf16_sr,optimizer.name=adafactor,optimizer_in_backward=true,gradient_clipping=null"

PART = (
    Row(SANA, "a40", "single"),
    Row(SANA, "a40", "zero2,world_size=8"),
    Row(SANA, "a40", "zero3,world_size=8,optimizer.name=came"),
    Row(SANA, "a40", "zero2-offload,world_size=8"),
    Row(SANA, "a40", "fsdp2,world_size=8,ema.device=gpu"),
    Row(FLUX, "a40", "single,lora.base=nf4,checkpointed_blocks=all", 1),
    Row(FLUX, "a40", "single,lora.rank=16,checkpointed_blocks=all,blocks_to_swap=3"),
    Row(FLUX, "a40", f"single,{IN_BACKWARD},checkpointed_blocks=all,blocks_to_swap=3"),
    Row(PIXART, "a40", "single,features=online", 1),
    Row(SANA, "h100-sxm", "single,checkpointed_blocks=1,optimizer.name=adamw_8bit"),
    Row(SD35, "h100-sxm", "single,micro_batch_size=2", 1),
    Row(PIXART, "h100-sxm", "fsdp2,world_size=16,dp_replicate=2,optimizer.name=adamw_8bit_ao"),
    Row(WAN, "h100-sxm", "single,precision=fp16,checkpointed_blocks=all", 1),
    Row(SANA, "a40", "zero2,world_size=2", ranks=True),
    Row(PIXART, "a40", "fsdp2,world_size=2,ema.device=gpu", 1, ranks=True),
)
"""Covers each rule once: reductions, attention of three kinds, convolutions, norms, lists; each engine and phase."""


def rows() -> list[Row]:
    """All of them, each once."""
    return list(dict.fromkeys([*PART, *_models(), *_strategies(), *_online(), *RANKS, *WHOLE]))


def _models() -> Iterator[Row]:
    """Every transformer two blocks deep, on one kind of card as it is and on another with its blocks recomputed."""
    known = [model for model in models() if model.obstacle is None]
    for i, model in enumerate(known):
        plain, recomputed = (LARGE.get(model.name, CARDS[at % len(CARDS)]) for at in (i, i + 2))
        yield Row(model.name, plain, "single")
        samples = 1 if model.name in ALONE else 2
        yield Row(model.name, recomputed, f"single,micro_batch_size={samples},checkpointed_blocks=all")


def _strategies() -> Iterator[Row]:
    cards = [CARDS[i % len(CARDS)] for i in range(200)]
    for i, optimizer in enumerate(OPTIMIZERS):
        yield Row(SANA, cards[i], f"single,optimizer.name={optimizer}")
        yield Row(PIXART, cards[i + 1], f"single,optimizer.name={optimizer},checkpointed_blocks=all")
        if not optimizer.endswith("_ao"):
            yield Row(PIXART, cards[i + 2], f"zero2,world_size=8,optimizer.name={optimizer}")
        if "8bit" not in optimizer or optimizer in ("adamw_8bit_ao", "came_8bit"):
            yield Row(SANA, cards[i + 3], f"fsdp2,world_size=8,optimizer.name={optimizer}")
    for i, precision in enumerate(PRECISIONS):
        for j, model in enumerate((SANA, SD35, WAN)):
            yield Row(model, cards[i + j], f"single,precision={precision}")
        if precision != "bf16_sr":
            yield Row(SANA, cards[i + 3], f"zero2,world_size=8,precision={precision}")
        yield Row(SANA, cards[i + 4], f"fsdp2,world_size=8,precision={precision}")
    for i, policy in enumerate(POLICIES):
        for j, model in enumerate((SANA, SD35)):
            yield Row(model, cards[i + 2 * j], f"single,{policy}")
    for i, engine in enumerate(ENGINES):
        for j, model in enumerate((SANA, PIXART, FLUX, WAN)):
            yield Row(model, cards[i + j], engine)
        yield Row(SANA, cards[i + 4], f"{engine},checkpointed_blocks=all,grad_accum_steps=2")
        yield Row(PIXART, cards[i + 3], f"{engine},ema.device=gpu")
        yield Row(SD35, cards[i + 2], f"{engine},lora.rank=16")


def _online() -> Iterator[Row]:
    for i, model in enumerate((SANA, PIXART, SD35, FLUX, WAN)):
        yield Row(model, CARDS[i], "single,features=online")
        yield Row(model, CARDS[(i + 3) % 5], "single,features=online,micro_batch_size=2,encode_chunk=1")
