"""Cards to train on, and slices of them: the memory that drivers really give, peak rates, links, each with its source.

A slice is one of Multi-Instance GPU: `a100-80g-sxm:3g.40gb` is a card of its own to a process.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from bigdit.catalog.names import aliases_of, instead, load_json, meant, normalise, resolve
from bigdit.errors import UserError
from bigdit.strategy import Strict
from bigdit.units import GIB, KIB, MIB

PCIE_LANE_GBS = {
    "3.0": 8 * 128 / 130 / 8,
    "4.0": 16 * 128 / 130 / 8,
    "5.0": 32 * 128 / 130 / 8,
    "6.0": 64 * 242 / 256 / 8,
}
"""10⁹ bytes a second that one lane carries one way, by generation: transfers a second × the share of them that is
not coding, over 8 bits. Headers of packets are not taken off.

Source: PCI Express Base Specification: 8, 16, 32 GT/s coded 128b/130b; 64 GT/s in flits of 242 bytes out of 256.
"""


class Tflops(Strict):
    """Dense peak rates in 10¹² operations a second; None where the card has no unit for the type."""

    bf16: PositiveFloat | None
    fp16: PositiveFloat
    tf32: PositiveFloat | None
    fp32: PositiveFloat

    def computes(self, precision: str) -> bool:
        """Whether the card has units for a precision of `Strategy`."""
        return bool({"bf16": self.bf16, "bf16_sr": self.bf16, "tf32": self.tf32}.get(precision, self.fp32))

    def of(self, dtype: str, *, tf32: bool) -> float:
        """Operations a second of the units that compute matrix products of `dtype`. int8 counts as fp16: its products
        are scaled within the same kernel."""
        if dtype == "bfloat16":
            return (self.bf16 or self.fp32) * 1e12
        if dtype in ("float16", "int8", "uint8"):
            return self.fp16 * 1e12
        return (self.tf32 if tf32 and self.tf32 else self.fp32) * 1e12


class Sources(Strict):
    """Where each group of figures was read, or how it was derived."""

    total: str
    usable: str
    multiprocessors: str
    l2: str | None = None
    compute: str
    bandwidth: str
    link: str


class Kind(Strict):
    """Where cards of one kind are found: `host_gib` is a machine's memory for each of its cards, assumed where nobody
    says how much there is; `display_mib` is what a plan leaves free of the card for a screen."""

    host_gib: PositiveInt
    display_mib: NonNegativeInt
    source: str


class Gpu(Strict):
    """A card. `total_mib` is what nvidia-smi shows, `usable_mib` what a CUDA process is told: the total less
    what the driver keeps. `verified` is False where no sighting was at hand and the source says how the figure
    came about. `l2_mib` is of the second-level cache, None where it was not sighted. `bandwidth_gbs` of the memory;
    `nvlink_gbs` of all links to other cards and `c2c_gbs` of NVLink-C2C to the host's processor, both directions, None
    where there is none; in 10⁹ B/s. `pcie` as `4.0 x16`. `reserved_bytes` of the usable ones stay free."""

    name: str
    title: str
    architecture: str
    kind: Kind
    compute_capability: tuple[int, int]
    multiprocessors: PositiveInt
    l2_mib: PositiveFloat | None = None
    total_mib: PositiveInt
    total_verified: bool
    usable_mib: PositiveInt
    usable_verified: bool
    reserved_bytes: NonNegativeInt = 0
    tflops: Tflops
    bandwidth_gbs: PositiveFloat
    pcie: Annotated[str, Field(pattern=r"^[3456]\.0 x(4|8|16)$")]
    nvlink_gbs: PositiveFloat | None
    c2c_gbs: PositiveFloat | None = None
    sources: Sources

    @model_validator(mode="after")
    def _usable_within_total(self) -> Gpu:
        if self.usable_mib > self.total_mib:
            raise ValueError(f"{self.name}: usable {self.usable_mib} MiB of a total of {self.total_mib}")
        return self

    @model_validator(mode="after")
    def _cache_is_sourced(self) -> Gpu:
        if (self.l2_mib is None) != (self.sources.l2 is None):
            raise ValueError(f"{self.name}: l2_mib {self.l2_mib} from {self.sources.l2}; give both or neither")
        return self

    @property
    def mig(self) -> bool:
        """Whether this is a slice of a card, `CARD:PROFILE`."""
        return ":" in self.name

    @property
    def total_bytes(self) -> int:
        return self.total_mib * MIB

    @property
    def usable_bytes(self) -> int:
        """What a plan may fill, the CUDA context included."""
        return self.told_bytes - self.reserved_bytes

    @property
    def told_bytes(self) -> int:
        """What a CUDA process is told that there is."""
        return self.usable_mib * MIB

    @property
    def host_bytes(self) -> int:
        """The host memory that is assumed for each card of a machine."""
        return self.kind.host_gib * GIB

    def reserving(self, nbytes: int | None = None) -> Gpu:
        """The same card, of which so many bytes stay free; None: what a screen takes of its kind."""
        return self.model_copy(update={"reserved_bytes": self.kind.display_mib * MIB if nbytes is None else nbytes})

    @property
    def memory_bounds(self) -> tuple[int, int]:
        """The bytes that a card of this kind can have: from an eighth of it, the smallest slice that MIG makes of one,
        to a little over twice, where its chips were exchanged for larger ones (RTX 4090 of 49140 MiB)."""
        return self.total_bytes // 8, self.total_bytes * 21 // 10

    @property
    def pcie_gbs(self) -> float:
        """Peak of PCIe one way, in 10⁹ B/s; see PCIE_LANE_GBS."""
        generation, lanes = self.pcie.split(" x")
        return PCIE_LANE_GBS[generation] * int(lanes)

    @property
    def nvlink_one_way_gbs(self) -> float | None:
        """Peak of all NVLinks to other cards one way, in 10⁹ B/s; None without NVLink."""
        return None if self.nvlink_gbs is None else self.nvlink_gbs / 2

    @property
    def host_gbs(self) -> float:
        """Peak to and from host memory one way, in 10⁹ B/s: over NVLink-C2C where there is one, else PCIe."""
        return self.pcie_gbs if self.c2c_gbs is None else self.c2c_gbs / 2


@cache
def _document() -> dict[str, Any]:
    return load_json("gpus.json")


@cache
def _gpu(name: str) -> Gpu:
    entry = _document()["gpus"][name]
    return Gpu(name=name, **entry | {"kind": _document()["kinds"][entry["kind"]]})


def _plain(name: str) -> str:
    """Without the vendor's words."""
    return re.sub(r"^(nvidia-)?(geforce-|tesla-)?", "", normalise(name))


