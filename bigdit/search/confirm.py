"""The best candidates, rehearsed exactly as they stand, until the best one is known and fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigdit.errors import UserError
from bigdit.memory import Timeline
from bigdit.memory.footprint import Footprint
from bigdit.rehearse import RehearsalRequest, RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.anchors import Sample
from bigdit.search.candidates import Candidate
from bigdit.search.plan import Band, Verdict
from bigdit.search.space import settled
from bigdit.search.verdict import verdict

ROUNDS = 4
"""Rehearsals at full depth that the best candidate may take: predictions are moved by what each one found."""

RECORDED_ACCUMULATION = 2
"""Micro-batches of a step in a rehearsal, at most: from the second on all find the same memory."""


@dataclass(frozen=True)
class Confirmed:
    """A candidate with its rehearsal at full depth, and what the card says to it."""

    candidate: Candidate
    answer: RehearsedSize
    timeline: Timeline
    footprint: Footprint
    verdict: Verdict


def request(sample: Sample, candidate: Candidate) -> RehearsalRequest:
    """The rehearsal of the candidate's strategy."""
    strategy = settled(
        candidate.option.proposal.strategy,
        micro_batch_size=candidate.micro_batch_size,
        grad_accum_steps=min(candidate.grad_accum_steps, RECORDED_ACCUMULATION),
        checkpointed_blocks=candidate.blocks,
    )
    return sample.request(strategy)


def confirm(pool: Pool, sample: Sample, band: Band, candidates: Sequence[Candidate]) -> list[Confirmed]:
    """Rehearse each candidate at full depth, and move its option's predictions by what was found.

    Raises UserError for one that cannot be rehearsed.
    """
    answers = pool.rehearse([request(sample, each) for each in candidates])
    found = []
    for candidate, answer in zip(candidates, answers, strict=True):
        if isinstance(answer, UserError):
            raise answer
        timeline = answer.timeline
        said, footprint = verdict(timeline, sample.gpu, candidate.strategy.world_size, band)
        off = footprint.segments.wanted_bytes - candidate.reserved_bytes
        candidate.option.correct(candidate.micro_batch_size, candidate.blocks, off)
        found.append(Confirmed(candidate, answer, timeline, footprint, said))
    return found


def confirmed_best(
    pool: Pool,
    sample: Sample,
    band: Band,
    ranked: Callable[[], list[Candidate]],
) -> list[Confirmed]:
    """The best that fits first, then what else was rehearsed on the way.

    `ranked` orders candidates by the predictions as they are then: the first three are rehearsed, and after that
    whatever has come to the top, until the top has been rehearsed or ROUNDS are over.
    """
    known: dict[tuple[str, int, int], Confirmed] = {}
    for number in range(ROUNDS):
        order = ranked()
        if not order:
            break
        wanted = [each for each in order[: 3 if number == 0 else 1] if _key(each) not in known]
        if not wanted:
            break
        known |= {_key(each.candidate): each for each in confirm(pool, sample, band, wanted)}
    rank: dict[Verdict, int] = {"FITS": 0, "TIGHT": 1, "DOES NOT FIT": 2}
    return sorted(known.values(), key=lambda each: (rank[each.verdict], -each.candidate.worth))


def _key(candidate: Candidate) -> tuple[str, int, int]:
    return candidate.option.proposal.title, candidate.micro_batch_size, candidate.blocks
