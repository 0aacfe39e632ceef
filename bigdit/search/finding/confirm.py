"""The best candidates, run or rehearsed exactly as they stand, until the best one is known and fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bigdit.errors import UserError
from bigdit.memory import Timeline
from bigdit.memory.footprint import Footprint
from bigdit.memory.process import ByteRange
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.profile.attempt import Attempt
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import Candidate, beside, candidate, capacity, preferred
from bigdit.profile.cards import NO_CARDS, Device
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.verdict import planned, process, safe_bytes, verdict
from bigdit.search.needs.host import HostNeed, host_need
from bigdit.search.plan import Band, Verdict
from bigdit.search.predict.anchors import Sample
from bigdit.search.question import Question
from bigdit.spec import Strategy
from bigdit.speed.launches import Launches, launches_of

_VERDICTS: tuple[Verdict, ...] = ("FITS", "TIGHT", "DOES NOT FIT")
"""The best first; what is worse has no say in which of the better ones is preferred."""

ROUNDS = 5
"""Pairs of rehearsals at full depth at most: predictions are moved by what each one found."""

AT_LEAST = 3
"""The recommended one, and the two next."""

MOST_RUN = 10
"""Candidates on emulated cards at most, on the way to the best."""

WIDE = 2
"""Cards in one, on which a candidate that is short of room says what it wants."""

RECORDED_ACCUMULATION = 2
"""Micro-batches of a step in a rehearsal, at most: from the second on all find the same memory."""


@dataclass(frozen=True)
class Judged:
    """A strategy's rehearsal at full depth, and what card and host say to it: `process` is what one process takes of
    the card, `reserved_bytes` torch's part of it, `host` what those of a machine take of its memory. `ran`: on an
    emulated card, which then says whether it fits, and counts `launches` where it does."""

    answer: RehearsedSize
    timeline: Timeline
    footprint: Footprint
    process: ByteRange
    host: HostNeed
    verdict: Verdict
    reserved_bytes: int
    ran: bool
    launches: Launches | None


@dataclass(frozen=True)
class Confirmed(Judged):
    """A candidate so judged."""

    candidate: Candidate


def recorded(sample: Sample, candidate: Candidate) -> StepRequest:
    """The rehearsal of the candidate's strategy."""
    strategy = candidate.option.proposal.strategy.settled(
        micro_batch_size=candidate.micro_batch_size,
        grad_accum_steps=candidate.grad_accum_steps,
        checkpointed_blocks=candidate.blocks,
    )
    return sample.request(recorded_part(strategy))


def recorded_part(strategy: Strategy) -> Strategy:
    """The same strategy, with as many micro-batches in a step as tell what all of them take."""
    if strategy.grad_accum_steps <= RECORDED_ACCUMULATION:
        return strategy
    return strategy.settled(
        micro_batch_size=strategy.micro_batch_size,
        grad_accum_steps=RECORDED_ACCUMULATION,
        checkpointed_blocks=strategy.checkpointed_blocks,
    )


def confirm(
    pool: Pool,
    sample: Sample,
    question: Question,
    band: Band,
    candidates: Sequence[Candidate],
    device: Device = NO_CARDS,
) -> list[Confirmed]:
    """Rehearse each candidate at full depth, run it on the device, and move its option's predictions by what was
    found.

    Raises UserError for one that cannot be rehearsed.
    """
    with ThreadPoolExecutor(1) as aside:  # neither waits for the other
        asked = aside.submit(pool.rehearse, [recorded(sample, each) for each in candidates])
        runs = run(device, sample, question, band, candidates)
    found = []
    for each, answer, ran in zip(candidates, asked.result(), runs, strict=True):
        if isinstance(answer, UserError):
            raise answer
        said = judged(question, band, each.strategy, answer, ran)
        each.option.correct(each.micro_batch_size, each.blocks, said.reserved_bytes)
        found.append(Confirmed(**vars(said), candidate=each))
    return found


def judged(question: Question, band: Band, strategy: Strategy, answer: RehearsedSize, ran: Ran | None) -> Judged:
    """What card and host say to a rehearsal, and to how it `ran` if it did."""
    timeline = answer.timeline
    said, footprint = verdict(timeline, question.gpu, beside(question, strategy), band)
    reserved = planned(footprint).wanted_bytes
    if ran is not None:
        said, reserved = ran.verdict, ran.reserved_bytes or max(reserved, ran.wanted_bytes)
    host = host_need(answer.host_timeline, answer.checkpoint_bytes, question.cluster, question.samples)
    if question.short_of_host(host.node_bytes):
        said = "DOES NOT FIT"
    taken = process(reserved, footprint.beside, band)
    launches = None if ran is None else ran.launches
    return Judged(answer, timeline, footprint, taken, host, said, reserved, ran is not None, launches)


@dataclass(frozen=True)
class Ran:
    """What the card says. `reserved_bytes` is None where nothing came to its end there; with room for all of it torch
    would reserve `wanted_bytes`, or more where they are those of WIDE cards."""

    verdict: Verdict
    reserved_bytes: int | None
    wanted_bytes: int
    launches: Launches | None


