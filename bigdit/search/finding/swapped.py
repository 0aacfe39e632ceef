"""Proposals that swap blocks become options: how many of them wait on the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from bigdit.errors import UserError
from bigdit.rehearse import RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import Option, capacity, micro_batch_sizes, quarters
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.explore import explore
from bigdit.search.finding.space import Proposal
from bigdit.search.plan import Rejected
from bigdit.search.predict.anchors import Sample
from bigdit.search.predict.swap import Swapping, swapping, swapping_requests
from bigdit.search.question import Question
from bigdit.spec import LEAST_SWAPPED


def swapped(
    pool: Pool,
    sample: Sample,
    question: Question,
    evidence: Evidence,
    group: Sequence[Proposal],
    known: Sequence[Option],
) -> tuple[list[Option], list[Rejected]]:
    """For each proposal of the group that swaps blocks, options that swap the fewest with which anything fits, and
    quarters of all beyond these; with their bases that were not among the `known`."""
    found, rejected = [*known], list[Rejected]()
    for proposal in group:
        if proposal.base is None or not proposal.strategy.blocks_to_swap:
            continue
        if all(each.proposal.title != proposal.base.title for each in found):
            made, failed = explore(pool, sample, [replace(proposal.base, base=None)])
            found, rejected = [*found, *made], [*rejected, *failed]
        alone = (proposal.base.base or proposal.base).strategy  # an average is as large, whatever is swapped
        answers = pool.rehearse(swapping_requests(sample, alone))
        known_sizes = [each for each in answers if isinstance(each, RehearsedSize)]
        if len(known_sizes) < len(answers):
            why = next(str(each) for each in answers if isinstance(each, UserError))
            rejected.append(Rejected(choice=proposal.title, reason=why))
            continue
        moved = swapping(sample, alone, known_sizes)
        for base in [each for each in found if each.proposal.title == proposal.base.title]:
            found += _numbers(question, evidence, proposal, base, moved)
    return found[len(known) :], rejected


def _numbers(question: Question, evidence: Evidence, proposal: Proposal, base: Option, moved: Swapping) -> list[Option]:
    """The fewest with which the smallest micro-batch fits where all that may be is recomputed, or all that may be
    swapped; and the quarters beyond."""
    count, most, room = base.arrangement.count, proposal.strategy.blocks_to_swap, capacity(question, proposal, evidence)
    recomputed = count if question.pins.checkpointed_blocks in (None, "all") else most
    corrections: dict[tuple[str, int, int], float] = {}  # their own: those of packed weights say nothing of these
    least = next(micro_batch_sizes(question, proposal.strategy), 1)

    def option(first: int) -> Option:
        title = f"{base.proposal.title}, {first} of {count} blocks' weights on the host"
        strategy = proposal.strategy.model_copy(update={"blocks_to_swap": first})
        named = replace(proposal, title=title, strategy=strategy)
        return Option(named, moved.of(base.arrangement, first), corrections)

    numbers = range(LEAST_SWAPPED, most)
    fewest = bisect_left(numbers, True, key=lambda first: option(first).reserved(least, recomputed) <= room)
    first = LEAST_SWAPPED + fewest
    return [option(each) for each in sorted({first, *(each for each in quarters(count) if first < each <= most)})]
