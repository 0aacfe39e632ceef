"""Calls functions before and after the script imports a module, and replaces functions of modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_before: dict[str, list[Callable[[ModuleSpec], None]]] = {}
_after: dict[str, list[Callable[[ModuleType], None]]] = {}


def before(name: str, do: Callable[[ModuleSpec], None]) -> None:
    """Call `do` with the module's spec just before its code is executed."""
    _before.setdefault(name, []).append(do)


def after(name: str, do: Callable[[Any], None]) -> None:
    """Call `do` with the module after its code was executed; at once if it is imported already."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        do(module)
    else:
        _after.setdefault(name, []).append(do)


def replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """A decorator: the function replaces that of `owner`, and gets the original as its first argument."""
    original = getattr(owner, name)

    def replace(by: Callable[..., Any]) -> None:
        @wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return by(original, *args, **kwargs)

        setattr(owner, name, called)

    return replace


class Finder:
    """Finds modules as other finders do, and makes the loader of a watched module call the functions.

    Finding a module is not importing it (`find_spec("torch")` only checks that it is installed). So the loader calls
    them.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _before and name not in _after:
            return None
        spec = self._found_by_others(name, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            _watch(name, spec)
        return spec

    def _found_by_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def _watch(name: str, spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        for do in _before.pop(name, ()):
            do(spec)
        execute(module)
        for then in _after.pop(name, ()):
            then(module)

    loader.exec_module = exec_module  # only of this object: inspect and importlib.resources need its other methods
