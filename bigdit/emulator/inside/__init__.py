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

    from . import imports, options

    sys.meta_path.insert(0, imports.Finder())
    imports.before("torch", _before_torch)
    imports.after("torch", _after_torch)
    if options.OUT:
        from . import account, counts, deepspeed_engine, ending, history, notices, ooms, phases, steps

        observers = (history, notices, ooms, phases, steps, counts)
        ending.install(account.write, [observer.forget for observer in observers])
        deepspeed_engine.install()


def _before_torch(spec: ModuleSpec) -> None:
    """The stub libraries, before torch asks for CUDA's."""
    from . import ending, libraries

    if spec.submodule_search_locations:
        try:
            libraries.before_torch(next(iter(spec.submodule_search_locations)))
        except libraries.NoCard as why:
            ending.refuse(str(why))


def _after_torch(torch: Any) -> None:
    from . import history, host, libraries, loads, loss_scaler, ooms, options, phases, saves, steps, values

    libraries.install(torch)
    for part in (host, values, saves, loads):
        part.install(torch)
    if options.OUT:
        for observer in (history, ooms, phases, steps, loss_scaler):
            observer.install(torch)
