"""What runs inside every python process of an emulated script, whatever environment that is of.

The standard library, and torch where the script imports it; nothing of bigdit, which is not there. Never imported
by bigdit's own processes, but for the parts that only compute (`replay`).
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from typing import Any


def start() -> None:
    """Put the card in, and begin to observe where the parent wants to know: called once, before the script."""
    import sys

    from . import imports, parent

    sys.meta_path.insert(0, imports.Finder())
    imports.before("torch", _before_torch)
    imports.after("torch", _after_torch)
    if parent.OUT:
        from . import account, ending, history, libraries, notices, steps

        observers = (account, history, libraries, notices, steps)
        ending.install(account.write, [observer.forget for observer in observers])


def _before_torch(spec: ModuleSpec) -> None:
    """The stub libraries, before torch asks for CUDA's."""
    from . import ending, libraries

    if spec.submodule_search_locations:
        try:
            libraries.before_torch(next(iter(spec.submodule_search_locations)))
        except libraries.NoCard as why:
            ending.refuse(str(why))


def _after_torch(torch: Any) -> None:
    from . import account, engines, history, host, libraries, parent, sparse, steps, values

    libraries.install(torch)
    for part in (host, values, sparse):
        part.install(torch)
    if parent.OUT:
        for observer in (history, account, steps, engines):
            observer.install(torch)
