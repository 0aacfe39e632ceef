"""GPUs and their MIG slices: usable memory, peak rates and links, each with its source.

A slice of Multi-Instance GPU, `a100-80g-sxm:3g.40gb`, is a GPU of its own for a process.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from bigdit.catalog.names import aliases_of, load_json, matches, normalise, resolve, suggestion
from bigdit.errors import UserError
from bigdit.strategy import Float8, Precision, Strategy, Strict
from bigdit.units import GIB, KIB, MIB

PCIE_LANE_GBS = {
    "3.0": 8 * 128 / 130 / 8,
    "4.0": 16 * 128 / 130 / 8,
    "5.0": 32 * 128 / 130 / 8,
    "6.0": 64 * 242 / 256 / 8,
}
"""10⁹ bytes per second of one lane one way, by generation: transfers per second × the share without coding / 8 bits.
Packet headers are included.

Source: PCI Express Base Specification: 8, 16, 32 GT/s coded 128b/130b; 64 GT/s in flits of 242 bytes out of 256.
"""


class Tflops(Strict):
    """Dense peak rates in 10¹² operations per second; None if the GPU has no unit for the type."""

    fp8: PositiveFloat | None
    bf16: PositiveFloat | None
    fp16: PositiveFloat
    tf32: PositiveFloat | None
    fp32: PositiveFloat

    def computes(self, strategy: Strategy) -> bool:
        """Whether the GPU has units for the strategy's precision, and for FP8 if the strategy uses it."""
        rate = {"bf16": self.bf16, "bf16_sr": self.bf16, "tf32": self.tf32}.get(strategy.precision, self.fp32)
        return rate is not None and (strategy.float8 == "none" or self.fp8 is not None)

    def of(self, dtype: str, *, tf32: bool) -> float:
        """Operations per second of matrix products in `dtype`. int8 counts as fp16: the same kernel scales its
        products."""
        if dtype == "bfloat16":
            return (self.bf16 or self.fp32) * 1e12
        if dtype.startswith("float8"):
            return (self.fp8 or self.fp16) * 1e12
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
    """The machines of one kind of GPU. `host_gib`: assumed CPU memory per GPU; `display_mib`: GPU memory to leave for
    a screen."""

    host_gib: PositiveInt
    display_mib: NonNegativeInt
    source: str


class Gpu(Strict):
    """A GPU. `total_mib`: as in nvidia-smi; `usable_mib`: what a CUDA process sees, the total less the driver's part.

    `usable_verified` is False if nobody measured that figure: the source says how it was derived. `l2_mib`: L2 cache,
    None where it is unknown. In 10⁹ B/s: `bandwidth_gbs` of the memory; both directions of `nvlink_gbs` (all links to
    other GPUs) and `c2c_gbs` (NVLink-C2C to the CPU), None without them. `pcie`: `4.0 x16`. `reserved_bytes` of the
    usable ones stay free.
    """

    name: str
    title: str
    architecture: str
    kind: Kind
    compute_capability: tuple[int, int]
    multiprocessors: PositiveInt
    l2_mib: PositiveFloat | None = None
    total_mib: PositiveInt
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
        """Whether this is a slice of a GPU, `GPU:PROFILE`."""
        return ":" in self.name

    @property
    def total_bytes(self) -> int:
        return self.total_mib * MIB

    @property
    def usable_bytes(self) -> int:
        """Bytes that a plan may use, with the CUDA context."""
        return self.driver_bytes - self.reserved_bytes

    @property
    def driver_bytes(self) -> int:
        """Bytes that a CUDA process sees."""
        return self.usable_mib * MIB

    @property
    def host_bytes(self) -> int:
        """The CPU memory that is assumed for each GPU of a machine."""
        return self.kind.host_gib * GIB

    def reserving(self, nbytes: int | None = None) -> Gpu:
        """The same GPU with `nbytes` reserved; None: what a screen needs."""
        return self.model_copy(update={"reserved_bytes": self.kind.display_mib * MIB if nbytes is None else nbytes})

    @property
    def memory_bounds(self) -> tuple[int, int]:
        """The possible bytes of such a GPU: from an eighth (the smallest MIG slice) to 2.1 times (an RTX 4090 with
        larger memory chips has 49140 MiB)."""
        return self.total_bytes // 8, self.total_bytes * 21 // 10

    @property
    def pcie_gbs(self) -> float:
        """Peak of PCIe one way, in 10⁹ B/s; see PCIE_LANE_GBS."""
        generation, lanes = self.pcie.split(" x")
        return PCIE_LANE_GBS[generation] * int(lanes)

    @property
    def nvlink_one_way_gbs(self) -> float | None:
        """Peak of all NVLinks to other GPUs one way, in 10⁹ B/s; None without NVLink."""
        return None if self.nvlink_gbs is None else self.nvlink_gbs / 2

    @property
    def host_gbs(self) -> float:
        """Peak to and from CPU memory one way, in 10⁹ B/s: over NVLink-C2C if there is one, else PCIe."""
        return self.pcie_gbs if self.c2c_gbs is None else self.c2c_gbs / 2


