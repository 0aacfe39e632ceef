"""What the matrix of real training steps asks of one H100: model, strategy, depth, allocator; most important first.

All points were written down before the first run. A micro-batch of one more than the largest is to run out of memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain, zip_longest

from bigdit import catalog
from bigdit.catalog import FAMILIES, CatalogModel, Gpu
from bigdit.config.strategy import parse_strategy
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.request import StepRequest, request_for

GPU = "h100-sxm"

MEASURED_BY = FlowMatchingSpec()
"""The objective of all measured runs. Some models have another one now."""


@dataclass(frozen=True)
class Point:
    """A strategy on one GPU for a model with at most `blocks` of each kind of block (0: the whole model).

    `held_out`: measured last; no rule and no constant is made from it.
    """

    model: str
    strategy: str
    blocks: int = 0
    expandable_segments: bool = True
    held_out: bool = False

    @property
    def name(self) -> str:
        depth = f"{self.blocks} blocks" if self.blocks else "whole"
        return f"{self.model} ({depth}) · {self.strategy}{'' if self.expandable_segments else ' · default allocator'}"

    @property
    def key(self) -> str:
        """A file name of its own."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")

    def question(self) -> tuple[StepRequest, Gpu]:
        """The two steps, with the objective of the measured run, and the GPU.

        Raises UserError for what the catalogue does not know.
        """
        gpu, model = catalog.resolve_gpu(GPU), catalog.find_model(self.model)
        if self.blocks:
            model = few_blocks(model, self.blocks)
        request = request_for(model, gpu, parse_strategy([self.strategy]))
        return request.model_copy(update={"objective": MEASURED_BY}), gpu


def few_blocks(model: CatalogModel, most: int) -> CatalogModel:
    """`model` with at most so many blocks of each kind; blocks with a second attention (SD3.5-M) are a kind."""
    inputs = FAMILIES[model.spec.class_name]
    most += most % 2 if inputs.even else 0
    kwargs, lists = dict(model.spec.kwargs), []
    for name, length in model.block_lists:
        kept = length
        if name in inputs.depths:
            dual = kwargs.get("dual_attention_layers") or []
            kept = min(len(dual), most) + min(length - len(dual), most)
            kwargs[inputs.depths[name]] = kept
            if dual:
                kwargs["dual_attention_layers"] = dual[:most]
        lists.append((name, kept))
    if "llama_layers" in kwargs:  # of HiDream: the layer of Llama that each block reads
        kwargs["llama_layers"] = kwargs["llama_layers"][: sum(kept for _, kept in lists)]
    spec = model.spec.model_copy(update={"kwargs": kwargs})
    return model.model_copy(update={"spec": spec, "params": None, "block_lists": tuple(lists)})


SANA, SMALL_SANA, PIXART, DIT = "sana-1600m-1024", "sana-600m-1024", "pixart-sigma-xl-2-1024", "dit-xl-2-paper"
SD35, FLUX, WAN = "sd3.5-medium", "flux.1-dev", "wan2.1-t2v-1.3b"

WHOLE = (
    Point(SANA, "single,micro_batch_size=10"),
    Point(SANA, "single,micro_batch_size=4", expandable_segments=False),
    Point(SANA, "single,micro_batch_size=32,checkpointed_blocks=all"),
    Point(PIXART, "single,micro_batch_size=8"),
    Point(SD35, "single,micro_batch_size=8,checkpointed_blocks=all"),
    Point(DIT, "single,micro_batch_size=64"),
    Point(FLUX, "single,lora.rank=16,checkpointed_blocks=all"),
    Point(WAN, "single,checkpointed_blocks=all"),
    Point(SANA, "single,optimizer.name=adamw_8bit,micro_batch_size=8"),
    Point(DIT, "single,precision=tf32,micro_batch_size=32,ema.device=gpu"),
    Point(SANA, "single,micro_batch_size=15"),
    Point(SANA, "single,micro_batch_size=16"),
    Point(PIXART, "single,micro_batch_size=16,checkpointed_blocks=all,ema.device=gpu", expandable_segments=False),
    Point("pixart-alpha-xl-2-256", "single,micro_batch_size=32"),
    Point("dit-b-4-paper", "single,micro_batch_size=32"),
)
"""Memory and speed of what people train; Sana with nothing recomputed near the end of the card, and beyond it."""

