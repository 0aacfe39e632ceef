"""The sections of a run's YAML for data and encoders."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from bigdit.documents import Count, Natural, NotNegative, Number, Positive, Processes, Share, Side, Switch
from bigdit.errors import UserError
from bigdit.strategy import Section
from bigdit.units import GIB, parse_bytes


def _as_bytes(value: Any) -> Any:
    """`16GiB` as bytes; pydantic judges the rest."""
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except UserError:
        raise PydanticCustomError("bytes", "a size such as 16GiB") from None


Bucket = Annotated[tuple[Side, ...], Field(min_length=2, max_length=3)]
"""[height, width] in pixels for images, [frames, height, width] for videos."""


def _sizes(value: Any) -> Any:
    """A list of buckets. Raises ValueError for numbers, and for texts such as 512x768, with the list of that bucket."""
    sides = value if isinstance(value, list) else [value]
    if sides and isinstance(sides[0], str) and re.fullmatch(r"\d+(x\d+)+", sides[0]):
        sides = [int(side) for side in sides[0].split("x")]
    if sides and all(isinstance(side, int) for side in sides):
        raise ValueError(f"it is a list of sizes, such as [{sides * 2 if len(sides) == 1 else sides}]")
    return value


Buckets = Annotated[tuple[Bucket, ...], BeforeValidator(_sizes), Field(min_length=1)]


def frames_of(bucket: tuple[int, ...]) -> int:
    """The frames of a bucket; 1 for images."""
    return bucket[0] if len(bucket) == 3 else 1


def written_bucket(bucket: tuple[int, ...]) -> str:
    """`512 × 768`, or `17 × 512 × 768`."""
    return " × ".join(map(str, bucket))


def fitting_bucket(bucket: tuple[int, ...], side: int) -> tuple[int, ...]:
    """The bucket whose sides are the nearest multiples of `side`."""
    return (*bucket[:-2], *(max(round(each / side), 1) * side for each in bucket[-2:]))


MAX_PIXELS = 89_478_485
"""A quarter of a GiB at three bytes a pixel. Source: Pillow, Image.MAX_IMAGE_PIXELS."""

LEAST_WEIGHT, MOST_WEIGHT = 1.2e-38, 3.4e38
"""Bounds of caption weights: the cache has them in fp32 (IEEE 754), where others would be 0 or infinite."""
WEIGHTS = f"from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"


def is_weight(number: float) -> bool:
    """Whether a caption may have this weight; an integer may be of any size."""
    return LEAST_WEIGHT <= number <= MOST_WEIGHT


SourceKind = Literal["folder", "csv", "json", "parquet", "webdataset", "datasets"]


PART_SIZE = 256
"""Default samples in a part of a cache."""
MOST_REFERENCES = 10
"""The most images that a sample can be an edit of."""
LARGE_PART = 1e9
"""The most bytes of a part, because several parts are in memory at once."""


def _named(value: Any) -> Any:
    """The path. Raises ValueError for an empty one, which would be the current folder."""
    if value == "":
        raise ValueError("it is empty; a path was expected, and . is the current folder")
    return value


class TagsConfig(Section):
    """Variants of captions that are lists of tags. Each is encoded, and steps draw one of them."""

    variants: Annotated[Count, Field(le=1000)] = 4
    """Variants of each caption, the first as it is written."""
    keep: Natural = 0
    """The first tags, which keep their places."""
    shuffle: Switch = True
    """Shuffle the other tags."""
    dropout: Share = 0.0
    """The share of the other tags that are left out."""
    separator: Annotated[str, Field(min_length=1)] = ","
    """What separates tags."""
    seed: Natural = 0
    """The seed of the variants."""


class SourceConfig(Section):
    """Images or videos with captions or classes. A string stands for `path` alone."""

    path: Annotated[Path, BeforeValidator(_named)]
    """A folder of images or videos with captions in .txt or .json files; a list of paths and captions in CSV, JSON,
    JSONL or Parquet; Parquet files or WebDataset tars (a file, a folder or a pattern: {000..099}.tar); a folder of
    datasets."""
    kind: SourceKind | None = None
    """What the path is, if bigdit cannot recognise it."""
    image: str | None = None
    """For lists, tables and metadata of a folder: the column of images, or of their paths."""
    reference: str = "reference"
    """For lists and tables, with data.references: the column of the images that samples are edits of. A cell is an
    image, or a list of paths."""
    captions: dict[str, float | str] = {}
    """For lists, tables and metadata of a folder: the column of captions, a list of columns, or a mapping of columns to
    weights (numbers or columns)."""
    caption: str | None = None
    """One caption for all images or videos, in place of their own."""
    caption_prefix: str = ""
    """Text before each caption, such as a trigger word."""
    caption_suffix: str = ""
    """Text after each caption."""
    tags: TagsConfig | None = None
    """Variants of captions that are lists of tags."""
    label: str | None = None
    """For class-conditional models: a column, a key of the .json in tars, or folder (the first of the path). Then
    captions are not read."""
    split: str | None = None
    """The split to read, in a folder of datasets or Parquet files with several."""
    follow_links: Switch = False
    """Read files outside the folder through links. Links to folders are never followed."""
    frame_rate: Positive | None = None
    """Frames per second, for a folder whose subfolders are videos of numbered images."""
    mask: Literal["file", "alpha"] | Path | None = None
    """For folders of images: what weights the loss of each place, from 0 (black) to 1 (white). file: x.mask.png beside
    x.png; alpha: the opacity; else a folder of masks, which have the names of their images. An image without a mask
    counts in full. With fill: what is painted (white)."""
    buckets: Buckets | None = None
    """Sizes of this source, in place of data.buckets."""
    flip: Switch = False
    """Encode each image or video mirrored too, as a sample of its own."""
    crops: Annotated[Count, Field(le=100)] = 1
    """Crops of each image or video, each a sample of its own. They are spread over the side that its bucket crops; one
    crop is centred."""
    repeats: Annotated[Count, Field(le=10_000)] = 1
    """How often an epoch has each sample."""
    weight: Annotated[Number, Field(ge=0.001, le=1000)] = 1.0
    """A factor of repeats. With 0.5 an epoch has half of the samples, and the next one the other half."""
    loss_weight: Annotated[Number, Field(ge=0.001, le=1000)] = 1.0
    """A factor of the loss of its samples, such as 0.5 for a regularisation set."""
    clips: Annotated[Count, Field(le=10_000)] = 1
    """The most clips from a video, each as long as the longest of its buckets."""

    @property
    def rate(self) -> Fraction:
        """How often an epoch has each sample, exactly as written."""
        return self.repeats * Fraction(str(self.weight)).limit_denominator(1000)

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        if not isinstance(value, dict | str | Path | SourceConfig):
            raise ValueError("it is a path, or a mapping with path")
        return {"path": value} if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _one_condition(self) -> SourceConfig:
        rules = [
            name for name in ("captions", "caption", "caption_prefix", "caption_suffix", "tags") if getattr(self, name)
        ]
        if self.label is not None and rules:
            raise ValueError(f"{rules[0]} and label are both set, and a model takes one of them; leave out the other")
        if self.caption is not None and not self.caption.strip():
            raise ValueError("caption is blank; leave it out, and captions of their own are read")
        if self.caption is not None and self.captions:
            raise ValueError("caption replaces the captions of all images, and captions names columns; leave out one")
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


class FirstFrameNoise(Section):
    """Gaussian noise on the latents of a first frame. Its standard deviation is drawn for each sample: exp(x), with x
    normal. The defaults are those of CogVideoX's authors, who add it to pixels (sat/diffusion_video.py)."""

    mean: Annotated[Number, Field(ge=-10, le=2)] = -3.0
    """The mean of x."""
    std: Annotated[NotNegative, Field(le=2)] = 0.5
    """The standard deviation of x."""


