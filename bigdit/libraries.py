"""What libraries are told in bigdit's own processes, before diffusers and transformers are imported there."""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import importlib.util
import logging
import os
import resource
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec

from bigdit.errors import UserError
from bigdit.units import gib

_ASKING = ("diffusers.utils.import_utils", "transformers.utils.import_utils")
_NOT_FOR_THEM = ("bitsandbytes", "peft", "scipy", "torchao")
"""Libraries that bigdit drives itself, or not at all. diffusers and transformers import what they find of them with any
model, for quantised checkpoints, adapters and losses of their own: four of eleven seconds, in every process."""
_NOT_FOR_MODELS = ("transformers",)
"""What diffusers imports with any model for its pipelines, which steps do without: a fifth of what is left."""
_NOT_FOR_LAUNCHES = "accelerate.utils.imports", "boto3"
"""accelerate, which diffusers imports with any model, imports Amazon's client for launches there where it is installed:
a sixteenth of the start."""
_FOR_PIPELINES = "transformers.utils.quantization_config"
"""What it imports whether it finds transformers or not, and does without where that fails (diffusers 0.42)."""
_NAMES_ASKED = "diffusers.utils.import_utils"
"""Reads the files of all installed packages for the names under which three are distributed that bigdit never drives
(optimum, flashinfer, modelopt), and by what code of a downloaded pipeline imports, which bigdit runs none of."""

_ADDRESS_SPACE = 2 << 30
"""Bytes that a process with torch, diffusers and DeepSpeed takes of it at least. libgomp ends one that has less, and
says nothing: a tiny training of two processes did not begin with 1.7 GiB, and one of one process ended with 1.9."""

_hidden: tuple[str, ...] = _NOT_FOR_THEM


def prepare() -> None:
    """Keep what concerns only the libraries' own developers from the user's screen, whose errors stay, and what only
    other uses of them need from being imported. Raises UserError where the address space is too small for them."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < _ADDRESS_SPACE:
        raise UserError(
            f"this process may have {gib(space)} of address space (ulimit -v), and torch with its libraries needs "
            f"{gib(_ADDRESS_SPACE)} or more; lift the limit: ulimit -v unlimited"
        )
    # torch's distributed checkpoint says that one process saves and loads for itself.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # bitsandbytes looks for optional CPU kernels of a package that it does not depend on.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # diffusers warns of tensors that are missing or left over, which models.load makes an error of. Both set their own
    # level when they are imported, by these.
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # transformers draws a bar for each model that it loads, of many lines in a file.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # diffusers speaks of its own renamed classes when PRXPipeline is made, and normalises queries in fp32 by weights in
    # bf16 (Krea 2, Kandinsky 5), of which torch says that no fused kernel does it.
    warnings.filterwarnings("ignore", message="`LoraLoaderMixin` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    # torchao names kernels that it cannot load here, and registers its enums as torch has come to do by itself.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # FSDP2 says of each model whose output is a view that writing into it would lose a hook: the step writes into none,
    # and no family into what its parts return (tests/models, `test_nothing_is_written_into_views_of_units`).
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    # matplotlib draws a frame for a letter that its font lacks, as captions above pictures may have.
    warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
    importlib.util.find_spec = _find_spec
    importlib.metadata.packages_distributions = _packages_distributions


@contextmanager
def models_alone() -> Iterator[None]:
    """`prepare`, for a process that imports diffusers within, and with it no encoders for pipelines, which others still
    may import later."""
    global _hidden
    prepare()
    _hidden = (*_NOT_FOR_THEM, *_NOT_FOR_MODELS)
    imported = _FOR_PIPELINES in sys.modules
    if not imported:
        sys.modules[_FOR_PIPELINES] = None  # type: ignore[assignment]  # an import of it fails, as the interpreter says
    try:
        yield
    finally:
        if not imported:
            del sys.modules[_FOR_PIPELINES]


@contextmanager
def importing() -> Iterator[None]:
    """What is imported within stays: collections of garbage, which would look through all of it time and again, a fifth
    of the time, wait, and later ones leave it out."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # or Triton, where it is installed, tells in forty lines of all that is frozen


@contextmanager
def switched_on(variable: str) -> Iterator[None]:
    """This variable is 1 for what is imported or started within."""
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
    """What is imported within runs as it is written, where it would have torch compile it: bitsandbytes does, whose
    import then takes a second less, and allocates as it is written.

    Source: `optimize` in torch/_dynamo/eval_frame.py, torch 2.13.
    """
    return switched_on("TORCHDYNAMO_DISABLE")


_every_spec = importlib.util.find_spec
_every_name = importlib.metadata.packages_distributions


def _find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    """Where a module lies, as these ask to know what is installed; the interpreter's own imports do not come by."""
    asking = sys._getframe(1).f_globals.get("__name__")
    if (name in _hidden and asking in _ASKING) or (asking, name) == _NOT_FOR_LAUNCHES:
        return None
    return _every_spec(name, package)


def _packages_distributions() -> Mapping[str, list[str]]:
    """Packages by the modules that they install; none where that is asked for nothing."""
    return {} if sys._getframe(1).f_globals.get("__name__") == _NAMES_ASKED else _every_name()
