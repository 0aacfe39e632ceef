"""What may be asked of a page whose changes run: every setting that the search looks at, of any number of cards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bigdit.errors import UserError
from bigdit.search.finding.candidates import beside, micro_batch_sizes
from bigdit.search.finding.space import proposals
from bigdit.search.plan import Plan, Setting
from bigdit.search.predict.anchors import Sample
from bigdit.search.predict.sibling import block_count
from bigdit.search.question import Question
from bigdit.search.telling.settings import rooms
from bigdit.spec import Strategy

NUMBERS = (1, 2, 4, 8, 16, 32, 64)
"""Cards in all, beside the plan's own number."""


@dataclass(frozen=True)
class Way:
    """A setting with the question that it belongs to, of as many cards, and what may be asked of it: its sizes are
    those that the search would take, and `blocks` the numbers of them that are recomputed."""

    question: Question
    setting: Setting
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]

    @property
    def any_size(self) -> bool:
        """Whether micro-batches between the `sizes` can be asked for too: none is pinned, or shared out."""
        return self.question.global_batch_size is None and self.question.pins.micro_batch_size is None

    @property
    def sample(self) -> Sample:
        return Sample(self.question.model, self.question.gpu, self.question.resolution, self.question.frames)


def ways(plan: Plan, ask: Callable[[int], Question]) -> tuple[Way, ...]:
    """Those of the plan, which may be better known, and after them those of other numbers of cards; `ask` is the same
    question of so many cards, and raises UserError where it cannot be asked."""
    own = [_way(plan.question, each.title, each.strategy) for each in plan.settings]
    others = [way for question in _questions(plan, ask) for way in _proposed(question)]
    known = [*own, *(each for each in others if not any(way.setting.holds(each.setting.strategy) for way in own))]
    return tuple({way.setting.title: way for way in known}.values())


def _questions(plan: Plan, ask: Callable[[int], Question]) -> Iterator[Question]:
    yield plan.question
    for number in sorted({*NUMBERS} - {plan.question.cluster.gpus}):
        try:
            yield ask(number)
        except UserError:  # MIG slices, a machine of fewer, a pinned engine
            continue


def _proposed(question: Question) -> Iterator[Way]:
    """What the search looks at first, with an average and without where none is asked for; not what it looks at where
    nothing else fits."""
    places = ("none", "gpu", "cpu") if question.pins.ema == "none" else (question.pins.ema,)
    for place in places:
        pins = question.pins.model_copy(update={"ema": place})
        for each in proposals(question.model_copy(update={"pins": pins}))[0]:
            if not each.last_resort:
                yield _way(question, each.title, each.strategy)


def _way(question: Question, title: str, strategy: Strategy) -> Way:
    sample = Sample(question.model, question.gpu, question.resolution, question.frames)
    around, cards = beside(question, strategy), rooms(sample, question, strategy)
    pinned, count = question.pins.checkpointed_blocks, block_count(question.model)
    blocks = range(strategy.blocks_to_swap, count + 1) if pinned is None else (count if pinned == "all" else pinned,)
    setting = Setting(title=title, strategy=strategy, beside=around, rooms=cards, points=())
    return Way(question, setting, tuple(micro_batch_sizes(question, strategy)), tuple(blocks))
