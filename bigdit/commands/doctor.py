"""`bigdit doctor`: what this machine can run, what is missing, and the fix."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Annotated

import typer

from bigdit import log
from bigdit.errors import UserError, versions
from bigdit.units import gib

# The bounds of setup.cfg's `torch>=2.11,<2.16`, as first and last minor release, and what the tests ran with.
TORCH_FIRST, TORCH_LAST, TORCH_TESTED = (2, 11), (2, 15), "2.13.0+cpu"

# What each engine needs.
IMPORTS = {
    "single": "import torch",
    "ddp": "from torch.distributed import all_reduce",
    "fsdp2": "from torch.distributed.fsdp import fully_shard",
    "deepspeed": "from deepspeed import initialize",
}


@dataclass(frozen=True)
class Device:
    """A CUDA GPU that torch sees; `catalog` is its name for `--gpu`, None for a GPU not in the catalogue."""

    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    catalog: str | None


@dataclass(frozen=True)
class FoundEngine:
    """An engine; `found`: what was found, or why it cannot run here."""

    name: str
    usable: bool
    found: str


@dataclass(frozen=True)
class EmulatedGpu:
    """What emulated GPUs need. None for what is missing.

    `python` has the CUDA build of torch. `compiler` builds libraries into `cache` at first use; `builds`: how many.
    """

    torch: str | None
    python: str | None
    compiler: str | None
    cache: str
    builds: int


@dataclass
class Health:
    """What was found; `fixes`: a line for each thing that is missing."""

    versions: dict[str, str]
    cores: int
    ram_bytes: int
    devices: list[Device] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    engines: list[FoundEngine] = field(default_factory=list)
    compiler: str | None = None
    emulated: EmulatedGpu | None = None
    fixes: list[str] = field(default_factory=list)


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Report versions, GPUs, memory, engines, compilers and emulated GPUs, with the fix for what is missing."""
    health = examine()
    if as_json:
        log.emit_json(asdict(health))
    else:
        _print(health)
    if not any(engine.usable for engine in health.engines):
        raise UserError("no engine is usable on this machine", *health.fixes)


def examine() -> Health:
    """Look at this machine: versions, cores, RAM, GPUs, collective backends, engines, compilers, emulated GPUs."""
    from bigdit import __version__
    from bigdit.machine import memory_bytes

    health = Health(
        versions=versions() | {"bigdit": __version__},
        cores=len(os.sched_getaffinity(0)),
        ram_bytes=memory_bytes(),
    )
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")  # for what DeepSpeed builds when it is needed
    health.compiler = next((path for name in compilers if name and (path := shutil.which(name))), None)
    _check_versions(health)
    with ThreadPoolExecutor() as pool:
        errors = dict(zip(IMPORTS, pool.map(_import_error, IMPORTS.values()), strict=True))
    if errors["single"] is None:
        _look_at_torch(health)
    _look_at_engines(health, errors)
    _look_at_emulated_gpus(health)
    return health


def _check_versions(health: Health) -> None:
    for name, version in health.versions.items():
        if version == "missing":
            health.fixes.append(f"{name} is not installed: pip install {name}")
    torch = health.versions["torch"]
    if torch != "missing" and not torch_supported(torch):
        health.fixes.append(f"torch {torch} is not supported, {_range()} is: pip install 'torch>=2.11,<2.16'")


def _range() -> str:
    return "{}.{} to {}.{}".format(*TORCH_FIRST, *TORCH_LAST)


def torch_supported(version: str) -> bool:
    """Whether a torch version such as `2.13.0+cu130` lies within the supported range."""
    major, minor = version.split("+")[0].split(".")[:2]
    return TORCH_FIRST <= (int(major), int(minor)) <= TORCH_LAST


def _look_at_torch(health: Health) -> None:
    import torch
    from torch import distributed

    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        health.devices.append(Device(name, f"{major}.{minor}", total, free, _in_catalog(name, total)))
    if not health.devices and shutil.which("nvidia-smi"):
        health.fixes.append(
            f"nvidia-smi is installed, but torch {torch.__version__} sees no CUDA GPU: install a CUDA build of torch"
        )
    if distributed.is_available():
        here = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
        health.backends = [name for name, available in here.items() if available]
    if health.devices and "nccl" not in health.backends:
        health.fixes.append("torch has no NCCL, which several GPUs need: install a CUDA build of torch")


