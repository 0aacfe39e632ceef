"""Loads the stub libraries before torch loads the real ones, and reads their counters."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

OTHERS = ("bitsandbytes", "torchao", "torchvision", "torchaudio", "xformers", "flash_attn")
"""Other packages whose libraries need functions of CUDA."""

loaded: dict[str, ctypes.CDLL] = {}
"""Libraries by file name; empty until torch is imported."""


class NoGpu(Exception):
    """Why this process cannot have an emulated GPU; one line for the user."""


def before_torch(torch_folder: str) -> None:
    """Load the stub libraries; build them first if they are not in the cache.

    The dynamic linker prefers a library that is already loaded to any path. So these replace NVIDIA's own wherever they
    lie. (torch's DT_RPATH would win over LD_LIBRARY_PATH.)

    Raises NoGpu for a torch without CUDA, and if the libraries cannot be built.
    """
    torch = Path(torch_folder)
    _check_cuda(torch)
    packages = [torch, *_installed(OTHERS)]
    folder = Path(os.environ["BIGDIT_EMULATED_CACHE"]) / _key(packages)
    if folder.is_dir() and not _whole(folder):
        print(f"emulated GPU: {folder} is damaged, and is built again", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.is_dir():
        _build(packages, folder)
    for name in sorted(_digests(folder), key=lambda name: name != "libcuda.so.1"):  # the others are linked to it
        loaded[name] = ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    _keep_nvidia_out()


def library(stem: str) -> ctypes.CDLL:
    """The loaded library with a name such as `libcudart`. Raises StopIteration before torch is imported."""
    return next(found for name, found in loaded.items() if name.startswith(stem + ".so"))


def limit(nbytes: int, *, final: bool = False) -> None:
    """Limit this process to `nbytes` of its GPU besides the context and NCCL's buffers, instead of the GPU's memory.

    It is like a GPU of this size. torch's own limit, `set_per_process_memory_fraction`, counts whole blocks in pages
    that an expandable segment has already, and frees caches too early. With `final`, after the first refusal every
    allocation is refused: torch runs out of memory instead of freeing caches.
    """
    library("libcuda").gpu_limit(ctypes.c_size_t(nbytes), final)


def install(torch: Any) -> None:
    """After torch's import, restore ctypes."""
    ctypes.CDLL = _real  # type: ignore[misc]


_real = ctypes.CDLL


def _keep_nvidia_out() -> None:
    """Keep torch's import from loading NVIDIA's libraries by path, if their packages are installed."""

    def stub(name: object, *args: Any, **kwargs: Any) -> ctypes.CDLL:
        if "/nvidia/" in str(name):
            raise OSError(f"{name} is not loaded in an emulated process")
        return _real(name, *args, **kwargs)  # type: ignore[arg-type]

    ctypes.CDLL = stub  # type: ignore[assignment, misc]


def _check_cuda(torch: Path) -> None:
    text = (torch / "version.py").read_text()
    found: dict[str, str] = dict(re.findall(r"^(\w+)[^=\n]*= '([^']*)'", text, re.MULTILINE))
    if "cuda" not in found:
        version = found.get("__version__", "?")
        plain = version.partition("+")[0]
        raise NoGpu(
            f"torch {version} in {torch.parent} has no CUDA, and an emulated GPU runs CUDA's own code: run "
            "`bigdit setup` and start the command with the python that it names, or pip install "
            f"'torch==={plain}' (three equals signs: the CUDA build; it needs no GPU, and with --no-deps none of "
            "NVIDIA's packages)"
        )


def _installed(names: tuple[str, ...]) -> list[Path]:
    found = []
    for name in names:
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found.append(Path(next(iter(spec.submodule_search_locations))))
    return found


def _key(packages: list[Path]) -> str:
    """A digest of the build: of the recipe, and of sizes and times of the packages' files."""
    digest = hashlib.sha256(os.environ["BIGDIT_EMULATED_RECIPE"].encode())
    for package in packages:
        for file in sorted([*package.glob("*.so"), *package.glob("lib/*.so")]):
            stat = file.stat()
            digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _digests(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / "digests.json").read_text()))


def _whole(folder: Path) -> bool:
    """Whether all libraries exist and are undamaged."""
    try:
        found = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in _digests(folder)}
        return found == _digests(folder) and "libcuda.so.1" in found
    except (OSError, ValueError):
        return False


def _build(packages: list[Path], folder: Path) -> None:
    own = {"PYTHONPATH", "PYTHONHOME", "LD_PRELOAD"}
    environment = {key: value for key, value in os.environ.items() if key not in own and "EMULATED" not in key}
    environment["PYTHONPATH"] = os.environ["BIGDIT_EMULATED_HOME"]
    command = [os.environ["BIGDIT_EMULATED_BUILDER"], "-W", "ignore", "-P", "-m", "bigdit.emulator.build"]
    command += [str(folder), *map(str, packages)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().removeprefix("error: ")
        raise NoGpu(why or f"building the emulated GPU's libraries ended with {done.returncode}")


NAMES = (
    "launches",
    "copies_to_device",
    "copies_to_host",
    "copies_on_device",
    "host_syncs",
    "bytes_to_device",
    "bytes_to_host",
    "bytes_on_device",
    "library_calls",
    "fills",
    "copies_between",
    "bytes_between",
    "all_reduces",
    "all_gathers",
    "reduce_scatters",
    "broadcasts",
    "reduces",
    "sends",
    "receives",
)
"""The fields of gpu_counts, in gpu.h."""

by_step: list[dict[str, int]] = []
"""The counts of each of the first steps."""

_MOST_STEPS = 1000
_last: dict[str, int] = {}


def read_counts() -> dict[str, int]:
    """Launched kernels, copies by direction with their bytes, waits for the GPU, calls of cuBLAS and cuDNN that launch,
    and NCCL's collectives by kind."""
    counted = library("libcuda").gpu_counted
    counted.restype = ctypes.POINTER(ctypes.c_uint64 * len(NAMES))
    return dict(zip(NAMES, counted().contents, strict=True))


def kernels() -> dict[str, int]:
    """How often each kernel was launched through the runtime, by mangled name."""
    found: dict[str, int] = {}
    tell = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint64)
    library("libcudart").gpu_kernels(tell(lambda name, times: found.update({name.decode(): times})))
    return found


def refused() -> list[str]:
    """The called library functions that are not supported."""
    ask = library("libcuda").gpu_refused
    ask.restype = ctypes.c_char_p
    found: list[str] = []
    while (name := ask(len(found))) is not None:
        found.append(name.decode())
    return found


def sample_counts() -> None:
    """Add the counts since the last step to `by_step`."""
    global _last
    now = read_counts()
    if len(by_step) < _MOST_STEPS:
        by_step.append({name: count - _last.get(name, 0) for name, count in now.items()})
    _last = now


def forget() -> None:
    global _last
    _last = {}
    by_step.clear()
