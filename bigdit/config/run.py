"""A run's YAML, and its sections of what is trained and how. What each key means is said here alone, and in data.py,
encoders.py and sight.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bigdit.config.data import DataConfig
from bigdit.config.encoders import EncodersConfig
from bigdit.config.sight import SamplesConfig, TrackerName, ValidationConfig
from bigdit.numbers import Count, Natural, NotNegative, Positive, Processes, Switch
from bigdit.objective_spec import ObjectiveSpec
from bigdit.spec import EmaSpec, EngineName, LoraSpec, OptimizerSpec, Precision, Strict


class ModelConfig(Strict):
    """One of: `name` from the catalogue, `path` to a diffusers config.json, or `class_name` with `kwargs`.

    `init_from`: a folder of diffusers weights to start from, or a checkpoint; without it they are drawn from the seed.
    """

    name: str | None = None
    path: Path | None = None
    class_name: str | None = None
    kwargs: dict[str, Any] = {}
    init_from: Path | None = None


class TrainConfig(Strict):
    """The length and the size of training: `steps` of the optimizer, or as many as the store's samples, without those
    held out, take for `epochs`, the last one full too. In each a process takes `micro_batch_size` samples at once,
    `grad_accum_steps` times (once), or so often that all processes at hand come to `global_batch_size`. `precision`: as
    of a Strategy. `seed`: of weights, order, noise, t and, in bf16_sr, of rounding. `gradient_clipping`: the most that
    the norm of all gradients may be; null: it is not computed. The learning rate warms up over `warmup_steps`; then it
    stays (`lr_schedule`: constant), or falls from there on a half cosine (cosine), or, as one minus the root of what is
    done, in the last `decay_steps` (wsd: warm-up, stable, decay); down to `min_lr`.

    `checkpointed_blocks`: the first so many blocks are recomputed in the backward pass, whole or (`checkpointing:
    selective`) all but matrix products and attention; `offload_activations`: what the blocks save waits on the host;
    `blocks_to_swap`: weights of the first so many blocks do (with `lora` frozen ones), but for two blocks at a time.
    `compile_blocks`: torch compiles the repeated block, which no plan counts on.
    `optimizer_in_backward`: each parameter is stepped when its gradient is there, which is then freed. `ema`: a moving
    average of the weights; `lora`: adapters are trained, over a frozen model.init_from. Of the checkpoints, every
    `checkpoint_every` steps, the last `keep_checkpoints` stay and those that `keep_every` divides; those that
    `export_every` divides, and the last, are written in diffusers' format too: the transformer, or the adapters of
    `lora`, without the pipeline, which would take more disk (`bigdit export` writes it). Every `snapshot_every`
    steps a snapshot of the averages of ema.widths is written, and stays, to make averages of other widths of: 4 bytes
    for each of them and each trained weight. `grace`: the seconds after SIGTERM, SIGUSR1, SIGHUP or Ctrl-C in which a
    checkpoint is saved, before the run ends. A step whose gradients are not finite is skipped; after
    `most_skipped_steps` in a row the run ends.
    """

    steps: Count | None = None
    epochs: Annotated[Positive, Field(le=10**6)] | None = None
    micro_batch_size: Count
    global_batch_size: Count | None = None
    grad_accum_steps: Count | None = None
    precision: Precision = "bf16"
    gradient_clipping: Positive | None = 1.0
    optimizer_in_backward: Switch = False
    checkpointed_blocks: Natural | Literal["all"] = 0
    checkpointing: Literal["full", "selective"] = "full"
    offload_activations: Switch = False
    compile_blocks: Switch = False
    blocks_to_swap: Natural = 0
    ema: EmaSpec | None = None
    lora: LoraSpec | None = None
    warmup_steps: Natural = 0
    lr_schedule: Literal["constant", "cosine", "wsd"] = "constant"
    decay_steps: Count | None = None
    min_lr: NotNegative = 0.0
    checkpoint_every: Count = 1000
    keep_checkpoints: Count = 2
    keep_every: Count | None = None
    export_every: Count | None = None
    snapshot_every: Count | None = None
    grace: Positive = 60.0
    most_skipped_steps: Count = 10
    seed: Natural = 0

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.steps is None and self.epochs is None:
            raise ValueError("steps and epochs are both missing; set one of them")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps is {self.steps} and epochs {self.epochs:g}, and one follows from the other; leave one of them "
                "out, or set it to null"
            )
        return self

    @property
    def known_steps(self) -> int:
        """`steps`, which a run by epochs has when its samples were counted (train/epochs.py)."""
        assert self.steps is not None, "its epochs were not counted"
        return self.steps


class EngineConfig(Strict):
    """`name`: one process, DeepSpeed or FSDP2. `processes`: how many `bigdit train` starts on this machine.
    `ds_config`: DeepSpeed's JSON document. `timeout`: the seconds that a process waits for another, after which the run
    ends.

    Of FSDP2: `reshard_after_forward` lets gathered weights go until the backward pass; `dp_replicate` copies of
    the model, each sharded over the others (HSDP); `cpu_offload` keeps shards, gradients and optimizer on the host.
    """

    name: EngineName = "single"
    processes: Processes = 1
    timeout: Positive = 600.0
    ds_config: Path | None = None
    reshard_after_forward: Switch = True
    dp_replicate: Count = 1
    cpu_offload: Switch = False


class RunConfig(Strict):
    """A whole run: the `model`; pictures and features (`data`) and their `encoders`; `objective`, `optimizer`, length
    and size (`train`) and `engine`; `validation`, without which all samples are trained on; `samples`, pictures that
    are drawn on the way; `trackers` that get metrics and pictures too, by accelerate; `output`: the folder of
    checkpoints, exports, pictures, metrics, the receipt and the run's page.

    `stages`, one after another with the same weights, optimizer state and average: of each, what it has otherwise than
    the run, under the same keys, such as `data` and `train.steps` or `train.epochs`, which are its own; and `plan`, a
    folder of `bigdit plan --out` that decides how it is stepped.

    `objective` left out is the model's own: DDPM of DiT and PixArt, flow matching of all others.
    """

    model: ModelConfig
    data: DataConfig
    encoders: EncodersConfig
    objective: ObjectiveSpec | None = None
    optimizer: OptimizerSpec = OptimizerSpec()
    train: TrainConfig
    engine: EngineConfig = EngineConfig()
    validation: ValidationConfig | None = None
    samples: SamplesConfig | None = None
    trackers: tuple[TrackerName, ...] = ()
    stages: tuple[dict[str, Any], ...] = ()
    output: Path
