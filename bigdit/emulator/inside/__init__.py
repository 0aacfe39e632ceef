"""Runs inside every python process of an emulated script, in any environment, as the package `bigdit_emulated`.

It imports only the standard library, and torch if the script does. bigdit may be missing there. bigdit's own processes
import only parts that need no emulation (`replay`, `sparse`).
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from typing import Any


def start() -> None:
    """Provide the GPU, and begin to observe if the parent asks for accounts. Called once, before the script."""
    import sys

    from . import imports, parent

    sys.meta_path.insert(0, imports.Finder())
    imports.before("torch", _before_torch)
    imports.after("torch", _after_torch)
    if parent.OUT:
        from . import account, ending, history, libraries, notices, steps

        observers = (account, history, libraries, notices, steps)
        ending.install(account.write, [observer.forget for observer in observers])
        parent.write_stack_on_signal()


def _before_torch(spec: ModuleSpec) -> None:
    """Load the stub libraries before torch looks for CUDA's."""
    from . import ending, libraries

    if spec.submodule_search_locations:
        try:
            libraries.before_torch(next(iter(spec.submodule_search_locations)))
        except libraries.NoGpu as why:
            ending.refuse(str(why))


def _after_torch(torch: Any) -> None:
    from . import account, compiling, engines, history, host, libraries, parent, sparse, steps, values

    libraries.install(torch)
    for part in (host, values, sparse, compiling):
        part.install(torch)
    if parent.OUT:
        for observer in (history, account, steps, engines):
            observer.install(torch)
