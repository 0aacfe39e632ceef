"""The waterfall: each change from the usual setting to the recommended one, and what it saves; and what would fit.

All of it runs on emulated GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from bigdit.catalog import gpus
from bigdit.errors import UserError
from bigdit.profile.attempt import Attempt
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.pool import WorkerError
from bigdit.search.dataset import encoding_requests
from bigdit.search.explore import explore_group, hopeful
from bigdit.search.plan import Constraints, Estimate, ResolvedRequest, WaterfallStep
from bigdit.search.planner import Planner, speed_fields
from bigdit.search.space import proposals
from bigdit.strategy import BITSANDBYTES, OPTIMIZERS, EmaSpec, LoraSpec, OptimizerSpec, Precision, Strategy
from bigdit.units import gib

WORTH_SAYING = 0.005
"""Effects below this share of the bytes before are reported as nothing."""

Bar = tuple[Mapping[str, int], int]
"""Allocated bytes by phase, and what torch reserved."""


def waterfall(planner: Planner, chosen: Estimate) -> tuple[tuple[WaterfallStep, ...], tuple[str, ...]]:
    """The bars from the naive setting to `chosen`, and a line for each that could not run."""
    shown, notices, before = list[WaterfallStep](), list[str](), None
    *ways, last = changes(planner.request, chosen, planner.options[chosen.option].count)
    for change, attempt in zip(ways, planner.unlimited([each.strategy for each in ways]), strict=True):
        if not isinstance(attempt, Attempt) or not attempt.ran:
            problem = attempt.out_of_memory if isinstance(attempt, Attempt) else attempt
            notices.append(f"left out of --explain: {change.title}: {problem}".splitlines()[0])
            continue
        bar = attempt.peaks, attempt.peak_reserved_bytes
        taken = planner.reserving(attempt.peak_reserved_bytes, planner.non_torch(change.strategy))
        nbytes, why = taken["process"].high_bytes, effect(change, before, bar)
        shown.append(WaterfallStep(change=change.title, process_bytes=nbytes, verdict=taken["verdict"], saved_by=why))
        before = bar
    why, high = effect(last, before, (chosen.phases, chosen.peak_reserved_bytes)), chosen.process.high_bytes
    shown.append(WaterfallStep(change=last.title, process_bytes=high, verdict=chosen.verdict, saved_by=why))
    return tuple(shown), tuple(notices)


def effect(change: Change, before: Bar | None, bar: Bar) -> str:
    """The effect of a change: `VAE and text encoders leave the GPU: 8.55 GiB less`."""
    peaks, reserved = bar
    phase = max(peaks, key=peaks.__getitem__)
    if before is None:
        return f"peak phase: {phase}"
    peaks_before, reserved_before = before
    less, least = reserved_before - reserved, reserved_before * WORTH_SAYING
    amount = f"{gib(abs(less))} {'less' if less > 0 else 'more'}" if abs(less) >= least else "nothing at the peak"
    drops = {each: peaks_before[each] - peak for each, peak in peaks.items() if each in peaks_before}
    most = max(drops, key=drops.__getitem__)
    parts = [f"{change.why}: {amount}"]
    if most != phase and drops[most] > max(less, 0) + least:
        parts.append(f"{gib(drops[most])} less in the {most}, which is not the peak")
    if phase != max(peaks_before, key=peaks_before.__getitem__):
        parts.append(f"peak phase: {phase}")
    return "; ".join(parts)


DEEPSPEED_BUCKET = 500_000_000
"""Elements. Source: reduce_bucket_size and allgather_bucket_size in DeepSpeed's documentation of ZeRO."""

BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
OFFLOADS = ("offload_optimizer", "offload_param")


class Change(NamedTuple):
    """A strategy, what changed in it, and why that takes less (or more)."""

    title: str
    why: str
    strategy: Strategy


def naive(request: ResolvedRequest, target: Strategy) -> Strategy:
    """The usual setting that people copy: the engine of `target` with AdamW in fp32 (torch's foreach), encoders and EMA
    on the GPU, nothing recomputed or offloaded, DeepSpeed's own buckets.

    Its micro-batch is the fixed one, or a GPU's whole share of the global batch, or one.
    """
    size = request.constraints.micro_batch_size or request.share(target.dp) or 1
    strategy = target.model_copy(
        update={
            "precision": target.precision if target.frozen else "fp32",
            "optimizer": OptimizerSpec(implementation="foreach"),
            "checkpointing": "full",
            "ema": (target.ema or EmaSpec()).model_copy(update={"device": "gpu"}),
            "cpu_offload": False,
            "encode_chunk": None,
            "blocks_to_swap": 0,
            "optimizer_in_backward": False,
            "features": "online" if encoding_requests(request) else target.features,
            "ds_config": _document(target, own_buckets=True),
        }
    )
    return strategy.settled(micro_batch_size=size, grad_accum_steps=1, checkpointed_blocks=0)


