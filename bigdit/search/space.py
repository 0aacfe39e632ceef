"""The options that the search explores, and those that it leaves out, with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from pydantic import ValidationError

from bigdit.catalog.context import least_ring
from bigdit.config.strategy_text import PRESETS
from bigdit.search.option import Option
from bigdit.search.plan import Constraints, Rejected, ResolvedRequest
from bigdit.strategy import FACTORED, OPTIMIZERS, Precision, Strategy
from bigdit.units import gib

ENGINE_TITLES = {
    "single": "single GPU",
    "ddp": "DDP",
    "zero0": "ZeRO-0 (plain data parallelism)",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero2-offload": "ZeRO-2, optimizer in CPU memory",
    "zero3-offload": "ZeRO-3, optimizer in CPU memory",
    "zero3-offload-all": "ZeRO-3, optimizer and weights in CPU memory",
    "fsdp2": "FSDP2",
    "fsdp2-offload": "FSDP2, weights and optimizer in CPU memory",
}
BUCKETS = (5_000_000, 50_000_000)
"""Least and most elements of DeepSpeed's buckets; between them, one block's parameters. DeepSpeed's own 5e8 cost up to
1.9 GiB. Below some MB, a collective takes as long as its latency."""

COPIES = {"single": 2, "zero0": 2, "zero1": 2, "zero2": 1, "zero2-offload": 1}
"""Copies of the weights' bytes that every GPU needs at the end of the backward pass: weights, and gradients except
under ZeRO-2."""

ONLINE_ENCODE_CHUNK = 1
"""Samples that online encoders take at a time. A VAE in fp32 takes 2 to 3 GiB for each image of 1024 × 1024: a whole
micro-batch would set the peak. One such image fills a GPU's cores."""


def proposals(request: ResolvedRequest) -> tuple[list[Option], list[Rejected]]:
    """The options to explore, bases before their variants, and those that are left out."""
    found: list[Option] = []
    left_out = _left_out(request)
    for engine, cp in _engines(request):
        ring = least_ring(request.model.spec, cp, request.cluster.gpus_per_node)
        least = COPIES.get(engine, 0) * _weights(request)
        if least > request.usable_bytes and request.constraints.engine is None:
            what = "weights and gradients" if COPIES[engine] > 1 else "the weights"
            reason = f"{what} alone take {gib(least)} of the GPU's {gib(request.usable_bytes)}"
            whole = ", all weights on the GPU" if engine == "single" else ""
            left_out.append(Rejected(choice=f"{_engine_title(request, engine, cp)}{whole}", reason=reason))
            continue
        base: Option | None = None
        for settings in _settings(request, engine):
            strategy = _strategy(request, engine, settings | {"cp": cp, "cp_ring": ring})
            if strategy is None:
                continue
            title = f"{_engine_title(request, engine, cp)}, {_setting_title(request, settings)}"
            offload = "offload" in engine and request.constraints.engine is None
            minutes = strategy.optimizer.name != "adamw" or strategy.precision == "bf16_sr"
            copies: Literal[1, 2, 5] = 5 if minutes else 2 if request.constraints.frozen else 1
            option = Option(title, strategy, base, copies if offload else 0)
            sharded = request.cluster.gpus > 1 and engine != "ddp"
            if base is not None and sharded and base.lossless and not option.lossless:
                option = Option(title, strategy, None, 4 if offload else 3)  # sharded state leaves little to save
            found.append(option)
            base = base or option
    return [*found, *_swapped(request, found)], left_out


def precision_of(request: ResolvedRequest) -> Precision:
    """The fixed precision, or bf16 with fp32 masters; without bf16 on the GPU fp16, or fp32 with text encoders."""
    fixed = request.constraints
    other: Precision = "fp32" if fixed.lora is not None and fixed.lora.text_encoders else "fp16"
    return fixed.precision or (other if request.gpu.tflops.bf16 is None else "bf16")


def _engines(request: ResolvedRequest) -> list[tuple[str, int]]:
    """Presets with degrees of context parallelism. Unless an engine is fixed, only FSDP2 has degrees above 1, since it
    takes the least memory."""
    fixed = request.constraints
    return [
        (engine, cp)
        for engine in _presets(request)
        for cp in request.degrees
        if cp == 1 or engine in ("fsdp2", "hsdp") or fixed.engine == engine
    ]


def _presets(request: ResolvedRequest) -> tuple[str, ...]:
    """Presets; `hsdp` is FSDP2 with a copy of the model in each machine."""
    if request.constraints.engine is not None:
        return (request.constraints.engine,)
    offloaded = ("fsdp2-offload",) if request.constraints.lora is not None else ("zero2-offload", "fsdp2-offload")
    if request.cluster.gpus == 1:
        return "single", *offloaded
    hsdp = ("hsdp",) if request.cluster.nodes > 1 else ()
    if request.constraints.lora is not None:  # its gradients and optimizer state are too small to shard
        return "ddp", "fsdp2", *hsdp, *offloaded
    return "zero1" if _accumulates(request) else "zero2", "fsdp2", *hsdp, *offloaded


