"""What a step has a card do, as the emulated card's libraries count it. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from pydantic import NonNegativeInt

from bigdit.spec import Strict

Way = Literal["to device", "to host", "on device", "between"]
"""Where a copy goes: from the host, to it, on one card, from card to card."""

_WAYS: dict[Way, str] = {"to device": "to_device", "to host": "to_host", "on device": "on_device", "between": "between"}
_COLLECTIVES = {
    "all_reduces": "all_reduce",
    "all_gathers": "all_gather",
    "reduce_scatters": "reduce_scatter",
    "broadcasts": "broadcast",
    "reduces": "reduce",
    "sends": "send",
    "receives": "receive",
}


class Copies(Strict):
    """So many copies of so many bytes together."""

    count: NonNegativeInt
    nbytes: NonNegativeInt

    def __add__(self, other: Copies) -> Copies:
        return Copies(count=self.count + other.count, nbytes=self.nbytes + other.nbytes)


class Launched(Strict):
    """What the host handed to the card in one phase of a step, and how often it waited.

    `kernels` were launched by name; `library_calls` are products, convolutions and attention of cuBLAS and cuDNN, whose
    kernels only these know, one at least each; `fills` are memsets; `collectives` NCCL's by kind.
    """

    kernels: NonNegativeInt
    library_calls: NonNegativeInt
    fills: NonNegativeInt
    copies: dict[Way, Copies]
    collectives: dict[str, NonNegativeInt]
    host_syncs: NonNegativeInt

    def __add__(self, other: Launched) -> Launched:
        return Launched(
            kernels=self.kernels + other.kernels,
            library_calls=self.library_calls + other.library_calls,
            fills=self.fills + other.fills,
            copies={way: self._copies(way) + other._copies(way) for way in {**self.copies, **other.copies}},
            collectives=dict(Counter(self.collectives) + Counter(other.collectives)),
            host_syncs=self.host_syncs + other.host_syncs,
        )

    def _copies(self, way: Way) -> Copies:
        return self.copies.get(way, Copies(count=0, nbytes=0))

    @property
    def launches(self) -> int:
        """All that the host handed over, one thing after another."""
        copies = sum(each.count for each in self.copies.values())
        return self.kernels + self.library_calls + self.fills + copies + sum(self.collectives.values())


def launched(before: Mapping[str, int], after: Mapping[str, int]) -> Launched:
    """Between two readings of the libraries' counters, by the names of emulator/inside/counts.py."""
    new = {name: after[name] - before[name] for name in after}
    copies = {
        way: Copies(count=count, nbytes=new[f"bytes_{name}"])
        for way, name in _WAYS.items()
        if (count := new[f"copies_{name}"])
    }
    return Launched(
        kernels=new["launches"],
        library_calls=new["library_calls"],
        fills=new["fills"],
        copies=copies,
        collectives={kind: count for name, kind in _COLLECTIVES.items() if (count := new[name])},
        host_syncs=new["host_syncs"],
    )
