"""Claims about Sana: one function each, with why our answer differs."""

from __future__ import annotations

from bigdit.rehearse.pool import Pool

from bigdit.search.asking.ask import question_for
from bigdit.search.plan import Plan
from bigdit.units import gib
from claims.answers import Case, Found, Say, between, explained, largest, option, plan, published_came, rehearsed


def came_on_sana(pool: Pool, say: Say) -> Case:
    """Sana-1600M online at the YAML's batch, and three optimizers at a batch of one."""
    model, card = "sana-1600m", "a40"
    whole = "features=online,micro_batch_size=64,optimizer.name=came"
    plain, recomputed, chunked = rehearsed(
        pool,
        model,
        card,
        [whole, f"{whole},checkpointed_blocks=all", f"{whole},checkpointed_blocks=all,encode_chunk=4"],
    )
    one = "checkpointed_blocks=all,optimizer.name"
    adamw, came = rehearsed(pool, model, card, [f"{one}=adamw", f"{one}=came"])
    yaml = "checkpointed_blocks=all,features=online,precision=fp32,optimizer.name"
    yaml_adamw, yaml_came = rehearsed(pool, model, card, [f"{yaml}=adamw", f"{yaml}=came"])
    say("case 1: CAME as published")
    published = published_came(model, card, f"{one}=came")
    yaml_published = published_came(model, card, f"{yaml}=came")
    params = adamw.answer.params
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
        state = found.live("optimizer state")
        rows.append([run, name, f"{gib(state)}, {state / params:.1f} B a weight", *_taken(found)])
    return Case(
        "Sana-1600M, 1024 px, A40, encoders online, CAME, the YAML's batch of 64",
        "Out of memory; and CAME takes more than AdamW (NVlabs/Sana#49).",
        rows,
        [
            f"Out of memory: encoding 64 pictures at once takes {gib(recomputed.peaks['encode'])} (the VAE in fp32), "
            f"and without recomputation 64 samples save {gib(plain.live('saved activation'))}. With all blocks "
            f"recomputed and pictures encoded 4 at a time the process wants {gib(chunked.process_bytes)} of "
            f"{gib(chunked.usable_bytes)}: {chunked.verdict}.",
            "CAME as published takes more than AdamW: it factors the last two dimensions, which in a 1×1 convolution "
            "[O, I, 1, 1] are single, so that four statistics of its size stand in the place of one (20 B a weight "
            "with the momentum). Half of Sana's weights are such convolutions. Seen as matrices they factor.",
            "The published optimizer is rehearsed by putting its factoring in the place of ours "
            "(`benchmarks/claims/published_came.py`); its temporaries are not copied: a few of the size of one weight.",
        ],
    )


def sana_cached(pool: Pool, say: Say) -> Case:
    """The largest micro-batches of Sana-1600M on an A40, and what smaller cards take."""
    question = question_for(model="sana-1600m", gpu="a40", device="rehearsed")
    total = sum(length for _, length in question.model.block_lists)
    depths = (0, total // 4, total // 2, 3 * total // 4, total)
    rows = [["card", "strategy", *(f"{k} of {total} blocks" for k in depths)]]
    for title, text in (("AdamW", "optimizer.name=adamw"), ("8-bit AdamW", "optimizer.name=adamw_8bit")):
        say(f"case 2: {title} on the A40")
        found = option(pool, question, text)
        rows.append(["A40", title, *(f"micro-batch {largest(pool, question, found, k)}" for k in depths)])
    why = [
        f"With k of {total} blocks recomputed, the micro-batches are the largest that FIT, and the next do not: both "
        "were rehearsed at full depth, with expandable segments. They keep 0.3 % free for what torch may reserve "
        "beyond that, for no A40 has been measured yet.",
    ]
    for card in ("rtx-4090", "rtx-4080", "rtx-3060-12g"):
        found_plan = plan(say, model="sana-1600m", gpu=card)
        why.append(
            f"{found_plan.question.gpu.title} ({gib(found_plan.question.gpu.usable_bytes)}): {_chosen(found_plan)}"
        )
    return Case(
        "Sana-1600M, 1024 px, A40, cached features, bf16, AdamW",
        "Fits.",
        rows,
        why,
    )


def sana_waterfall(pool: Pool, say: Say) -> Case:
    """From what is copied to what fits, with one process and with ZeRO-2 on one card."""
    rows = [["start", "change", "process", "verdict", "why"]]
    for title, engine in (("one process", None), ("ZeRO-2", "zero2")):
        found = plan(say, model="sana-1600m", gpu="a40", engine=engine)
        for step in explained(pool, found):
            rows.append([title, step.change, gib(step.process_bytes), step.verdict, step.saved_by])
    return Case(
        "Batch 1 of a 1.6 B model on 48 GB",
        "Out of memory.",
        rows,
        [
            "A card of 48 GB gives 44.35 GiB. fp32 weights, gradients, AdamW and an average take 20 B a weight, the "
            "update's temporaries 4 more, the encoders 6 GiB: at one sample this is at the card's limit in one "
            "process, and beyond it with DeepSpeed's flat copies.",
            "Smaller buckets save nothing on one card: DeepSpeed allocates the gradients of its whole partition when "
            "it reduces the first bucket, and with small ones that is early, when more activations are alive.",
            "Bars before recomputation are from siblings of 3 and 5 blocks, and all of them with expandable segments, "
            "which are not in what people copy: with torch's default allocator they are longer.",
        ],
    )


def _taken(found: Found) -> list[str]:
    return [
        f"{gib(found.answer.ledger.peak_allocated_bytes)} ({found.deciding})",
        gib(found.reserved_bytes),
        found.verdict,
    ]


def _chosen(found: Plan) -> str:
    chosen = found.chosen
    said = f"{found.verdict}, {chosen.title}: {gib(chosen.process.high_bytes)}, "
    return said + f"{between(chosen.samples_per_second_per_card)} images/s."
