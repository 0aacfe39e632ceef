"""Plans to show, write and train by: one recorded run, with made-up figures for the rest of a search."""

import functools
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from bigdit import catalog
from bigdit.config.plan_file import LargestMicroBatch
from bigdit.errors import versions
from bigdit.memory.process import ByteRange, non_torch_memory_of
from bigdit.profile.attempt import request_for
from bigdit.profile.gpus import EmulatedGpus
from bigdit.report.plan import show
from bigdit.search.plan import (
    Constraints,
    DatasetNeed,
    Estimate,
    Margin,
    Plan,
    Rejected,
    ResolvedRequest,
    Verdict,
    WaterfallStep,
    WholeRun,
    host_need,
)
from bigdit.search.plan import process as process_of
from bigdit.speed.seconds import Cluster, Interval, StepTime
from bigdit.strategy import EmaSpec, OptimizerSpec, StepSize, Strategy
from bigdit.units import GIB, KIB

IMAGES = 30_000_000
GLOBAL_BATCH = 256


def interval(low: float, high: float) -> Interval:
    return Interval(low=low, high=high)


def strategy(**changes: Any) -> Strategy:
    """A strategy for a single GPU, with `changes`."""
    usual = {"micro_batch_size": 8, "grad_accum_steps": 32, "checkpointed_blocks": 12, "gradient_clipping": 1.0}
    return Strategy(**(usual | changes))


def _non_torch(gpu: catalog.Gpu) -> ByteRange:
    return non_torch_memory_of(strategy(), gpu)