def gpus() -> list[Gpu]:
    """All cards, in the order of the catalogue: by architecture, consumer cards first."""
    return [_gpu(name) for name in _document()["gpus"]]


def gpu(name: str) -> Gpu:
    """The card of that name, alias or driver's name (`NVIDIA GeForce RTX 4090`). `asked.resolve_gpu` knows slices
    of cards, other memories and this machine's cards besides.

    Raises UserError for an unknown name, and for one that means cards of different memory (`a100`).
    """
    return _gpu(resolve("gpu", name, _plain(name), _document()["gpus"], _document()["aliases"]))


def named(name: str) -> list[Gpu]:
    """All cards that a name, alias or driver's name can mean; none for an unknown one."""
    return [_gpu(found) for found in meant(_plain(name), _document()["gpus"], _document()["aliases"])]


def no_gpu(name: str) -> str:
    """The end of a sentence that says that there is no such card: why, where that is known, and what is nearest."""
    return instead("gpu", _plain(name), _document()["gpus"], _document()["aliases"])


def gpu_aliases(name: str) -> tuple[str, ...]:
    """The further names that mean this card alone."""
    return aliases_of(name, _document()["aliases"])


MEDIA_ENGINES = r"[+-](me\.all|me|gfx)"
"""What a profile's name says of engines for video and graphics: nothing of memory and multiprocessors."""


class Profile(Strict):
    """An instance's memory in GiB, multiprocessors and memory slices; `sighted` unless derived from the guide."""

    gib: PositiveFloat
    sms: PositiveInt
    slices: PositiveInt
    sighted: bool = True


class Layout(Strict):
    """How `cards` of `sms` multiprocessors and so many memory slices are divided; `source` is of the listing."""

    cards: tuple[str, ...]
    sms: PositiveInt
    slices: PositiveInt
    source: str
    profiles: dict[str, Profile]


@cache
def _layouts() -> dict[str, Layout]:
    layouts = [Layout.model_validate(entry) for entry in load_json("mig.json")["layouts"]]
    return {card: layout for layout in layouts for card in layout.cards}


def mig_profiles(card: Gpu) -> tuple[str, ...]:
    """The names of the slices that a card can be divided into; none for a card without MIG."""
    layout = _layouts().get(card.name)
    return () if layout is None else tuple(layout.profiles)


