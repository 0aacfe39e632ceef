"""Whether two steps run in so many bytes of an emulated card. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from bigdit.catalog import Gpu
from bigdit.errors import UserError
from bigdit.kept import Kept
from bigdit.memory.caching import fits
from bigdit.rehearse.card import cache
from bigdit.rehearse.card.client import ask, build_with, worker
from bigdit.rehearse.card.launched import Launched
from bigdit.rehearse.lanes import Lanes, RehearsalError
from bigdit.rehearse.request import RehearsalRequest
from bigdit.spec import OptimizerSpec, Strict


class Asked(Strict):
    """The first micro-batch size of `request`, on a card with `capacity_bytes` for torch and no more. Without
    `values` no small tensor is computed either, and all that is read of the card is zero. Without `to_end` the card
    gives nothing more where the allocator is first short of room: the steps do not fit then."""

    request: RehearsalRequest
    capacity_bytes: PositiveInt
    to_end: bool = True
    values: bool = True


class Attempt(Strict):
    """Two steps, or what was taken until one ran out of memory: by torch's own counters, whose allocator had expandable
    segments. `out_of_memory`: torch's message. `retries`: how often it gave back what it kept, to find room.
    `launched`: what the second step had the card do, by phase; empty where it did not end."""

    out_of_memory: str | None
    retries: NonNegativeInt
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    launched: dict[str, Launched]
    seconds: NonNegativeFloat

    @property
    def ran(self) -> bool:
        return self.out_of_memory is None

    @property
    def memory(self) -> tuple[int, int, int]:
        """What two attempts that take the same memory have alike."""
        return self.retries, self.peak_allocated_bytes, self.peak_reserved_bytes

    @property
    def fits(self) -> bool:
        return fits(not self.ran, self.retries)


Shallow = Callable[[RehearsalRequest], RehearsalRequest]

_KEPT = Kept("attempts", Attempt, "the attempt", "the card is emulated")


class Attempts:
    """Emulated cards of one kind, `count` of them side by side: processes answer question after question there, each
    on a card that has nothing.

    Before the first question of a kind, which are those that differ in sizes, bytes and the optimizer alone, its
    `shallow` one is asked with the values of small tensors and without: the same steps of a model of few blocks, or
    else the question itself. Where both take the same memory, it does not follow from values, and those of the kind go
    without: in a third of the time or less.

    They start with the first question whose answer is not kept, or when they are told to, and end with the `with`
    block. Raises UserError where there is no CUDA build of torch.
    """

    def __init__(self, gpu: Gpu, count: int = 1, *, shallow: Shallow = lambda request: request) -> None:
        self.gpu = gpu
        self._build = build_with(expandable_segments=True)
        self._count = count
        self._shallow = shallow
        self._without_values: dict[str, bool] = {}  # whether they take the same memory so, by kind
        self._first: dict[str, Lock] = {}  # held by the question that finds out, by kind
        # Two forks a card: one cannot have values again.
        self.lanes = Lanes(worker(gpu, "bigdit.rehearse.card.attempts", expandable_segments=True), 2 * count)

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *error: object) -> None:
        self.lanes.end()

    def run(
        self,
        request: RehearsalRequest,
        capacity_bytes: int,
        *,
        to_end: bool = True,
        card: int = 0,
        timeout_s: float = 120.0,
    ) -> Attempt:
        """Two steps of `request` on the card of this number, where torch may reserve so many bytes, or what is kept of
        them: without `to_end` no more than whether they fit, of those that do not.

        Raises UserError where they take longer, and for what the user can mend; RehearsalError where the process dies.
        """
        asked = Asked(request=request, capacity_bytes=capacity_bytes, to_end=to_end)
        decides = cache.decides(self.gpu, asked, self._build)
        found = _KEPT.find(decides)
        if found is None:
            found = self._attempt(asked, card, timeout_s)
            _KEPT.keep(decides, found)
        return found

    def _attempt(self, asked: Asked, card: int, timeout_s: float) -> Attempt:
        kind = _kind(asked.request)
        with self._first.setdefault(kind, Lock()):
            if kind not in self._without_values:
                first = asked.model_copy(update={"request": self._shallow(asked.request)})
                found = self._ask(first, card, timeout_s, values=True)
                if found.ran:
                    without = self._valueless(first, card, timeout_s)
                    self._without_values[kind] = without is not None and without.memory == found.memory
                if first == asked:
                    return found
        return self._ask(asked, card, timeout_s, values=not self._without_values.get(kind, False))

    def _valueless(self, asked: Asked, card: int, timeout_s: float) -> Attempt | None:
        """None where it asks for values that are not there."""
        try:
            return self._ask(asked, card, timeout_s, values=False)
        except (UserError, RehearsalError):
            return None

    def _ask(self, asked: Asked, card: int, timeout_s: float, *, values: bool) -> Attempt:
        lane = card if values else self._count + card
        question = asked.model_copy(update={"values": values})
        return Attempt.model_validate_json(
            ask(self.lanes, lane, self.gpu, asked.request.model.name, question, timeout_s)
        )


def _kind(request: RehearsalRequest) -> str:
    """What attempts have alike that differ in sizes, and in the optimizer and what is kept of recomputed blocks, whose
    memory follows from shapes alone.

    fp16 is a kind of its own: it reads whether gradients are finite.
    """
    strategy = request.strategy.settled(micro_batch_size=1, grad_accum_steps=1, checkpointed_blocks=0)
    update: dict[str, object] = {"optimizer": OptimizerSpec(), "checkpointing": "full"}
    update["blocks_to_swap"] = min(strategy.blocks_to_swap, 1)
    if strategy.precision == "bf16_sr":
        update["precision"] = "bf16"
    batch = request.batch.model_copy(update={"latents": (1, 1, 1)})
    sizes = {"strategy": strategy.model_copy(update=update), "batch": batch, "micro_batch_sizes": (1,)}
    return request.model_copy(update=sizes).model_dump_json()
