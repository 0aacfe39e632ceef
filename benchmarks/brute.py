"""Plans beside every strategy of their space, run one by one: writes benchmarks/brute.md.

    python benchmarks/brute.py [--quick] [PART OF A QUESTION]

For small requests each engine, optimizer and precision of the planner's space runs with none to all blocks recomputed,
in quarters, and with selective checkpointing. Micro-batches double up to the largest that fits. Then the plan is
made. It must fit where anything does. Nothing of its class may be faster at both ends of the interval and take less. It
may not leave nine tenths of the GPU empty where something faster fits. The exit status is 1 where any of this is not
so. --quick leaves out lossy strategies and last resorts where others fit. Attempts are cached, so that the command
continues where it was. With part of a request nothing is written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from emulated import step_of

from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.files import write_text
from bigdit.memory.process import non_torch_memory_of
from bigdit.profile.attempt import Attempt, AttemptJob, StepRequest, request_for
from bigdit.profile.gpus import EmulatedGpus, Row
from bigdit.search.answer import make_plan
from bigdit.search.calibration import UNPROVED
from bigdit.search.plan import Plan, ResolvedRequest, lossy_by, node_bytes, safe_bytes
from bigdit.search.planner import SAME_ROOM, SAME_SPEED
from bigdit.search.resolve import resolve_request
from bigdit.search.space import proposals
from bigdit.speed.seconds import Interval
from bigdit.strategy import StepSize, Strategy
from bigdit.units import gib

PAGE = Path(__file__).with_suffix(".md")

REQUESTS: tuple[dict[str, Any], ...] = (
    {"model": "dit-b-4-paper", "gpu": "rtx-3060-12g"},
    {"model": "dit-l-2", "gpu": "rtx-3060-12g"},
    {"model": "dit-l-2", "gpu": "rtx-4090", "global_batch": 256},
    {"model": "dit-b-4-paper", "gpu": "rtx-3060-12g", "gpus": 8, "global_batch": 256},
    {"model": "sana-600m-512", "gpu": "rtx-3060-12g"},
    {"model": "sana-600m-512", "gpu": "a40", "engine": "single", "optimizer": "came"},
    {"model": "sana-600m-512", "gpu": "rtx-4090", "gpus": 8},
    {"model": "pixart-alpha-xl-2-256", "gpu": "rtx-3060-12g", "lora": 16},
    {"model": "pixart-alpha-xl-2-256", "gpu": "rtx-4090", "ema": "auto"},
    {"model": "pixart-alpha-xl-2-512", "gpu": "rtx-3060-12g"},
    {"model": "pixart-alpha-xl-2-512", "gpu": "a40", "gpus": 8, "global_batch": 128},
    {"model": "sd3-medium", "gpu": "rtx-4090", "lora": 16},
    {"model": "sd3-medium", "gpu": "a40", "precision": "bf16_sr"},
)

EMPTY = 0.1
"""Share of a GPU's memory: a plan that needs less leaves the GPU empty."""

MICRO_BATCHES_RUN = 2
"""Accumulated micro-batches that run. All after the first take the same memory."""


@dataclass(frozen=True)
class Ran:
    """A strategy that ran: bytes that torch reserved, bytes of a machine's memory, and images a second."""

    strategy: Strategy
    title: str
    group: tuple[bool, int]
    reserved_bytes: int
    rate: Interval
    fits: bool

    def beats(self, other: Ran) -> bool:
        """Whether it is faster at both ends of the interval, and needs less by more than the margin of a real GPU."""
        faster = self.rate.low > other.rate.low and self.rate.high > other.rate.high
        return faster and self.reserved_bytes < other.reserved_bytes * (1 - SAME_ROOM)

    def is_better(self, other: Ran) -> bool:
        """Whether the planner should have chosen it instead of `other`. If that one recomputes nothing, selective
        checkpointing must be faster by more than the speeds' uncertainty: no real GPU has shown smaller gains. So must
        one that swaps more blocks: copies take CPU memory and PCIe."""
        selective = self.strategy.checkpointing == "selective" and self.strategy.checkpointed_blocks != 0
        swaps_more = self.strategy.blocks_to_swap > other.strategy.blocks_to_swap
        if swaps_more or (selective and other.strategy.checkpointed_blocks == 0):
            return self.much_faster(other) and self.beats(other)
        return self.beats(other)

    def much_faster(self, other: Ran) -> bool:
        """Whether it is faster by more than the speeds' uncertainty."""
        return min(self.rate.low / other.rate.low, self.rate.high / other.rate.high) > 1 + SAME_SPEED