@cache
def _document() -> dict[str, Any]:
    return load_json("gpus.json")


@cache
def _gpu(name: str) -> Gpu:
    entry = _document()["gpus"][name]
    return Gpu(name=name, **entry | {"kind": _document()["kinds"][entry["kind"]]})


def _plain(name: str) -> str:
    """The name without NVIDIA, GeForce and Tesla."""
    return re.sub(r"^(nvidia-)?(geforce-|tesla-)?", "", normalise(name))


def gpus() -> list[Gpu]:
    """All GPUs, in the order of the catalogue: by architecture, consumer GPUs first."""
    return [_gpu(name) for name in _document()["gpus"]]


def gpu(name: str) -> Gpu:
    """The GPU of that name, alias or driver's name (`NVIDIA GeForce RTX 4090`).

    `machine.resolve_gpu` also knows slices, other memory sizes and this machine's GPUs. Raises UserError for an unknown
    name, and for a name of several GPUs (`a100`).
    """
    return _gpu(resolve("gpu", name, _plain(name), _document()["gpus"], _document()["aliases"]))


def named(name: str) -> list[Gpu]:
    """All GPUs that a name, alias or driver's name can mean; none for an unknown one."""
    return [_gpu(found) for found in matches(_plain(name), _document()["gpus"], _document()["aliases"])]


def no_gpu(name: str) -> str:
    """The end of an error for an unknown GPU: the reason, if known, and the nearest names."""
    return suggestion("gpu", _plain(name), _document()["gpus"], _document()["aliases"])


def gpu_aliases(name: str) -> tuple[str, ...]:
    """Other names of this GPU alone."""
    return aliases_of(name, _document()["aliases"])


MEDIA_ENGINES = r"[+-](me\.all|me|gfx)"
"""Parts of a profile's name for video and graphics engines, which change neither memory nor multiprocessors."""


class MigProfile(Strict):
    """An instance's memory in GiB, multiprocessors and memory slices; `sighted` unless derived from the guide."""

    gib: PositiveFloat
    sms: PositiveInt
    slices: PositiveInt
    sighted: bool = True


class Layout(Strict):
    """How MIG divides `gpus` of `sms` multiprocessors and `slices` of memory; `source`: of the listing."""

    gpus: tuple[str, ...]
    sms: PositiveInt
    slices: PositiveInt
    source: str
    profiles: dict[str, MigProfile]


@cache
def _layouts() -> dict[str, Layout]:
    layouts = [Layout.model_validate(entry) for entry in _document()["mig"]["layouts"]]
    return {gpu: layout for layout in layouts for gpu in layout.gpus}


