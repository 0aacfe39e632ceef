"""The best candidates, run exactly as they stand, until the best one is known and fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bigdit.memory.process import ByteRange
from bigdit.profile.attempt import UNLIMITED, Attempt, Profile
from bigdit.search.finding.candidates import Candidate, Planner, candidate, preferred
from bigdit.search.finding.verdict import process
from bigdit.search.needs.host import HostNeed, host_need
from bigdit.search.plan import Verdict
from bigdit.speed.launches import Launches, launches_of

MOST_RUN = 10
"""Candidates that are run at most, on the way to the best."""


@dataclass(frozen=True)
class Ran:
    """How a candidate ran. `reserved_bytes` is what torch reserved of the GPU, and `wanted_bytes` what it does where
    there is room for all. `phases`: allocated bytes at the most."""

    candidate: Candidate
    verdict: Verdict
    reserved_bytes: int
    wanted_bytes: int
    phases: dict[str, int]
    launches: Launches | None


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
    taken = process(ran.reserved_bytes, planner.non_torch(found.strategy), planner.band)
    return Confirmed(ran, answer, taken, host, "DOES NOT FIT" if short else ran.verdict)


def run(planner: Planner, candidates: Sequence[Candidate]) -> list[Ran | None]:
    """As each ran on a GPU without a limit: FITS where torch reserved no more than it has for sure, TIGHT where no more
    than it may have, or where it came through within that by looking for room. None where an attempt failed.

    Options' predictions are moved by what was found.
    """
    question = planner.question
    requests = [planner.request(each.strategy) for each in candidates]
    wide = planner.cards.attempts([(request, UNLIMITED) for request in requests])
    found: list[Ran | None] = []
    for each, request, attempt in zip(candidates, requests, wide, strict=True):
        if not isinstance(attempt, Attempt) or not attempt.ran:
            found.append(None)
            continue
        wanted = reserved = attempt.peak_reserved_bytes
        most = question.gpu.usable_bytes - planner.non_torch(each.strategy).low_bytes
        said: Verdict = "FITS" if wanted <= planner.capacity(each.strategy) else "TIGHT"
        if wanted > most:
            (last,) = planner.cards.attempts([(request, max(most, 1))])
            came_through = isinstance(last, Attempt) and last.ran
            said = "TIGHT" if came_through else "DOES NOT FIT"
            reserved = last.peak_reserved_bytes if isinstance(last, Attempt) and came_through else wanted
        each.option.correct(each.micro_batch_size, each.blocks, wanted)
        launches = launches_of(attempt.launched, request.strategy.grad_accum_steps)
        phases = {phase: each.peak_bytes for phase, each in attempt.phases.items()}
        found.append(Ran(each, said, reserved, wanted, phases, launches))
    return found


def best_that_runs(
    planner: Planner,
    ranked: Callable[[], list[Candidate]],
    ahead: Callable[[Candidate], object],
    *,
    lossless_later: bool,
) -> list[Confirmed]:
    """The best that runs, which alone is recorded: for what it takes of the host, and by category.

    `ranked` orders candidates by predictions, which each run moves; where nothing fits, the best of what is TIGHT. None
    that is lossy runs where others are `lossless_later`. `ahead` has what will be asked of the best run beside its
    record.
    """
    ran: dict[_Key, tuple[Candidate, Ran | None]] = {}
    refused: set[_Key] = set()
    while True:
        order = [each for each in ranked() if _key(each) not in refused and (each.lossless or not lossless_later)]
        if order and _key(order[0]) not in ran and len(ran) < MOST_RUN:
            asked = _pair(planner, order)[: planner.cards.count]
            ran |= {_key(each): (each, said) for each, said in zip(asked, run(planner, asked), strict=True)}
            continue
        fits = {at: said for at, (_, said) in ran.items() if at not in refused and said and said.verdict == "FITS"}
        held = preferred(said.candidate for said in fits.values())
        if not held:
            break
        best = _confirmed(planner, fits[_key(held[0])], ahead)
        if best is not None and best.verdict == "FITS":
            return [best]
        refused.add(_key(held[0]))
    tight = [said for _, said in ran.values() if said is not None and said.verdict == "TIGHT"]
    order = preferred(said.candidate for said in tight)
    if not order:
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
