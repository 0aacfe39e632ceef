"""What training goes on with where a step of the plan runs out of memory after all."""

from __future__ import annotations

from bigdit.search.finding.candidates import Candidate, Planner
from bigdit.spec import StepSize
from bigdit.speed.step import step_time

LESS = 0.05
"""The share of the GPU that each frees, at least: what is tried costs a start each."""


def smaller(planner: Planner, chosen: Candidate) -> tuple[StepSize, ...]:
    """Sizes of the chosen strategy's step with the same global batch, each with LESS of the GPU than the one before:
    the fastest that there is."""
    found: list[StepSize] = []
    capacity = chosen.reserved_bytes
    while True:
        capacity -= LESS * planner.question.gpu.usable_bytes
        fastest = _fastest(planner, chosen, capacity)
        if fastest is None:
            return tuple(found)
        found.append(fastest.strategy.step_size)
        capacity = fastest.reserved_bytes


def _fastest(planner: Planner, chosen: Candidate, capacity_bytes: float) -> Candidate | None:
    """The fastest of the same samples a step and at least as many recomputed blocks that fits."""
    option, samples = chosen.option, chosen.micro_batch_size * chosen.grad_accum_steps
    question, found = planner.question, []
    for size in range(1, chosen.micro_batch_size + 1):
        accumulated = samples // size
        if samples % size or (accumulated > 1 and option.proposal.strategy.optimizer_in_backward):
            continue
        blocks = option.fewest_blocks(size, capacity_bytes)
        if blocks is None:
            continue
        blocks = max(blocks, chosen.blocks)
        settled = option.proposal.strategy.settled(
            micro_batch_size=size, grad_accum_steps=accumulated, checkpointed_blocks=blocks
        )
        work = option.arrangement.work(size, blocks)
        step = step_time(work, settled, question.gpu, question.cluster, planner.evidence.calibration(settled))
        found.append(Candidate(option, size, accumulated, blocks, step))
    return max(found, key=lambda each: each.rate.middle, default=None)
