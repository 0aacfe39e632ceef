"""Speeds of training that were published, with their conditions and the strategy that comes nearest to each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """`seconds` of one optimizer step, as published at `source`; `differs`: what theirs does otherwise.

    Where no one strategy has all that is said of theirs, `other` has the rest: parts of the step (speed/step.py) that
    are as there (`instead`), or between both (`between`).
    """

    name: str
    source: str
    seconds: float
    model: str
    resolution: int
    gpu: str
    strategy: str
    differs: str
    other: str | None = None
    between: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()


DIT, FAST_DIT = "https://github.com/facebookresearch/DiT/issues/22", "https://github.com/chuanyangjin/fast-DiT"
KREA = "https://github.com/bghira/SimpleTuner/blob/bc8e6ab7738ce457a2ed8eb2d26cadd91c6442cb/documentation/quickstart/KREA2.md"
UNFUSED = "attention of timm as it was then: products and softmax apart, in memory"
AUTOCAST = "autocast: what is no product is in fp16 or in fp32, and weights are cast at each use"
FIRST = (
    Claim(
        "dit-fp32",
        DIT,
        1 / 0.51,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "zero0,world_size=8,micro_batch_size=32,precision=fp32,ema.device=gpu,features=online",
        f"DDP; {UNFUSED}; pictures decoded beside",
    ),
    Claim(
        "dit-tf32",
        DIT,
        1 / 0.81,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "zero0,world_size=8,micro_batch_size=32,precision=tf32,ema.device=gpu,features=online",
        f"DDP; {UNFUSED}; pictures decoded beside, which decides: from features (dic-dit-xl) it takes 0.58 s, and of "
        "the other 0.65 s the encoder has 0.1 to 0.2",
    ),
    Claim(
        "fast-dit-tf32",
        FAST_DIT,
        1 / 0.43,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "single,micro_batch_size=128,precision=tf32,checkpointed_blocks=all,ema.device=gpu,features=online",
        f"{UNFUSED}; pictures decoded beside",
    ),
    Claim(
        "fast-dit-fp16-online",
        FAST_DIT,
        1 / 0.56,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "single,micro_batch_size=128,precision=fp16,checkpointed_blocks=all,ema.device=gpu,features=online",
        f"its VAE's convolutions run in TF32, cuDNN's default; {AUTOCAST}; {UNFUSED}",
        other="single,micro_batch_size=128,precision=tf32,checkpointed_blocks=all,ema.device=gpu,features=online",
        between=("memory-bound operators",),
        instead=("encoders",),
    ),
    Claim(
        "fast-dit-fp16",
        FAST_DIT,
        1 / 0.84,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "single,micro_batch_size=128,precision=fp16,checkpointed_blocks=all,ema.device=gpu",
        f"{AUTOCAST}; {UNFUSED}",
        other="single,micro_batch_size=128,precision=tf32,checkpointed_blocks=all,ema.device=gpu",
        between=("memory-bound operators",),
    ),
    Claim(
        "krea2-lora-1",
        KREA,
        0.99,
        "krea2",
        1024,
        "h100-sxm",
        "single,micro_batch_size=1,lora.rank=16,checkpointed_blocks=all",
        "Lion, query, key and value in one product; form factor of the H100 and rank not stated",
    ),
    Claim(
        "krea2-lora-8",
        KREA,
        7.69,
        "krea2",
        1024,
        "h100-sxm",
        "single,micro_batch_size=8,lora.rank=16,checkpointed_blocks=all",
        "Lion, query, key and value in one product; form factor of the H100 and rank not stated",
    ),
    Claim(
        "dic-dit-xl",
        "https://github.com/YuchuanTian/DiC/issues/6",
        1 / 1.71,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "zero0,world_size=8,micro_batch_size=32,precision=tf32,ema.device=gpu",
        f"only speed and card are stated: 8 cards, 256 pictures a step and TF32 are DiT's usual setting; {UNFUSED}",
    ),
    Claim(
        "flux-lora-a40-1",
        "https://github.com/ostris/ai-toolkit/issues/145",
        6.5,
        "flux.1-dev",
        1024,
        "a40",
        "single,micro_batch_size=1,lora.rank=16,checkpointed_blocks=all",
        "the default config: weights in 8 bits that are unpacked at each use, pictures of 512, 768 and 1024 mixed; "
        "with flux-lora-a40-4 it says that 1.3 s of a step do not grow with the batch, as what unpacks weights",
    ),
    Claim(
        "flux-lora-a40-4",
        "https://github.com/ostris/ai-toolkit/issues/145",
        22.0,
        "flux.1-dev",
        1024,
        "a40",
        "single,micro_batch_size=4,lora.rank=16,checkpointed_blocks=all",
        "the default config: weights in 8 bits that are unpacked at each use, pictures of 512, 768 and 1024 mixed",
    ),
)

TUNER = (
    "https://github.com/bghira/SimpleTuner/blob/bc8e6ab7738ce457a2ed8eb2d26cadd91c6442cb/"
    "documentation/experimental/SEGMENTED_CHECKPOINTING.md"
)
KREA_SHORT = "Lion; query, key and value in one product, which takes the place of three"
IN_BF16 = "AdamW in bf16"


Cell = tuple[str, str]
"""A card, and what is recomputed: none, or all blocks (layer)."""


def _sweep(
    model: str, resolution: int, micro_batch_size: int, rank: int, differs: str, cells: dict[Cell, float]
) -> tuple[Claim, ...]:
    """LoRA on one card by SimpleTuner's example of the model, its steps after the first ones; a claim for each card
    with nothing (none) and all blocks (layer) recomputed. Pictures are encoded before."""
    return tuple(
        Claim(
            f"{model}-{resolution}-{mode}-{gpu}",
            TUNER,
            seconds,
            model,
            resolution,
            gpu,
            f"single,micro_batch_size={micro_batch_size},lora.rank={rank}"
            + (",checkpointed_blocks=all" if mode == "layer" else ""),
            f"{differs}; form factor of the H100 not stated" if gpu == "h100-sxm" else differs,
        )
        for (gpu, mode), seconds in cells.items()
    )


SWEEP = (
    *_sweep(
        "krea2",
        512,
        1,
        64,
        KREA_SHORT,
        {
            ("h100-sxm", "none"): 0.272,
            ("h100-sxm", "layer"): 0.371,
            ("l40s", "none"): 0.661,
            ("l40s", "layer"): 0.919,
        },
    ),
    *_sweep(
        "lumina-image-2.0",
        512,
        2,
        16,
        IN_BF16,
        {
            ("h100-sxm", "none"): 0.235,
            ("h100-sxm", "layer"): 0.384,
            ("l40s", "none"): 0.332,
            ("l40s", "layer"): 0.457,
        },
    ),
    *_sweep(
        "sd3.5-medium",
        1024,
        3,
        128,
        IN_BF16,
        {
            ("h100-sxm", "none"): 0.529,
            ("h100-sxm", "layer"): 0.721,
            ("l40s", "none"): 1.189,
            ("l40s", "layer"): 1.607,
        },
    ),
    *_sweep("qwen-image", 1024, 1, 8, "Lion", {("h100-sxm", "layer"): 1.202, ("l40s", "layer"): 3.377}),
)
"""Their page says: one card, validation and checkpoints off, caches made before, seconds a step after the warm-up."""

CLAIMS = (*FIRST, *SWEEP)

OUTSIDE = {
    "lumina-image-2.0-512-none-l40s": "its tensors of 9 MB stay in the L2 cache of 96 MB from one operator to the next",
    "sd3.5-medium-1024-layer-h100-sxm": "1 % beyond; why is not found",
}
"""Why claims of the sweep lie outside, as far as it is known; of the others it stands in `differs`."""
