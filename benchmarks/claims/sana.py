"""Claims about Sana, a function each, and why our answer differs."""

from __future__ import annotations

from bigdit import catalog
from bigdit.config.strategy_text import parse_strategy
from bigdit.memory import Category
from bigdit.memory.process import non_torch_memory_of
from bigdit.profile.attempt import Profile
from bigdit.search.calibration import UNPROVED
from bigdit.search.plan import Plan, process, verdict_of
from bigdit.units import gib
from claims.answers import Case, Say, between, case, largest, plan, profiles

MODEL, GPU = "sana-1600m", "a40"
CAME = "features=online,micro_batch_size=64,optimizer.name=came"
WHOLE = f"{CAME},encode_chunk=null"
ONE = "checkpointed_blocks=all,optimizer.name"
YAML = "checkpointed_blocks=all,features=online,precision=fp32,optimizer.name"


def live(found: Profile, category: Category) -> int:
    """The most bytes of this category at the peak of any phase."""
    return max(phase.at_peak.get(category, 0) for phase in found.ledger.phases)


def came_on_sana(say: Say) -> Case:
    """Sana-1600M with online features at the YAML's batch, and three optimizers at batch 1."""
    texts = [
        WHOLE,
        f"{WHOLE},checkpointed_blocks=all",
        f"{CAME},checkpointed_blocks=all,encode_chunk=4",
        *(f"{base}={name}" for base in (ONE, YAML) for name in ("adamw", "came")),
    ]
    plain, recomputed, chunked, adamw, came, yaml_adamw, yaml_came = profiles(MODEL, GPU, texts)
    rows = [["run", "optimizer", "state", "allocated", "reserved", "verdict"]]
    for run, name, found in (
        ("batch 64, encoders online, nothing recomputed", "CAME (ours)", plain),
        ("batch 64, encoders online, all recomputed, as the YAML has it", "CAME (ours)", recomputed),
        ("the same, encoded 4 at a time", "CAME (ours)", chunked),
        ("batch 1, cached, all recomputed, bf16 with masters", "AdamW", adamw),
        ("the same", "CAME (ours)", came),
        ("batch 1, encoders online, all recomputed, fp32 weights", "AdamW", yaml_adamw),
        ("the same", "CAME (ours)", yaml_came),
    ):
        state = live(found, "optimizer state")
        rows.append([run, name, f"{gib(state)}, {state / found.params:.1f} B a weight", *_taken(found)])
    encode = next(phase for phase in recomputed.ledger.phases if phase.phase == "encode")
    return case(
        "came_on_sana",
        rows,
        encode=gib(encode.peak_bytes),
        saved=gib(live(plain, "saved activation")),
        reserved=gib(chunked.peak_reserved_bytes),
        usable=gib(catalog.gpu(GPU).usable_bytes),
    )


def sana_cached(say: Say) -> Case:
    """The largest micro-batches of Sana-1600M on an A40, and what smaller GPUs hold."""
    total = catalog.find_model(MODEL).block_count
    depths = (0, total // 4, total // 2, 3 * total // 4, total)
    rows = [["GPU", "strategy", *(f"{k} of {total} blocks" for k in depths)]]
    for title, name in (("AdamW", "adamw"), ("8-bit AdamW", "adamw_8bit")):
        say(f"case 2: {title} on the A40")
        sizes = largest(MODEL, GPU, f"optimizer.name={name}", depths)
        rows.append(["A40", title, *(f"micro-batch {size}" for size in sizes)])
    found, more = case("sana_cached", rows, blocks=total, share=f"{UNPROVED.share:.1%}"), []
    for card in ("rtx-4090", "rtx-4080", "rtx-3060-12g"):
        smaller = plan(say, model=MODEL, gpu=card)
        gpu = smaller.request.gpu
        more.append(f"{gpu.title} ({gib(gpu.usable_bytes)}): {_chosen(smaller)}")
    return found._replace(why=[*found.why, *more])


def sana_waterfall(say: Say) -> Case:
    """From a copied setting to one that fits, on a single GPU and with ZeRO-2."""
    rows = [["start", "change", "process", "verdict", "why"]]
    for title, engine in (("single GPU", None), ("ZeRO-2", "zero2")):
        for step in plan(say, model=MODEL, gpu=GPU, engine=engine, explain=True).waterfall:
            rows.append([title, step.change, gib(step.process_bytes), step.verdict, step.saved_by])
    return case("sana_waterfall", rows)


def _taken(found: Profile) -> list[str]:
    gpu = catalog.gpu(GPU)
    taken = process(found.peak_reserved_bytes, non_torch_memory_of(parse_strategy(["single"]), gpu), UNPROVED)
    peak = f"{gib(found.ledger.peak_allocated_bytes)} ({found.ledger.deciding.phase})"
    return [peak, gib(found.peak_reserved_bytes), verdict_of(taken, gpu.usable_bytes)]


def _chosen(found: Plan) -> str:
    chosen = found.chosen
    said = f"{found.verdict}, {chosen.title}: {gib(chosen.process.high_bytes)}, "
    return said + f"{between(chosen.samples_per_second_per_gpu)} images/s."
