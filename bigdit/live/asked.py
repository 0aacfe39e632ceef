"""One question of a live page, and whether it can be asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from bigdit.catalog.gpus import gpus
from bigdit.config.strategy import MOST_MICRO_BATCH
from bigdit.errors import UserError, nearest
from bigdit.numbers import Count, Natural
from bigdit.rehearse import StepRequest
from bigdit.search.asking.check import cluster_problems
from bigdit.search.finding.candidates import accumulation
from bigdit.search.finding.confirm import RECORDED_ACCUMULATION
from bigdit.search.telling.ways import Way
from bigdit.spec import Strategy, Strict


class Asked(Strict):
    """A way by the title of its setting, a `card` of its rooms, and the sizes of a step."""

    strategy: str
    card: str
    micro_batch_size: Annotated[Count, Field(le=MOST_MICRO_BATCH)]
    checkpointed_blocks: Natural


@dataclass(frozen=True)
class Step:
    """What is asked, as it is run: on the card of `way`'s question."""

    way: Way
    strategy: Strategy

    @property
    def request(self) -> StepRequest:
        accum = min(self.strategy.grad_accum_steps, RECORDED_ACCUMULATION)
        return self.way.sample.request(self.strategy.settled(
            micro_batch_size=self.strategy.micro_batch_size,
            grad_accum_steps=accum,
            checkpointed_blocks=self.strategy.checkpointed_blocks,
        ))  # fmt: skip


def step(ways: dict[str, Way], asked: Asked) -> Step:
    """What is to be run. Raises UserError for what this page does not offer."""
    way = ways.get(asked.strategy)
    if way is None:
        raise UserError(f"strategy {asked.strategy!r} is not offered; {nearest(asked.strategy, ways)}")
    cards = [room.card for room in way.setting.rooms]
    if asked.card not in cards:
        raise UserError(f"card {asked.card!r} is not offered; {nearest(asked.card, cards)}")
    if asked.checkpointed_blocks not in way.blocks:
        first, last = way.blocks[0], way.blocks[-1]
        raise UserError(f"{asked.checkpointed_blocks} recomputed blocks were asked for; {first} to {last} can be")
    question = way.question
    pinned = question.pins.micro_batch_size
    if pinned is not None and asked.micro_batch_size != pinned:
        raise UserError(f"micro-batch {asked.micro_batch_size} was asked for, and it is pinned to {pinned}")
    sizes = question.pins.model_copy(update={"micro_batch_size": asked.micro_batch_size})
    problems = cluster_problems(question.cluster, sizes, question.global_batch_size, question.gpu)
    if problems:
        raise UserError(*problems)
    gpu = next(each for each in (question.gpu, *gpus()) if each.title == asked.card)
    strategy = way.setting.strategy.settled(
        micro_batch_size=asked.micro_batch_size,
        grad_accum_steps=accumulation(question, asked.micro_batch_size, way.setting.strategy.world_size),
        checkpointed_blocks=asked.checkpointed_blocks,
    )
    return Step(replace(way, question=question.model_copy(update={"gpu": gpu})), strategy)
