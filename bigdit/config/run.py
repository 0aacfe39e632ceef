"""The sections of a run's YAML. What each key means is said here, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from bigdit.config.sight import SamplesConfig, TrackerName, ValidationConfig
from bigdit.config.weights import WEIGHTS, is_weight
from bigdit.errors import UserError
from bigdit.numbers import Count, Natural, NotNegative, Positive, Processes, Share, Side, Switch
from bigdit.objective_spec import ObjectiveSpec
from bigdit.spec import EmaSpec, EngineName, LoraSpec, OptimizerSpec, Precision, Strict
from bigdit.units import GIB, parse_bytes


def _as_bytes(value: Any) -> Any:
    """`16GiB` as bytes; pydantic judges the rest."""
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except UserError:
        raise PydanticCustomError("bytes", "a size such as 16GiB") from None


T5_TOKENS = 300
"""Where nothing else is said, as in PixArt-Σ (arXiv:2403.04692) and Sana (arXiv:2410.10629)."""


class ModelConfig(Strict):
    """One of: `name` from the catalogue, `path` to a diffusers config.json, or `class_name` with `kwargs`.

    `init_from`: a folder of diffusers weights to start from, or a checkpoint; without it they are drawn from the seed.
    """

    name: str | None = None
    path: Path | None = None
    class_name: str | None = None
    kwargs: dict[str, Any] = {}
    init_from: Path | None = None


Bucket = Annotated[tuple[Side, ...], Field(min_length=2, max_length=3)]
"""[height, width] of pictures in pixels, or [frames, height, width] of videos."""


def frames_of(bucket: tuple[int, ...]) -> int:
    """The frames of a bucket; a picture has one."""
    return bucket[0] if len(bucket) == 3 else 1


def written_bucket(bucket: tuple[int, ...]) -> str:
    """`512 × 768`, or `17 × 512 × 768`."""
    return " × ".join(map(str, bucket))


SourceKind = Literal["folder", "csv", "parquet", "webdataset", "datasets"]


class SourceConfig(Strict):
    """Pictures or videos and their captions, or their classes. A string stands for a `path` alone.

    `path`: a folder of pictures or videos with `.txt` or `.json` captions beside them; a CSV or Parquet file of paths
    and captions; Parquet files or WebDataset tars: one, a folder, or a pattern (`*.tar`, `{000..099}.tar`); a folder of
    Hugging Face `datasets`. `kind`: which of these it is, where the path does not show it.
    Of tables: `image`, the column of pictures or of their paths, and `captions`, the columns of captions: one,
    several, or a mapping of columns to their weights, each a number or the column that holds it. `split`: which
    of several a `datasets` or Parquet folder is read.
    `label`: where the class of a picture stands, for models of classes, and then no captions are read: a column of a
    table, a key of the `.json` in tars, or `folder`: the first folder of its path, as in `n01440764/x.jpg`.
    `follow_links`: of a folder of pictures, whether links to files outside it are read. Without it each is skipped,
    with a line in the report; links to files within the folder are read, and links to folders are never entered.
    `frame_rate`: of a folder of folders of numbered pictures, each of which is a video then, of so many frames a
    second; its captions stand beside it (`clip/0001.png`, `clip.txt`).
    """

    path: Path
    kind: SourceKind | None = None
    image: str | None = None
    captions: dict[str, float | str] = {}
    label: str | None = None
    split: str | None = None
    follow_links: Switch = False
    frame_rate: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        if not isinstance(value, dict | str | Path | SourceConfig):
            raise ValueError("it is a path, or a mapping with path")
        return {"path": value} if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _one_condition(self) -> SourceConfig:
        if self.label is not None and self.captions:
            raise ValueError("captions and label are both set, and a model is fed one of them; leave out the other")
        return self

    @field_validator("captions", mode="before")
    @classmethod
    def _columns_alone(cls, value: Any) -> Any:
        columns = [value] if isinstance(value, str) else value
        if isinstance(columns, list | tuple) and all(isinstance(column, str) for column in columns):
            return dict.fromkeys(columns, 1.0)
        if not isinstance(columns, dict):
            raise ValueError("it is a column, a list of columns, or a mapping of columns to weights")
        for column, weight in columns.items():
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not isinstance(weight, str) and not (number and is_weight(weight)):
                raise ValueError(
                    f"the weight of {column} is a number {WEIGHTS}, or a column; {str(weight)[:20]} was found"
                )
        return columns


class DataConfig(Strict):
    """`images`: the source of pictures or videos and captions, or a list of sources, one after another: what is
    appended to the list later leaves the features before it as they are. `features`: where they are encoded to.
    `classes`: of sources with a `label`, the names of the classes from class 0 on. Left out, they are the folders'
    names, sorted, or labels are the numbers themselves.

    `buckets`: the sizes [height, width] in pixels that pictures are brought to, each to the nearest aspect
    ratio; of videos [frames, height, width]: each goes to those of the most frames that it has, and is cut at their
    end; one with fewer frames than any is skipped. `fps`: the frames a second that are taken of videos.
    `part_size`: pictures of the source in one part of the store; `workers`: processes that encode.
    `caption_dropout`: the share of samples trained on the empty caption, or on no class, for classifier-free guidance
    (Ho & Salimans, arXiv:2207.12598). `read_ahead_steps`: steps whose micro-batches are read, and held on the
    host, before they are trained on; `read_threads`: that read them. `reader`: how the store's files are read: pread,
    or mmap, which spends less of the CPU on a store that is on a local disk and fits into the page cache, reads too
    much where it does not, and dies where a network's file system fails. `features` may be a URL (s3://, gs://, az://):
    each process keeps at most `remote_cache` bytes of it (`16GiB`) in a temporary folder, best a window of 64 parts.
    """

    images: tuple[SourceConfig, ...]
    features: Path
    classes: tuple[str, ...] | None = Field(default=None, min_length=1)
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    fps: Positive | None = None
    part_size: Count = 256
    workers: Processes = 1
    caption_dropout: Share = 0.1
    read_ahead_steps: Natural = 2
    read_threads: Processes = 2
    reader: Literal["pread", "mmap"] = "pread"
    remote_cache: Annotated[Count, BeforeValidator(_as_bytes)] = 16 * GIB

    @field_validator("images", mode="before")
    @classmethod
    def _one_source(cls, value: Any) -> Any:
        if value in ([], ()):
            raise ValueError("the list is empty; name a source, such as a folder of pictures")
        return value if isinstance(value, list | tuple) else [value]

    @model_validator(mode="after")
    def _rate_of_videos(self) -> DataConfig:
        videos = [bucket for bucket in self.buckets if len(bucket) == 3]
        if videos and self.fps is None:
            raise ValueError(
                f"buckets has {written_bucket(videos[0])} of videos, and fps is missing; set it to the frames a second "
                "that the model is trained at, such as 16 of Wan, 8 of CogVideoX or 25 of LTX-Video"
            )
        if self.fps is not None and not videos:
            raise ValueError(
                f"fps is {self.fps:g}, and buckets has no frames; give [frames, height, width], such as "
                f"{[17, *self.buckets[0]]}, or leave fps out"
            )
        return self


class IdentityCodec(Strict):
    """Pixels as latents: scaled to [-1, 1] and unshuffled, `factor`² × channels channels; exactly invertible.

    `name`: identity, which chooses it. `color`: three channels, or one.
    """

    name: Literal["identity"] = "identity"
    factor: Count = 1
    color: Literal["rgb", "gray"] = "rgb"


class VaeCodec(Strict):
    """A diffusers VAE in the folder `path`, as its save_pretrained writes it; its latents are scaled and shifted, or
    brought to mean 0 and deviation 1, as its family's pipeline does it.

    `name`: vae, which chooses it; `class_name`: the VAE's class in diffusers. `latents`: the mode of its distribution;
    `sampled`, once, from `seed` and the picture's place in the source; or its `moments`, mean and standard deviation,
    for loaders that draw anew each time. `dtype`: what it computes in. `tiling`: what is large goes through it in
    tiles, blended at their seams: less memory, and slightly other latents.
    """

    name: Literal["vae"] = "vae"
    class_name: Literal[
        "AutoencoderKL",
        "AutoencoderDC",
        "AutoencoderKLFlux2",
        "AutoencoderKLQwenImage",
        "AutoencoderKLWan",
        "AutoencoderKLLTXVideo",
        "AutoencoderKLHunyuanImage",
        "AutoencoderKLHunyuanVideo",
        "AutoencoderKLCogVideoX",
    ]
    path: Path
    latents: Literal["mode", "sampled", "moments"] = "mode"
    seed: Natural = 0
    dtype: Literal["fp32", "bf16"] = "fp32"
    tiling: Switch = False


class TextEncoderConfig(Strict):
    """One of: `pipeline`, the folder of a diffusers pipeline, whose text encoders and tokenizers encode as it does;
    `path` to the folder of a T5 (safetensors weights and tokenizer); or `config`, T5Config's arguments, for one with
    weights drawn from `seed` and a byte-level tokenizer, which needs no download. `class_name`: the class of these two.

    Captions are cut to `max_tokens`: 300, or as many as the pipeline takes. `dtype`: what the encoders compute in.
    `stored`: how the store keeps hidden states; fp8, e4m3 with a scale for each token, takes half the bytes and is off
    by 2.6 % of a state.
    """

    pipeline: Path | None = None
    class_name: Literal["T5EncoderModel"] = "T5EncoderModel"
    path: Path | None = None
    config: dict[str, Any] | None = None
    seed: Natural = 0
    max_tokens: Count | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"
    stored: Literal["bf16", "fp8"] = "bf16"

    @property
    def tokens_asked(self) -> int | None:
        """The most tokens of a caption; None: as many as the pipeline takes."""
        return self.max_tokens or (T5_TOKENS if self.pipeline is None else None)


class FirstFrameConfig(Strict):
    """The first frame of videos, for models that begin with one: its latents by `encoders.image`, and, where the model
    takes embeddings of it, those of the image encoder of `pipeline`, the folder of a diffusers pipeline. `dtype`: what
    that computes in.
    """

    pipeline: Path | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"


class EncodersConfig(Strict):
    """What turns pictures (`image`) and captions (`text`; of a model of classes, none) into features; of models that
    begin with an image, the `first_frame` of videos too. The same encoders serve sampling.

    `device`: where they encode; auto: on the GPUs of the machine, its workers by turns, or else on its cores.
    `batch_size`: pictures, or frames of videos, and captions, that are encoded at once; auto: on a GPU what the
    rehearsed encode phase of a catalogue's model leaves room for, else 16, and on a CPU one caption; but one video.
    Halved where memory runs out, raised again.
    """

    image: IdentityCodec | VaeCodec = Field(discriminator="name")
    text: TextEncoderConfig | None = None
    first_frame: FirstFrameConfig | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch_size: Count | Literal["auto"] = "auto"


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
    `export_every` divides, and the last, are written in diffusers' format too. Every `snapshot_every` steps a snapshot
    of the averages of ema.widths is written, and stays, to make averages of other widths of: 4 bytes for each of them
    and each trained weight. `grace`: the seconds after SIGTERM, SIGUSR1, SIGHUP or Ctrl-C in which a checkpoint is
    saved, before the run ends. A step whose gradients are not finite is skipped; after `most_skipped_steps` in a row
    the run ends.
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