def run(
    device: Device, sample: Sample, question: Question, band: Band, candidates: Sequence[Candidate]
) -> list[Ran | None]:
    """FITS where it ran in the bytes that torch has at least, TIGHT in those that it has at most; options' predictions
    are moved by what was found, which of the others a card tells that has room for them."""
    around = [beside(question, each.strategy) for each in candidates]
    safe = [safe_bytes(question.gpu, each, band) for each in around]
    most = [max(question.gpu.usable_bytes - each.low_bytes, 1) for each in around]
    requests = [recorded(sample, each) for each in candidates]

    def tried(places: Sequence[int], room: Sequence[int], *, to_end: bool = True) -> dict[int, Attempt]:
        attempts = device.run([(requests[at], room[at]) for at in places], to_end=to_end)
        return {at: attempt for at, attempt in zip(places, attempts, strict=True) if attempt is not None}

    first = tried(range(len(requests)), safe, to_end=False)
    wide = tried([at for at, each in first.items() if not each.fits], [WIDE * question.gpu.usable_bytes] * len(most))
    beyond = [at for at, each in wide.items() if not each.fits or each.peak_reserved_bytes > most[at]]
    last = {at: each for at, each in wide.items() if at not in beyond} | tried(beyond, most)
    found = []
    for at, each in enumerate(candidates):
        ran = _ran(requests[at].strategy.grad_accum_steps, first.get(at), wide.get(at), last.get(at))
        if ran is not None:
            each.option.correct(each.micro_batch_size, each.blocks, ran.wanted_bytes)
        found.append(ran)
    return found


def _ran(micro_batches: int, first: Attempt | None, wide: Attempt | None, last: Attempt | None) -> Ran | None:
    """By the attempts in the fewest bytes that torch may have, and where these are too few, with room for all that is
    wanted and in the most; None where one of them could not be run."""
    if first is not None and first.fits:
        reserved = first.peak_reserved_bytes
        return Ran("FITS", reserved, reserved, launches_of(first.launched, micro_batches))
    if wide is None or last is None:
        return None
    wanted, launches = wide.peak_reserved_bytes, launches_of(wide.launched, micro_batches)
    if last.ran:
        return Ran("TIGHT", last.peak_reserved_bytes, wanted, launches)
    return Ran("DOES NOT FIT", None, wanted, launches)


def confirmed_best(
    pool: Pool,
    sample: Sample,
    question: Question,
    evidence: Evidence,
    ranked: Callable[[], list[Candidate]],
) -> list[Confirmed]:
    """The best that fits first, then what else was rehearsed on the way.

    `ranked` orders candidates by the predictions as they are then, the best of each option before the second ones: the
    first two or three are rehearsed, and after that whatever has come to the top, until the top has been rehearsed or
    ROUNDS are over; two at a time, as a Pool does.
    """
    known: dict[_Key, Confirmed] = {}
    for _ in range(ROUNDS):
        order = ranked()
        new = [each for each in order if _key(each) not in known]
        if not new or (len(known) >= AT_LEAST and new[0] is not order[0]):
            break
        pair = _pair(question, evidence, new) if new[0] is order[0] else new[: AT_LEAST - len(known)][:2]
        known |= {_key(each.candidate): each for each in confirm(pool, sample, question, evidence.band, pair)}
    return [
        known[_key(each)]
        for verdict in _VERDICTS
        for each in preferred(one.candidate for one in known.values() if one.verdict == verdict)
    ]


def best_that_runs(
    pool: Pool,
    sample: Sample,
    question: Question,
    evidence: Evidence,
    ranked: Callable[[], list[Candidate]],
    device: Device,
    ahead: Callable[[Candidate], object],
    *,
    lossless_later: bool,
) -> list[Confirmed]:
    """The best that runs on a card, which alone is rehearsed: for what it takes of the host, and by category.

    `ranked` as above, by predictions that each run moves; where nothing fits, the best of what is TIGHT. None that is
    lossy where others are `lossless_later`. `ahead` has the device do what will be asked of the best, while it is
    rehearsed.
    """
    band = evidence.band
    ran: dict[_Key, tuple[Candidate, Ran | None]] = {}
    refused: set[_Key] = set()
    while True:
        order = [each for each in ranked() if _key(each) not in refused]
        if order and _key(order[0]) not in ran and len(ran) < MOST_RUN:
            asked = _pair(question, evidence, order)[: device.count]
            found = run(device, sample, question, band, asked)
            ran |= {_key(each): (each, said) for each, said in zip(asked, found, strict=True)}
            continue
        held = preferred(
            each for at, (each, said) in ran.items() if at not in refused and (said is None or said.verdict == "FITS")
        )
        if not held:
            break
        if lossless_later and not held[0].lossless:
            return []
        with ThreadPoolExecutor(1) as aside:
            asked_next = aside.submit(ahead, held[0])
            (best,) = confirm(pool, sample, question, band, held[:1], device)
            asked_next.result()
        if best.verdict == "FITS":
            return [best]
        refused.add(_key(best.candidate))
    tight = preferred(each for each, said in ran.values() if said is not None and said.verdict == "TIGHT")
    if lossless_later and tight and not tight[0].lossless:
        return []
    return confirm(pool, sample, question, band, tight[:1], device)


def _pair(question: Question, evidence: Evidence, new: Sequence[Candidate]) -> list[Candidate]:
    """The two best; or the best and itself with one more block recomputed, where it is a second attempt with as few as
    are thought to fit: such a one is often short of a few MiB, as the allocator's pieces fit."""
    best = new[0]
    option, size = best.option, best.micro_batch_size
    tried = any(title == option.proposal.title for title, _, _ in option.corrections)
    if not tried or question.pins.checkpointed_blocks is not None or best.blocks in (0, option.arrangement.count):
        return list(new[:2])
    if option.reserved(size, best.blocks - 1) <= capacity(question, option.proposal, evidence):
        return list(new[:2])
    return [best, candidate(question, option, size, best.blocks + 1, evidence)]


_Key = tuple[str, int, int]
"""A candidate's option, micro-batch size and recomputed blocks."""


def _key(candidate: Candidate) -> _Key:
    return candidate.option.proposal.title, candidate.micro_batch_size, candidate.blocks
