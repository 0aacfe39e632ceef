"""Libraries: their tested versions, and settings before diffusers and transformers are imported."""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import importlib.util
import logging
import os
import re
import resource
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from bigdit.errors import UserError
from bigdit.units import gib

TESTED_WITH: Mapping[str, tuple[str, str]] = {
    "torch": ("2.11.0", "2.15.0"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "diffusers": ("0.42.1", "0.42.1"),
    "bitsandbytes": ("0.50.2", "0.50.2"),
    "torchao": ("0.18.0", "0.18.0"),
    "prodigyopt": ("1.1.2", "1.1.2"),
    "schedulefree": ("1.4.1", "1.4.1"),
}
"""The first and the last version with which tests run steps on emulated GPUs. Torch 2.13 is used in all of them."""

_IMPORT_CHECKS = ("diffusers.utils.import_utils", "transformers.utils.import_utils")
_UNNEEDED = ("bitsandbytes", "peft", "scipy", "torchao")
"""Libraries that diffusers and transformers would import with any model, for quantised checkpoints, adapters and
losses: four of eleven seconds in every process. bigdit imports them itself if it needs them."""
_UNNEEDED_BY_MODELS = ("transformers",)
"""diffusers imports it for pipelines, which steps do not need: a fifth of the remaining time."""
_UNNEEDED_BY_ONE = {("accelerate.utils.imports", "boto3"), ("peft.import_utils", "torchao")}
"""accelerate, which diffusers imports with any model, imports Amazon's client if it is installed: a sixteenth of the
start. peft imports torchao for weights that torchao quantised, which bigdit does not have: a tenth."""
_FOR_PIPELINES = "transformers.utils.quantization_config"
"""diffusers 0.42 tries to import it even without transformers, and works if that fails."""
_LISTS_PACKAGES = "diffusers.utils.import_utils"
"""This module reads the files of all installed packages to find three that bigdit never uses (optimum, flashinfer,
modelopt), and code of downloaded pipelines, which bigdit never runs."""

_ADDRESS_SPACE = 2 << 30
"""The least address space of a process with torch, diffusers and DeepSpeed. With less, libgomp ends the process without
a message: with 1.7 GiB a tiny training of two processes did not start, and with 1.9 GiB one of one process ended."""

_hidden: tuple[str, ...] = _UNNEEDED


def untested(versions: Mapping[str, str], unused: Collection[str]) -> list[str]:
    """A line for each library outside the versions of TESTED_WITH, without those that are `unused`."""
    return [
        f"{name} {versions[name]} is outside the versions that bigdit was tested with "
        f"({first if first == last else f'{first} to {last}'})"
        for name, (first, last) in TESTED_WITH.items()
        if name not in unused and not _numbers(first) <= _numbers(versions.get(name, "")) <= _numbers(last)
    ]


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def prepare() -> None:
    """Silence libraries' warnings for their developers, and skip imports that bigdit does not need. Raises UserError if
    the address space is too small."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < _ADDRESS_SPACE:
        raise UserError(
            f"this process may have {gib(space)} of address space (ulimit -v), and torch with its libraries needs "
            f"{gib(_ADDRESS_SPACE)} or more; lift the limit: ulimit -v unlimited"
        )
    # torch's distributed checkpoint warns that a single process saves and loads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # bitsandbytes looks for optional CPU kernels of a package that it does not depend on.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # diffusers warns of missing and unexpected tensors, for which models.load raises an error. Both libraries read
    # these variables when they are imported.
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # transformers shows a progress bar for each model that it loads: many lines in a file.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # diffusers warns of its own renamed classes in PRXPipeline. It normalises fp32 queries with bf16 weights (Krea 2,
    # Kandinsky 5): torch warns that there is no fused kernel for that.
    warnings.filterwarnings("ignore", message="`LoraLoaderMixin` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="`FluxPosEmbed` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    # torchao logs kernels that it cannot load here, and registers enums that newer torch registers itself.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # diffusers gathers with a deprecated name of torch.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"diffusers\.hooks\.context_parallel")
    # FSDP2 warns that writing into an output that is a view would lose a hook. Neither the step nor any family writes
    # into one (tests/models, `test_nothing_is_written_into_views_of_units`).
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    # Captions may have letters that matplotlib's font lacks.
    warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
    importlib.util.find_spec = _find_spec
    importlib.metadata.packages_distributions = _packages_distributions


@contextmanager
def models_alone() -> Iterator[None]:
    """`prepare`, and import diffusers inside without transformers, which may be imported later."""
    global _hidden
    prepare()
    _hidden = (*_UNNEEDED, *_UNNEEDED_BY_MODELS)
    imported = _FOR_PIPELINES in sys.modules
    if not imported:
        sys.modules[_FOR_PIPELINES] = None  # type: ignore[assignment]  # its import fails
    try:
        yield
    finally:
        if not imported:
            del sys.modules[_FOR_PIPELINES]


@contextmanager
def without_transformers() -> Iterator[None]:
    """Import peft inside without transformers, which takes four fifths of its time and may be imported later."""
    if "transformers" in sys.modules:
        yield
        return
    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        yield
    finally:
        sys.meta_path.remove(absent)
        for name in [name for name in sys.modules if absent.find_spec(name)]:
            del sys.modules[name]  # peft keeps its references


class _Absent(MetaPathFinder, Loader):
    """Stands for transformers and its modules. Each name in them is an empty class."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "transformers" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = importlib.metadata.version("transformers")


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found: type = self.__dict__.setdefault(name, type(name, (), {}))
        return found


@contextmanager
def importing() -> Iterator[None]:
    """Import inside without garbage collections, a fifth of the time; later collections skip what was imported."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else Triton prints forty lines about frozen objects


@contextmanager
def switched_on(variable: str) -> Iterator[None]:
    """Set this environment variable to 1 inside."""
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def uncompiled() -> AbstractContextManager[None]:
    """Import inside without torch.compile, which bitsandbytes uses. This saves a second, and allocations stay as
    written.

    Source: `optimize` in torch/_dynamo/eval_frame.py, torch 2.13.
    """
    return switched_on("TORCHDYNAMO_DISABLE")


_every_spec = importlib.util.find_spec
_every_name = importlib.metadata.packages_distributions


def _find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    """The spec of a module; None hides it from a library that checks what is installed. Imports do not use this."""
    caller = sys._getframe(1).f_globals.get("__name__")
    if (name in _hidden and caller in _IMPORT_CHECKS) or (caller, name) in _UNNEEDED_BY_ONE:
        return None
    return _every_spec(name, package)


def _packages_distributions() -> Mapping[str, list[str]]:
    """Packages by the modules that they install; empty for the module that does not need them."""
    return {} if sys._getframe(1).f_globals.get("__name__") == _LISTS_PACKAGES else _every_name()