class DataConfig(Section):
    """The training data, and its latent and embedding cache."""

    images: tuple[SourceConfig, ...]
    """The source of images or videos, or a list of sources. You may append more later."""
    features: Annotated[Path | None, BeforeValidator(_named)] = None
    """The latent and embedding cache that `bigdit extract` fills: a folder or a URL (s3://, gs://, az://). Left out
    with strategy.features online."""
    classes: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the classes from class 0 on, for sources with a label. null: the sorted names of folders, or labels are
    numbers."""
    buckets: Buckets
    """Sizes in pixels: [height, width], for videos [frames, height, width]. Each sample goes to the nearest aspect
    ratio, and a video to the most frames that it can fill. A source may have its own."""
    fps: Positive | None = None
    """Frames per second that are read from videos."""
    references: Annotated[Natural, Field(le=MOST_REFERENCES)] = 0
    """For edit models: images that each sample is an edit of: x.reference.png and x.reference2.png beside x.png, or the
    column reference. A sample that lacks one is skipped."""
    min_references: Natural | None = None
    """The fewest, for samples with different numbers of references; 0: some are no edits. Each batch has samples of one
    number. null: all samples have as many as `references` says."""
    fill: bool = False
    """For fill models: each sample is also encoded with a part masked out, which the model paints. The mask is the one
    that its source has (mask), else a random rectangle or ellipse."""
    max_pixels: Count = MAX_PIXELS
    """The most pixels of an image or frame; larger ones are skipped. Each worker needs four bytes per pixel."""
    min_side: Count = 1
    """The fewest pixels of an image's or frame's shorter side; smaller ones are skipped."""
    max_upscale: Annotated[Number, Field(ge=1)] | None = None
    """The most that an image or frame is enlarged to fill a bucket. Without a bucket within this limit it is
    skipped."""
    part_size: Count = PART_SIZE
    """Samples in one part of the cache."""
    workers: Processes = 1
    """Processes of `bigdit extract`."""
    caption_dropout: Share = 0.1
    """The share of samples trained on the empty caption, or on no class, for classifier-free guidance (Ho & Salimans,
    arXiv:2207.12598)."""
    first_frame_dropout: Share = 0.0
    """The share of videos trained without their first frame, for image-to-video models: as zeros, or as from text."""
    first_frame_noise: FirstFrameNoise | None = None
    """Noise on first frames in training: {} for the defaults. null: none."""
    read_threads: Processes = 2
    """Threads that read the cache, or the images with features online."""
    reader: Literal["pread", "mmap"] = "pread"
    """How the cache's files are read. mmap needs less CPU time if they are local and fit the page cache."""
    remote_cache: Annotated[Count, BeforeValidator(_as_bytes)] = 16 * GIB
    """Bytes of remote files that each process keeps in a temporary folder, such as 16GiB. At least 64 parts should
    fit."""

    @property
    def store(self) -> Path:
        """The folder of the cache, for a run with cached features."""
        assert self.features is not None, "its features are online"
        return self.features

    @property
    def reference_counts(self) -> range:
        """The numbers of references that a sample can have; empty where it is no edit."""
        fewest = self.references if self.min_references is None else self.min_references
        return range(fewest, self.references + 1) if self.references else range(0)

    @property
    def keyed_buckets(self) -> dict[str, tuple[Bucket, ...]]:
        """The buckets that samples can have, by their keys: data.buckets, unless all sources have their own."""
        own = {f"data.images[{number}].buckets": each.buckets for number, each in enumerate(self.images)}
        shared = {"data.buckets": self.buckets} if None in own.values() else {}
        return shared | {key: buckets for key, buckets in own.items() if buckets is not None}

    @property
    def all_buckets(self) -> list[Bucket]:
        """The buckets that samples can have, each once."""
        return list(dict.fromkeys(itertools.chain.from_iterable(self.keyed_buckets.values())))

    @property
    def samples(self) -> str:
        """`images`, `videos`, or `samples` for both."""
        kinds = {len(bucket) for bucket in self.all_buckets}
        return "samples" if len(kinds) > 1 else "videos" if 3 in kinds else "images"

    @field_validator("images", mode="before")
    @classmethod
    def _one_source(cls, value: Any) -> Any:
        if value in ([], ()):
            raise ValueError("the list is empty; name a source, such as a folder of images")
        return value if isinstance(value, list | tuple) else [value]

    @model_validator(mode="after")
    def _rate_of_videos(self) -> DataConfig:
        videos = [bucket for bucket in self.all_buckets if len(bucket) == 3]
        if videos and self.fps is None:
            raise ValueError(
                f"buckets has {written_bucket(videos[0])} of videos, and fps is missing; set it to the frames per "
                "second that the model is trained at, such as 16 of Wan, 8 of CogVideoX or 25 of LTX-Video"
            )
        if self.fps is not None and not videos:
            raise ValueError(
                f"fps is {self.fps:g}, and buckets has no frames; give [frames, height, width], such as "
                f"{[17, *self.all_buckets[0]]}, or leave fps out"
            )
        asked = f"references is {self.references}" if self.references else "fill is true" if self.fill else None
        if asked is not None and videos:
            raise ValueError(
                f"{asked}, and buckets has {written_bucket(videos[0])} of videos; it is for images, so leave it out"
            )
        if self.min_references is not None and not self.reference_counts:
            raise ValueError(
                f"min_references is {self.min_references}, and references is {self.references}; set references to the "
                "most that a sample has, or leave min_references out"
            )
        if self.references and self.fill:
            raise ValueError("references and fill are both set, and a model takes one of them; leave out the other")
        return self