def changes(request: ResolvedRequest, chosen: Estimate, count: int) -> list[Change]:
    """The naive setting and each change from it to `chosen`, which is last; the model has `count` blocks."""
    target = chosen.strategy
    start = naive(request, target)
    precision = "bf16" if start.precision == "bf16_sr" else start.precision
    encoders = "encoders and EMA" if start.features == "online" else "EMA"
    buckets = ", DeepSpeed's own buckets" if start.ds_config else ""
    copied = f"as copied: {precision}, AdamW, {encoders} on the GPU{buckets}, micro-batch {start.micro_batch_size}"
    found = [Change(copied, "", start)]
    for title, why, update in _updates(target):
        before = found[-1].strategy
        after = before.model_copy(update=update).sized(start.step_size)
        if after != before:
            found.append(Change(title, why, after))
    return [*found, *_sizes(start.micro_batch_size, chosen, count)]


def _updates(target: Strategy) -> list[tuple[str, str, dict[str, Any]]]:
    """All changes in order, also those that change nothing for this target."""
    masters: Precision = "bf16" if target.precision == "bf16_sr" else target.precision
    theirs = (target.ds_config or {}).get("zero_optimization", {})
    bucket = theirs.get(BUCKETS[0], DEEPSPEED_BUCKET)
    offloaded = "weights and optimizer" if target.cpu_offload or OFFLOADS[1] in theirs else "optimizer"
    state = OPTIMIZERS[target.optimizer.name]
    lossy = f"{state}, bf16 without masters" if target.precision == "bf16_sr" else state
    ema = "no EMA" if target.ema is None else "EMA in CPU memory"
    dtype = masters if masters in ("fp32", "tf32") else f"{masters} with fp32 masters"

    def own(*keys: str) -> dict[str, Any]:
        return {key: getattr(target, key) for key in keys}

    return [
        ("features cached", "VAE and text encoders leave the GPU", own("features")),
        (
            f"encoded {target.encode_chunk} at a time",
            "the VAE's activations are those of so many samples",
            own("encode_chunk"),
        ),
        (
            f"DeepSpeed's buckets of {bucket / 1e6:.0f} M elements",
            f"instead of {DEEPSPEED_BUCKET / 1e6:.0f} M, its own",
            {"ds_config": _document(target)},
        ),
        (dtype, "weights, gradients and activations of 2 B instead of 4, plus masters of 4 B", {"precision": masters}),
        (f"{offloaded} in CPU memory", "the GPU keeps what it computes with", own("cpu_offload", "ds_config")),
        ("fused optimizer", "no temporary of the size of what is stepped", {"optimizer": OptimizerSpec()}),
        (ema, "its fp32 copy of the weights leaves the GPU", own("ema")),
        (lossy, "less state for each weight", own("optimizer", "precision")),
        ("optimizer in the backward pass", "each gradient is freed once it is used", own("optimizer_in_backward")),
    ]


def _sizes(first: int, chosen: Estimate, count: int) -> list[Change]:
    """Recomputation, with block swap, and the micro-batch. A larger micro-batch comes first, so that the last change
    saves memory; except with block swap, which needs the recomputation."""
    last, accum = chosen.micro_batch_size, chosen.strategy.grad_accum_steps
    kept = ", but for matrix products and attention" if chosen.strategy.checkpointing == "selective" else ""
    recomputed = (f"{chosen.blocks} of {count} blocks recomputed{kept}", "their activations are not kept")
    swapped = chosen.strategy.blocks_to_swap
    if swapped:
        recomputed = (
            f"{chosen.blocks} of {count} blocks recomputed, weights of {swapped} in CPU memory",
            "neither their activations nor these weights are kept",
        )
    why = "fewer activations at once" if last < first else "what was saved goes into activations of more samples"
    resized = (f"micro-batch {last}" + (f", {accum} of them accumulated" if accum > 1 else ""), why)
    grows = last > first and not swapped
    between = chosen.strategy.settled(
        micro_batch_size=last if grows else first,
        grad_accum_steps=accum if grows else 1,
        checkpointed_blocks=0 if grows else chosen.blocks,
    )
    steps = [*([resized] if last != first else []), *([recomputed] if chosen.blocks else [])]
    strategies = [between, chosen.strategy][2 - len(steps) :]
    return [Change(*why, each) for why, each in zip(steps if grows else steps[::-1], strategies, strict=True)]


def _document(target: Strategy, *, own_buckets: bool = False) -> dict[str, Any] | None:
    """DeepSpeed's document of `target` without offload; None for other engines."""
    if target.ds_config is None:
        return None
    zero = {key: value for key, value in target.ds_config["zero_optimization"].items() if key not in OFFLOADS}
    if own_buckets:
        zero |= dict.fromkeys(BUCKETS, DEEPSPEED_BUCKET)
    return target.ds_config | {"zero_optimization": zero}


MORE_GPUS = (2, 4, 8)
"""Multiples of the requested GPUs to try."""

ADAPTER_RANK = 16

MOST_RUN = 6
"""Most runs for each fix: each that does not fit corrects the prediction of the next."""


