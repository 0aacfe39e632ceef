"""Builds the stub libraries at first use, into the user's cache, once for each build of torch.

The ELF files of the installed packages show which functions of CUDA's libraries they need. Functions without code in
`c/` are generated: they succeed and do nothing, make a handle, or refuse.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bigdit.cache import VARIABLE, cache_root
from bigdit.errors import UserError
from bigdit.files import FULL, TEMPORARY, check_writable, why_unwritten
from bigdit.units import MIB

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile


@dataclass(frozen=True)
class Manner:
    """How a library's generated functions answer, by patterns of their names.

    `create`: store a handle where their first argument points. `launch`: are counted, since they launch at least one
    kernel, and return 0. `succeed`: return 0. All others refuse by name, with the library's status `refusal` for
    unsupported functions.
    """

    refusal: int
    succeed: str = r"(?!)"
    create: str = r"(?!)"
    launch: str = r"(?!)"


MANNERS = {
    # Kernels compute products, and are not run.
    "libcublas.so": Manner(
        succeed=r".*", create=r"cublasCreate.*", launch=r"cublas(?!Create|Destroy|Get|Set)\w+", refusal=15
    ),
    "libcublasLt.so": Manner(succeed=r".*", create=r"cublasLt\w*Create", launch="cublasLtMatmul", refusal=15),
    # Functions for sizes that only cuDNN knows are refused, unless dnn.c returns 0 and says why.
    "libcudnn.so": Manner(
        succeed=r"cudnn(Destroy|Set|Backend|Convolution|BatchNormalization|Pooling|SpatialTf|Restore)\w*",
        create=r"cudnnCreate\w*",
        launch=r"cudnn(BackendExecute|(Convolution|BatchNormalization|Pooling|SpatialTf)\w+)",
        refusal=3000,
    ),
    "libcufft.so": Manner(succeed=r"cufft(Destroy|Set|XtExec)\w*", refusal=16),
    # Their functions return sizes of buffers, and results that the CPU reads.
    "libcusolver.so": Manner(succeed=r"cusolver\w*(Destroy|Set)\w*", create=r"cusolver\w*Create\w*", refusal=9),
    "libcusparse.so": Manner(succeed=r"cusparse\w*(Destroy|Set)\w*", create=r"cusparseCreate\w*", refusal=10),
    "libcusparseLt.so": Manner(refusal=10),
    "libcurand.so": Manner(refusal=103),
    "libcufile.so": Manner(refusal=5031),
    "libnvshmem_host.so": Manner(refusal=-1),
    # The profiler has no records.
    "libcupti.so": Manner(succeed=r".*", refusal=27),
    "libnccl.so": Manner(succeed=r"nccl(CommRegister|CommDeregister|RedOpDestroy|GroupSimulateEnd)", refusal=5),
    "libnvrtc.so": Manner(refusal=6),
    "libnvidia-ml.so": Manner(refusal=3),
    "libcudart.so": Manner(
        succeed=r"__cudaInitModule|cuda(EventRecord|EventQuery|StreamQuery|StreamWaitEvent|StreamUpdateCapture|Profiler"
        r"|FuncSet|KernelSet|LibraryUnload|DeviceEnablePeerAccess|DeviceReset|DeviceSet|MemPoolSet|MemPoolTrim"
        r"|GraphDebugDotPrint|GraphRetainUserObject|UserObject)\w*",
        refusal=801,
    ),
    "libcuda.so": Manner(succeed=r"cu(Logs|StreamWriteValue|StreamSynchronize|MemsetD|LinkDestroy)\w*", refusal=801),
}
"""By the library's name without its version.

Source of refusals: *_STATUS_NOT_SUPPORTED and the like of each library's header; cuSOLVER and cuSPARSE 9 and 10,
cuFFT 16, cuRAND's TYPE_ERROR 103, cuFile's driver version 5031, NCCL's invalid usage 5, nvrtc's compilation 6.
"""


def sources(library: str, functions: Iterable[str]) -> str:
    """C code of the generated functions of `library` (`libcudart.so.13`)."""
    manner = MANNERS[re.sub(r"\.so\..*", ".so", library)]
    lines = ["#include <stdlib.h>", "int gpu_refuse(const char *function, int status);", "int gpu_called(void);"]
    for name in sorted(functions):
        if re.fullmatch(manner.create, name):
            lines.append(f"int {name}(void **out) {{ *out = calloc(1, 256); return 0; }}")
        elif re.fullmatch(manner.launch, name):
            lines.append(f"int {name}(void) {{ return gpu_called(); }}")
        elif re.fullmatch(manner.succeed, name):
            lines.append(f"int {name}(void) {{ return 0; }}")
        else:
            lines.append(f'int {name}(void) {{ return gpu_refuse("{name}", {manner.refusal}); }}')
    return "\n".join(lines) + "\n"


_CUDA = re.compile(r"lib(cu|nv|nccl)")
"""The beginning of the file names of NVIDIA's libraries."""

