"""Claims about DiT: one function each, with why our answer differs."""

from __future__ import annotations

from bigdit.rehearse.pool import Pool

from bigdit.search.asking.ask import question_for
from bigdit.search.finding.candidates import Option
from bigdit.units import count, gib
from claims.answers import Case, Say, largest, option, rehearsed

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


def dit_batches(pool: Pool, say: Say) -> Case:
    """How far the "optimal" batches of DiT are from the cards' limits."""
    rows = [
        ["model", "parameters", "card", "claimed", "as DiT's train.py", "largest so", "cached, bf16", "largest, cached"]
    ]
    for model, card, claimed in DIT_CLAIMS:
        say(f"case 3: {model}")
        question = question_for(model=model, gpu=card, device="rehearsed")
        cells = []
        for text in (DIT_THEIRS, DIT_OURS):
            size = claimed or 1
            (found,) = rehearsed(pool, model, card, [f"{text},micro_batch_size={size}"])
            share = found.process_bytes / found.usable_bytes
            limit = largest(pool, question, option(pool, question, text), 0)
            cells += [f"{gib(found.process_bytes)} at {size}, {share:.0%} of the card", f"{limit:,}"]
        rows.append([model, count(found.answer.params), question.gpu.title, str(claimed or "–"), *cells])
    return Case(
        "DiT-B/8 on 24 GB at 32, DiT-L/4 on 48 GB at 16, DiT-XL/2 on 80 GB at 8; DiT-B/4 and DiT-S/2 on 12 GB",
        "These batches are optimal; B/8 has 79 M parameters, and XL/2 1.06 B.",
        rows,
        [
            "All fit, and none is near the card's limit: at 256 px a picture is 16 tokens for B/8, 64 for L/4, 256 for "
            "XL/2. What sets the memory there is the state, which does not depend on the batch.",
            "train.py keeps weights in fp32 with TF32 products, an average and the VAE (fp32) on the card, and encodes "
            "the whole micro-batch at once, which decides the largest one of small models. Nothing is recomputed.",
            "Parameters are counted in the model that was built (the paper's, which predicts variances too); "
            "Peebles & Xie (arXiv:2212.09748) have 131 M for B/8 and 675 M for XL/2. Largest micro-batches are "
            "found to 2 %, and rehearsed at full depth.",
        ],
    )


def half_precision(pool: Pool, say: Say) -> Case:
    """What 16 bits save of the process, for each size of DiT."""
    rows = [["model", "precision", *(f"at {size}" for size in BATCHES), "40 % from"]]
    for model in DIT_SIZES:
        say(f"case 6: {model}")
        question = question_for(model=model, gpu="a100-80g-sxm", device="rehearsed")
        options = {name: option(pool, question, f"precision={name}") for name in ("fp32", "bf16", "fp16", "bf16_sr")}
        for name, title in (("bf16", "bf16, fp32 masters"), ("fp16", "fp16, fp32 masters"), ("bf16_sr", "bf16 alone")):

            def saved(size: int, half: Option = options[name], whole: Option = options["fp32"]) -> float:
                return 1 - _allocated(half, size) / _allocated(whole, size)

            start = next((size for size in range(1, 1025) if saved(size) >= 0.4), None)
            rows.append([model, title, *(f"{saved(size):.0%}" for size in BATCHES), str(start or "never")])
    return Case(
        "fp16 or bf16 against fp32, for each size of DiT",
        "It saves 40 %.",
        rows,
        [
            "Of allocated bytes, AdamW, nothing recomputed, features cached. With fp32 masters the state is 16 B a "
            "weight as in fp32 (2 weights + 2 gradients + 4 masters + 8 Adam, for 4 + 4 + 8): at small batches nothing "
            "is saved. What halves are activations, so that the saving grows with the batch towards one half.",
            "Below nothing, at a batch of one: gradients become fp32 up to 256 MiB at a time for the masters, which is "
            "much beside a model of 33 M or 130 M weights.",
            "Without masters (`bf16_sr`) everything halves, state too, at any batch.",
        ],
    )


def _allocated(found: Option, micro_batch_size: int) -> float:
    return max(found.arrangement.peaks(micro_batch_size, 0).values())
