"""The best candidates, run exactly as they stand, until the best one is known and fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bigdit.memory.process import ByteRange
from bigdit.profile.attempt import Attempt, Profile
from bigdit.search.finding.candidates import Candidate, Planner, candidate, preferred
from bigdit.search.finding.verdict import process
from bigdit.search.needs.host import HostNeed, host_need
from bigdit.search.plan import Verdict
from bigdit.speed.launches import Launches, launches_of

MOST_RUN = 10
"""Candidates that are run at most, on the way to the best."""

WIDE = 2
"""GPUs in one, on which a candidate that is short of room says what it wants."""


@dataclass(frozen=True)
class Ran:
    """How a candidate ran. `reserved_bytes` is None where it did not come to its end; with room for all of it torch
    would reserve `wanted_bytes`, or more where they are those of WIDE GPUs. `phases`: allocated bytes at the most."""

    candidate: Candidate
    verdict: Verdict
    reserved_bytes: int | None
    wanted_bytes: int
    phases: dict[str, int]
    launches: Launches | None

    @property
    def known_bytes(self) -> int:
        return self.wanted_bytes if self.reserved_bytes is None else self.reserved_bytes


@dataclass(frozen=True)
class Confirmed:
    """A candidate that ran, and was recorded: `taken` is what one process takes of the GPU, `host` what those of a
    machine take of its memory. `verdict` is that of both."""

    ran: Ran
    answer: Profile
    taken: ByteRange
    host: HostNeed
    verdict: Verdict

    @property
    def candidate(self) -> Candidate:
        return self.ran.candidate


def confirm(planner: Planner, ran: Ran) -> Confirmed:
    """Record what ran. Raises UserError and WorkerError where it cannot be recorded."""
    question, found = planner.question, ran.candidate
    answer = planner.cards.profile(planner.request(found.strategy))
    host = host_need(answer.host_timeline, answer.checkpoint_bytes, question.cluster, question.samples)
    short = question.short_of_host(host.node_bytes)
    taken = process(ran.known_bytes, planner.non_torch(found.strategy), planner.band)
    return Confirmed(ran, answer, taken, host, "DOES NOT FIT" if short else ran.verdict)


def run(planner: Planner, candidates: Sequence[Candidate]) -> list[Ran | None]:
    """FITS where it ran in the bytes that torch has at least, TIGHT in those that it has at most; None where an attempt
    failed. Options' predictions are moved by what was found."""
    question = planner.question
    safe = [planner.capacity(each.strategy) for each in candidates]
    most = [
        max(question.gpu.usable_bytes - planner.non_torch(each.strategy).low_bytes, 1) for each in candidates
    ]
    requests = [planner.request(each.strategy) for each in candidates]

    def tried(places: Sequence[int], room: Sequence[int], *, to_end: bool = True) -> dict[int, Attempt]:
        attempts = planner.cards.attempts([(requests[at], room[at]) for at in places], to_end=to_end)
        return {at: each for at, each in zip(places, attempts, strict=True) if isinstance(each, Attempt)}

    first = tried(range(len(requests)), safe, to_end=False)
    wide = tried([at for at, each in first.items() if not each.fits], [WIDE * question.gpu.usable_bytes] * len(most))
    beyond = [at for at, each in wide.items() if not each.fits or each.peak_reserved_bytes > most[at]]
    last = {at: each for at, each in wide.items() if at not in beyond} | tried(beyond, most)
    found = []
    for at, each in enumerate(candidates):
        ran = _ran(each, requests[at].strategy.grad_accum_steps, first.get(at), wide.get(at), last.get(at))
        if ran is not None:
            each.option.correct(each.micro_batch_size, each.blocks, ran.wanted_bytes)
        found.append(ran)
    return found


