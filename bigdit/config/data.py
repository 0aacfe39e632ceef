"""The sections of a run's YAML that say what is read. What each key means is said here alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from bigdit.config.weights import WEIGHTS, is_weight
from bigdit.errors import UserError
from bigdit.numbers import Count, Natural, Positive, Processes, Share, Side, Switch
from bigdit.spec import Strict
from bigdit.units import GIB, parse_bytes


def _as_bytes(value: Any) -> Any:
    """`16GiB` as bytes; pydantic judges the rest."""
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except UserError:
        raise PydanticCustomError("bytes", "a size such as 16GiB") from None


Bucket = Annotated[tuple[Side, ...], Field(min_length=2, max_length=3)]
"""[height, width] of pictures in pixels, or [frames, height, width] of videos."""


def frames_of(bucket: tuple[int, ...]) -> int:
    """The frames of a bucket; a picture has one."""
    return bucket[0] if len(bucket) == 3 else 1


def written_bucket(bucket: tuple[int, ...]) -> str:
    """`512 × 768`, or `17 × 512 × 768`."""
    return " × ".join(map(str, bucket))


def fitting_bucket(bucket: tuple[int, ...], side: int) -> tuple[int, ...]:
    """The bucket whose sides are the nearest multiples of `side`."""
    return (*bucket[:-2], *(max(round(each / side), 1) * side for each in bucket[-2:]))


MAX_PIXELS = 89_478_485
"""A quarter of a GiB at three bytes a pixel. Source: Pillow, Image.MAX_IMAGE_PIXELS."""

SourceKind = Literal["folder", "csv", "parquet", "webdataset", "datasets"]


PART_SIZE = 256
"""Samples in a part of a store, where a run does not say."""
LARGE_PART = 1e9
"""Bytes of a part, of which there are few in a data set and several in memory."""


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
    `clips`: how many are taken of each video at most, one after another from its start, each as long as the longest of
    data.buckets, all with its captions; those that it is too short for are skipped, with a line in the report.
    """

    path: Path
    kind: SourceKind | None = None
    image: str | None = None
    captions: dict[str, float | str] = {}
    label: str | None = None
    split: str | None = None
    follow_links: Switch = False
    frame_rate: Positive | None = None
    clips: Annotated[Count, Field(le=10_000)] = 1

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
    appended to the list later leaves the features before it as they are. `features`: where they are encoded to; or
    online: the encoders stay on the card that trains, and encode in each step (of one bucket, with no `validation`).
    `classes`: of sources with a `label`, the names of the classes from class 0 on. Left out, they are the folders'
    names, sorted, or labels are the numbers themselves.

    `buckets`: the sizes [height, width] in pixels that pictures are brought to, each to the nearest aspect
    ratio; of videos [frames, height, width]: each goes to those of the most frames that it has, and is cut at their
    end; one with fewer frames than any is skipped. `fps`: the frames a second that are taken of videos.
    `max_pixels`: the most pixels of an image or a frame that is read: a decoded one takes four bytes a pixel or more in
    each worker. Larger ones are skipped, and named in the report.
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
    max_pixels: Count = MAX_PIXELS
    part_size: Count = PART_SIZE
    workers: Processes = 1
    caption_dropout: Share = 0.1
    read_ahead_steps: Natural = 2
    read_threads: Processes = 2
    reader: Literal["pread", "mmap"] = "pread"
    remote_cache: Annotated[Count, BeforeValidator(_as_bytes)] = 16 * GIB

    @property
    def online(self) -> bool:
        """Whether features are made in each step, and kept nowhere."""
        return str(self.features) == "online"

    @property
    def samples(self) -> str:
        """What is counted of it: images, videos, or samples where there are both."""
        kinds = {len(bucket) for bucket in self.buckets}
        return "samples" if len(kinds) > 1 else "videos" if 3 in kinds else "images"

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


def part_size(sample_bytes: float) -> int:
    """How many samples of so many bytes make a part of a store: PART_SIZE, or as many as fit 1 GB."""
    return min(PART_SIZE, 1 << int(math.log2(max(LARGE_PART / sample_bytes, 1))))