def _weights(request: ResolvedRequest) -> int:
    """Bytes of the whole model's weights; 0 if they are unknown, or frozen."""
    if request.constraints.frozen or request.model.params is None:
        return 0
    return request.model.params * (4 if precision_of(request) in ("fp32", "tf32") else 2)


def _accumulates(request: ResolvedRequest) -> bool:
    """Whether a GPU's share of the global batch may come in several micro-batches."""
    return (request.share(request.cluster.gpus) or 0) > (request.constraints.micro_batch_size or 1)


def _settings(request: ResolvedRequest, engine: str) -> list[dict[str, Any]]:
    """Optimizer, precision, EMA and adapters: the lossless ones first."""
    fixed, precision = request.constraints, precision_of(request)
    if fixed.optimizer is not None:
        pairs: list[tuple[str, str]] = [(fixed.optimizer, precision)]
    elif "offload" in engine or fixed.lora is not None:
        pairs = [("adamw", precision)]
    else:
        without_masters = precision == "bf16" and fixed.precision is None
        pairs = [("adamw", precision), ("adamw_8bit_ao" if engine in ("fsdp2", "hsdp") else "adamw_8bit", precision)]
        if engine == "single":
            pairs.append(("came", precision))
            pairs += [("adamw", "bf16_sr"), ("came", "bf16_sr")] if without_masters else []
        elif engine in ("fsdp2", "hsdp"):  # the smallest state, sharded
            pairs.append(("came", "bf16_sr" if without_masters else precision))
    return [
        {"optimizer": {"name": optimizer}, "precision": kind, "base": base, "ema": ema}
        for optimizer, kind in pairs
        for base in fixed.lora_bases
        for ema in _emas(fixed)
    ]


def _emas(fixed: Constraints) -> list[str | None]:
    """Places of the EMA to try; None keeps none."""
    places: dict[str, list[str | None]] = {"none": [None], "auto": ["gpu", "cpu"]}
    return places.get(fixed.ema, [fixed.ema])


def _swapped(request: ResolvedRequest, found: Sequence[Option]) -> list[Option]:
    """Options with block swap of as many blocks as possible. With frozen weights they vary those `found` that do not
    shard. Full fine-tuning steps in the backward pass, on a single GPU, with block swap and without.
    """
    fixed, most = request.constraints, request.model.block_count
    most -= 0 if fixed.controlnet is None else fixed.controlnet.blocks  # trained blocks are not swapped
    if fixed.engine not in (None, "single", "ddp") or (not fixed.frozen and request.cluster.gpus > 1):
        return []
    if isinstance(fixed.checkpointed_blocks, int):
        most = min(most, fixed.checkpointed_blocks)
    swapped = [] if fixed.frozen else _in_backward(request)
    bases = [each for each in found if each.strategy.engine in ("single", "ddp")] if fixed.frozen else swapped[:]
    for base in bases if most else []:
        with suppress(ValidationError):  # Strategy refuses what cannot swap
            values = base.strategy.model_dump() | {"checkpointed_blocks": "all", "blocks_to_swap": most}
            strategy = Strategy.model_validate(values)
            title = f"{base.title}, weights of blocks in CPU memory"
            swapped.append(Option(title, strategy, base, 1 if fixed.frozen else 4))
    return swapped


def _in_backward(request: ResolvedRequest) -> list[Option]:
    """Full fine-tuning in the backward pass, without masters, with the optimizer of the least state. There is no
    accumulation. If the user fixed only the optimizer, its usual numbers are meant, with masters: there is no option.
    """
    fixed = request.constraints
    if fixed.optimizer is not None and fixed.precision is None:
        return []
    one_pass = fixed.micro_batch_size is None or request.global_batch_size in (None, fixed.micro_batch_size)
    if not one_pass or fixed.precision not in (None, "bf16_sr") or precision_of(request) == "fp16":
        return []
    found = []
    for ema in _emas(fixed):
        named = {"name": fixed.optimizer or "adafactor"}
        settings = {"optimizer": named, "precision": "bf16_sr", "base": None, "ema": ema}
        alone = {"optimizer_in_backward": True, "gradient_clipping": None}
        strategy = _strategy(request, "single", settings | alone)
        if strategy is not None:
            title = f"{_engine_title(request, 'single', 1)}, {_setting_title(request, settings)}"
            found.append(Option(f"{title}, stepped in the backward pass", strategy, None, 3))
    return found