@functools.cache
def made_plan() -> Plan:
    """Sana-1600M on one A40 at 1024 × 1024. The run is recorded; other strategies, speeds and the data set are made
    up."""
    model, gpu = catalog.model("sana-1600m"), catalog.gpu("a40")
    # Two micro-batches show all that thirty-two would.
    with EmulatedGpus(gpu, 1) as gpus:
        found = gpus.profile(request_for(model, gpu, strategy(grad_accum_steps=2)))
    margin = Margin(share=0.03, source="9 engines on a GPU like this one")
    process = process_of(found.peak_reserved_bytes, _non_torch(gpu), margin)
    host = host_need(found.host_timeline, found.checkpoint_bytes, Cluster())
    step = StepTime(seconds=interval(28.4, 37.1), parts={"compute": interval(26.0, 32.2), "memory": interval(2.4, 4.9)})
    chosen = Estimate(
        option="single GPU, AdamW",
        title="12 of 20 blocks checkpointed",
        strategy=strategy(),
        source="recorded",
        phases={phase.phase: phase.peak_bytes for phase in found.ledger.phases},
        peak_allocated_bytes=found.ledger.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        non_torch=_non_torch(gpu),
        process=process,
        verdict="FITS",
        headroom_bytes=gpu.usable_bytes - process.high_bytes,
        host_bytes=host.node_bytes,
        step=step,
        samples_per_second_per_gpu=step.seconds.per(GLOBAL_BATCH),
        lossless=True,
        reason="the fewest checkpointed blocks with which a micro-batch of 8 fits; larger ones gain nothing here",
    )
    return Plan(
        request=ResolvedRequest(
            model=model,
            gpu=gpu,
            cluster=Cluster(),
            resolution=(1024, 1024),
            buckets=((1024, 1024), (832, 1248), (512, 512)),
            global_batch_size=GLOBAL_BATCH,
            images=IMAGES,
            price=0.49,
        ),
        params=found.params,
        batch=catalog.batch_shape(model),
        verdict="FITS",
        margin=margin,
        chosen=chosen,
        ledger=found.ledger,
        packed_timeline=found.packed_timeline,
        host=host,
        front=front(chosen),
        rejected=REJECTED,
        buckets=(
            LargestMicroBatch(height=1024, width=1024, none=4, recommended=9, full=31),
            LargestMicroBatch(height=832, width=1248, none=4, recommended=9, full=31),
            LargestMicroBatch(height=512, width=512, none=19, recommended=38, full=127),
        ),
        curves={
            "none": curve(chosen, 2.0),
            "12 of 20 blocks": curve(chosen, 1.0),
            "all 20 blocks": curve(chosen, 0.3),
        },
        ran=(chosen,),
        same_kernels={gpu.title: gpu.usable_bytes},
        smaller=(StepSize(micro_batch_size=4, grad_accum_steps=64, checkpointed_blocks=12),),
        without_machine=None,
        passed_over=None,
        fixes=(),
        dataset=DatasetNeed(
            images=IMAGES,
            latent_bytes=64 * KIB,
            text_bytes=interval(138_240, 1_382_400),
            padded_text_bytes=300 * 2304 * 2,
            store_bytes=interval(IMAGES * (64 * KIB + 138_240), IMAGES * (64 * KIB + 1_382_400)),
            extraction_seconds=interval(1.6e5, 3.1e5),
            notes=("text is stored unpadded; captions of 30 to 300 tokens are taken",),
        ),
        run=WholeRun(
            steps=IMAGES // GLOBAL_BATCH,
            seconds=step.seconds * (IMAGES // GLOBAL_BATCH),
            gpu_hours=step.seconds * (IMAGES // GLOBAL_BATCH / 3600),
            money=step.seconds * (IMAGES // GLOBAL_BATCH / 3600 * 0.49),
            samples_per_second=step.seconds.per(GLOBAL_BATCH),
        ),
        waterfall=WATERFALL,
        calibration="a roofline of the A40 at 45 to 60 % of its bf16 rate and 70 to 85 % of its bandwidth; no receipts",
        notices=("Gemma-2's text encoder and the VAE are needed for extraction alone",),
        versions=versions(),
        emulated="2.13.0+cu130 CUDA 13.0",
        catalogue="0123456789abcdef",
        seconds=12.3,
    )


def curve(chosen: Estimate, share: float) -> dict[int, int]:
    """A made-up curve: flat while the step dominates, then rising by a `share` of what one image takes."""
    sizes = (1, 2, 4, 6, 8, 12, 16, 24, 32)
    flat, peak = chosen.phases["step"] + GIB, chosen.process.high_bytes
    each = share * (peak - 21 * GIB) / chosen.strategy.micro_batch_size
    return {size: int(max(flat, 21 * GIB + each * size)) for size in sizes}


def front(chosen: Estimate) -> tuple[Estimate, ...]:
    """The chosen strategy among neighbours that need less and are slower, or need more."""
    came = OptimizerSpec(name="came")
    eight = OptimizerSpec(name="adamw_8bit")
    rows: list[tuple[str, dict[str, Any], float, float, bool, Verdict, str]] = [
        ("no checkpointing", {"micro_batch_size": 4, "grad_accum_steps": 64, "checkpointed_blocks": 0}, 0.91, 0.97,
         True, "FITS", "no recomputation, and half the micro-batch"),
        ("16 of 20 blocks", {"checkpointed_blocks": 16}, 0.86, 0.94, True, "FITS", "5 GiB more headroom for 6 %"),
        ("all blocks", {"checkpointed_blocks": "all", "micro_batch_size": 16, "grad_accum_steps": 16}, 0.77, 0.88,
         True, "FITS", "the least memory that keeps the numbers of AdamW"),
        ("8-bit AdamW", {"optimizer": eight, "checkpointed_blocks": 2}, 0.97, 1.05, False, "TIGHT",
         "state of 2 B/param leaves room for activations; rounds the state"),
        ("8-bit AdamW, all blocks", {"optimizer": eight, "checkpointed_blocks": "all"}, 0.51, 0.87, False, "FITS",
         "fits a GPU of 24 GB"),
        ("CAME", {"optimizer": came, "checkpointed_blocks": 2}, 0.93, 0.99, False, "FITS",
         "factored second moments"),
    ]  # fmt: skip
    return tuple(
        [chosen]
        + [
            chosen.model_copy(
                update={
                    "title": title,
                    "strategy": strategy(**changes),
                    "verdict": verdict,
                    "peak_reserved_bytes": int(chosen.peak_reserved_bytes * less),
                    "process": chosen.process.model_copy(
                        update={
                            "low_bytes": int(chosen.process.low_bytes * less),
                            "high_bytes": int(chosen.process.high_bytes * less),
                        }
                    ),
                    "headroom_bytes": chosen.headroom_bytes + int(chosen.process.high_bytes * (1 - less)),
                    "samples_per_second_per_gpu": chosen.samples_per_second_per_gpu * speed,
                    "lossless": lossless,
                    "reason": reason,
                }
            )
            for title, changes, less, speed, lossless, verdict, reason in rows
        ]
    )


REJECTED = (
    Rejected(choice="ZeRO-2", reason="on one GPU it shards nothing, and its buckets cost 0.19 GiB"),
    Rejected(choice="CPU offload", reason="the optimizer's state fits the GPU; the step would wait for PCIe"),
    Rejected(choice="fp16", reason="needs loss scaling, and the A40 computes bf16 at the same rate"),
)
WATERFALL = (
    WaterfallStep(
        change="as is: AdamW, micro-batch 16, online encoders",
        process_bytes=92 * GIB,
        verdict="DOES NOT FIT",
        saved_by="–",
    ),
    WaterfallStep(
        change="features cached",
        process_bytes=84 * GIB,
        verdict="DOES NOT FIT",
        saved_by="Gemma-2 and the VAE leave the GPU",
    ),
    WaterfallStep(
        change="DeepSpeed's buckets left out",
        process_bytes=82 * GIB,
        verdict="DOES NOT FIT",
        saved_by="a single GPU needs none",
    ),
    WaterfallStep(change="micro-batch 8", process_bytes=54 * GIB, verdict="DOES NOT FIT", saved_by="fewer activations"),
    WaterfallStep(change="12 of 20 blocks checkpointed", process_bytes=40 * GIB, verdict="FITS", saved_by="recomputed"),
)


def unfitting_plan() -> Plan:
    """The same plan on a GPU of 16 GB: the nearest strategy does not fit, and what would."""
    plan = made_plan()
    gpu = catalog.gpu("rtx-4080")
    reserved = plan.chosen.peak_reserved_bytes
    taken = process_of(reserved, _non_torch(gpu), plan.margin)
    chosen = plan.chosen.model_copy(
        update={
            "verdict": "DOES NOT FIT",
            "peak_reserved_bytes": reserved,
            "non_torch": _non_torch(gpu),
            "process": taken,
            "headroom_bytes": gpu.usable_bytes - taken.high_bytes,
            "reason": "the nearest to fitting of all that keep the numbers of AdamW",
        }
    )
    fits = chosen.process.model_copy(update={"low_bytes": 14 * GIB, "high_bytes": 15 * GIB})
    fixing = {"verdict": "FITS", "process": fits, "headroom_bytes": gpu.usable_bytes - fits.high_bytes}
    fixes = tuple(choice.model_copy(update=fixing) for choice in plan.front[-2:])
    return plan.model_copy(
        update={
            "request": plan.request.model_copy(update={"gpu": gpu}),
            "verdict": "DOES NOT FIT",
            "chosen": chosen,
            "fixes": fixes,
            "front": (chosen,),
            "ran": (),
            "waterfall": plan.waterfall[:-1],
        }
    )


def sharded_plan(world_size: int = 32) -> Plan:
    """The same plan by ZeRO-2 on four machines, with EMA in CPU memory. The ledger stays that of one GPU."""
    from bigdit.config.strategy_text import parse_strategy

    plan = made_plan()
    asked = [f"zero2,world_size={world_size},micro_batch_size=8,checkpointed_blocks=12"]
    zero2 = parse_strategy(asked).model_copy(update={"ema": EmaSpec(device="cpu")})
    request = plan.request.model_copy(
        update={"cluster": Cluster(gpus=world_size), "constraints": Constraints(engine="zero2", ema="cpu")}
    )
    chosen = plan.chosen.model_copy(update={"strategy": zero2, "title": "ZeRO-2, 12 of 20 blocks checkpointed"})
    changed = {"request": request, "chosen": chosen, "front": (chosen, *plan.front[1:]), "ran": ()}
    return plan.model_copy(update=changed)


def shown(plan: Plan, folder: Path | None = None, width: int = 80) -> str:
    """The plan as a terminal with this many columns shows it."""
    out = StringIO()
    show(plan, folder, Console(width=width, no_color=True, file=out))
    return out.getvalue()
