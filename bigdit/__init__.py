"""bigdit: plan and train large diffusion transformers; each step runs on an emulated GPU before it runs on yours."""

from __future__ import annotations

TYPE_CHECKING = False  # an import here would delay the answer to Ctrl-C
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `bigdit.plan` at its first use, so that `import bigdit` is fast."""
    if name == "plan":
        import importlib

        return importlib.import_module("bigdit.report.page").plan
    raise AttributeError(f"module 'bigdit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), "plan"))