def _strategy(request: ResolvedRequest, engine: str, settings: dict[str, Any]) -> Strategy | None:
    """The strategy of these settings; None where Strategy's rules refuse them."""
    fixed, world_size = request.constraints, 1 if engine == "single" else request.cluster.gpus
    more: dict[str, Any] = {"world_size": world_size}
    if (request.global_batch_size or 0) % (world_size // settings.get("cp", 1)):
        more["repeated_samples"] = 1  # one is enough for a batch to have weights
    if fixed.features == "online":
        more["encode_chunk"] = ONLINE_ENCODE_CHUNK
    if engine == "hsdp":
        more["dp_replicate"] = request.cluster.nodes
    if engine.startswith("zero") and request.model.params is not None:
        block = request.model.params // max(request.model.block_count, 1)
        # In whole millions, easy to read; DeepSpeed needs an even number.
        size = min(max(round(block, -6), BUCKETS[0]), BUCKETS[1])
        sizes = {"reduce_bucket_size": size, "allgather_bucket_size": size}
        more["ds_config"] = {"zero_optimization": PRESETS[engine]["ds_config"]["zero_optimization"] | sizes}
    try:
        found = fixed.strategy("fsdp2" if engine == "hsdp" else engine, **settings, **more)
    except ValidationError:
        return None
    return found.model_copy(update={"checkpointed_segments": fixed.checkpointed_segments})


def _engine_title(request: ResolvedRequest, engine: str, cp: int) -> str:
    cluster, shared = request.cluster, f", cp {cp}" if cp > 1 else ""
    if engine == "hsdp":
        return f"HSDP {cluster.nodes} × {cluster.gpus_per_node}{shared}"
    title = ENGINE_TITLES[engine]
    return title if cluster.gpus == 1 else f"{title} on {cluster.gpus}{shared}"


def _setting_title(request: ResolvedRequest, settings: dict[str, Any]) -> str:
    parts = [OPTIMIZERS[settings["optimizer"]["name"]]]
    if settings["precision"] == "bf16_sr":
        parts.append("bf16 without masters")
    if settings["base"] is not None:
        lora = request.constraints.lora
        parts.append(f"{'ControlNet' if lora is None else f'{lora.title} {lora.rank}'} over {settings['base']}")
    if settings["ema"] is not None:
        widths = request.constraints.ema_widths
        many = "EMA" if widths is None else f"{len(widths)} EMAs"
        parts.append(f"{many} {'in CPU memory' if settings['ema'] == 'cpu' else 'on the GPU'}")
    return ", ".join(parts)


def _left_out(request: ResolvedRequest) -> list[Rejected]:
    """Obvious choices that the search leaves out, with reasons."""
    fixed, one_gpu = request.constraints, request.cluster.gpus == 1
    reasons: dict[str, str] = {}
    if fixed.engine is None and one_gpu:
        reasons["ZeRO-1, ZeRO-2, ZeRO-3 and FSDP2 on one GPU, without CPU offload"] = (
            "they shard over GPUs; on one GPU they only add buffers and flat copies"
        )
    if fixed.engine is None and fixed.lora is not None:
        reason = "the optimizer state of adapters is too small to gain anything"
        reasons["ZeRO-2, optimizer in CPU memory" if one_gpu else "ZeRO-0 to ZeRO-2"] = reason
    if fixed.engine is None and not one_gpu:
        reasons["ZeRO-3"] = "FSDP2 shards the same and gathers one block at a time; choose it with --engine zero3"
    if fixed.engine is None and not one_gpu and fixed.lora is None:
        if _accumulates(request):
            reasons["ZeRO-2"] = (
                "it reduces gradients in every micro-batch, ZeRO-1 once per step; "
                "where memory is short, FSDP2 takes less"
            )
        else:
            reasons["ZeRO-1"] = (
                "with one micro-batch per step it communicates as much as ZeRO-2, and keeps whole gradients"
            )
        reasons["ZeRO-0, plain data parallelism"] = (
            "it communicates as much as ZeRO-1 and ZeRO-2, and keeps the whole optimizer state on every GPU"
        )
    if fixed.optimizer is None and not one_gpu and fixed.lora is None:
        named = " and ".join(OPTIMIZERS[name] for name in FACTORED[1:2])
        reasons[f"{named} under ZeRO"] = (
            "ZeRO gives the optimizer flat partitions, which cannot be factored: its state is then as large as AdamW's"
        )
    if fixed.precision is None and precision_of(request) == "bf16":
        reasons["fp16"] = "it takes as many bytes as bf16 and needs loss scaling; choose it with --precision fp16"
    if fixed.precision is None and precision_of(request) == "fp16":
        reasons["bf16"] = f"{request.gpu.title} does not compute it; fp16 with loss scaling takes the same bytes"
    if not fixed.compile and not (fixed.engine or "").startswith("zero3"):
        reasons["compiled blocks"] = (
            "torch's compiler takes seconds at each size that runs, minutes for a first plan; "
            "choose them with --compile"
        )
    takes_fp8 = fixed.float8 is None and request.gpu.tflops.fp8 is not None
    if takes_fp8 and precision_of(request).startswith("bf16") and not (fixed.engine or "").startswith("zero"):
        reasons["FP8 products"] = (
            "they change numbers, and save memory in compiled blocks alone; choose them with --compile --fp8"
        )
    if fixed.features == "cached":
        reasons["encoders online"] = (
            "VAE and text encoder would stay on the GPU and run in every step, and `bigdit extract` runs them once; "
            "choose them with --features online"
        )
    return [Rejected(choice=choice, reason=reason) for choice, reason in reasons.items()]
