"""The few rehearsals that a prediction stands on: shallow siblings of the model at two micro-batch sizes, or three."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from bigdit.catalog import FAMILIES, CatalogModel, Gpu
from bigdit.memory.host import host_memory
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.profile.request import request_for
from bigdit.search.predict.gap import Gap
from bigdit.search.predict.moments import family, moments
from bigdit.search.predict.outline import FIRST_SIZE, SECOND_SIZE, Line, Outline
from bigdit.search.predict.sibling import block_count, depths, possible, sibling
from bigdit.spec import Strategy
from bigdit.speed.work import Work, work_of

SIZES = (FIRST_SIZE, SECOND_SIZE)
"""Micro-batch sizes of anchors; behind them stands a third one where they do not reach (`Outline.reaches`)."""

Depths = tuple[int, int]
"""Blocks of the shallowest sibling and of the deeper ones."""

OF_STEP: Depths = 3, 5
"""With 3 one block has neighbours on both sides, as FSDP2's prefetching wants to see."""

OF_STATE: Depths = 1, 3
"""Where only the state is wanted, which no neighbour changes."""


@dataclass(frozen=True)
class Sample:
    """What is trained, on which card and on which pictures (pixels; frames of a video)."""

    model: CatalogModel
    gpu: Gpu
    resolution: tuple[int, int]
    frames: int | None = None

    def request(self, strategy: Strategy, model: CatalogModel | None = None) -> StepRequest:
        """The rehearsal of `strategy` as it stands, with `model` in the place of the whole one."""
        chosen = self.model if model is None else model
        return request_for(chosen, self.gpu, strategy, resolution=self.resolution, frames=self.frames)


@dataclass(frozen=True)
class Grid:
    """Siblings of a model and their `weights`: values affine in the depths, so weighted, add up to the model's own.

    Of each list in `varied` one sibling, in this order after the first, has so many `more` blocks.
    """

    siblings: tuple[CatalogModel, ...]
    weights: tuple[float, ...]
    varied: tuple[str, ...]
    more: tuple[int, ...]
    shallow: int

    def weights_of(self, lengths: Mapping[str, int]) -> tuple[float, ...]:
        """The weights of a model whose lists are so long."""
        shares = [
            (lengths.get(name, 0) - self.shallow) / added for name, added in zip(self.varied, self.more, strict=True)
        ]
        return (1 - sum(shares), *shares)


def grid(model: CatalogModel, of: Depths = OF_STEP) -> Grid:
    """The shallowest sibling, and one for each list of blocks that is longer, with more of these."""
    aside = 2 if FAMILIES[model.spec.class_name].even else 0  # so that one block of each half has neighbours
    full, (shallow, deeper) = depths(model), (possible(model, blocks) + aside for blocks in of)
    base = {name: min(shallow, length) for name, length in full.items()}
    varied = tuple(name for name, length in full.items() if length > shallow)
    more = tuple(min(deeper, full[name]) - shallow for name in varied)
    longer = [base | {name: shallow + added} for name, added in zip(varied, more, strict=True)]
    siblings = tuple(sibling(model, lengths) for lengths in (base, *longer))
    found = Grid(siblings=siblings, weights=(), varied=varied, more=more, shallow=shallow)
    return replace(found, weights=found.weights_of(full))


def requests(
    sample: Sample, strategy: Strategy, sizes: Sequence[int] = SIZES, of: Depths = OF_STEP
) -> list[StepRequest]:
    """What `outline` needs: every sibling at the first micro-batch size, then every one at the next."""
    siblings = grid(sample.model, of).siblings
    return [sample.request(strategy.with_micro_batch_size(size), each) for size in sizes for each in siblings]


def shallowest(model: CatalogModel, request: StepRequest) -> StepRequest:
    """The steps of a request about `model` with its shallowest sibling, which has as large a part of its blocks
    recomputed, and all swapped where any are."""
    small = grid(model).siblings[0]
    count, strategy = block_count(small), request.strategy
    blocks, swapped = strategy.checkpointed_blocks, min(strategy.blocks_to_swap, count)
    part = blocks if blocks == "all" else max(math.ceil(blocks * count / block_count(model)), swapped)
    update = {"checkpointed_blocks": part, "blocks_to_swap": swapped}
    return request.model_copy(update={"model": small.spec, "strategy": strategy.model_copy(update=update)})


def outline(model: CatalogModel, strategy: Strategy, answers: Sequence[RehearsedSize], of: Depths = OF_STEP) -> Outline:
    """The step at full depth, from the answers to `requests`.

    From anchors of one micro-batch size nothing grows with it.
    """
    plan = grid(model, of)
    count = len(plan.siblings)
    timelines = [answer.timeline for answer in answers]
    sizes = [answer.micro_batch_size for answer in answers[::count]]
    spans = [moments(timeline) for timeline in timelines]
    rows = [spans[at : at + count] for at in range(0, len(spans), count)]
    shared = family(rows, halved=FAMILIES[model.spec.class_name].even)

    def line(values: Sequence[Any]) -> Line:
        """Values of all anchors, at full depth and for any micro-batch size."""
        found = [
            np.tensordot(plan.weights, np.stack(values[at : at + count]), 1) for at in range(0, len(values), count)
        ]
        return _through(sizes, found)

    last_forward = max(at for at, phase in enumerate(shared.phases) if phase == "forward")
    kept = [float(each[last_forward].live[-1]) for each in spans]

    def saved(at: int) -> Line:
        each = [np.asarray((kept[i + at + 1] - kept[i]) / plan.more[at]) for i in range(0, len(kept), count)]
        return _through(sizes, each)

    works = [work_of(timeline, strategy) for timeline in timelines]
    whole = [weighted(works[at : at + count], plan.weights) for at in range(0, len(works), count)][: len(SIZES)]
    growth = (whole[-1] - whole[0]) * (1 / (SIZES[1] - SIZES[0]))
    return Outline(
        phases=shared.phases,
        live=tuple(line(list(rows)) for rows in shared.live),
        parts=tuple(line(list(rows)) for rows in shared.parts),
        saved={name: saved(at) for at, name in enumerate(plan.varied)},
        host=line([host_memory(answer.host_timeline).saving(answer.checkpoint_bytes) for answer in answers]),
        gap=Gap(dict(zip(sizes, timelines[count - 1 :: count], strict=True))),
        work=(whole[0], growth),
        params=round(float(np.dot(plan.weights, [answer.params for answer in answers[:count]]))),
        farthest=sizes[-1],
    )


def _through(sizes: Sequence[int], values: Sequence[np.ndarray[Any, Any]]) -> Line:
    """The line through the values at SIZES, and from there to those at a third size; a level one through one value."""
    if len(values) == 1:
        return Line(values[0], np.zeros_like(values[0]))
    line = Line(values[0], (values[1] - values[0]) / (SIZES[1] - SIZES[0]))
    if len(values) == len(SIZES):
        return line
    return replace(line, bend=(values[-1] - line.at(sizes[-1])) / (sizes[-1] - SIZES[-1]))


def weighted(works: Sequence[Work], weights: Sequence[float]) -> Work:
    """The sum of so much of each."""
    return reduce(add, (work * weight for work, weight in zip(works, weights, strict=True)))
