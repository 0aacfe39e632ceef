"""What may be asked of a plan: the options of `bigdit plan`, the arguments of `bigdit.plan`, the keys of a run."""

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
    """A field that is None where nothing is asked. `key`: of a run's YAML, with the same value; `instead`: what says
    it there in another form. `many`: the option may be repeated."""
    known = {"help": help, "metavar": metavar, "key": key, "instead": instead, "many": many}
    return field(default=None, metadata=known)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A plan as it is asked for, before anything is checked. None leaves it to the search, or to a default."""

    model: str | None = _option(
        "A model of `bigdit models`, by its name or repository; or a config.json or a folder of diffusers.",
        "NAME",
        key="model",
    )
    gpu: str | None = _option("A GPU of `bigdit gpus`; GPU:PROFILE, a MIG slice; auto, this machine's.", "NAME")
    gpu_memory: str | None = _option("The GPU's used + free in nvidia-smi, such as 45416MiB.", "SIZE")
    reserve: int | str | None = _option(
        "GPU memory to keep free, 1GiB or 0; if left out 512MiB for a display, 0 for data-centre GPUs.", "SIZE"
    )
    gpus: int | None = _option("GPUs in all; 1 if left out.", "N")
    gpus_per_node: int | None = _option("GPUs in a machine; 8 if left out.", "N")
    network: float | None = _option("10^9 bytes a second between machines; 12.5 if left out.", "GB/S")
    host_memory: str | None = _option(
        "CPU memory of one machine: 128GiB; this one's for --gpu auto, else assumed by the kind of GPU.", "SIZE"
    )
    resolution: Asked | list[Asked] | None = _option(
        "1024, or 480x832 (height x width); the model's own if left out. Of "
        "several, with commas or by repetition, the first decides, and the others are buckets.",
        "PIXELS",
        key="data.buckets",
        instead="data.buckets=[[HEIGHT,WIDTH]]",
        many=True,
    )
    buckets: Asked | list[Asked] | Literal["none", "aspect"] | None = _option(
        "Further sizes to find the largest micro-batch of, or none; of images the usual "
        "aspect ratios, if left out (aspect).",
        "PIXELS",
        instead="data.buckets=[[HEIGHT,WIDTH],…]",
    )
    frames: int | None = _option(
        "Frames of a video; the model's own if left out.",
        "N",
        key="data.buckets",
        instead="data.buckets=[[FRAMES,HEIGHT,WIDTH]]",
    )
    global_batch: int | None = _option(
        "Samples in an optimizer step over all GPUs.", "N", key="strategy.global_batch_size"
    )
    images: int | str | None = _option("Samples of the data set: 250000, 1.5k, 30M; for time and disk.", "N")
    epochs: float | None = _option("How often each is trained on; once if left out.", "N", key="train.epochs")
    price: float | None = _option("Price of one GPU-hour, in your currency.", "MONEY")
    receipts: Path | str | None = _option("Receipts of measured runs, to calibrate the speed by.", "DIR")
    engine: str | None = _option(
        "Fix the engine: single, zero0 to zero3, zero2-offload, fsdp2, …", "NAME", key="strategy.engine"
    )
    optimizer: str | None = _option(
        "Fix the optimizer: adamw, adamw_8bit, came, …", "NAME", key="strategy.optimizer.name"
    )
    precision: str | None = _option(
        "Fix the precision: bf16, bf16_sr, fp16, tf32, fp32.", "NAME", key="strategy.precision"
    )
    checkpointed_blocks: int | str | None = _option(
        "Fix how many blocks are recomputed: a number, or all.", "K", key="strategy.checkpointed_blocks"
    )
    micro_batch: int | None = _option("Fix the samples of a GPU in one pass.", "N", key="strategy.micro_batch_size")
    ema: str | None = _option("Keep an EMA: auto, gpu or cpu; none if left out.", "PLACE", key="strategy.ema")
    ema_widths: str | list[float] | None = _option(
        "Keep EMAs by power functions of these widths: 0.05,0.1.", "W,W", key="strategy.ema.widths"
    )
    lora: int | None = _option("Train adapters of this rank.", "RANK", key="strategy.lora.rank")
    features: str | None = _option("cached (if left out), or online: encode while training.", "WHEN")
    compile: bool | None = _option("Compile the blocks by torch.compile.", key="strategy.compile_blocks")
    full: bool | None = _option("Full fine-tuning: propose no adapters instead.", instead="strategy.lora=null")
    from_scratch: bool | None = _option(
        "Train from random weights: run.yaml names none to start from.", instead="model.init_from=null"
    )
    explain: bool | None = _option("Show the way from the setting that people copy to the recommended one.")

    @classmethod
    def of(cls, **asked: Any) -> PlanRequest:
        """The request with these fields, unchecked. Raises TypeError for a name that is none."""
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in asked if name not in known]:
            raise TypeError(f"bigdit.plan has no argument {unknown[0]!r}; {nearest(unknown[0], known)}")
        return cls(**asked)


OPTIONS: dict[str, dict[str, Any]] = {
    each.name: {**each.metadata, "type": get_type_hints(PlanRequest)[each.name]} for each in fields(PlanRequest)
}
"""What is known of each field: its type, help, metavar, and the key of a run's YAML."""


def option(name: str) -> str:
    """`--global-batch` for global_batch."""
    return f"--{name.replace('_', '-')}"
