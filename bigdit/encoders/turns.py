"""Encoders on a card that does not hold all of them: they take turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn

from bigdit.encoders.batch_size import OneIsTooMuch
from bigdit.shortage import ran_out, told
from bigdit.units import gib

R = TypeVar("R")
_HOST = torch.device("cpu")


class Turn(Protocol):
    """Calls what asks some encoders, while these are on their device."""

    def __call__(self, ask: Callable[[], R], /) -> R: ...


def at_once(ask: Callable[[], R], /) -> R:
    """The turn of encoders that stay where they are."""
    return ask()


class HasModules(Protocol):
    """What is asked of an encoder: what moves."""

    def modules(self) -> list[nn.Module]: ...


E = TypeVar("E", bound=HasModules | None)


@dataclass
class Side:
    """Encoders that are on the device together. `title`: what they are called where they run out of memory; `less`:
    what takes less of it."""

    title: str
    less: str
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of their weights."""
        return sum(tensor.nbytes for module in self.modules for tensor in module.parameters())

    def to(self, device: torch.device | str) -> None:
        """Move them there."""
        for module in self.modules:
            module.to(device)


class Turns:
    """The sides of one process: all on `device` until memory does not do for what one is asked, and from then on the
    one that is asked, the others on the host. `note` is told when that begins."""

    def __init__(self, device: torch.device, sides: Sequence[Side], note: Callable[[str], None]) -> None:
        self._device, self._sides, self._note = device, sides, note
        self._apart = False
        self._here: Side | None = None

    def load(self, side: Side, load: Callable[[], E]) -> E:
        """Encoders of a side, loaded in its turn. Raises UserError where the device does not hold them alone."""
        encoder: E = self._ask(side, load)
        side.modules += [] if encoder is None else encoder.modules()
        return encoder

    def of(self, side: Side) -> Turn:
        """The turn of a side. It raises UserError where memory does not do for what it is asked alone."""
        return partial(self._ask, side)

    def _ask(self, side: Side, ask: Callable[[], R], /) -> R:
        if not self._apart and self._device.type != "cpu" and any(other.modules for other in self._others(side)):
            answer = _attempt(ask)
            if answer is not None:
                return answer[0]
            self._apart = True
            self._note(self._said())
        if self._apart and self._here is not side:
            self._clear()
        with told(side.title, self._device, side.less):
            if self._apart and self._here is not side:
                side.to(self._device)
                self._here = side
            return ask()

    def _clear(self) -> None:
        """Have all wait on the host, the side that comes too: while they were there together it has put small weights
        between the others', which hold torch's segments. Raises UserError where the host has no room for them."""
        for each in self._sides:
            with told(f"{each.title} that waits for its turn on the host", _HOST, "fewer workers take less of it"):
                each.to(_HOST)
        gc.collect()  # what was half loaded, or half encoded, when memory ran out
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _others(self, side: Side) -> list[Side]:
        return [other for other in self._sides if other is not side]

    def _said(self) -> str:
        waiting = gib(max(side.nbytes for side in self._sides))
        return (
            "note: text encoders and VAE have no room on the card together, and take turns: of each part the pictures "
            f"first, then the captions; up to {waiting} of weights wait on the host"
        )


def _attempt(ask: Callable[[], R]) -> tuple[R] | None:
    """The answer; None where memory ran out. The error, which holds what was allocated, ends here."""
    try:
        return (ask(),)
    except OneIsTooMuch:
        return None
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return None