def _in_catalog(name: str, total_bytes: int) -> str | None:
    """The catalogue's name of the GPU with this driver name and about this memory."""
    from bigdit.catalog.gpus import named

    return next((c.name for c in named(name) if abs(c.usable_bytes - total_bytes) < 0.05 * total_bytes), None)


def _look_at_engines(health: Health, errors: dict[str, str | None]) -> None:
    over = f"over {' and '.join(health.backends)}" if health.backends else "but torch has no gloo and no nccl"
    for name, error in errors.items():
        usable = error is None and (name == "single" or bool(health.backends))
        health.engines.append(
            FoundEngine(name, usable, error or f"imports; {'one process' if name == 'single' else over}")
        )
    if errors["single"] is None and not health.backends:
        health.fixes.append("torch.distributed has neither gloo nor nccl: install a build of torch that has one")
    if errors["single"] is not None and find_spec("torch") is not None:
        health.fixes.append(f"torch does not import ({errors['single']}): reinstall torch")
    if find_spec("deepspeed") is None:
        return
    if errors["deepspeed"] is not None:
        health.fixes.append(f"deepspeed does not import ({errors['deepspeed']}): reinstall deepspeed for this torch")
    if health.compiler is None:
        health.fixes.append(
            "no C++ compiler was found (CXX, c++, g++, clang++): DeepSpeed compiles ops at first use; install one, "
            "such as Debian's g++"
        )
    if shutil.which("ninja") is None and find_spec("ninja") is None:
        health.fixes.append("DeepSpeed's builds need ninja, which is not installed: pip install ninja")


def _look_at_emulated_gpus(health: Health) -> None:
    from bigdit.emulator import build, interpreter

    compiler = python = torch = None
    with suppress(UserError):
        compiler = build.compiler()
    with _fixes(health):
        interpreter.check_machine()
    with _fixes(health):
        found = interpreter.needed_python()
        torch, python = interpreter.cuda_build(found), str(found)
    health.emulated = EmulatedGpu(torch, python, compiler, str(build.cache_folder()), len(build.builds()))


@contextmanager
def _fixes(health: Health) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        health.fixes.extend(error.problems)


def _import_error(code: str) -> str | None:
    """The last line of the error that the import in `code` raises; None if it succeeds.

    It runs in its own process, because an import can be slow, print, set up logging or crash.
    """
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return f"{code!r} took more than 120 s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _print(health: Health) -> None:
    from rich.markup import escape

    from bigdit.report.tables import cell, table

    machine = table("This machine", ("what", "found"))
    for name, version in health.versions.items():
        supported = f" (supported: {_range()}; tested with {TORCH_TESTED})" if name == "torch" else ""
        machine.add_row(name, version + supported)
    machine.add_row("cores", str(health.cores))
    machine.add_row("RAM", gib(health.ram_bytes))
    machine.add_row("collectives", ", ".join(health.backends) or "none")
    machine.add_row("C++ compiler", cell(health.compiler))
    if not health.devices:
        machine.add_row("GPUs", "torch sees none: CPU only (plans need no GPU)")
    log.out.print(machine)
    if health.devices:
        gpus = table("GPUs", ("GPU", "sm", "memory", "free", "catalogue"), numeric=("sm", "memory", "free"))
        for d in health.devices:
            sizes = gib(d.total_bytes), gib(d.free_bytes)
            gpus.add_row(escape(d.name), d.compute_capability, *sizes, cell(d.catalog))
        log.out.print(gpus)
    engines = table("Engines", ("engine", "usable", "found"))
    for engine in health.engines:
        engines.add_row(engine.name, cell(engine.usable), escape(engine.found))
    log.out.print(engines)
    if health.emulated is not None:
        _print_emulated(health.emulated)
    for fix in health.fixes:
        log.out.print(f"fix: {fix}", soft_wrap=True, highlight=False, markup=False)
    if not health.fixes:
        log.out.print("nothing is missing")


def _print_emulated(gpu: EmulatedGpu) -> None:
    from rich.markup import escape

    from bigdit.report.tables import cell, table

    built = table("Emulated GPUs", ("what", "found"))
    built.add_row("torch", cell(gpu.torch))
    built.add_row("interpreter", cell(gpu.python and escape(gpu.python)))
    built.add_row("C compiler", cell(gpu.compiler and escape(gpu.compiler)))
    known = f"{gpu.builds} built" if gpu.builds else "built at first use"
    built.add_row("libraries", escape(f"{known}, in {gpu.cache}"))
    log.out.print(built)
