"""Claims about DiT: one function each, with why our answer differs."""

from __future__ import annotations

from bigdit import catalog
from bigdit.units import count, gib
from claims.answers import Case, Found, Say, at_most, largest, ran

DIT_CLAIMS = (
    ("dit-b-8-paper", "rtx-4090", 32),
    ("dit-l-4-paper", "rtx-a6000", 16),
    ("dit-xl-2-paper", "a100-80g-sxm", 8),
    ("dit-b-4-paper", "rtx-3060-12g", None),
    ("dit-s-2-paper", "rtx-3060-12g", None),
)
DIT_OURS = "optimizer.name=adamw"
DIT_THEIRS = "precision=tf32,ema.device=gpu,features=online,optimizer.implementation=foreach"

DIT_SIZES = ("dit-s-2-paper", "dit-b-2-paper", "dit-l-2-paper", "dit-xl-2-paper")
BATCHES = (1, 8, 32, 64, 128)
HALVES = {"bf16": "bf16, fp32 masters", "fp16": "fp16, fp32 masters", "bf16_sr": "bf16 alone"}


def dit_batches(say: Say) -> Case:
    """How far the "optimal" batches of DiT are from the GPUs' limits."""
    rows = [
        ["model", "parameters", "GPU", "claimed", "as DiT's train.py", "largest so", "cached, bf16", "largest, cached"]
    ]
    for model, gpu, claimed in DIT_CLAIMS:
        say(f"case 3: {model}")
        size, cells = claimed or 1, []
        for text in (DIT_THEIRS, DIT_OURS):
            (found,) = ran(model, gpu, [f"{text},micro_batch_size={size}"])
            share = found.process_bytes / found.usable_bytes
            (limit,) = largest(model, gpu, text)
            cells += [f"{gib(found.process_bytes)} at {size}, {share:.0%} of the GPU", at_most(limit)]
        rows.append([model, count(found.attempt.params), catalog.gpu(gpu).title, str(claimed or "–"), *cells])
    return Case(
        "DiT-B/8 on 24 GB at 32, DiT-L/4 on 48 GB at 16, DiT-XL/2 on 80 GB at 8; DiT-B/4 and DiT-S/2 on 12 GB",
        "These batches are optimal; B/8 has 79 M parameters, and XL/2 1.06 B.",
        rows,
        [
            "All fit, and none is near the GPU's limit. At 256 px an image is 16 tokens for B/8, 64 for L/4, 256 for "
            "XL/2. The state takes most of the memory there, and it does not depend on the batch.",
            "train.py keeps fp32 weights with TF32 products, an EMA and the VAE (fp32) on the GPU. It encodes the "
            "whole micro-batch at once, which limits small models. Nothing is recomputed.",
            "Parameters are counted in the model that was built (the paper's, which predicts variances too). "
            "Peebles & Xie (arXiv:2212.09748) have 131 M for B/8 and 675 M for XL/2.",
        ],
    )


def half_precision(say: Say) -> Case:
    """What 16 bits save, for each size of DiT."""
    rows = [["model", "precision", *(f"at {size}" for size in BATCHES)]]
    for model in DIT_SIZES:
        say(f"case 6: {model}")
        whole, *halves = (allocated(model, precision) for precision in ("fp32", *HALVES))
        for title, half in zip(HALVES.values(), halves, strict=True):
            rows.append([model, title, *(f"{1 - half[size] / whole[size]:.0%}" for size in BATCHES)])
    return Case(
        "fp16 or bf16 against fp32, for each size of DiT",
        "It saves 40 %.",
        rows,
        [
            "Of allocated bytes, with AdamW, nothing recomputed, features cached. With fp32 masters the state takes 16 "
            "B a weight as in fp32 (2 weights + 2 gradients + 4 masters + 8 Adam, for 4 + 4 + 8): small batches save "
            "nothing. Activations halve, so the saving grows with the batch towards one half.",
            "Below nothing, at a batch of one: gradients are cast to fp32 up to 256 MiB at a time for the masters, "
            "which is much beside a model of 33 M or 130 M weights.",
            "Without masters (`bf16_sr`) everything halves, state too, at any batch.",
        ],
    )


def allocated(model: str, precision: str) -> dict[int, int]:
    """The most allocated bytes on an A100 at each of BATCHES."""
    texts = [f"precision={precision},micro_batch_size={size}" for size in BATCHES]
    found: list[Found] = ran(model, "a100-80g-sxm", texts)
    return {size: each.attempt.peak_allocated_bytes for size, each in zip(BATCHES, found, strict=True)}