KERNELS = (
    Point(SANA, "single,features=online", 2),
    Point(PIXART, "single,features=online,micro_batch_size=2", 2),
    Point(SD35, "single,lora.base=nf4,checkpointed_blocks=all", 2),
    Point(SANA, "single,precision=tf32,micro_batch_size=4", 2),
    Point(SANA, "single,precision=fp16,micro_batch_size=2", 2),
    Point(SANA, "single,precision=bf16_sr,optimizer.name=came", 2),
    Point("hunyuandit-v1.2", "single,micro_batch_size=2", 2),
    Point("cogvideox-2b", "single", 2),
    Point("ltx-video-0.9", "single,micro_batch_size=2", 2),
    Point("lumina-image-2.0", "single,micro_batch_size=2", 2),
    Point("qwen-image", "single,micro_batch_size=2", 2),
    Point("sd3-medium", "single,micro_batch_size=4,offload_activations=true", 2),
    Point("auraflow-v0.1", "single,checkpointed_blocks=1", 2),
    Point("chroma1-hd", "single,lora.base=int8", 2),
    Point("flux.2-klein-4b", "single,optimizer.name=paged_adamw_8bit", 2),
    Point("sana-video-2b-480p", "single", 2),
    Point("dit-xl-2", "single,micro_batch_size=16,optimizer_in_backward=true,gradient_clipping=null", 2),
    Point("dit-l-2-paper", "single,precision=fp32,micro_batch_size=8", 2),
)
"""Every kind of kernel and optimizer, two blocks deep."""

ENGINES = (
    Point(SANA, "fsdp2,world_size=1,micro_batch_size=4"),
    Point(SANA, "zero2,world_size=1,micro_batch_size=4"),
    Point(SANA, "zero3,world_size=1,optimizer.name=adamw_8bit", 2),
    Point(SANA, "zero1,world_size=1,grad_accum_steps=2", 2, expandable_segments=False),
    Point(PIXART, "fsdp2,world_size=1,optimizer.name=adamw_8bit_ao,ema.device=gpu", 2),
)

HELD_OUT = tuple(
    Point(model, strategy, blocks, expandable_segments, held_out=True)
    for model, strategy, blocks, expandable_segments in (
        (SMALL_SANA, "single,micro_batch_size=16", 0, True),
        ("sana-1600m-512", "single,micro_batch_size=16", 0, True),
        (SD35, "single,micro_batch_size=4", 0, True),
        ("sd3-medium", "single,micro_batch_size=8,checkpointed_blocks=all", 0, False),
        ("dit-xl-2", "single,micro_batch_size=32", 0, True),
        ("dit-l-2-paper", "single,precision=fp32,micro_batch_size=32", 0, True),
        ("pixart-sigma-xl-2-512", "single,micro_batch_size=32,checkpointed_blocks=all", 0, True),
        ("pixart-alpha-xl-2-1024", "single,micro_batch_size=4,optimizer.name=came_8bit", 0, True),
        (FLUX, "single,lora.base=nf4,checkpointed_blocks=all,micro_batch_size=2", 0, True),
        ("qwen-image", "single,lora.rank=16,checkpointed_blocks=all", 4, True),
        ("hunyuandit-v1.2", "single,micro_batch_size=4,checkpointed_blocks=all", 0, True),
        ("cogvideox-2b", "single,lora.rank=64,checkpointed_blocks=all", 0, True),
        ("lumina-image-2.0", "single,optimizer.name=adafactor", 0, True),
        ("ltx-video-0.9", "single,checkpointed_blocks=all,optimizer.name=lion_8bit", 0, True),
        ("z-image", "single,micro_batch_size=2", 2, True),
        ("krea2", "single,micro_batch_size=2", 2, True),
        ("prx-1.2b", "single,micro_batch_size=8", 0, True),
        ("cogview4-6b", "single", 2, True),
        ("hidream-i1", "single", 2, True),
        ("hunyuanimage-2.1", "single", 2, True),
        ("hunyuanvideo-t2v", "single,checkpointed_blocks=all", 1, True),
        ("wan2.2-ti2v-5b", "single", 2, True),
        ("lumina-next-sft", "single,micro_batch_size=2", 2, True),
        ("sd3.5-large", "single,precision=fp16,micro_batch_size=2", 2, False),
        (WAN, "zero2,world_size=1,checkpointed_blocks=all", 4, True),
        (SD35, "fsdp2,world_size=1,micro_batch_size=4,checkpointed_blocks=all", 0, True),
    )
)


def _mixed() -> list[Point]:
    """Whole models and kinds of kernels in turn: what is interrupted has something of both."""
    both = chain.from_iterable(zip_longest(WHOLE, KERNELS))
    return [point for point in both if point is not None]


POINTS = (*_mixed(), *ENGINES, *HELD_OUT)
