"""A model that reads data in its forward pass has no one memory: such a read is an error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from bigdit.errors import UserError
from bigdit.record import Recorder

_running = 0


def refuse(func: Any) -> None:
    """Raise what FakeTensorMode raises for data that is not there, if a module's forward pass asks for it.

    Engines and optimizers read flags and norms, which are answered: they decide nothing about memory.
    """
    if _running:
        raise DataDependentOutputException(func)


@contextmanager
def by_engine() -> Iterator[None]:
    """Reads in here are an engine's, though it may make them from within a module's forward pass."""
    global _running
    before, _running = _running, 0
    try:
        yield
    finally:
        _running = before


@contextmanager
def named_in_errors(model: str, recorder: Recorder) -> Iterator[None]:
    """Raises UserError with the operator and the module where data is read in here."""
    hooks = (
        register_module_forward_pre_hook(lambda *_: _count(1)),
        register_module_forward_hook(lambda *_: _count(-1), always_call=True),
    )
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"{model} cannot be rehearsed: {recorder.broke_in or 'its caller'} reads data with {error.func}, and a "
            "rehearsal has shapes alone; take that number from shapes, or hand it in as an argument"
        ) from None
    finally:
        for hook in hooks:
            hook.remove()


def _count(change: int) -> None:
    global _running
    _running += change
