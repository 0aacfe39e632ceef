"""What a plan is asked: the model, the cards, the data, and what is fixed beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from bigdit.catalog import CatalogModel, Gpu
from bigdit.config.load import MOST_MICRO_BATCH, MOST_RANK
from bigdit.encoders.host_bytes import HostWeights
from bigdit.numbers import Count, Natural, Positive, Side, Switch
from bigdit.speed.seconds import Cluster
from bigdit.strategy import OptimizerName, Precision, Strict, Widths
from bigdit.units import GIB

EngineChoice = Literal[
    "single",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2-offload",
    "zero3-offload",
    "zero3-offload-all",
    "fsdp2",
    "fsdp2-offload",
]
"""Engines by the names of config/load.py's presets."""


class Pins(Strict):
    """What the user has fixed; None leaves it to the search. `full`: no adapters are proposed in its place."""

    engine: EngineChoice | None = None
    optimizer: OptimizerName | None = None
    precision: Precision | None = None
    checkpointed_blocks: Natural | Literal["all"] | None = None
    micro_batch_size: Annotated[Count, Field(le=MOST_MICRO_BATCH)] | None = None
    ema: Literal["none", "auto", "gpu", "cpu"] = "none"
    ema_widths: Widths | None = None
    lora_rank: Annotated[Count, Field(le=MOST_RANK)] | None = None
    features: Literal["cached", "online"] = "cached"
    full: Switch = False


class Question(Strict):
    """One question to the planner, checked as a whole.

    `host_memory_bytes` are those of one machine, which are no verdict where they are only assumed (`host_assumed`): the
    search prefers what they hold. `resolution` is (height, width) in pixels, `frames` of a video;
    `buckets` are further sizes whose largest micro-batch is wanted. `images` of the data set are encoded, and all but
    those `held_out` seen `epochs` times; `samples`: what the run loads on the host to draw pictures on the way, None
    where it draws none.
    `price` is of one card for an hour, in the user's currency. `receipts`: a folder of measured runs, whose speeds
    count for the same card. `explain`: the way from the setting that people copy to the recommended one is wanted too.
    `from_scratch`: training starts from random weights.
    """

    model: CatalogModel
    gpu: Gpu
    cluster: Cluster = Cluster()
    host_memory_bytes: Count = 64 * GIB
    host_assumed: Switch = False
    resolution: tuple[Side, Side]
    frames: Count | None = None
    buckets: tuple[tuple[Side, Side], ...] = ()
    global_batch_size: Count | None = None
    images: Count | None = None
    held_out: Natural = 0
    samples: HostWeights | None = None
    epochs: Positive = 1.0
    price: Positive | None = None
    receipts: Path | None = None
    pins: Pins = Pins()
    from_scratch: Switch = False
    explain: Switch = False

    def over(self, cluster: Cluster) -> Question:
        """The same, over other cards: a machine that nobody described has more memory where it has more of them."""
        host = self.gpu.host_bytes * cluster.processes_per_node if self.host_assumed else self.host_memory_bytes
        return self.model_copy(update={"cluster": cluster, "global_batch_size": None, "host_memory_bytes": host})

    def short_of_host(self, nbytes: int) -> bool:
        """Whether a machine that is known has less memory than that."""
        return nbytes > self.host_memory_bytes and not self.host_assumed
