"""What answers a live page: emulated cards, which say within a second whether a step fits, and rehearsals, which say
what is live at its peak, and take longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from pydantic import NonNegativeFloat, NonNegativeInt

from bigdit.errors import UserError
from bigdit.live.asked import Asked, Step, step
from bigdit.memory import Category
from bigdit.memory.process import ByteRange
from bigdit.profile.attempt import Attempts
from bigdit.rehearse.pool import Pool
from bigdit.search.finding.candidates import beside
from bigdit.search.finding.confirm import Ran, judged
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.verdict import process, safe_bytes
from bigdit.search.plan import Verdict
from bigdit.search.telling.ways import Way
from bigdit.spec import Strict
from bigdit.speed.interval import Interval
from bigdit.speed.launches import launches_of
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of

TIMEOUT_S = 120.0
"""After which a question is given up: an optimizer on the host really steps there, for up to a minute."""


class Answer(Strict):
    """One strategy as it `ran` on an emulated card, and as it was rehearsed where `at_peak` is there: what is live by
    category where the deciding `phase` is highest.

    Where it does not fit the card and was not rehearsed, it took `peak_reserved_bytes` when it ran out of memory, and
    wants more. `seconds` are those of this answer; the rest as in search.plan.Choice.
    """

    ran: bool
    verdict: Verdict
    ran_out: bool
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    process: ByteRange
    phase: str | None = None
    at_peak: dict[Category, NonNegativeInt] | None = None
    host_bytes: NonNegativeInt | None = None
    seconds_per_step: Interval | None = None
    samples_per_second_per_card: Interval | None = None
    seconds: NonNegativeFloat


class Answers:
    """Answers about `ways`, on cards of any kind that these have; their processes end with the `with` block."""

    def __init__(self, ways: Sequence[Way], evidence: Evidence, *, timeout_s: float = TIMEOUT_S) -> None:
        self._ways = {way.setting.title: way for way in ways}
        self._band, self._evidence, self._timeout_s = evidence.band, evidence, timeout_s
        # A process group's size stays what it is: a lane for each.
        sizes = sorted({way.setting.strategy.world_size for way in ways})
        self._lanes = {size: at for at, size in enumerate(sizes)}
        self.cards: dict[str, Attempts] = {}
        self._lock = threading.Lock()
        self._pool = Pool(1, timeout_s=timeout_s)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        for card in self.cards.values():
            card.lanes.end()
        self._pool.__exit__(*error)

    def warm(self, asked: Asked) -> None:
        """Have what answers this question import what it needs."""
        self._pool.start()
        wanted = step(self._ways, asked)
        if wanted.way.question.device == "emulated":
            self._card(wanted).lanes.start()

    def run(self, asked: Asked) -> Answer:
        """As it runs on an emulated card.

        Raises UserError for what cannot be asked or takes too long, and WorkerError where the process dies.
        """
        began = time.perf_counter()
        wanted = step(self._ways, asked)
        found, allocated, reserved = self._run(wanted)
        return Answer(
            ran=True,
            verdict=found.verdict,
            ran_out=found.reserved_bytes is None,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            process=process(reserved, beside(wanted.way.question, wanted.strategy), self._band),
            seconds=round(time.perf_counter() - began, 3),
        )

    def rehearse(self, asked: Asked) -> Answer:
        """As it was rehearsed, and ran where it may run; as in a plan, what ran decides. Raises as `run` does."""
        began = time.perf_counter()
        wanted = step(self._ways, asked)
        question, strategy = wanted.way.question, wanted.strategy
        (answer,) = self._pool.rehearse([wanted.request])
        if isinstance(answer, UserError):
            raise answer
        ran = self._run(wanted)[0] if question.device == "emulated" else None
        found = judged(question, self._band, strategy, answer, ran)
        work, calibration = work_of(found.timeline, strategy), self._evidence.calibration(strategy)
        speed = step_time(work, strategy, question.gpu, question.cluster, calibration, found.launches).seconds
        return Answer(
            ran=found.ran,
            verdict=found.verdict,
            ran_out=ran is not None and ran.reserved_bytes is None,
            peak_allocated_bytes=answer.ledger.peak_allocated_bytes,
            peak_reserved_bytes=found.reserved_bytes,
            process=found.process,
            phase=answer.ledger.deciding.phase,
            at_peak=answer.ledger.at_peak,
            host_bytes=found.host.node_bytes,
            seconds_per_step=speed,
            samples_per_second_per_card=speed.per(strategy.micro_batch_size * strategy.grad_accum_steps),
            seconds=round(time.perf_counter() - began, 3),
        )

    def _run(self, wanted: Step) -> tuple[Ran, int, int]:
        """What the card says, and the most bytes that were allocated and reserved there.

        In the most bytes that torch may have: where it reserves no more than the fewest, it would run in these alike.
        """
        question, strategy = wanted.way.question, wanted.strategy
        around = beside(question, strategy)
        safe, most = safe_bytes(question.gpu, around, self._band), max(question.gpu.usable_bytes - around.low_bytes, 1)
        found = self._card(wanted).run(
            wanted.request, most, card=self._lanes[strategy.world_size], timeout_s=self._timeout_s
        )
        verdict: Verdict = "DOES NOT FIT"
        if found.ran:
            verdict = "FITS" if found.fits and found.peak_reserved_bytes <= safe else "TIGHT"
        launches = launches_of(found.launched, wanted.request.strategy.grad_accum_steps)
        reserved = found.peak_reserved_bytes if found.ran else None
        return Ran(verdict, reserved, most, launches), found.peak_allocated_bytes, found.peak_reserved_bytes

    def _card(self, wanted: Step) -> Attempts:
        gpu = wanted.way.question.gpu
        with self._lock:
            if gpu.name not in self.cards:
                self.cards[gpu.name] = Attempts(gpu, len(self._lanes))
            return self.cards[gpu.name]
