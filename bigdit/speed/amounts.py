"""Amounts of many operators or collectives as one array, since a search adds and scales them at hundreds of sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Key = TypeVar("Key")
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Amount:
    """How often, floating-point operations, bytes. Numbers between two attempts need not be whole."""

    calls: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.calls + other.calls, self.flops + other.flops, self.nbytes + other.nbytes)


class Keys(Generic[Key]):
    """Keys in an order. What has the same ones in the same order shares this object, and caches go by it."""

    def __init__(self, order: tuple[Key, ...]) -> None:
        self.order = order
        self.row = {key: row for row, key in enumerate(order)}


class Amounts(Mapping[Key, Amount]):
    """Amounts by their keys, as a vector: `a + b`, `a * 0.5`. `numbers`: [keys, 3], of calls, FLOPs, bytes."""

    def __init__(self, named: Keys[Key], numbers: npt.NDArray[np.float64]) -> None:
        self.named = named
        self.numbers = numbers

    @classmethod
    def of(cls, given: Mapping[Key, Amount]) -> Amounts[Key]:
        """The amounts of a mapping."""
        if isinstance(given, Amounts):
            return given
        rows = [(amount.calls, amount.flops, amount.nbytes) for amount in given.values()]
        return cls(_keys(tuple(given)), np.array(rows, dtype=np.float64).reshape(len(rows), 3))

    def __getitem__(self, key: Key) -> Amount:
        return Amount(*self.numbers[self.named.row[key]].tolist())

    def __iter__(self) -> Iterator[Key]:
        return iter(self.named.order)

    def __len__(self) -> int:
        return len(self.named.order)

    def __add__(self, other: Amounts[Key]) -> Amounts[Key]:
        if self.named is other.named:
            return Amounts(self.named, self.numbers + other.numbers)
        named, rows = _together(self.named, other.named)
        numbers = np.zeros((len(named.order), 3))
        numbers[: len(self)] = self.numbers
        numbers[rows] += other.numbers
        return Amounts(named, numbers)

    def __mul__(self, times: float) -> Amounts[Key]:
        return Amounts(self.named, self.numbers * times)

    def clamped(self) -> Amounts[Key]:
        """Nothing below zero, where an interpolation went there."""
        return Amounts(self.named, np.maximum(self.numbers, 0.0))

    def total(self, rows: Rows) -> Amount:
        """The sum of these rows."""
        return Amount(*self.numbers[rows].sum(axis=0).tolist())


@functools.lru_cache(maxsize=512)
def _keys(order: tuple[Any, ...]) -> Keys[Any]:
    return Keys(order)


@functools.lru_cache(maxsize=512)
def _together(first: Keys[Any], second: Keys[Any]) -> tuple[Keys[Any], Rows]:
    """The keys of both, those of the first before what the second has beside them; and the rows of the second's."""
    named = _keys(first.order + tuple(key for key in second.order if key not in first.row))
    return named, np.array([named.row[key] for key in second.order], dtype=np.intp)