def fixes(planner: Planner, nearest: Estimate) -> tuple[Estimate, ...]:
    """Estimates that fit, one for each fix: fewer constraints, more GPUs, adapters, more CPU memory, a larger GPU.

    `nearest` is the recorded estimate that comes nearest to fitting the request.
    """
    request = planner.request

    def first(ways: Iterable[tuple[str, ResolvedRequest]]) -> list[Estimate]:
        for why, other in ways:
            best = _best(planner.about(other))
            if best is not None:
                return [best.model_copy(update={"reason": why})]
        return []

    ways = (_unconstrained(request), _more_gpus(request), _adapters(request))
    found = [each for way in ways for each in first(way)]
    short = request.short_of_host(nearest.host_bytes)
    host = f"{gib(nearest.host_bytes)} of CPU memory per machine, instead of {gib(request.host_memory_bytes)}"
    if short and nearest.headroom_bytes >= 0:
        found.append(nearest.model_copy(update={"verdict": "FITS", "reason": host}))
    return (*found, *_larger_gpu(planner, nearest, f"a larger GPU, and {host}" if short else "a larger GPU"))


def _unconstrained(request: ResolvedRequest) -> Iterator[tuple[str, ResolvedRequest]]:
    fixed = request.constraints
    if fixed.features == "online" and not (fixed.lora and fixed.lora.text_encoders):
        cached = fixed.model_copy(update={"features": "cached"})
        yield "encode once, and train from cached features", request.model_copy(update={"constraints": cached})
    stays = ("features", "ema", "ema_widths", "lora", "lora_base", "controlnet", "full")
    free = Constraints(**{key: getattr(fixed, key) for key in stays})
    if fixed != free:
        yield "without what was fixed", request.model_copy(update={"constraints": free})


def _more_gpus(request: ResolvedRequest) -> Iterator[tuple[str, ResolvedRequest]]:
    """FSDP2 with AdamW or the fixed optimizer, on the fewest GPUs first."""
    optimizer = request.constraints.optimizer or "adamw"
    optimizer = "adamw_8bit_ao" if optimizer in BITSANDBYTES else optimizer
    fixed = request.constraints.model_copy(update={"engine": "fsdp2", "optimizer": optimizer})
    for times in MORE_GPUS:
        count = request.cluster.gpus * times
        cluster = request.cluster.model_copy(update={"gpus": count})
        if count <= cluster.gpus_per_node or count % cluster.gpus_per_node == 0:
            more = request.over(cluster).model_copy(update={"constraints": fixed})
            yield f"{count} GPUs instead of {request.cluster.gpus}", more


def _adapters(request: ResolvedRequest) -> Iterator[tuple[str, ResolvedRequest]]:
    if not (request.constraints.frozen or request.constraints.full):
        fixed = Constraints(features=request.constraints.features, lora=LoraSpec(rank=ADAPTER_RANK))
        yield "LoRA over frozen weights: another training", request.model_copy(update={"constraints": fixed})


def _best(planner: Planner) -> Estimate | None:
    """The preferred estimate that fits, of the earliest last resort with one."""
    proposed, _ = proposals(planner.request)
    for resort in sorted({each.last_resort for each in proposed}):
        group = [each for each in proposed if each.last_resort == resort]
        explore_group(planner, group, hopeful(planner, group)[0])
        for _ in range(MOST_RUN):
            options = planner.options.values()
            order = planner.preferred(each for option in options for each in planner.fitting(option))
            (ran,) = planner.run(order[:1]) if order else (None,)
            if ran is None:
                break
            if ran.verdict == "FITS":
                return ran
    return None


def _larger_gpu(planner: Planner, nearest: Estimate, why: str) -> list[Estimate]:
    """`nearest` unchanged on the smallest GPU of the catalogue on which it runs, in a machine with enough memory."""
    request, needed, strategy = planner.request, nearest.process.high_bytes, nearest.strategy
    if needed <= request.usable_bytes:
        return []
    every = (each.reserving() for each in gpus.gpus())
    larger = [each for each in every if each.usable_bytes >= needed and each.tflops.computes(strategy)]
    for gpu in sorted(larger, key=lambda each: each.usable_bytes)[:2]:
        other = planner.about(request.model_copy(update={"gpu": gpu}))
        try:
            with EmulatedGpus(gpu, 1) as emulated:
                attempt = emulated.attempt(other.step_request(strategy), other.capacity(strategy), to_end=False)
        except (UserError, WorkerError):
            continue
        if not attempt.fits:
            continue
        update = {
            "title": f"{nearest.title}, on {gpu.title}",
            "verdict": "FITS",
            "phases": attempt.peaks,
            "peak_allocated_bytes": attempt.peak_allocated_bytes,
            "peak_reserved_bytes": attempt.peak_reserved_bytes,
            "headroom_bytes": gpu.usable_bytes - needed,
            "reason": why,
        }
        return [nearest.model_copy(update=update | speed_fields(strategy, planner.recorded_step(nearest, gpu)))]
    return []
