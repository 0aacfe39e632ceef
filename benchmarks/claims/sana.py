"""Claims about Sana: one function each, with why our answer differs."""

from __future__ import annotations

from emulated import non_torch

from bigdit import catalog
from bigdit.config.strategy import parse_strategy
from bigdit.memory import Category
from bigdit.profile.attempt import Profile
from bigdit.search.calibration import UNPROVED
from bigdit.search.candidates import process, verdict_of
from bigdit.search.plan import Plan
from bigdit.units import gib
from claims.answers import Case, Say, between, largest, plan, profiles, published_came

MODEL, GPU = "sana-1600m", "a40"
WHOLE = "features=online,micro_batch_size=64,optimizer.name=came"
ONE = "checkpointed_blocks=all,optimizer.name"
YAML = "checkpointed_blocks=all,features=online,precision=fp32,optimizer.name"


def live(found: Profile, category: Category) -> int:
    """The most bytes of this category at any phase's peak."""
    return max(phase.at_peak.get(category, 0) for phase in found.ledger.phases)


def came_on_sana(say: Say) -> Case:
    """Sana-1600M online at the YAML's batch, and three optimizers at a batch of one."""
    texts = [
        WHOLE,
        f"{WHOLE},checkpointed_blocks=all",
        f"{WHOLE},checkpointed_blocks=all,encode_chunk=4",
        *(f"{base}={name}" for base in (ONE, YAML) for name in ("adamw", "came")),
    ]
    plain, recomputed, chunked, adamw, came, yaml_adamw, yaml_came = profiles(MODEL, GPU, texts)
    say("case 1: CAME as published")
    published, yaml_published = (published_came(MODEL, GPU, f"{base}=came") for base in (ONE, YAML))
    rows = [["run", "optimizer", "state", "allocated", "reserved", "verdict"]]
    for run, name, found in (
        ("batch 64, encoders online, nothing recomputed", "CAME (ours)", plain),
        ("batch 64, encoders online, all recomputed, as the YAML has it", "CAME (ours)", recomputed),
        ("the same, encoded 4 at a time", "CAME (ours)", chunked),
        ("batch 1, cached, all recomputed, bf16 with masters", "AdamW", adamw),
        ("the same", "CAME as published", published),
        ("the same", "CAME (ours)", came),
        ("batch 1, encoders online, all recomputed, fp32 weights", "AdamW", yaml_adamw),
        ("the same", "CAME as published", yaml_published),
        ("the same", "CAME (ours)", yaml_came),
    ):
        state = live(found, "optimizer state")
        rows.append([run, name, f"{gib(state)}, {state / found.params:.1f} B a weight", *_taken(found)])
    encode = next(phase for phase in recomputed.ledger.phases if phase.phase == "encode")
    return Case(
        "Sana-1600M, 1024 px, A40, encoders online, CAME, the YAML's batch of 64",
        "Out of memory; and CAME takes more than AdamW (NVlabs/Sana#49).",
        rows,
        [
            f"Out of memory: encoding 64 images at once takes {gib(encode.peak_bytes)} (the VAE in fp32). Without "
            f"recomputation 64 samples save {gib(live(plain, 'saved activation'))}. With all blocks recomputed and "
            f"images encoded 4 at a time torch reserves {gib(chunked.peak_reserved_bytes)} of the GPU's "
            f"{gib(catalog.gpu(GPU).usable_bytes)}.",
            "CAME as published takes more than AdamW. It factors the last two dimensions, and a 1×1 convolution "
            "[O, I, 1, 1] has one element in each. It keeps four statistics of the weight's size there: 20 B a weight "
            "with the momentum. Half of Sana's weights are such convolutions. Seen as matrices they factor.",
            "The published optimizer runs by its factoring in the place of ours "
            "(`benchmarks/claims/published_came.py`). Its temporaries are not copied: a few of the size of one weight.",
        ],
    )


def sana_cached(say: Say) -> Case:
    """The largest micro-batches of Sana-1600M on an A40, and what smaller GPUs take."""
    total = catalog.find_model(MODEL).block_count
    depths = (0, total // 4, total // 2, 3 * total // 4, total)
    rows = [["GPU", "strategy", *(f"{k} of {total} blocks" for k in depths)]]
    for title, name in (("AdamW", "adamw"), ("8-bit AdamW", "adamw_8bit")):
        say(f"case 2: {title} on the A40")
        sizes = largest(MODEL, GPU, f"optimizer.name={name}", depths)
        rows.append(["A40", title, *(f"micro-batch {size}" for size in sizes)])
    why = [
        f"With k of {total} blocks recomputed, the micro-batches are the largest that fit: one more does not. "
        f"Expandable segments are on. {UNPROVED.share:.1%} stays free for what torch may reserve beyond that, since no "
        "A40 has been measured yet.",
    ]
    for card in ("rtx-4090", "rtx-4080", "rtx-3060-12g"):
        found = plan(say, model=MODEL, gpu=card)
        why.append(f"{found.question.gpu.title} ({gib(found.question.gpu.usable_bytes)}): {_chosen(found)}")
    return Case("Sana-1600M, 1024 px, A40, cached features, bf16, AdamW", "Fits.", rows, why)


def sana_waterfall(say: Say) -> Case:
    """From what is copied to what fits, on a single GPU and with ZeRO-2 on it."""
    rows = [["start", "change", "process", "verdict", "why"]]
    for title, engine in (("single GPU", None), ("ZeRO-2", "zero2")):
        for step in plan(say, model=MODEL, gpu=GPU, engine=engine, explain=True).waterfall:
            rows.append([title, step.change, gib(step.process_bytes), step.verdict, step.saved_by])
    return Case(
        "Batch 1 of a 1.6 B model on 48 GB",
        "Out of memory.",
        rows,
        [
            "A GPU of 48 GB gives 44.35 GiB. fp32 weights, gradients, AdamW and an EMA take 20 B a weight, the "
            "update's temporaries 4 more, the encoders 6 GiB. One sample is then at the limit on a single GPU, and "
            "beyond it with DeepSpeed's flat copies.",
            "Smaller buckets save little on one GPU: DeepSpeed allocates the gradients of its whole partition when it "
            "reduces the first bucket. With small ones that is early, when more activations are allocated.",
            "All bars are with expandable segments, which people's copied settings lack: with torch's default "
            "allocator they are longer.",
        ],
    )


def _taken(found: Profile) -> list[str]:
    gpu = catalog.gpu(GPU)
    taken = process(found.peak_reserved_bytes, non_torch(parse_strategy(["single"]), gpu), UNPROVED)
    peak = f"{gib(found.ledger.peak_allocated_bytes)} ({found.ledger.deciding.phase})"
    return [peak, gib(found.peak_reserved_bytes), verdict_of(taken, gpu.usable_bytes)]


def _chosen(found: Plan) -> str:
    chosen = found.chosen
    said = f"{found.verdict}, {chosen.title}: {gib(chosen.process.high_bytes)}, "
    return said + f"{between(chosen.samples_per_second_per_card)} images/s."
