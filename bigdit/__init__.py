"""bigdit: plan and train large diffusion transformers; each step runs on an emulated GPU before it runs on yours."""

from __future__ import annotations

TYPE_CHECKING = False  # what is imported here delays the word that Ctrl-C gets
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`bigdit.plan`, once it is asked for: until then `import bigdit` takes no time."""
    if name == "plan":
        import importlib

        return importlib.import_module("bigdit.report.page").plan
    raise AttributeError(f"module 'bigdit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), "plan"))
