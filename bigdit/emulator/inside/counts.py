"""What the libraries counted since the process began, and in each step."""

from __future__ import annotations

import ctypes

from .libraries import library

NAMES = (
    "launches",
    "copies_to_device",
    "copies_to_host",
    "copies_on_device",
    "host_syncs",
    "bytes_to_device",
    "bytes_to_host",
    "bytes_on_device",
    "library_calls",
    "fills",
    "copies_between",
    "bytes_between",
    "all_reduces",
    "all_gathers",
    "reduce_scatters",
    "broadcasts",
    "reduces",
    "sends",
    "receives",
)
"""The fields of card_counts, in card.h."""

by_step: list[dict[str, int]] = []
"""Of the first so many steps."""

_MOST_STEPS = 1000
_last: dict[str, int] = {}


def read() -> dict[str, int]:
    """Kernels launched, copies by direction with their bytes, waits of the host for the card, calls of cuBLAS and cuDNN
    that launch, and NCCL's collectives by kind."""
    counted = library("libcuda").card_counted
    counted.restype = ctypes.POINTER(ctypes.c_uint64 * len(NAMES))
    return dict(zip(NAMES, counted().contents, strict=True))


def kernels() -> dict[str, int]:
    """By mangled name, how often each kernel was launched through the runtime."""
    found: dict[str, int] = {}
    tell = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint64)
    library("libcudart").card_kernels(tell(lambda name, times: found.update({name.decode(): times})))
    return found


def refused() -> list[str]:
    """The functions of libraries that were called and have no answer."""
    ask = library("libcuda").card_refused
    ask.restype = ctypes.c_char_p
    found: list[str] = []
    while (name := ask(len(found))) is not None:
        found.append(name.decode())
    return found


def sample() -> None:
    """Note what was counted since the last step ended."""
    global _last
    now = read()
    if len(by_step) < _MOST_STEPS:
        by_step.append({name: count - _last.get(name, 0) for name, count in now.items()})
    _last = now


def forget() -> None:
    global _last
    _last = {}
    by_step.clear()
