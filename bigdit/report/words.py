"""Strategies, ranges and sizes as text."""

from __future__ import annotations

from bigdit.config.strategy_text import LARGEST_MICRO_BATCH
from bigdit.search.plan import Estimate, Plan, lossy_by
from bigdit.speed.seconds import Interval
from bigdit.strategy import BITSANDBYTES, OPTIMIZERS, Strategy
from bigdit.units import GIB, count, gib, how_many, unit_of

PRECISIONS = {
    "fp32": "fp32",
    "tf32": "fp32, with TF32 matrix products",
    "bf16": "bf16, with fp32 master weights",
    "bf16_sr": "bf16 without masters, rounded stochastically",
    "fp16": "fp16 with loss scaling and fp32 master weights",
}
ALLOCATOR = "PYTORCH_ALLOC_CONF=expandable_segments:True"

NO_FIX = "nothing that was tried: fewer fixed options, up to 8 times the GPUs, LoRA (without --full), a larger GPU"
NO_LIMIT = "none fits: CPU memory is too small for any micro-batch"

_SPANS = ((86_400, "days"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"))


def precision(strategy: Strategy) -> str:
    """`bf16, with fp32 master weights; products of the blocks in FP8, tensorwise`."""
    fp8 = "" if strategy.float8 == "none" else f"; products of the blocks in FP8, {strategy.float8}"
    return PRECISIONS[strategy.precision] + fp8


def number(value: float) -> str:
    """A number with three digits, or all before the point; two below one: 0.043, 0.40, 1.25, 38.5, 1,208."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}" if value >= 1 or not value else f"{value:#.2g}"


def between(interval: Interval, unit: float = 1) -> str:
    """`28.4–37.1`, or one number where both bounds read the same."""
    low, high = number(interval.low / unit), number(interval.high / unit)
    return low if low == high else f"{low}–{high}"


def span(seconds: Interval, like: Interval | None = None) -> str:
    """A range of seconds in the unit of its middle, or of `like`: `38.5–50.3 days`."""
    middle = (like or seconds).middle or (like or seconds).high
    unit, name = next(((unit, name) for unit, name in _SPANS if middle >= unit), _SPANS[-1])
    return f"{between(seconds, unit)} {name}"


def size(nbytes: float, like: float | None = None) -> str:
    """Bytes in the unit of `like` or their own; large ones without decimals: 40,455 GiB."""
    unit, name = unit_of(nbytes if like is None else like)
    digits = 0 if unit == 1 or abs(nbytes) >= 1000 * GIB else 2
    return f"{nbytes / unit:,.{digits}f} {name}"


def gibs(low: float, high: float, like: float | None = None) -> str:
    """Two sizes as a range in the unit of the larger one, or of `like`: `40.09–40.48 GiB`."""
    like = high if like is None else like
    first, last = size(low, like), size(high, like)
    return last if first == last else f"{first.rpartition(' ')[0]}–{last}"


def samples(plan: Plan) -> str:
    """`images` or `videos`."""
    return "videos" if plan.request.model.video else "images"


def largest(micro_batch_size: int | None) -> str:
    """A largest micro-batch; with a + if the search ended there, and a dash if it was not searched."""
    if micro_batch_size is None:
        return "–"
    if micro_batch_size >= LARGEST_MICRO_BATCH:
        return f"{LARGEST_MICRO_BATCH}+"
    return str(micro_batch_size) if micro_batch_size else "none fits"


def limited(plan: Plan) -> list[str]:
    """Notes on the largest micro-batches: their settings, and what a `+` means."""
    found = (getattr(limit, key) for limit in plan.buckets for key in limits(plan))
    most, notes = LARGEST_MICRO_BATCH, ["by number of recomputed blocks, with the settings above"]
    if plan.chosen.strategy.checkpointing == "selective":
        notes.append("blocks keep matrix products and attention; larger ones may fit if these are recomputed too")
    if max((each or 0 for each in found), default=0) >= most:
        notes.append(f"{most}+: the search ends at {most}; larger ones may fit")
    return notes


def blocks(plan: Plan) -> int | None:
    """The number of transformer blocks; None for a user's own model."""
    return sum(length for _, length in plan.request.model.block_lists) or None


def subject(plan: Plan) -> str:
    """`8 × NVIDIA A40`, with the number of machines if there are several."""
    cluster = plan.request.cluster
    if cluster.gpus == 1:
        return f"one {plan.request.gpu.title}"
    machines = f" in {cluster.nodes} machines" if cluster.nodes > 1 else ""
    return f"{cluster.gpus} × {plan.request.gpu.title}{machines}"


def checkpointing(strategy: Strategy, total: int | None) -> str:
    """`12 of 20 blocks recomputed in the backward pass`."""
    chosen, segments = strategy.checkpointed_blocks, strategy.checkpointed_segments
    if chosen == 0:
        return "none: nothing is recomputed"
    if segments is not None and total:
        chosen = segments.count(total if chosen == "all" else chosen)
    if chosen == "all" or chosen == total:
        count = f"all {total} blocks" if total else "all blocks"
    else:
        count = f"{chosen} of {total} blocks" if total else f"the first {chosen} blocks"
    kept = ", except matrix products and attention" if strategy.checkpointing == "selective" else ""
    grouped = "" if segments is None else f", {segments.described}"
    return f"{count} recomputed in the backward pass{grouped}{kept}"


def swapped(strategy: Strategy, total: int | None) -> str:
    """`weights of 36 of 57 blocks in CPU memory`."""
    of_all = f"{strategy.blocks_to_swap} of {total}" if total else f"the first {strategy.blocks_to_swap}"
    return f"weights of {of_all} blocks in CPU memory"


def limits(plan: Plan) -> dict[str, str]:
    """Columns of largest micro-batches with their heads; the plan's own number of blocks unless it is none or all."""
    total, chosen = blocks(plan), plan.chosen.strategy.checkpointed_blocks
    heads = {"none": "none", "recommended": f"{chosen} of {total or '…'}", "full": f"all {total}" if total else "all"}
    if chosen in (0, "all", total):
        del heads["recommended"]
    if plan.chosen.strategy.blocks_to_swap:
        del heads["none"]
    return heads


def engine(strategy: Strategy) -> str:
    """The engine, with sharding and offload."""
    world = strategy.world_size
    if strategy.engine == "single":
        return "single GPU"
    if strategy.engine == "ddp":
        return f"DDP, a replica on each of {world} GPUs"
    if strategy.engine == "fsdp2":
        copies = f"HSDP, {strategy.dp_replicate} replicas of {how_many(strategy.dp_shard, 'process')} each"
        text = copies if strategy.dp_replicate > 1 else f"FSDP2 over {world} process{'es' * (world > 1)}"
        text += "" if strategy.reshard_after_forward else ", weights stay gathered until the backward pass"
        return text + (", CPU offload of shards and optimizer" if strategy.cpu_offload else "")
    zero = (strategy.ds_config or {}).get("zero_optimization", {})
    offloaded = [
        name
        for name, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param"))
        if (zero.get(key) or {}).get("device", "none") == "cpu"
    ]
    text = f"DeepSpeed ZeRO-{strategy.zero_stage} over {world} process{'es' if world > 1 else ''}"
    return text + (f", CPU offload of {' and '.join(offloaded)}" if offloaded else "")


def optimizer(strategy: Strategy) -> str:
    """The optimizer, with its library or implementation, and whether it steps in the backward pass."""
    spec = strategy.optimizer
    text = OPTIMIZERS[spec.name]
    text += " (bitsandbytes)" if spec.name in BITSANDBYTES else ""
    text += f" ({spec.implementation.replace('_', '-')})" if spec.name == "adamw" else ""
    return text + (", stepped in the backward pass" if strategy.optimizer_in_backward else "")


def reason(choice: Estimate) -> str:
    """Why a choice is listed, without the word `recommended`."""
    return choice.reason.removeprefix("recommended: ")


def why(choice: Estimate) -> str:
    """Why a choice is listed, and what is lossy: `the fastest that fits; lossy: 8-bit CAME instead of AdamW`."""
    lossy = lossy_by(choice.strategy)
    return reason(choice) + (f"; lossy: {', '.join(lossy)}" if lossy else "")


def settings(choice: Estimate, plan: Plan) -> dict[str, str]:
    """The settings of a strategy, by name."""
    strategy = choice.strategy
    found = {
        "engine": engine(strategy),
        "precision": precision(strategy),
        "optimizer": optimizer(strategy),
        "checkpointing": checkpointing(strategy, blocks(plan)),
        "batch": batch(strategy),
        **({"tokens": _tokens(strategy, plan)} if strategy.cp > 1 else {}),
        "EMA": ema(strategy),
        "encoders": _encoders(strategy),
    }
    if strategy.compile_blocks:
        found["compiled"] = "the repeated block, by torch.compile"
    if strategy.offload_activations:
        found["activations"] = "CPU offload of what blocks save"
    if strategy.blocks_to_swap:
        found["weights"] = f"block swap: {swapped(strategy, blocks(plan))}, two at a time on the GPU"
    if strategy.lora is not None:
        found["adapters"] = (
            f"{strategy.lora.title} of rank {strategy.lora.rank} over a frozen {strategy.lora.base} base"
        )
    if (trained := strategy.controlnet) is not None:
        base = "" if trained.base == "bf16" else f" in {trained.base}"
        found["trained"] = f"a ControlNet of {how_many(trained.blocks, 'block')}; the model is frozen{base}"
    found |= _buckets(strategy)
    found["allocator"] = ALLOCATOR
    return found


def _tokens(strategy: Strategy, plan: Plan) -> str:
    """How GPUs share samples, and why with ring attention."""
    text = f"each sample's over {strategy.cp} GPUs (context parallelism"
    if strategy.cp_ring > 1:
        heads = plan.request.model.spec.kwargs["num_attention_heads"]
        why = f"{strategy.cp} does not divide {heads} heads" if heads % strategy.cp else "it spans machines"
        text += f", a ring of {strategy.cp_ring}: {why}"
    return f"{text})"


def _encoders(strategy: Strategy) -> str:
    """Where the encoders are during training."""
    if strategy.features == "cached":
        return "not on the GPU: latents and embeddings are cached"
    return "VAE and text encoder stay on the GPU"


def ema(strategy: Strategy) -> str:
    """The EMA of the weights, and where it is kept."""
    if strategy.ema is None:
        return "none"
    many = "" if strategy.ema.count == 1 else f"{strategy.ema.count} "
    return f"{many}in fp32 {'in CPU memory' if strategy.ema.device == 'cpu' else 'on the GPU'}"


def _buckets(strategy: Strategy) -> dict[str, str]:
    """DeepSpeed's bucket sizes in elements; empty for other engines."""
    zero = (strategy.ds_config or {}).get("zero_optimization", {})
    sizes = [
        f"{name} {count(zero[key])}"
        for name, key in (("reduce", "reduce_bucket_size"), ("all-gather", "allgather_bucket_size"))
        if isinstance(zero.get(key), int | float)
    ]
    return {"buckets": f"{', '.join(sizes)} elements (default 500.0 M)"} if sizes else {}


def batch(strategy: Strategy) -> str:
    """`micro-batch 8 × 32 accumulated = 256 a step`, for a plan."""
    return step_size(strategy, " (where the search ends)" * (strategy.micro_batch_size == LARGEST_MICRO_BATCH))


def step_size(strategy: Strategy, note: str = "") -> str:
    """`batch` for any strategy, with a note on its micro-batch."""
    parts = [f"micro-batch {strategy.micro_batch_size}{note}"]
    if strategy.grad_accum_steps > 1:
        parts.append(f"{strategy.grad_accum_steps} accumulated")
    if strategy.world_size > 1:
        shared = f" / cp {strategy.cp}" if strategy.cp > 1 else ""
        parts.append(f"{strategy.world_size} GPUs{shared}")
    if not strategy.repeated_samples:
        return " × ".join(parts) + (f" = {strategy.places:,} a step" if len(parts) > 1 else ", one per step")
    repeated = f"{strategy.repeated_samples:,} repeated with weight 0"
    return f"{' × '.join(parts)} = {strategy.global_batch_size:,} a step, and {repeated}"


def verdict(plan: Plan) -> str:
    """The memory that is needed, usable and left."""
    chosen, usable = plan.chosen, plan.request.usable_bytes
    needs = f"needs {gibs(chosen.process.low_bytes, chosen.process.high_bytes)} of {gib(usable)} usable"
    needs += reserved(plan)
    if plan.verdict == "TIGHT":
        least = chosen.process.low_bytes
        when = "the low end fits" if least <= usable else "torch must free cached memory to fit"
        return f"{needs}: {when}, and the high end is {gib(-chosen.headroom_bytes)} too much"
    left = chosen.headroom_bytes
    needs += f", {gib(left)} left" if left >= 0 else f", {gib(-left)} too much"
    if not plan.short_of_host:
        return needs
    host = f"{gib(chosen.host_bytes)} of CPU memory per machine, of {gib(plan.request.host_memory_bytes)}"
    return f"needs {host} (--host-memory); on the GPU it {needs}"


def reserved(plan: Plan) -> str:
    """The GPU memory that is reserved for other programs, if any."""
    gpu = plan.request.gpu
    what = " for the display" if gpu == gpu.reserving() else ""
    return f" ({gib(gpu.reserved_bytes)} reserved{what})" if gpu.reserved_bytes else ""


def host(plan: Plan) -> list[str]:
    """A line if the assumed machine has less CPU memory than needed."""
    needed, assumed = plan.chosen.host_bytes, plan.request.host_memory_bytes
    if not plan.request.host_assumed or needed <= assumed:
        return []
    return [
        f"CPU memory: {gib(needed)} needed per machine, more than the {gib(assumed)} assumed; set it with --host-memory"
    ]


def numerics(plan: Plan) -> str:
    """A note for the headline of a plan that is lossy although no option fixes that."""
    fixed, base = plan.request.constraints, plan.chosen.strategy.base
    if plan.chosen.lossless or (fixed.optimizer, fixed.precision, fixed.lora_base) != (None, None, None):
        return ""
    if base is not None:
        fits = [row for row in plan.front if row.verdict == "FITS"]
        other = next((row for row in fits if row.title == plan.passed_over), None)
        if other is None:
            return f" over a base quantised to {base}, since nothing lossless fits"
        alike = [row.samples_per_second_per_gpu.middle for row in (*fits, plan.chosen) if row.strategy.base == base]
        times = max(alike) / other.samples_per_second_per_gpu.middle
        return f" over a base quantised to {base}, up to {times:.2f} times as fast as over bf16, which is lossless"
    memory = f"{gib(plan.request.host_memory_bytes)} of {'assumed ' * plan.request.host_assumed}CPU memory"
    return f" with a lossy optimizer: nothing lossless fits with {memory} (--host-memory)"


def how(plan: Plan) -> str:
    """How the memory of the recommended strategy was found."""
    return f"ran with exactly these settings on an emulated GPU, torch {plan.emulated}"


EXPLAINED = "each ran on an emulated GPU without a memory limit"


def accuracy(plan: Plan) -> str:
    """How the memory was found, and how it may differ on a real GPU."""
    other, share = plan.chosen.non_torch, f"{100 * plan.margin.share:.2g}"
    varying = "the CUDA context" if plan.chosen.strategy.engine == "single" else "the CUDA context and NCCL"
    return (
        f"{how(plan)}; safety margin {gib(margin(plan))} ({share} %), "
        f"uncertainty of {varying} {gib(other.high_bytes - other.low_bytes)}"
    )


def margin(plan: Plan) -> int:
    """The safety margin in bytes: what torch may reserve on a real GPU beyond an emulated one."""
    return plan.chosen.process.high_bytes - plan.chosen.non_torch.high_bytes - plan.chosen.peak_reserved_bytes


def held(plan: Plan) -> dict[str, int]:
    """The parts of the process at the high end, and their sum."""
    return {
        "reserved by torch": plan.chosen.peak_reserved_bytes,
        "safety margin": margin(plan),
        "CUDA context, NCCL": plan.chosen.non_torch.high_bytes,
        "process (nvidia-smi)": plan.chosen.process.high_bytes,
    }
