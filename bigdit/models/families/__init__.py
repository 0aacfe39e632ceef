"""Families of transformers: how their models are called, and which modules are their blocks.

Each file has one or several `Family`; all files are imported.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from bigdit.errors import UserError, nearest
from bigdit.models.family import Family

_MODULES = [module.name for module in iter_modules(__path__, f"{__name__}.")]
_FOUND = [each for name in _MODULES for each in vars(import_module(name)).values() if isinstance(each, Family)]
_FAMILIES = {each.CLASS_NAME: each for each in _FOUND}


def families() -> tuple[str, ...]:
    """The classes that can be planned and trained."""
    return tuple(_FAMILIES)


def family(class_name: str) -> Family:
    """The adapter of a class. Raises UserError for a class without one."""
    if class_name not in _FAMILIES:
        raise UserError(f"no family adapter drives {class_name!r}; {nearest(class_name, _FAMILIES)}")
    return _FAMILIES[class_name]
