"""Which functions of which CUDA libraries the installed packages want, read from their ELF files."""

from __future__ import annotations

import re
import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_CUDA = re.compile(r"lib(cu|nv|nccl)")
"""How the file names of NVIDIA's libraries begin."""

_FUNCTION = re.compile(r"(cu[A-Z]|nvml[A-Z])\w+")

_SYMBOL = struct.Struct("<IBBHQQ")
"""An Elf64_Sym: name, info, other, section, value, size. Source: System V ABI, "Symbol Table"."""

_UNDEFINED, _VERSION_MASK = 0, 0x7FFF

BY_NAME = (
    "cuCtxGetDevice",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuLaunchKernelEx",
    "cuMemsetD32Async",
    "cuStreamWriteValue32_v2",
    "cuTensorMapEncodeTiled",
)
"""Driver functions that torch and Triton look up by name outside libc10_cuda, whose own names are read from it."""


@dataclass
class Library:
    """A library that is wanted: its functions, each with the version of its symbol, None for none."""

    functions: dict[str, str | None] = field(default_factory=dict)


def wanted(packages: Sequence[Path]) -> dict[str, Library]:
    """By the library's file name, what torch and the other packages in these folders want of it; torch is the first.

    Of libraries that torch wants in one version, those of another are left out: bitsandbytes brings a file for each
    release of CUDA. Functions that carry no version are given to a library by their prefix.
    """
    torch, *others = packages
    found: dict[str, Library] = {"libcuda.so.1": Library(), "libnvidia-ml.so.1": Library()}
    _read_all(torch, found)
    stems = {name.partition(".so")[0] for name in found}
    rest: dict[str, Library] = {}
    for package in others:
        _read_all(package, rest)
    for name, library in rest.items():
        if name in found or name.partition(".so")[0] not in stems:
            found.setdefault(name, Library()).functions.update(library.functions)
    for name in BY_NAME:
        found["libcuda.so.1"].functions.setdefault(name, None)
    return found


def _read_all(package: Path, found: dict[str, Library]) -> None:
    bundled = {file.name for file in package.with_name(f"{package.name}.libs").glob("*")}  # renamed, as auditwheel does
    for file in sorted(package.rglob("*.so*")):
        if file.is_file():
            _read(file, found, bundled)


def _read(file: Path, found: dict[str, Library], bundled: Container[str]) -> None:
    from elftools.elf.elffile import ELFFile  # all processes of bigdit import this file, and few read libraries

    with open(file, "rb") as opened:
        if opened.read(4) != b"\x7fELF":
            return
        elf = ELFFile(opened)
        dynamic = elf.get_section_by_name(".dynamic")
        if dynamic is None or elf.get_machine_arch() not in ("x64", "AArch64"):
            return
        needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED") if tag.needed not in bundled]
        if not any(_CUDA.match(name) for name in needed):
            return
        for name in filter(_CUDA.match, needed):
            found.setdefault(name, Library())
        for name, library, version in _undefined(elf):
            owner = library or _by_prefix(name, needed)
            if owner is not None and owner not in bundled:
                found.setdefault(owner, Library()).functions[name] = version
        if file.name == "libc10_cuda.so":
            for name in _looked_up(elf):
                owner = "libnvidia-ml.so.1" if name.startswith("nvml") else "libcuda.so.1"
                found[owner].functions.setdefault(name, None)


def _undefined(elf: ELFFile) -> Iterator[tuple[str, str | None, str | None]]:
    """Each function that the file leaves to others: its name, and its library and version where it has one."""
    table, strings = elf.get_section_by_name(".dynsym").data(), elf.get_section_by_name(".dynstr").data()
    versions = _versions(elf)
    marks = elf.get_section_by_name(".gnu.version").data()
    for i, (name, _, _, section, _, _) in enumerate(_SYMBOL.iter_unpack(table)):
        if section != _UNDEFINED or not name:
            continue
        library, version = versions.get(
            int.from_bytes(marks[2 * i : 2 * i + 2], "little") & _VERSION_MASK, (None, None)
        )
        if library is None or _CUDA.match(library):
            yield strings[name : strings.index(b"\0", name)].decode(), library, version


def _versions(elf: ELFFile) -> Mapping[int, tuple[str, str]]:
    """By a symbol's version index, the library that has it and the version's name."""
    section = elf.get_section_by_name(".gnu.version_r")
    if section is None:
        return {}
    return {one["vna_other"]: (need.name, one.name) for need, versions in section.iter_versions() for one in versions}


_PREFIXES = (
    ("cusparseLt", "libcusparseLt.so"),
    ("cuFile", "libcufile.so"),
    ("curand", "libcurand.so"),
    ("cusolver", "libcusolver.so"),
    ("cusparse", "libcusparse.so"),
    ("cublasLt", "libcublasLt.so"),
    ("cublas", "libcublas.so"),
    ("cudnn", "libcudnn.so"),
    ("cufft", "libcufft.so"),
    ("cupti", "libcupti.so"),
    ("cuda", "libcudart.so"),
    ("__cuda", "libcudart.so"),
    ("nvrtc", "libnvrtc.so"),
    ("nvshmem", "libnvshmem_host.so"),
    ("pnccl", "libnccl.so"),
    ("nccl", "libnccl.so"),
    ("nvml", "libnvidia-ml.so"),
    ("cu", "libcuda.so"),
)


def _by_prefix(name: str, needed: Iterable[str]) -> str | None:
    """The library of a function without a version: among those that the file needs, or the driver's."""
    if not re.match(r"(__cuda|cu|p?nccl|nvrtc|nvshmem|nvml)[A-Zm_a-z]", name):
        return None
    start = next((library for prefix, library in _PREFIXES if name.startswith(prefix)), None)
    if start is None:
        return None
    if start in ("libcuda.so", "libnvidia-ml.so"):
        # `cu` alone is the driver's only where a capital follows: `current_…` is anybody's
        return f"{start}.1" if _FUNCTION.fullmatch(name) else None
    return next((library for library in needed if library.startswith(start + ".")), None)


def _looked_up(elf: ELFFile) -> Iterator[str]:
    """The names of functions among the file's constant strings: torch asks the driver and NVML for them by name."""
    data = elf.get_section_by_name(".rodata").data()
    for text in re.findall(rb"\0((?:cu[A-Z]|nvml[A-Z])[A-Za-z0-9_]{5,})(?=\0)", data):
        yield text.decode()