def _ran(
    tried: Candidate, micro_batches: int, first: Attempt | None, wide: Attempt | None, last: Attempt | None
) -> Ran | None:
    """By the attempts in the fewest bytes that torch may have, and where these are too few, with room for all that is
    wanted and in the most; None where one of them failed."""
    if first is not None and first.fits:
        return _as_ran(tried, "FITS", first, first, first, micro_batches)
    if wide is None or last is None:
        return None
    return _as_ran(tried, "TIGHT" if last.ran else "DOES NOT FIT", last, wide, wide, micro_batches)


def _as_ran(
    tried: Candidate, said: Verdict, reserved: Attempt, wanted: Attempt, launched: Attempt, micro_batches: int
) -> Ran:
    return Ran(
        candidate=tried,
        verdict=said,
        reserved_bytes=None if said == "DOES NOT FIT" else reserved.peak_reserved_bytes,
        wanted_bytes=wanted.peak_reserved_bytes,
        phases={phase: each.peak_bytes for phase, each in wanted.phases.items()},
        launches=launches_of(launched.launched, micro_batches),
    )


def best_that_runs(
    planner: Planner,
    ranked: Callable[[], list[Candidate]],
    ahead: Callable[[Candidate], object],
    *,
    lossless_later: bool,
) -> list[Confirmed]:
    """The best that runs, which alone is recorded: for what it takes of the host, and by category.

    `ranked` orders candidates by predictions, which each run moves; where nothing fits, the best of what is TIGHT. None
    that is lossy where others are `lossless_later`. `ahead` has what will be asked of the best run beside its record.
    """
    ran: dict[_Key, tuple[Candidate, Ran | None]] = {}
    refused: set[_Key] = set()
    while True:
        order = [each for each in ranked() if _key(each) not in refused]
        if order and _key(order[0]) not in ran and len(ran) < MOST_RUN:
            asked = _pair(planner, order)[: planner.cards.count]
            ran |= {_key(each): (each, said) for each, said in zip(asked, run(planner, asked), strict=True)}
            continue
        fits = {at: said for at, (_, said) in ran.items() if at not in refused and said and said.verdict == "FITS"}
        held = preferred(said.candidate for said in fits.values())
        if not held:
            break
        if lossless_later and not held[0].lossless:
            return []
        best = _confirmed(planner, fits[_key(held[0])], ahead)
        if best is not None and best.verdict == "FITS":
            return [best]
        refused.add(_key(held[0]))
    tight = [said for _, said in ran.values() if said is not None and said.verdict == "TIGHT"]
    order = preferred(said.candidate for said in tight)
    if not order or (lossless_later and not order[0].lossless):
        return []
    first = next(said for said in tight if _key(said.candidate) == _key(order[0]))
    return [confirm(planner, first)]


def _confirmed(planner: Planner, ran: Ran, ahead: Callable[[Candidate], object]) -> Confirmed:
    with ThreadPoolExecutor(1) as aside:
        asked_next = aside.submit(ahead, ran.candidate)
        best = confirm(planner, ran)
        asked_next.result()
    return best


def _pair(planner: Planner, new: Sequence[Candidate]) -> list[Candidate]:
    """The two best; or the best and itself with one more block recomputed, where it is a second attempt with as few as
    are thought to fit: such a one is often short of a few MiB, as the allocator's pieces fit."""
    best = new[0]
    option, size = best.option, best.micro_batch_size
    tried = any(title == option.proposal.title for title, _, _ in option.corrections)
    pinned = planner.question.pins.checkpointed_blocks is not None
    if not tried or pinned or best.blocks in (0, option.arrangement.count):
        return list(new[:2])
    if option.reserved(size, best.blocks - 1) <= planner.capacity(option.proposal.strategy):
        return list(new[:2])
    return [best, candidate(planner, option, size, best.blocks + 1)]


_Key = tuple[str, int, int]
"""A candidate's option, micro-batch size and recomputed blocks."""


def _key(candidate: Candidate) -> _Key:
    return candidate.option.proposal.title, candidate.micro_batch_size, candidate.blocks