def mig_slice(card: Gpu, profile: str) -> Gpu:
    """The slice as a card of its own: compute by its share of the multiprocessors, bandwidth by its share of the
    memory slices, and no NVLink, since MIG lets instances reach no other GPU; PCIe is shared with the others.

    Raises UserError for a card without MIG and for a profile that it does not have.
    """
    layout = _layouts().get(card.name)
    if layout is None:
        raise UserError(f"{card.name} has no MIG slices here; cards that have: {', '.join(_layouts())}")
    name = re.sub(rf"{MEDIA_ENGINES}$", "", profile.casefold())
    found = layout.profiles.get(name)
    if found is None:
        raise UserError(f"{card.name} has no MIG profile {profile!r}; it has {', '.join(layout.profiles)}")
    guide = load_json("mig.json")["guide"]
    usable_mib = min(int(found.gib * 1024), card.usable_mib)
    origin = layout.source if found.sighted else f"derived: multiples of a smaller profile of {layout.source}"
    compute, bandwidth = found.sms / layout.sms, found.slices / layout.slices
    return card.model_copy(
        update={
            "name": f"{card.name}:{name}",
            "title": f"{card.title} MIG {name}",
            "multiprocessors": found.sms,
            "l2_mib": None,
            "total_mib": usable_mib,
            "total_verified": found.sighted,
            "usable_mib": usable_mib,
            "usable_verified": found.sighted,
            "tflops": _scaled(card.tflops, compute),
            "bandwidth_gbs": round(card.bandwidth_gbs * bandwidth, 1),
            "nvlink_gbs": None,
            "sources": Sources(
                total=origin,
                usable=origin,
                multiprocessors=origin,
                compute=f"{found.sms} of {layout.sms} multiprocessors ({origin}); the card: {card.sources.compute}",
                bandwidth=f"{found.slices} of {layout.slices} memory slices ({guide}); the card: "
                f"{card.sources.bandwidth}",
                link=f"no peer-to-peer under MIG, PCIe shared with the other instances ({guide}); the card: "
                f"{card.sources.link}",
            ),
        }
    )


def _scaled(rates: Tflops, share: float) -> Tflops:
    return Tflops.model_validate(
        {name: None if rate is None else round(rate * share, 2) for name, rate in rates.model_dump().items()}
    )


WARP_SIZE = 32
"""Threads that execute together, at every compute capability. Source: as of CAPABILITIES."""

THREADS_PER_BLOCK = 1024
"""The most threads of a block, at every compute capability. Source: as of CAPABILITIES."""

REGISTERS = 65536
"""Registers of 32 bits of a multiprocessor, and the most of a block, at every one here. Source: as of CAPABILITIES."""

SHARED_PER_BLOCK_BYTES = 48 * KIB
"""Shared memory that a block has without asking for more, at every one here. Source: as of CAPABILITIES."""


class Capability(Strict):
    """The most that one multiprocessor holds at a time: `threads` and `blocks`; its shared memory in bytes, and how
    much of that a single block may ask for (`shared_optin_bytes`). `cores` are its fp32 units."""

    threads: PositiveInt
    blocks: PositiveInt
    shared_bytes: PositiveInt
    shared_optin_bytes: PositiveInt
    cores: PositiveInt


def _of(threads: int, blocks: int, shared_kib: int, optin_kib: int, cores: int) -> Capability:
    shared, optin = shared_kib * KIB, optin_kib * KIB
    return Capability(threads=threads, blocks=blocks, shared_bytes=shared, shared_optin_bytes=optin, cores=cores)


CAPABILITIES = {
    (7, 0): _of(threads=2048, blocks=32, shared_kib=96, optin_kib=96, cores=64),
    (7, 5): _of(threads=1024, blocks=16, shared_kib=64, optin_kib=64, cores=64),
    (8, 0): _of(threads=2048, blocks=32, shared_kib=164, optin_kib=163, cores=64),
    (8, 6): _of(threads=1536, blocks=16, shared_kib=100, optin_kib=99, cores=128),
    (8, 9): _of(threads=1536, blocks=24, shared_kib=100, optin_kib=99, cores=128),
    (9, 0): _of(threads=2048, blocks=32, shared_kib=228, optin_kib=227, cores=128),
    (10, 0): _of(threads=2048, blocks=32, shared_kib=228, optin_kib=227, cores=128),
    (10, 3): _of(threads=2048, blocks=32, shared_kib=228, optin_kib=227, cores=128),
    (12, 0): _of(threads=1536, blocks=24, shared_kib=100, optin_kib=99, cores=128),
}
"""By compute capability.

Source: table "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide, with blocks and
shared memory as cuda_occupancy.h of CUDA 13.5 has them; cores: "Throughput of Native Arithmetic Instructions" there,
32-bit floating-point add a clock cycle and multiprocessor.
"""


def capability(compute_capability: tuple[int, int]) -> Capability:
    """Raises UserError for a compute capability that no card of the catalogue has."""
    found = CAPABILITIES.get(compute_capability)
    if found is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        asked = ".".join(map(str, compute_capability))
        raise UserError(f"compute capability {asked} is not in the catalogue, which has {known}")
    return found