_FUNCTION = re.compile(r"(cu[A-Z]|nvml[A-Z])\w+")

_SYMBOL = struct.Struct("<IBBHQQ")
"""An Elf64_Sym: name, info, other, section, value, size. Source: System V ABI, "Symbol Table"."""

_UNDEFINED, _VERSION_MASK = 0, 0x7FFF

BY_NAME = (
    "cuCtxGetDevice",
    "cuCtxGetLimit",
    "cuCtxSetLimit",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuLaunchKernelEx",
    "cuMemsetD32Async",
    "cuOccupancyMaxActiveClusters",
    "cuStreamIsCapturing",
    "cuStreamWriteValue32_v2",
    "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeTiled",
)
"""Driver functions that torch and Triton look up by name outside libc10_cuda, which has the other names."""


@dataclass
class Library:
    """A needed library: its functions, each with the version of its symbol or None."""

    functions: dict[str, str | None] = field(default_factory=dict)


def wanted(packages: Sequence[Path]) -> dict[str, Library]:
    """The libraries, by file name, that torch and the other packages in these folders need. torch is the first.

    Other versions of libraries that torch needs are left out: bitsandbytes has a file for each release of CUDA. The
    prefix of a function without a version decides its library.
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
    bundled = {file.name for file in package.with_name(f"{package.name}.libs").glob("*")}  # renamed by auditwheel
    for file in sorted(package.rglob("*.so*")):
        if file.is_file():
            _read(file, found, bundled)


def _read(file: Path, found: dict[str, Library], bundled: Container[str]) -> None:
    from elftools.elf.elffile import ELFFile  # late: few processes of bigdit read libraries

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
    """Each undefined function of the file: its name, and its library and version if it has them."""
    table, strings = elf.get_section_by_name(".dynsym").data(), elf.get_section_by_name(".dynstr").data()
    versions = _needed_versions(elf)
    marks = elf.get_section_by_name(".gnu.version").data()
    for i, (name, _, _, section, _, _) in enumerate(_SYMBOL.iter_unpack(table)):
        if section != _UNDEFINED or not name:
            continue
        library, version = versions.get(
            int.from_bytes(marks[2 * i : 2 * i + 2], "little") & _VERSION_MASK, (None, None)
        )
        if library is None or _CUDA.match(library):
            yield strings[name : strings.index(b"\0", name)].decode(), library, version


def _needed_versions(elf: ELFFile) -> Mapping[int, tuple[str, str]]:
    """The library and the version's name of each version index of symbols."""
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
    """The library of a function without a version: one that the file needs, or the driver's."""
    if not re.match(r"(__cuda|cu|p?nccl|nvrtc|nvshmem|nvml)[A-Zm_a-z]", name):
        return None
    start = next((library for prefix, library in _PREFIXES if name.startswith(prefix)), None)
    if start is None:
        return None
    if start in ("libcuda.so", "libnvidia-ml.so"):
        # `cu` is the driver's only before a capital letter, unlike `current_…`
        return f"{start}.1" if _FUNCTION.fullmatch(name) else None
    return next((library for library in needed if library.startswith(start + ".")), None)


def _looked_up(elf: ELFFile) -> Iterator[str]:
    """The names of functions among the file's constant strings: torch looks functions of driver and NVML up by name."""
    data = elf.get_section_by_name(".rodata").data()
    for text in re.findall(rb"\0((?:cu[A-Z]|nvml[A-Z])[A-Za-z0-9_]{5,})(?=\0)", data):
        yield text.decode()


C = Path(__file__).parent / "c"

BY_HAND = {
    "libcuda.so": "gpu.c",
    "libcudart.so": "runtime.c",
    "libcublas.so": "blas.c",
    "libcublasLt.so": "blaslt.c",
    "libcudnn.so": "dnn.c",
    "libcufft.so": "fft.c",
    "libnccl.so": "nccl.c",
    "libnvidia-ml.so": "nvml.c",
    "libnvrtc.so": "nvrtc.c",
}
"""The C file of each library that does more than succeed or refuse."""

HOST, HOST_SOURCES = "libbigdit-host.so", ("host.c", "blank.c")

DIGESTS = "digests.json"
"""The file with the SHA-256 of each library, which is checked before loading (inside/libraries.py)."""