def part_size(sample_bytes: float) -> int:
    """The samples in a part of a cache: PART_SIZE, or fewer if these exceed 1 GB."""
    return min(PART_SIZE, 1 << int(math.log2(max(LARGE_PART / sample_bytes, 1))))


T5_TOKENS = 300
"""The default, as in PixArt-Σ (arXiv:2403.04692) and Sana (arXiv:2410.10629)."""


class IdentityCodec(Section):
    """Pixels as latents, scaled to [-1, 1]. A square of factor × factor pixels becomes one latent with factor² times
    the channels. This is exactly invertible."""

    name: Literal["identity"] = "identity"
    """identity selects this codec."""
    factor: Count = 1
    """Pixels per side of a latent."""
    color: Literal["rgb", "gray"] = "rgb"
    """Three channels, or one."""


class VaeCodec(Section):
    """A VAE of diffusers. Latents are scaled and shifted as in its family's pipeline."""

    name: Literal["vae"] = "vae"
    """vae selects this codec."""
    class_name: Literal[
        "AutoencoderKL",
        "AutoencoderDC",
        "AutoencoderKLFlux2",
        "AutoencoderKLQwenImage",
        "AutoencoderKLWan",
        "AutoencoderKLLTXVideo",
        "AutoencoderKLHunyuanImage",
        "AutoencoderKLHunyuanVideo",
        "AutoencoderKLHunyuanVideo15",
        "AutoencoderKLCogVideoX",
        "AutoencoderKLMochi",
    ]
    """The class of the VAE in diffusers."""
    path: Path
    """The folder of the VAE, as save_pretrained writes it; or one .safetensors file of its weights."""
    config: Path | None = None
    """The folder of the VAE's config.json, where path is one file."""
    latents: Literal["mode", "sampled", "moments"] = "mode"
    """What the cache keeps of the VAE's distribution: its mode, one sample, or its moments: mean and standard
    deviation. With moments, each read draws a new sample."""
    seed: Natural = 0
    """With latents sampled: the seed. It and an image's position in the source determine its noise."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """The dtype of the VAE."""
    tiling: Switch = False
    """Encode in tiles and blend their seams. This needs less memory and changes latents slightly."""

    @property
    def described_in(self) -> Path:
        """The folder of its config.json."""
        return self.config or self.path


class TextEncoderConfig(Section):
    """The encoders of captions, given by one of `pipeline`, `path` and `config`."""

    pipeline: Path | None = None
    """The folder of a diffusers pipeline. Its text encoders and tokenizers encode as in the pipeline."""
    files: dict[str, Path] = {}
    """Text encoders of `pipeline` whose weights are one file each, as ComfyUI has them, by the names of their folders:
    `{text_encoder: clip_l.safetensors}`. The folders hold their `config.json`."""
    class_name: Literal["T5EncoderModel"] = "T5EncoderModel"
    """The class of what `path` or `config` describe."""
    path: Path | None = None
    """The folder of a T5: safetensors weights and tokenizer."""
    config: dict[str, Any] | None = None
    """Arguments of T5Config, for random weights and a byte-level tokenizer without a download."""
    seed: Natural = 0
    """With config: the seed of the weights."""
    max_tokens: Count | None = None
    """The most tokens of a caption; longer ones are truncated. null: 300, or as many as the pipeline takes."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """The dtype of the encoders."""
    stored: Literal["bf16", "fp8"] = "bf16"
    """The dtype of stored hidden states. fp8 (e4m3, a scale per token) halves the bytes, with an error of 2.6 %."""

    def weights_of(self, name: str) -> Path:
        """The weights of a text encoder of `pipeline`: its folder, or one file."""
        return self.files.get(name) or (self.pipeline or Path()) / name

    @property
    def tokens_asked(self) -> int | None:
        """The most tokens of a caption; None: as many as the pipeline takes."""
        return self.max_tokens or (T5_TOKENS if self.pipeline is None else None)


class FirstFrameConfig(Section):
    """The first frame of videos, for image-to-video models. encoders.image encodes it to latents."""

    pipeline: Path | None = None
    """The folder of a diffusers pipeline. Its image encoder embeds the frame, if the model takes an embedding."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """The dtype of the image encoder."""


class EncodersConfig(Section):
    """The encoders of images and captions, which sampling uses too."""

    image: IdentityCodec | VaeCodec = Field(discriminator="name")
    """The encoder of images and videos."""
    text: TextEncoderConfig | None = None
    """The encoder of captions. null: the model takes classes."""
    first_frame: FirstFrameConfig | None = None
    """The encoding of a video's first frame, for image-to-video models."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where `bigdit extract` encodes. auto: on all GPUs of the machine, else on its CPU."""
    batch_size: Count | Literal["auto"] = "auto"
    """Images, frames or captions that `bigdit extract` encodes at once; halved if memory runs out. auto: what fits on
    the GPU; without one 16 images, one caption or one video."""
