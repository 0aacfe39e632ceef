"""The options of `bigdit plan`, which are also the arguments of `bigdit.plan`, and their keys in a run.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from bigdit.errors import nearest

Size = tuple[int, int]
"""Height and width."""
Asked = int | str | Size
"""1024 is a square, "480x832" and (480, 832) are height and width; "1024,480x832" names several sizes."""


def _option(
    help: str, metavar: str | None = None, *, key: str | None = None, instead: str | None = None, many: bool = False
) -> Any:
    """A field whose default is None. `key`: the key of a run.yaml with the same value. `instead`: how a run.yaml says
    it in another form. `many`: the option may be repeated."""
    known = {"help": help, "metavar": metavar, "key": key, "instead": instead, "many": many}
    return field(default=None, metadata=known)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the user asks of a plan, unchecked. None leaves a field to the search, or to its default."""

    model: str | None = _option(
        "A model of `bigdit models`, by name or repository; or a diffusers config.json or folder.",
        "NAME",
        key="model",
    )
    gpu: str | None = _option("A GPU of `bigdit gpus`, a MIG slice (GPU:PROFILE), or auto for this machine's.", "NAME")
    gpu_memory: str | None = _option("Memory of the GPU, such as 45416MiB: used + free in nvidia-smi.", "SIZE")
    reserve: int | str | None = _option(
        "GPU memory to keep free, such as 1GiB or 0. Default: 512MiB if a display may need it, else 0.", "SIZE"
    )
    gpus: int | None = _option("Number of GPUs. Default: 1.", "N")
    gpus_per_node: int | None = _option("GPUs per machine. Default: 8.", "N")
    network: float | None = _option("Bandwidth between machines, in 10^9 bytes per second. Default: 12.5.", "GB/S")
    host_memory: str | None = _option(
        "CPU memory per machine, such as 128GiB. Default: this machine's for --gpu auto, else typical for the GPU.",
        "SIZE",
    )
    resolution: Asked | list[Asked] | None = _option(
        "1024, or 480x832 (height x width). Default: the model's own. Of several sizes (1024,512, or repeat the "
        "option) the first is planned; the others are buckets.",
        "PIXELS",
        key="data.buckets",
        instead="data.buckets=[[HEIGHT,WIDTH]]",
        many=True,
    )
    buckets: Asked | list[Asked] | Literal["none", "aspect"] | None = _option(
        "Further sizes whose largest micro-batch is shown: sizes, none, "
        "or aspect (the usual aspect ratios, the default for images).",
        "PIXELS",
        instead="data.buckets=[[HEIGHT,WIDTH],…]",
    )
    frames: int | None = _option(
        "Frames of a video. Default: the model's own.",
        "N",
        key="data.buckets",
        instead="data.buckets=[[FRAMES,HEIGHT,WIDTH]]",
    )
    global_batch: int | None = _option(
        "Samples per optimizer step over all GPUs.", "N", key="strategy.global_batch_size"
    )
    images: int | str | None = _option("Samples in the data set, for time and disk: 250000, 1.5k, 30M.", "N")
    epochs: float | None = _option("Passes over the data set. Default: 1.", "N", key="train.epochs")
    price: float | None = _option("Price of one GPU-hour, in your currency.", "MONEY")
    receipts: Path | str | None = _option("Folder with receipts of measured runs, to calibrate the speed.", "DIR")
    engine: str | None = _option(
        "Fix the engine: single, ddp, zero0 to zero3, zero2-offload, fsdp2, …", "NAME", key="strategy.engine"
    )
    optimizer: str | None = _option(
        "Fix the optimizer: adamw, adamw_8bit, came, …", "NAME", key="strategy.optimizer.name"
    )
    precision: str | None = _option(
        "Fix the precision: bf16, bf16_sr, fp16, tf32, fp32.", "NAME", key="strategy.precision"
    )
    checkpointed_blocks: int | str | None = _option(
        "Fix the number of recomputed blocks, or all.", "K", key="strategy.checkpointed_blocks"
    )
    micro_batch: int | None = _option("Fix the micro-batch size of each GPU.", "N", key="strategy.micro_batch_size")
    ema: str | None = _option(
        "Keep an EMA of the weights: gpu, cpu or auto. Default: none.", "PLACE", key="strategy.ema"
    )
    ema_widths: str | list[float] | None = _option(
        "Keep power-function EMAs of these relative widths, such as 0.05,0.1.",
        "W,W",
        key="strategy.ema.widths",
    )
    lora: int | None = _option("Train LoRA adapters of this rank.", "RANK", key="strategy.lora.rank")
    lora_base: str | None = _option(
        "Fix the dtype of frozen weights: bf16, int8, fp8 or nf4.", "NAME", key="strategy.lora.base"
    )
    lora_text_encoders: bool | None = _option(
        "Also train LoRA of CLIP, for SD3 and Flux.1 with features online.", key="strategy.lora.text_encoders"
    )
    controlnet: int | str | None = _option(
        "Train a ControlNet of so many blocks beside the frozen model; of Flux 4, or 4,10 with single-stream blocks.",
        "LAYERS",
        key="strategy.controlnet",
    )
    features: str | None = _option(
        "cached (the default), or online: run the encoders in every step.", "WHEN", key="strategy.features"
    )
    compile: bool | None = _option("Compile the blocks with torch.compile.", key="strategy.compile_blocks")
    fp8: str | None = _option(
        "Compute the blocks' matrix products in FP8, which is lossy: tensorwise (the default) or rowwise scales.",
        "[SCALES]",
        key="strategy.float8",
    )
    cp: int | None = _option(
        "Context parallelism: 1, 2, 4 or 8 GPUs share each sample. Default: 1, or more where one sample is too much.",
        "N",
        key="strategy.cp",
    )
    full: bool | None = _option("Full fine-tuning only: propose no adapters.", instead="strategy.lora=null")
    from_scratch: bool | None = _option(
        "Train from random weights: run.yaml names no weights.", instead="model.init_from=null"
    )
    explain: bool | None = _option("Show each change from the usual setting to the recommended one, and what it saves.")

    @classmethod
    def of(cls, **asked: Any) -> PlanRequest:
        """The request with these fields, unchecked. Raises TypeError for an unknown field."""
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in asked if name not in known]:
            raise TypeError(f"bigdit.plan has no argument {unknown[0]!r}; {nearest(unknown[0], known)}")
        return cls(**asked)


_TYPES = get_type_hints(PlanRequest)
OPTIONS: dict[str, dict[str, Any]] = {
    each.name: {**each.metadata, "type": _TYPES[each.name]} for each in fields(PlanRequest)
}
"""The type, help, metavar and key in a run.yaml of each field."""


def option(name: str) -> str:
    """`--global-batch` for global_batch."""
    return f"--{name.replace('_', '-')}"