def mig_profiles(gpu: Gpu) -> tuple[str, ...]:
    """The profiles of a GPU; empty without MIG."""
    layout = _layouts().get(gpu.name)
    return () if layout is None else tuple(layout.profiles)


def mig_slice(gpu: Gpu, profile: str) -> Gpu:
    """The slice as a GPU. It has a share of the multiprocessors and of the bandwidth, shared PCIe, and no NVLink.

    Raises UserError for a GPU without MIG, and for a profile that it does not have.
    """
    layout = _layouts().get(gpu.name)
    if layout is None:
        raise UserError(f"{gpu.name} has no MIG slices here; GPUs that have: {', '.join(_layouts())}")
    name = re.sub(rf"{MEDIA_ENGINES}$", "", profile.casefold())
    found = layout.profiles.get(name)
    if found is None:
        raise UserError(f"{gpu.name} has no MIG profile {profile!r}; it has {', '.join(layout.profiles)}")
    guide = _document()["mig"]["guide"]
    usable_mib = min(int(found.gib * 1024), gpu.usable_mib)
    origin = layout.source if found.sighted else f"derived: multiples of a smaller profile of {layout.source}"
    compute, bandwidth = found.sms / layout.sms, found.slices / layout.slices
    return gpu.model_copy(
        update={
            "name": f"{gpu.name}:{name}",
            "title": f"{gpu.title} MIG {name}",
            "multiprocessors": found.sms,
            "l2_mib": None,
            "total_mib": usable_mib,
            "usable_mib": usable_mib,
            "usable_verified": found.sighted,
            "tflops": _scaled(gpu.tflops, compute),
            "bandwidth_gbs": round(gpu.bandwidth_gbs * bandwidth, 1),
            "nvlink_gbs": None,
            "sources": Sources(
                total=origin,
                usable=origin,
                multiprocessors=origin,
                compute=f"{found.sms} of {layout.sms} multiprocessors ({origin}); the GPU: {gpu.sources.compute}",
                bandwidth=f"{found.slices} of {layout.slices} memory slices ({guide}); the GPU: "
                f"{gpu.sources.bandwidth}",
                link=f"no peer-to-peer under MIG, PCIe shared with the other instances ({guide}); the GPU: "
                f"{gpu.sources.link}",
            ),
        }
    )


def _scaled(rates: Tflops, share: float) -> Tflops:
    return Tflops.model_validate(
        {name: None if rate is None else round(rate * share, 2) for name, rate in rates.model_dump().items()}
    )


class Capability(Strict):
    """Limits of one multiprocessor: resident `threads` and `blocks`, shared memory in bytes, and the part that one
    block may request (`shared_optin_bytes`). `cores`: its fp32 units."""

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
    """Raises UserError for a compute capability that no GPU of the catalogue has."""
    found = CAPABILITIES.get(compute_capability)
    if found is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        asked = ".".join(map(str, compute_capability))
        raise UserError(f"compute capability {asked} is not in the catalogue, which has {known}")
    return found


def precision_problems(gpu: Gpu, precision: Precision) -> list[str]:
    """Why `gpu` does not compute in `precision`."""
    if precision not in ("bf16", "bf16_sr") or gpu.tflops.bf16 is not None:
        return []
    capability = ".".join(str(part) for part in gpu.compute_capability)
    return [
        f"{gpu.title} computes no bf16 (compute capability {capability}), and precision is {precision}; "
        "fp16 and fp32 fit it"
    ]


def float8_problems(gpu: Gpu, float8: Float8) -> list[str]:
    """Why `gpu` cannot multiply in FP8, if it should."""
    if float8 == "none" or gpu.tflops.fp8 is not None:
        return []
    capability = ".".join(str(part) for part in gpu.compute_capability)
    return [
        f"{gpu.title} multiplies nothing in FP8 (compute capability {capability}), which needs 8.9 or more; "
        "leave it out"
    ]