@dataclass(frozen=True)
class Way:
    """A proposal with a number of recomputed blocks, before its micro-batch is chosen. `group`: lossy or not, and how
    much of a last resort. The planner takes the first group in which anything fits."""

    strategy: Strategy
    title: str
    group: tuple[bool, int]


class Space:
    """All strategies of a request, on emulated GPUs."""

    def __init__(self, request: ResolvedRequest, cards: EmulatedGpus) -> None:
        self.request, self.cards = request, cards
        self.failed: dict[str, None] = {}

    def ways(self) -> list[Way]:
        """Engines, optimizers and precisions, with each policy that Strategy allows."""
        proposed, _ = proposals(self.request)
        return [
            Way(strategy, f"{each.title}, {_policy(strategy)}", (not each.lossless, each.last_resort))
            for each in proposed
            for strategy in self._policies(each.strategy)
        ]

    def run(self, ways: Sequence[Way]) -> list[Ran]:
        """Run every way at micro-batches that double, up to the largest that fits."""
        with ThreadPoolExecutor(self.cards.count) as threads:
            return [ran for found in threads.map(self._sizes, ways) for ran in found]

    def one(self, way: Way, size: int) -> Ran | None:
        """Run the way at one micro-batch size. Returns None, and adds a line to `failed`, if it cannot run."""
        strategy, accumulated = self._sized(way.strategy, size)
        asked = self._step_request(strategy)
        (attempt,) = self.cards.attempts([AttemptJob(request=asked, counted="step")])
        if not isinstance(attempt, Attempt) or not attempt.ran:
            why = attempt.out_of_memory if isinstance(attempt, Attempt) else attempt
            self.failed[f"{way.title}: {str(why).splitlines()[0]}"] = None
            return None
        request = self.request
        step = step_of(attempt, strategy, request.gpu, request.cluster, grad_accum_steps=accumulated)
        host = node_bytes(attempt.host.saving(attempt.checkpoint_bytes), request.cluster)
        return Ran(
            strategy=strategy,
            title=f"{way.title}, micro-batch {size}",
            group=way.group,
            reserved_bytes=attempt.peak_reserved_bytes,
            rate=step.seconds.per(size * accumulated / strategy.cp),
            fits=attempt.peak_reserved_bytes <= self._room(strategy) and host <= request.host_memory_bytes,
        )

    def _policies(self, strategy: Strategy) -> Iterator[Strategy]:
        """None to all blocks recomputed, in quarters; and selective checkpointing of all. Swapped blocks, which are
        also recomputed, come in quarters, too."""
        count, pinned = self.request.model.block_count, self.request.constraints.checkpointed_blocks
        if strategy.blocks_to_swap:
            swapped = sorted({max(strategy.blocks_to_swap * quarter // 4, 1) for quarter in range(1, 5)})
            yield from (strategy.model_copy(update={"blocks_to_swap": each}) for each in swapped)
            return
        some = sorted({count * quarter // 4 for quarter in range(5)})
        if pinned is not None:
            some = [count if pinned == "all" else pinned]
        for blocks in some:
            yield strategy.sized(StepSize(micro_batch_size=1, grad_accum_steps=1, checkpointed_blocks=blocks))
        if last := some[-1]:
            size = StepSize(micro_batch_size=1, grad_accum_steps=1, checkpointed_blocks=last, checkpointing="selective")
            yield strategy.sized(size)

    def _sizes(self, way: Way) -> list[Ran]:
        pinned, share = self.request.constraints.micro_batch_size, self._share(way.strategy)
        found: list[Ran] = []
        for size in [pinned] if pinned else _divisors(share) if share else _doubled():
            if share and size < share and way.strategy.optimizer_in_backward:
                continue  # it steps after each micro-batch
            ran = self.one(way, size)
            found += [ran] if ran else []
            if ran is None or not ran.fits:
                break
        fitting = [each for each in found if each.fits]
        if pinned or share or not fitting:
            return found
        known = {each.strategy.micro_batch_size: each.reserved_bytes for each in found}
        row = Row(partial(self._at, way), fitting[-1].strategy.micro_batch_size, known=known)
        largest = self.cards.largest(row, self._room(way.strategy))
        last = None if largest is None or int(largest[0]) in known else self.one(way, int(largest[0]))
        return [*found, *([last] if last else [])]

    def _at(self, way: Way, size: int) -> StepRequest:
        return self._step_request(self._sized(way.strategy, size)[0])

    def _step_request(self, strategy: Strategy) -> StepRequest:
        request = self.request
        return request_for(request.model, request.gpu, strategy, resolution=request.resolution, frames=request.frames)

    def _sized(self, strategy: Strategy, size: int) -> tuple[Strategy, int]:
        """The strategy as it runs, and the micro-batches of its step."""
        share = self._share(strategy)
        accumulated = share // size if share else 1
        update = {"micro_batch_size": size, "grad_accum_steps": min(accumulated, MICRO_BATCHES_RUN)}
        return strategy.sized(strategy.step_size.model_copy(update=update)), accumulated

    def _share(self, strategy: Strategy) -> int | None:
        batch = self.request.global_batch_size
        return None if batch is None else batch * strategy.cp // strategy.world_size

    def _room(self, strategy: Strategy) -> int:
        return safe_bytes(self.request.gpu, non_torch_memory_of(strategy, self.request.gpu), UNPROVED)


@dataclass(frozen=True)
class Proof:
    """A request, all that ran, and the plan. `chosen`: the plan's strategy, run like the others."""

    asked: str
    ran: Sequence[Ran]
    plan: Plan
    chosen: Ran | None
    failed: Sequence[str]
    seconds: float

    @property
    def rivals(self) -> list[Ran]:
        """What fits in the first group in which anything does."""
        fitting = [each for each in self.ran if each.fits]
        first = min((each.group for each in fitting), default=None)
        return [each for each in fitting if each.group == first]

    @property
    def faults(self) -> list[str]:
        """What is wrong with the plan, a line each."""
        if not self.rivals:
            return ["it fits, and nothing that ran does"] if self.plan.verdict == "FITS" else []
        if self.plan.verdict != "FITS":
            return [f"{self.plan.verdict}, and this fits: {self.rivals[0].title}"]
        if self.chosen is None:
            return ["its strategy could not be run"]
        chosen, found = self.chosen, []
        if chosen.reserved_bytes != self.plan.chosen.peak_reserved_bytes:
            found.append(f"it reserves {chosen.reserved_bytes:,} bytes, and the plan says otherwise")
        if chosen.group != self.rivals[0].group:
            found.append(f"it is a resort, and this fits: {self.rivals[0].title}")
        better = [each for each in self.rivals if each.is_better(chosen)]
        if better:
            best = max(better, key=lambda each: each.rate.low)
            found.append(f"{len(better)} are faster and take less, such as {best.title}: {_said(best)}")
        faster = [each for each in self.rivals if each.much_faster(chosen)]
        if chosen.reserved_bytes < EMPTY * self.plan.request.gpu.usable_bytes and faster:
            found.append(f"nine tenths of the GPU are empty, and this is faster: {faster[0].title}")
        return found


def prove(asked: dict[str, Any], *, quick: bool) -> Proof:
    """Run all strategies of a request, and make its plan. With `quick` only the first group in which anything fits
    runs."""
    began = time.perf_counter()
    request = resolve_request(**asked, buckets="none")
    with EmulatedGpus(request.gpu) as cards:
        space = Space(request, cards)
        ways = space.ways()
        ran: list[Ran] = []
        for group in sorted({way.group for way in ways}):
            if not (quick and any(each.fits for each in ran)):
                ran += space.run([way for way in ways if way.group == group])
        plan = make_plan(request)
        strategy = plan.chosen.strategy
        way = Way(strategy, plan.chosen.title, _group(strategy, ways))
        chosen = space.one(way, strategy.micro_batch_size)
    seconds = time.perf_counter() - began
    return Proof(" ".join(map(str, asked.values())), ran, plan, chosen, [*space.failed], seconds)


HEAD = """# Plans beside every strategy

Made by `python benchmarks/brute.py`. Every engine, optimizer and precision of the planner's space ran with
none to all blocks recomputed, in quarters, and with selective checkpointing. Micro-batches doubled up
to the largest that fits. *Its class*: lossless before lossy, and no last resort before one. A plan is wrong
in three cases. It does not fit, and something does. Another one of its class is faster at both ends of
the interval and takes less. It takes less than a tenth of the GPU, and something faster fits.
Selective checkpointing is better than recomputing nothing only if it is faster by 5 % or more."""
QUICK = "By `--quick`: strategies of the first class in which anything fits, alone."


def page(proofs: Sequence[Proof], *, quick: bool) -> str:
    """The page of all proofs so far."""
    heads = ["request", "ran", "fit", "plan", "reserved", "images/s of a GPU", "fastest of its class", "s"]
    rows = [heads, ["---"] * len(heads), *(_cells(each) for each in proofs)]
    lines = [HEAD, *([QUICK] if quick else []), ""]
    right, ran = sum(not each.faults for each in proofs), sum(len(each.ran) for each in proofs)
    lines += [
        f"{right} of {len(proofs)} plans are right; {ran:,} strategies ran, by torch {cuda_build(cuda_python())}."
    ]
    lines += ["", *(f"| {' | '.join(row)} |" for row in rows)]
    wrong = [f"- {each.asked}: {fault}" for each in proofs for fault in each.faults]
    failed = sorted({f"- {line}" for each in proofs for line in each.failed})
    for title, found in (("Wrong", wrong), ("Not run", failed)):
        lines += ["", f"## {title}", "", *found] if found else []
    return "\n".join([*lines, ""])


def _cells(proof: Proof) -> list[str]:
    fastest = max(proof.rivals, key=lambda each: each.rate.middle, default=None)
    return [
        proof.asked,
        f"{len(proof.ran):,}",
        f"{sum(each.fits for each in proof.ran):,}",
        f"{proof.plan.verdict}: {proof.plan.chosen.title}",
        gib(proof.plan.chosen.peak_reserved_bytes),
        "" if proof.chosen is None else _rate(proof.chosen),
        "" if fastest is None else f"{fastest.title}: {_said(fastest)}",
        f"{proof.seconds:.0f}",
    ]


def _said(ran: Ran) -> str:
    return f"{gib(ran.reserved_bytes)}, {_rate(ran)}"


def _rate(ran: Ran) -> str:
    return f"{ran.rate.low:.3g} to {ran.rate.high:.3g}"


def _policy(strategy: Strategy) -> str:
    if strategy.blocks_to_swap:
        return f"{strategy.blocks_to_swap} blocks swapped"
    kind = "selective, " if strategy.checkpointing == "selective" else ""
    return f"{kind}{strategy.checkpointed_blocks} blocks recomputed"


def _group(strategy: Strategy, ways: Sequence[Way]) -> tuple[bool, int]:
    """The group of the plan's strategy: that of the proposal that differs in sizes alone."""

    def like(other: Strategy) -> bool:
        same = {"checkpointing": strategy.checkpointing, "blocks_to_swap": strategy.blocks_to_swap}
        swaps = bool(other.blocks_to_swap) == bool(strategy.blocks_to_swap)
        return swaps and other.sized(strategy.step_size).model_copy(update=same) == strategy

    return next((way.group for way in ways if like(way.strategy)), (bool(lossy_by(strategy)), 0))


def _divisors(share: int) -> list[int]:
    return [size for size in range(1, share + 1) if share % size == 0]


def _doubled() -> Iterator[int]:
    size = 1
    while size <= 512:
        yield size
        size *= 2


def main(wanted: str, *, quick: bool) -> int:
    """Print a line a request. Returns 1 if a plan is wrong."""
    proofs: list[Proof] = []
    for asked in REQUESTS:
        if wanted in " ".join(map(str, asked.values())):
            proofs.append(prove(asked, quick=quick))
            print(" | ".join(_cells(proofs[-1])), *proofs[-1].faults, sep="\n  wrong: ", flush=True)
            if not wanted:
                write_text(PAGE, page(proofs, quick=quick))
    return int(any(proof.faults for proof in proofs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="PART OF A QUESTION")
    parser.add_argument("--quick", action="store_true", help="the first class in which anything fits alone")
    options = parser.parse_args()
    sys.exit(main(" ".join(options.wanted), quick=options.quick))
