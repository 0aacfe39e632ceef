"""Compiled blocks on an emulated GPU: torch's compiler makes their graphs and kernels as on a real one.

Machine code is not built: Triton would take a minute, and nothing would run it. A kernel is counted as a launch with
the bytes that Inductor expects it to move. Allocations do not depend on kernels.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import pickle
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import bytecode_transformation, package
from torch._dynamo.guards import CheckFunctionManager
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler

from bigdit.cache import digest_of
from bigdit.errors import UserError
from bigdit.files import read_bytes, replacing
from bigdit.profile.attempt import StepRequest
from bigdit.record.costs import Counting
from bigdit.strategy import OptimizerSpec

_UNTRACED = {
    **{"optimizer": OptimizerSpec(), "optimizer_in_backward": False, "gradient_clipping": None, "ema": None},
    **{"checkpointed_blocks": 0, "grad_accum_steps": 1, "repeated_samples": 0, "read_ahead_steps": 0},
}
"""Settings of a strategy that change nothing within a block."""
_SOURCES = ("models", "profile")
"""Of bigdit: traces depend on them."""
MOST_TRACES = 16
"""Of one function and size. Two strides of inputs, with a gradient and without, are four; some guards are never met."""


def without_machine_code() -> None:
    """Import torch's compiler, and keep this process from building machine code.

    Raises UserError if Triton is missing, since torch cannot compile for GPUs without it.
    """
    if find_spec("triton") is None:
        needed = next(
            (each.partition(";")[0] for each in requires("torch") or () if each.startswith("triton")), "triton"
        )
        raise UserError(f"compiled blocks need Triton: {sys.executable} -m pip install --no-deps '{needed}'")
    import torch._inductor.config
    from torch._inductor.async_compile import AsyncCompile

    importlib.import_module("torch._inductor.compile_fx")
    codecache = importlib.import_module("torch._inductor.codecache")
    codecache.torch_key()  # reads all of Inductor: here once, not in each fork
    # The same for Triton, which builds nothing here: its version is enough.
    vars(importlib.import_module("torch._inductor.runtime.triton_compat"))["triton_key"] = lambda: version("triton")
    codecache.CacheBase.get_system()
    digest_of(*_SOURCES)
    _mend_traces()
    torch._inductor.config.profile_bandwidth = True  # adds a kernel's bytes to its source
    # Else each attempt traces context parallelism again, as training does: torch does not trust that cache by default.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    AsyncCompile.triton = lambda self, name, source, **device: _Kernel(source)  # type: ignore[method-assign]
    importlib.import_module("torch._inductor.codegen.common").init_backend_registration()
    # For its debug log, Dynamo parses all files that it traces, and times guards: a tenth of an attempt.
    vars(importlib.import_module("torch._dynamo.symbolic_convert"))["get_funcname"] = lambda file, line: None
    vars(importlib.import_module("torch._dynamo.guards"))["profile_guard_manager"] = lambda root, values, times: 0.0
    # Dynamo's first call looks up a lot: here once, not in each fork, for a twelfth of an attempt. There is no backward
    # pass, since autograd's threads would not survive a fork.
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))
    torch._dynamo.reset()


def _mend_traces() -> None:
    """Mend what keeps torch from keeping the traces of some blocks, or from using them."""
    # A name that is new in each process is part of the key of AOTAutograd's graphs, which would be traced again.
    reduced = AOTAutogradCachePickler._reduce_aot_config
    AOTAutogradCachePickler._reduce_aot_config = lambda self, config: reduced(  # type: ignore[method-assign]
        self, replace(config, precompile_backend_id=None)
    )
    # Traces need AOTAutograd's graphs with their code. Runs without traces share them.
    for each in ("autograd_cache", "graph_compile"):
        vars(importlib.import_module(f"torch._functorch._aot_autograd.{each}"))["should_bundle_autograd_cache"] = (
            lambda: True
        )
    serialized = CheckFunctionManager.serialize_guards

    def serialize(self: Any, builder: Any, guards: Any, graph: Any) -> bytes:
        try:
            state = serialized(self, builder, guards, graph)
            package.load_guards_state(state)
        except Exception:  # torch cannot read what it writes of quantised weights
            graph.bypass_package()  # else it fails
            return b""
        return state

    CheckFunctionManager.serialize_guards = serialize  # type: ignore[method-assign]
    # Guards that were left out once need not be looked for again.
    once = torch._dynamo.config.patch(caching_precompile=False)
    package.CompilePackage.install = once(package.CompilePackage.install)  # type: ignore[method-assign]


@contextmanager
def kept_traces(request: StepRequest) -> Iterator[None]:
    """Within it, Dynamo takes the traces that earlier steps left beside Inductor's code, of the same blocks and sizes.
    What it traces anew is kept at the end.

    Tracing takes two thirds of an attempt whose code is kept. This process compiles nothing else afterwards.
    """
    strategy = request.strategy.model_copy(update=_UNTRACED)
    asked = request.model_copy(update={"strategy": strategy}).model_dump_json()
    of_here = f"{torch.__version__} {torch.cuda.get_device_name()} {digest_of(*_SOURCES)}"
    traces = _Traces(hashlib.sha256(f"{asked} {of_here}".encode()).hexdigest()[:32])
    vars(package)["DynamoCache"] = traces
    torch._dynamo.config.caching_precompile = True
    yield
    with suppress(UserError):  # Inductor reports a folder that cannot be written
        traces.keep()


class _Traces(package.DiskDynamoStore):
    """Traces of blocks of one size, in a file for each function.

    Torch checks their source code, and their guards: sizes, strides, types and numbers. It cannot keep guards by
    identity, such as of functions; `name` stands for them.
    """

    def __init__(self, name: str) -> None:
        super().__init__(str(Path(package.cache_dir(), "traces", name)))
        self._new: dict[str, package.CompilePackage] = {}

    def load(self, fn: Callable[..., Any]) -> package.PrecompileCacheEntry | None:
        """The traces of a function. None if they are missing or damaged: it is traced again."""
        with suppress(Exception):
            found = self.read(package.CompilePackage.source_id_from_fn(fn))
            # Names that torch numbers must differ from those in other processes' traces.
            bytecode_transformation._unique_id_counter = itertools.count(time.time_ns())
            return found if sum(len(code.guarded_codes) for code in found.dynamo.codes) < MOST_TRACES else None
        return None

    def record_package(self, package: package.CompilePackage) -> None:
        """Collect all traces of a function, one of which is new."""
        if not any(each.bypassed for each in package._codes.values()):
            self._new[package.source_id] = package

    def keep(self) -> None:
        """Write the functions with new traces. Raises UserError if a file cannot be written."""
        for key, traced in self._new.items():
            with suppress(Exception):  # it is new
                self.load_cache_entry(key)  # registers the code of earlier traces
            self.save_cache_entry(traced.cache_entry(), key)

    def write(self, cache_entry: package.PrecompileCacheEntry, path: str) -> None:
        packed = zlib.compress(pickle.dumps(cache_entry), 1)
        with replacing(Path(self.path_prefix(), path)) as file:
            file.write_bytes(hashlib.sha256(packed).digest() + packed)

    def read(self, path: str) -> package.PrecompileCacheEntry:
        data = read_bytes(Path(self.path_prefix(), path))
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise ValueError(f"{path} was changed")
        found: package.PrecompileCacheEntry = pickle.loads(zlib.decompress(data[32:]))
        return found


class _Kernel:
    """A Triton kernel in Inductor's code, which launches it by `run`."""

    def __init__(self, source: str) -> None:
        moved = re.search(r"'kernel_num_gb': ([\d.e+-]+)", source)
        self._nbytes = round(float(moved[1]) * 1e9) if moved else None  # None for kernels over lists of tensors
        named = re.search(r"^def \w+\((.*?)\):", source, re.MULTILINE)
        names = named[1].split(", ") if named else []
        self._written = [place for place, name in enumerate(names) if name.startswith(("out_ptr", "in_out_ptr"))]
        self._launch = importlib.import_module("bigdit_emulated.libraries").library("libcuda").cuLaunchKernel
        self._unknown = importlib.import_module("bigdit_emulated.values").unknown

    def run(self, *args: Any, **where: Any) -> None:
        self._launch(None, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        self._unknown([args[place] for place in self._written])
        for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            if isinstance(mode, Counting):
                mode.count_kernel([each for each in args if isinstance(each, torch.Tensor)], self._nbytes)