_BUILT_BYTES = MIB
"""More than the libraries and the compiler's temporary files take: 0.4 MiB, as `du` shows."""

_FLAGS = ("-O1", "-fPIC", "-shared", "-pthread", "-Wl,-rpath,$ORIGIN")


def cache_folder() -> Path:
    """The folder of built libraries."""
    return cache_root() / "emulator"


def builds() -> list[Path]:
    """The built libraries, for one build of torch each."""
    return [file.parent for file in cache_folder().glob(f"*/{DIGESTS}")]


def check_cache() -> None:
    """Raise UserError if no libraries are built, and the cache cannot take any."""
    if not builds():
        check_writable(VARIABLE, cache_folder(), _BUILT_BYTES)


def compiler() -> str:
    """The C compiler: CC, or cc. Raises UserError if there is none."""
    asked = os.environ.get("CC") or "cc"
    found = shutil.which(asked.split()[0])
    if found is None:
        raise UserError(
            f"no C compiler: {asked} is not found, and the emulated GPU's libraries are compiled at first use; "
            "install one (Debian: apt-get install gcc) or name it in CC"
        )
    return found


@functools.cache
def recipe() -> str:
    """A digest of these sources and the compiler. Raises UserError as `compiler`."""
    digest = hashlib.sha256(subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout)
    here = Path(__file__).parent
    for file in sorted([*C.iterdir(), here / "build.py"]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def build(packages: Sequence[Path], folder: Path) -> None:
    """Compile the libraries for these packages into `folder`, which appears when it is complete.

    Of processes that build at the same time, one wins. Raises UserError, with the compiler's message, on failure.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            _fill(packages, Path(temporary))
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise UserError(f"{VARIABLE}: cannot write {folder}: {why_unwritten(error, folder)}; choose another") from None


def _fill(packages: Sequence[Path], folder: Path) -> None:
    libraries = wanted(packages)
    for name in sorted(libraries, key=lambda name: name != "libcuda.so.1"):  # the others are linked to it
        _library(name, libraries[name], folder)
    _cc(folder, "-o", HOST, *(str(C / name) for name in HOST_SOURCES), "-ldl")
    built = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
    (folder / DIGESTS).write_text(json.dumps(built))


def _library(name: str, library: Library, folder: Path) -> None:
    stem = re.sub(r"\.so\..*", ".so", name)
    if stem not in MANNERS:
        raise UserError(f"the packages need {name}, which an emulated GPU does not have; it has {', '.join(MANNERS)}")
    by_hand = C / BY_HAND[stem] if stem in BY_HAND else None
    written = set() if by_hand is None else _functions(by_hand)
    generated = folder / f"{stem}.c"
    generated.write_text(sources(name, library.functions.keys() - written))
    script = folder / f"{stem}.map"
    script.write_text(_versions(library))
    linked = [] if stem == "libcuda.so" else ["-L.", "-Wl,--no-as-needed", "-l:libcuda.so.1"]
    parts = [str(generated), *([str(by_hand)] if by_hand else [])]
    _cc(folder, "-o", name, f"-Wl,-soname,{name}", f"-Wl,--version-script={script}", *parts, *linked, "-ldl")
    generated.unlink()
    script.unlink()


def _functions(source: Path) -> set[str]:
    """The public functions of a C file: they begin a line, and are not static."""
    return set(
        re.findall(r"^(?!static|typedef|struct \w+ \{)[\w ]+?\**(\w+)\([^;]*?\{", source.read_text(), re.MULTILINE)
    )


def _versions(library: Library) -> str:
    """A version script for the linker. Functions without a version get the last one."""
    versions = sorted({version for version in library.functions.values() if version})
    if not versions:
        return "{ global: *; };\n"
    named = {v: [name for name, version in library.functions.items() if version == v] for v in versions[:-1]}
    rest = "".join(f"{v} {{ global: {'; '.join(names)}; }};\n" for v, names in named.items())
    return rest + f"{versions[-1]} {{ global: *; }};\n"


def _cc(folder: Path, *arguments: str) -> None:
    own = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}
    command = [compiler(), *_FLAGS, *arguments]
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        for number in FULL:
            if os.strerror(number) in done.stderr:
                raise OSError(number, os.strerror(number))
        message = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise UserError(f"{compiler()} cannot build the emulated GPU's libraries: {message}")


def main(arguments: Sequence[str]) -> int:
    """`python -m bigdit.emulator.build FOLDER PACKAGE…`, which inside/libraries.py runs."""
    folder, *packages = map(Path, arguments)
    build(packages, folder)
    return 0


if __name__ == "__main__":
    from bigdit.errors import guard

    sys.exit(guard(lambda: main(sys.argv[1:])))
