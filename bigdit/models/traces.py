"""Dynamo's traces of compiled blocks, kept on disk: tracing a block again takes most of an attempt of known code.

torch.compile keeps kernels and AOTAutograd's graphs by itself. This adds the traces that lead to them, by torch's own
packages for precompilation, with one file for each function and size. The files are pickles, as Inductor's are. They
lie in the same folder of the cache, from which Inductor runs code.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import bytecode_transformation, package
from torch._dynamo.guards import CheckFunctionManager
from torch._functorch._aot_autograd import autograd_cache, graph_compile

from bigdit.cache import digest_of, installed
from bigdit.errors import UserError
from bigdit.files import read_bytes, replacing
from bigdit.strategy import OptimizerSpec, Strategy

_UNTRACED = {
    **{"optimizer": OptimizerSpec(), "optimizer_in_backward": False, "gradient_clipping": None, "ema": None},
    **{"checkpointed_blocks": 0, "grad_accum_steps": 1, "repeated_samples": 0, "read_ahead_steps": 0},
}
"""Settings of a strategy that change nothing within a block."""
_SOURCES = ("models", "profile")
"""Of bigdit: traces depend on them."""
MOST_TRACES = 16
"""Of one function and size. Two strides of inputs, with a gradient and without, are four; some guards are never met."""


@functools.cache
def _here() -> str:
    """What traces depend on in this process, and torch does not check."""
    return f"{torch.cuda.get_device_name()} {installed()} {digest_of(*_SOURCES)}"


def mend_traces() -> None:
    """Mend what keeps torch from keeping the traces of some blocks, or from using them. `kept_traces` needs it."""
    _here()  # here once, not in each fork
    # A name that is new in each process is part of the key of AOTAutograd's graphs, which would be traced again.
    pickler = autograd_cache.AOTAutogradCachePickler
    reduced = pickler._reduce_aot_config
    pickler._reduce_aot_config = lambda self, config: reduced(  # type: ignore[method-assign]
        self, replace(config, precompile_backend_id=None)
    )
    # Traces need AOTAutograd's graphs with their code, and runs without traces share them. Graphs that Inductor has no
    # code of are left out.
    vars(autograd_cache)["should_bundle_autograd_cache"] = lambda: True
    vars(graph_compile)["should_bundle_autograd_cache"] = lambda: False
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
def kept_traces(strategy: Strategy, others: str) -> Iterator[None]:
    """Within it, Dynamo takes the traces that earlier steps left beside Inductor's code, of the same blocks and sizes.
    New traces are cached at its end. `others`: model and sizes, which traces depend on too.

    Tracing takes two thirds of an attempt whose code is kept. This process compiles nothing else afterwards.
    """
    asked = strategy.model_copy(update=_UNTRACED).model_dump_json()
    traces = _Traces(hashlib.sha256(f"{asked} {others} {_here()}".encode()).hexdigest()[:32])
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

    def record_package(self, traced: package.CompilePackage) -> None:  # type: ignore[override]
        """Collect all traces of a function, one of which is new."""
        if not any(each.bypassed for each in traced._codes.values()):
            self._new[traced.source_id] = traced

    def keep(self) -> None:
        """Write the functions with new traces. Raises UserError if a file cannot be written."""
        for key, traced in self._new.items():
            with suppress(Exception):  # it is new
                self.load_cache_entry(key)  # registers the code of earlier traces
            with suppress(RuntimeError):  # a graph without code of Inductor
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
