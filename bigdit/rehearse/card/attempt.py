"""Whether two steps run in so many bytes of an emulated card. Nothing here imports torch."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from bigdit.catalog import Gpu
from bigdit.kept import Kept
from bigdit.rehearse.card import cache
from bigdit.rehearse.card.client import ask, build_with, worker
from bigdit.rehearse.lanes import Lanes
from bigdit.rehearse.request import RehearsalRequest
from bigdit.spec import Strict


class Asked(Strict):
    """The first micro-batch size of `request`, where torch may reserve `capacity_bytes` and no more."""

    request: RehearsalRequest
    capacity_bytes: PositiveInt


class Attempt(Strict):
    """Two steps, or what was taken until one ran out of memory: by torch's own counters, whose allocator had expandable
    segments. `out_of_memory`: torch's message. `retries`: how often it gave back what it kept, to find room."""

    out_of_memory: str | None
    retries: NonNegativeInt
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    seconds: NonNegativeFloat

    @property
    def ran(self) -> bool:
        return self.out_of_memory is None

    @property
    def fits(self) -> bool:
        """Whether both steps ran, and none waited for an allocator that was short of room."""
        return self.ran and not self.retries


_KEPT = Kept("attempts", Attempt, "the attempt", "the card is emulated")


class Attempts:
    """Emulated cards of one kind, `count` of them side by side: a process each answers question after question there,
    each on a card that has nothing.

    They start with the first question whose answer is not kept, or when they are told to, and end with the `with`
    block. Raises UserError where there is no CUDA build of torch.
    """

    def __init__(self, gpu: Gpu, count: int = 1) -> None:
        self.gpu = gpu
        self._build = build_with(expandable_segments=True)
        self.lanes = Lanes(worker(gpu, "bigdit.rehearse.card.attempts", expandable_segments=True), count)

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *error: object) -> None:
        self.lanes.end()

    def run(
        self, request: RehearsalRequest, capacity_bytes: int, *, card: int = 0, timeout_s: float = 120.0
    ) -> Attempt:
        """Two steps of `request` on the card of this number, where torch may reserve so many bytes, or what is kept of
        them.

        Raises UserError where they take longer, and for what the user can mend; RehearsalError where the process dies.
        """
        asked = Asked(request=request, capacity_bytes=capacity_bytes)
        decides = cache.decides(self.gpu, asked, self._build)
        found = _KEPT.find(decides)
        if found is None:
            found = Attempt.model_validate_json(ask(self.lanes, card, self.gpu, request.model.name, asked, timeout_s))
            _KEPT.keep(decides, found)
        return found
