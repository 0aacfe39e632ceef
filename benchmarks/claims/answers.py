"""Answer claims by plans, and by two steps on emulated GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from emulated import step_of

from bigdit import catalog
from bigdit.catalog import Gpu
from bigdit.catalog.encoders import online_encoders
from bigdit.config.strategy_text import LARGEST_MICRO_BATCH, parse_strategy
from bigdit.errors import UserError
from bigdit.memory.process import non_torch_memory_of
from bigdit.profile.attempt import Attempt, Profile, StepRequest, request_for
from bigdit.profile.gpus import EmulatedGpus, Row
from bigdit.search.answer import make_plan
from bigdit.search.calibration import UNPROVED
from bigdit.search.plan import Plan, Verdict, process, safe_bytes, verdict_of
from bigdit.search.resolve import resolve_request
from bigdit.speed.seconds import Interval, StepTime

Say = Callable[[str], None]


class Case(NamedTuple):
    """A claim, a table of answers, and what explains them. The first of `rows` is the head."""

    title: str
    claim: str
    rows: list[list[str]]
    why: list[str]


def case(name: str, rows: list[list[str]], **found: object) -> Case:
    """The claim with this name in claims.json, with figures filled into its texts."""
    texts = json.loads(Path(__file__).with_name("claims.json").read_text())[name]
    return Case(texts["title"], texts["claim"], rows, [line.format(**found) for line in texts["why"]])


@dataclass(frozen=True)
class Found:
    """Two steps of a strategy on an emulated GPU without a limit, compared with `usable_bytes`. `process_bytes`: the
    most that the process takes."""

    attempt: Attempt
    step: StepTime
    verdict: Verdict
    process_bytes: int
    usable_bytes: int

    @property
    def peaks(self) -> dict[str, int]:
        """Peak allocated bytes by phase."""
        return {phase: each.peak_bytes for phase, each in self.attempt.phases.items()}

    @property
    def peak_phase(self) -> str:
        return max(self.peaks, key=lambda phase: self.peaks[phase])


def ran(model: str, gpu: str, texts: Sequence[str], vae_dtype: Literal["fp32", "fp16"] = "fp32") -> list[Found]:
    """Run each strategy of `texts`, written as for --strategy. Raises UserError for one that cannot run."""
    card = catalog.gpu(gpu)
    requests = [request(model, card, text, vae_dtype) for text in texts]
    with EmulatedGpus(card) as cards:
        return [_found(cards.attempt(each, counted="step"), each, card) for each in requests]


def profiles(model: str, gpu: str, texts: Sequence[str]) -> list[Profile]:
    """Record each strategy of `texts`: every byte has a category."""
    card = catalog.gpu(gpu)
    with EmulatedGpus(card) as cards:
        return [cards.profile(request(model, card, text)) for text in texts]


def request(model: str, gpu: Gpu, text: str, vae_dtype: Literal["fp32", "fp16"] = "fp32") -> StepRequest:
    """Two steps of a strategy, at the model's own resolution."""
    found = catalog.find_model(model)
    asked = request_for(found, gpu, parse_strategy([text]))
    if asked.encoders is None:
        return asked
    return asked.model_copy(update={"encoders": online_encoders(found, asked.batch, vae_dtype=vae_dtype)})


def plan(say: Say, **options: Any) -> Plan:
    """The plan for options as `bigdit.plan` takes them."""
    return make_plan(resolve_request(**options), progress=say)


def largest(model: str, gpu: str, text: str, blocks: Sequence[int] = (0,)) -> list[int]:
    """For each number of recomputed blocks, the largest micro-batch that fits where one more does not; 0 if none
    fits. The search ends at LARGEST_MICRO_BATCH."""
    card, strategy = catalog.gpu(gpu), parse_strategy([text])
    room = safe_bytes(card, non_torch_memory_of(strategy, card), UNPROVED)
    sizes, guess = [], 1
    with EmulatedGpus(card) as cards:
        for each in blocks:
            sized = f"{text},checkpointed_blocks={each},micro_batch_size="
            row = Row(lambda size, sized=sized: request(model, card, f"{sized}{size}"), guess)  # type: ignore[misc]
            found = cards.largest(row, room)
            if found is None:
                raise UserError(f"{model} on {gpu}: {'; '.join(cards.unanswered) or 'an attempt failed'}")
            sizes.append(int(found[0]))
            guess = max(sizes[-1], 1)  # more blocks leave room for more images
    return sizes


def at_most(size: int) -> str:
    """A largest micro-batch as tables show it."""
    return f"{size} or more" if size == LARGEST_MICRO_BATCH else str(size)


def between(found: Interval) -> str:
    return f"{found.low:.2g}–{found.high:.2g}" if found.high < 10 else f"{found.low:.3g}–{found.high:.3g}"


def _found(attempt: Attempt, asked: StepRequest, gpu: Gpu) -> Found:
    taken = process(attempt.peak_reserved_bytes, non_torch_memory_of(asked.strategy, gpu), UNPROVED)
    return Found(
        attempt=attempt,
        step=step_of(attempt, asked.strategy, gpu),
        verdict=verdict_of(taken, gpu.usable_bytes),
        process_bytes=taken.high_bytes,
        usable_bytes=gpu.usable_bytes,
    )
