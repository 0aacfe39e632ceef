"""Compiled blocks on an emulated GPU: torch's compiler makes their graphs and kernels as on a real one.

Machine code is not built: Triton would take a minute, and nothing would run it. A kernel is counted as a launch with
the bytes that Inductor expects it to move. Allocations do not depend on kernels.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import requires, version
from importlib.util import find_spec
from typing import Any

import torch

from bigdit.errors import UserError
from bigdit.models.traces import mend_traces
from bigdit.record.costs import Counting


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

    for each in ("compile_fx", "codegen.memory_planning"):  # the latter is imported by the code that it makes
        importlib.import_module(f"torch._inductor.{each}")
    codecache = importlib.import_module("torch._inductor.codecache")
    codecache.torch_key()  # reads all of Inductor: here once, not in each fork
    # The same for Triton, which builds nothing here: its version is enough.
    vars(importlib.import_module("torch._inductor.runtime.triton_compat"))["triton_key"] = lambda: version("triton")
    codecache.CacheBase.get_system()
    mend_traces()
    torch._inductor.config.profile_bandwidth = True  # adds a kernel's bytes to its source
    # Else each attempt traces context parallelism again, as training does: torch does not trust that cache by default.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    AsyncCompile.triton = lambda self, name, source, **device: _Kernel(source)  # type: ignore[method-assign]
    importlib.import_module("torch._inductor.codegen.common").init_backend_registration()
    torch.utils._triton.triton_hash_with_backend()  # here once, not in each fork
    # For logs, Dynamo parses the files that it traces, and times and explains guards. It shortens their code too. All
    # this is a sixth of an attempt.
    vars(importlib.import_module("torch._dynamo.symbolic_convert"))["get_funcname"] = lambda file, line: None
    guards = vars(importlib.import_module("torch._dynamo.guards"))
    guards["profile_guard_manager"] = lambda root, values, times: 0.0
    guards["get_verbose_code_part"] = lambda code, guard: code
    guards["PyExprCSEPass"].count = lambda self, codes: None
    guards["PyExprCSEPass"].replace = lambda self, code: ([], code)
    # Dynamo's first call looks up a lot: here once, not in each fork, for a twelfth of an attempt. There is no backward
    # pass, since autograd's threads would not survive a fork.
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))
    torch._dynamo.reset()


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
