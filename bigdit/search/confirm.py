"""The best candidates, rehearsed exactly as they stand, until the best one is known and fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigdit.errors import UserError
from bigdit.memory import Timeline
from bigdit.memory.footprint import Footprint
from bigdit.memory.process import ByteRange
from bigdit.rehearse import RehearsalRequest, RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.candidates import Candidate, candidate, preferred
from bigdit.search.evidence import Evidence
from bigdit.search.needs.host import HostNeed, host_need
from bigdit.search.plan import Band, Verdict
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Question
from bigdit.search.verdict import planned, process, verdict

ROUNDS = 5
"""Pairs of rehearsals at full depth at most: predictions are moved by what each one found."""

AT_LEAST = 3
"""The recommended one, and the two next."""

RECORDED_ACCUMULATION = 2
"""Micro-batches of a step in a rehearsal, at most: from the second on all find the same memory."""


@dataclass(frozen=True)
class Confirmed:
    """A candidate with its rehearsal at full depth, and what card and host say to it: `process` is what one process
    takes of the card, `host` what those of a machine take of its memory."""

    candidate: Candidate
    answer: RehearsedSize
    timeline: Timeline
    footprint: Footprint
    process: ByteRange
    host: HostNeed
    verdict: Verdict


def request(sample: Sample, candidate: Candidate) -> RehearsalRequest:
    """The rehearsal of the candidate's strategy."""
    strategy = candidate.option.proposal.strategy.settled(
        micro_batch_size=candidate.micro_batch_size,
        grad_accum_steps=min(candidate.grad_accum_steps, RECORDED_ACCUMULATION),
        checkpointed_blocks=candidate.blocks,
    )
    return sample.request(strategy)


def confirm(
    pool: Pool, sample: Sample, question: Question, band: Band, candidates: Sequence[Candidate]
) -> list[Confirmed]:
    """Rehearse each candidate at full depth, and move its option's predictions by what was found.

    Raises UserError for one that cannot be rehearsed.
    """
    answers = pool.rehearse([request(sample, each) for each in candidates])
    found = []
    for each, answer in zip(candidates, answers, strict=True):
        if isinstance(answer, UserError):
            raise answer
        timeline = answer.timeline
        said, footprint = verdict(timeline, sample.gpu, each.strategy.world_size, band)
        reserved = planned(footprint).wanted_bytes
        each.option.correct(each.micro_batch_size, each.blocks, reserved)
        host = host_need(answer.host_timeline, answer.checkpoint_bytes, question.cluster)
        if host.node_bytes > question.host_memory_bytes:
            said = "DOES NOT FIT"
        taken = process(reserved, footprint.beside, band)
        found.append(Confirmed(each, answer, timeline, footprint, taken, host, said))
    return found


def confirmed_best(
    pool: Pool,
    sample: Sample,
    question: Question,
    evidence: Evidence,
    ranked: Callable[[], list[Candidate]],
) -> list[Confirmed]:
    """The best that fits first, then what else was rehearsed on the way.

    `ranked` orders candidates by the predictions as they are then, the best of each option before the second ones: the
    first three are rehearsed, and after that whatever has come to the top, until the top has been rehearsed or ROUNDS
    are over; two at a time, as a Pool does.
    """
    known: dict[tuple[str, int, int], Confirmed] = {}
    for _ in range(ROUNDS):
        order = ranked()
        new = [each for each in order if _key(each) not in known]
        if not new or (len(known) >= AT_LEAST and new[0] is not order[0]):
            break
        pair = _pair(question, evidence, new) if new[0] is order[0] else new[: AT_LEAST - len(known)][:2]
        known |= {_key(each.candidate): each for each in confirm(pool, sample, question, evidence.band, pair)}
    rank: dict[Verdict, int] = {"FITS": 0, "TIGHT": 1, "DOES NOT FIT": 2}
    places = {_key(each): at for at, each in enumerate(preferred(each.candidate for each in known.values()))}
    return sorted(known.values(), key=lambda each: (rank[each.verdict], places[_key(each.candidate)]))


def _pair(question: Question, evidence: Evidence, new: Sequence[Candidate]) -> list[Candidate]:
    """The two best; or the best and itself with one more block recomputed, where it is a second attempt: such a one is
    often short of a few MiB, as the allocator's pieces fit."""
    best = new[0]
    tried = any(title == best.option.proposal.title for title, _, _ in best.option.corrections)
    if not tried or question.pins.checkpointed_blocks is not None or best.blocks == best.option.arrangement.count:
        return list(new[:2])
    return [best, candidate(question, best.option, best.micro_batch_size, best.blocks + 1, evidence)]


def _key(candidate: Candidate) -> tuple[str, int, int]:
    return candidate.option.proposal.title, candidate.micro_batch_size, candidate.blocks
