"""Cards to train on: the memory that drivers really give, peak rates, links, each with its source."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from pydantic import PositiveFloat, PositiveInt, model_validator

from bigdit.catalog.names import load_json, normalise, resolve
from bigdit.spec import Strict
from bigdit.units import MIB


class Tflops(Strict):
    """Dense peak rates in 10¹² operations a second; None where the card has no unit for the type."""

    bf16: PositiveFloat | None
    fp16: PositiveFloat
    tf32: PositiveFloat | None
    fp32: PositiveFloat


class Sources(Strict):
    """Where each group of figures was read, or how it was derived."""

    total: str
    usable: str
    compute: str
    bandwidth: str
    link: str


class Gpu(Strict):
    """A card. `total_mib` is what nvidia-smi shows, `usable_mib` what a CUDA process is told: the total less
    what the driver keeps. `verified` is False where no sighting was at hand and the source says how the figure
    came about. `bandwidth_gbs` of the memory and `nvlink_gbs` of all links, both directions, in 10⁹ B/s."""

    name: str
    title: str
    architecture: str
    compute_capability: tuple[int, int]
    total_mib: PositiveInt
    total_verified: bool
    usable_mib: PositiveInt
    usable_verified: bool
    tflops: Tflops
    bandwidth_gbs: PositiveFloat
    pcie: str
    nvlink_gbs: PositiveFloat | None
    sources: Sources

    @model_validator(mode="after")
    def _usable_within_total(self) -> Gpu:
        if self.usable_mib > self.total_mib:
            raise ValueError(f"{self.name}: usable {self.usable_mib} MiB of a total of {self.total_mib}")
        return self

    @property
    def total_bytes(self) -> int:
        return self.total_mib * MIB

    @property
    def usable_bytes(self) -> int:
        """What a plan may fill, the CUDA context included."""
        return self.usable_mib * MIB


@cache
def _document() -> dict[str, Any]:
    return load_json("gpus.json")


@cache
def _gpu(name: str) -> Gpu:
    return Gpu(name=name, **_document()["gpus"][name])


def gpus() -> list[Gpu]:
    """All cards, in the order of the catalogue: by architecture, consumer cards first."""
    return [_gpu(name) for name in _document()["gpus"]]


def gpu(name: str) -> Gpu:
    """The card of that name, alias or driver's name (`NVIDIA GeForce RTX 4090`).

    Raises UserError for an unknown name, and for one that means cards of different memory (`a100`).
    """
    plain = re.sub(r"^(nvidia-)?(geforce-|tesla-)?", "", normalise(name))
    return _gpu(resolve("gpu", name, plain, _document()["gpus"], _document()["aliases"]))
