"""The work of a step: calls, FLOPs and bytes of operators and collectives, in arrays that can be added and scaled."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from bigdit.memory import Place, Span, Timeline
from bigdit.strategy import Strategy

Key = TypeVar("Key")
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Amount:
    """Calls, floating-point operations and bytes; interpolated ones need not be whole."""

    calls: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.calls + other.calls, self.flops + other.flops, self.nbytes + other.nbytes)


class Keys(Generic[Key]):
    """Ordered keys. Equal keys share one object, by which results are cached."""

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
        """The amounts without negative values, which interpolation can give."""
        return Amounts(self.named, np.maximum(self.numbers, 0.0))


@functools.lru_cache(maxsize=512)
def _keys(order: tuple[Any, ...]) -> Keys[Any]:
    return Keys(order)


@functools.lru_cache(maxsize=512)
def _together(first: Keys[Any], second: Keys[Any]) -> tuple[Keys[Any], Rows]:
    """The keys of both, the first's before new ones of the second; and the rows of the second's keys."""
    named = _keys(first.order + tuple(key for key in second.order if key not in first.row))
    return named, np.array([named.row[key] for key in second.order], dtype=np.intp)


class Operation(NamedTuple):
    """An operator of one dtype in one phase (encode, forward, backward, step, ema), computed at one place."""

    phase: str
    operator: str
    dtype: str
    place: Place


class Exchange(NamedTuple):
    """A collective over `group_size` processes in one phase."""

    phase: str
    name: str
    group_size: int


class Load:
    """Amounts of operations and exchanges, as a vector: `a + b`, `a - b`, `a * 0.5`."""

    def __init__(self, operations: Mapping[Operation, Amount], exchanges: Mapping[Exchange, Amount]) -> None:
        self.operations = Amounts.of(operations)
        self.exchanges = Amounts.of(exchanges)

    def __add__(self, other: Load) -> Load:
        return Load(self.operations + other.operations, self.exchanges + other.exchanges)

    def __mul__(self, times: float) -> Load:
        return Load(self.operations * times, self.exchanges * times)

    def __sub__(self, other: Load) -> Load:
        return self + other * -1.0

    def clamped(self) -> Load:
        return Load(self.operations.clamped(), self.exchanges.clamped())

    def at(self, place: Place) -> Amount:
        """All operations at that place."""
        rows = rows_at(self.operations.named, place)
        return Amount(*self.operations.numbers[rows].sum(axis=0).tolist())


NOTHING = Load({}, {})


@dataclass(frozen=True)
class Work:
    """One optimizer step of one process: `micro` for every micro-batch, `last` in addition for the last, then `step`.

    `micro` is encode, forward and backward. `last` waits for the last micro-batch, such as the reduction of accumulated
    gradients. `step` is the optimizer's and the EMA's. All is linear: attempts at several micro-batch sizes, depths and
    numbers of recomputed blocks can be added and scaled. Negative results count as zero.
    """

    micro: Load
    last: Load
    step: Load

    def __add__(self, other: Work) -> Work:
        return Work(self.micro + other.micro, self.last + other.last, self.step + other.step)

    def __mul__(self, times: float) -> Work:
        return Work(self.micro * times, self.last * times, self.step * times)

    def __sub__(self, other: Work) -> Work:
        return self + other * -1.0

    def accumulated(self, grad_accum_steps: int) -> Load:
        """The whole step, over that many micro-batches."""
        return self.micro * grad_accum_steps + self.last + self.step


def work_of(timeline: Timeline, strategy: Strategy) -> Work:
    """The work of the last recorded optimizer step, in which `strategy` has optimizer state.

    With several recorded micro-batches, `micro` is the mean of all but the last, and `last` what the last one does in
    addition. With one, the engine's rules decide: ZeRO-0 and 1, and HSDP between replicas, reduce gradients once per
    step, all others in each micro-batch. What else an engine does only at the end (ZeRO's copies of averaged gradients)
    then counts for every micro-batch. Raises ValueError for a timeline without a step.
    """
    micro_batches, step = _last_step(timeline.spans)
    loads = [_load(timeline, phases) for phases in micro_batches]
    if len(loads) > 1:
        micro = sum(loads[1:-1], loads[0]) * (1.0 / (len(loads) - 1))
        last = loads[-1] - micro
    else:
        waiting = {key: amount for key, amount in loads[0].exchanges.items() if _once_a_step(key, strategy)}
        last = Load({}, waiting)
        micro = Load(loads[0].operations, {k: v for k, v in loads[0].exchanges.items() if k not in waiting})
    return Work(micro, last, _load(timeline, step))


def load_of(timeline: Timeline, phases: Collection[str], phase: str) -> Load:
    """The work of all spans of these phases, as work of `phase`."""
    return _load(timeline, {i: phase for i, span in enumerate(timeline.spans) if span.phase in phases})


def _last_step(spans: Iterable[Span]) -> tuple[list[dict[int, str]], dict[int, str]]:
    """Phases by the number of their span: of each micro-batch of the last step, and of its end."""
    micro_batches: list[dict[int, str]] = []
    step: dict[int, str] = {}
    before = "init"
    for i, span in enumerate(spans):
        if span.phase in ("step", "ema"):
            step[i] = span.phase
        elif span.phase != "init":
            if step:
                micro_batches, step = [], {}
            if span.phase == "encode" or (span.phase == "forward" and before != "encode"):
                micro_batches.append({})
            micro_batches[-1][i] = span.phase
        before = span.phase
    if not micro_batches or not step:
        raise ValueError("the timeline has no optimizer step")
    return micro_batches, step


def _load(timeline: Timeline, phases: Mapping[int, str]) -> Load:
    """The work of these spans, given by number, as work of the phases that they map to."""
    operations: defaultdict[Operation, Amount] = defaultdict(Amount)
    exchanges: defaultdict[Exchange, Amount] = defaultdict(Amount)
    for cost in timeline.operators:
        if cost.span in phases:
            key = Operation(phases[cost.span], cost.operator, cost.dtype, cost.place)
            operations[key] += Amount(cost.calls, cost.flops, cost.nbytes)
    for sent in timeline.collectives:
        if sent.span in phases and sent.group_size > 1:
            exchanges[Exchange(phases[sent.span], sent.name, sent.group_size)] += Amount(1, 0, sent.nbytes)
    return Load(operations, exchanges)


def _once_a_step(exchange: Exchange, strategy: Strategy) -> bool:
    if exchange.phase != "backward" or exchange.name in ("all_to_all", "send"):
        return False
    if strategy.engine == "deepspeed":
        return strategy.zero_stage in (0, 1)
    return strategy.dp_replicate > 1 and exchange.name == "all_reduce"


@functools.lru_cache(maxsize=512)
def rows_at(named: Keys[Operation], place: Place) -> Rows:
    """Which of the operations are computed at that place."""
    return np.array([row for row, key in enumerate(named.order) if key.place == place], dtype=np.intp)
