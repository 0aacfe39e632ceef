"""Streams of the fake GPU: numbers that say whose pool a tensor comes from. Nothing runs, so nothing waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd import DeviceType


class Stream:
    """A stream with a number of its own; the default one has 0. What orders streams and waits for them passes.

    FSDP2 of torch 2.15 tells an operator of its own, which does nothing, which stream reads the gradients: by that
    number, and the two by which torch's streams name their device."""

    device_index = 0
    device_type = DeviceType.PrivateUse1.value
    _numbers = itertools.count(1)

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.stream_id = next(self._numbers)

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        """As optimizers of torch 2.15 ask of the current one, whether it records a graph."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """A mark on a stream that is reached at once."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return 0.0


def _default() -> Stream:
    stream = Stream()
    stream.stream_id = 0
    return stream


DEFAULT = _default()
_entered = [DEFAULT]


def count_anew() -> None:
    """The next stream has number 1: a rehearsal's numbers do not depend on those before it in the process."""
    Stream._numbers = itertools.count(1)


def current() -> Stream:
    """The stream of the innermost `entered`; DEFAULT outside of all."""
    return _entered[-1]


@contextmanager
def entered(stream: Stream | None) -> Iterator[None]:
    """What is allocated in here comes from this stream's pool; None changes nothing, as in torch."""
    _entered.append(stream or current())
    try:
        yield
    finally:
        _entered.pop()
