"""Claims about DiT, a function each, and why our answer differs."""

from __future__ import annotations

from bigdit import catalog
from bigdit.units import count, gib
from claims.answers import Case, Found, Say, at_most, case, largest, ran

DIT_CLAIMS = (
    ("dit-b-8-paper", "rtx-4090", 32),
    ("dit-l-4-paper", "rtx-a6000", 16),
    ("dit-xl-2-paper", "a100-80g-sxm", 8),
    ("dit-b-4-paper", "rtx-3060-12g", None),
    ("dit-s-2-paper", "rtx-3060-12g", None),
)
DIT_OURS = "optimizer.name=adamw"
DIT_THEIRS = "precision=tf32,ema.device=gpu,features=online,encode_chunk=null,optimizer.implementation=foreach"

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
    return case("dit_batches", rows)


def half_precision(say: Say) -> Case:
    """What 16 bits save for each size of DiT."""
    rows = [["model", "precision", *(f"at {size}" for size in BATCHES)]]
    for model in DIT_SIZES:
        say(f"case 6: {model}")
        whole, *halves = (allocated(model, precision) for precision in ("fp32", *HALVES))
        for title, half in zip(HALVES.values(), halves, strict=True):
            rows.append([model, title, *(f"{1 - half[size] / whole[size]:.0%}" for size in BATCHES)])
    return case("half_precision", rows)


def allocated(model: str, precision: str) -> dict[int, int]:
    """Peak allocated bytes on an A100 at each of BATCHES."""
    texts = [f"precision={precision},micro_batch_size={size}" for size in BATCHES]
    found: list[Found] = ran(model, "a100-80g-sxm", texts)
    return {size: each.attempt.peak_allocated_bytes for size, each in zip(BATCHES, found, strict=True)}
