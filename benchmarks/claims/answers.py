"""What claims are answered with: plans, and rehearsals at full depth."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bigdit.rehearse import RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.predict.anchors import Sample

from bigdit.catalog.encoders import online_encoders
from bigdit.config.strategy import parse_strategy
from bigdit.errors import UserError
from bigdit.memory.process import beside_training
from bigdit.memory.timeline import Category
from bigdit.profile.request import Rehearsal
from bigdit.search.answer import make_plan
from bigdit.search.asking.ask import question_for
from bigdit.search.finding.candidates import Option, candidate, capacity
from bigdit.search.finding.confirm import confirm
from bigdit.search.finding.evidence import Evidence
from bigdit.search.finding.explore import explore, selective
from bigdit.search.finding.space import Proposal
from bigdit.search.finding.verdict import planned, process, verdict
from bigdit.search.plan import Plan, Step, Verdict
from bigdit.search.question import Question
from bigdit.search.telling.waterfall import waterfall
from bigdit.spec import Strategy
from bigdit.speed.cluster import Cluster
from bigdit.speed.interval import Interval
from bigdit.speed.seconds import StepTime
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of

Say = Callable[[str], None]

EVIDENCE = Evidence()
"""No receipts: answers are the same on every machine."""

MOST = 1 << 17
"""The largest micro-batch that is looked for."""

CLOSE = 50
"""A largest micro-batch is found to a fiftieth of it."""


class Case(NamedTuple):
    """A claim, a table of answers, and what explains them. `rows`: the first is the head."""

    title: str
    claim: str
    rows: list[list[str]]
    why: list[str]


@dataclass(frozen=True)
class Found:
    """A rehearsal at full depth on a card: allocated, reserved without a limit, the process's high end, seconds."""

    step: StepTime
    answer: RehearsedSize
    verdict: Verdict
    peaks: dict[str, int]
    reserved_bytes: int
    process_bytes: int
    usable_bytes: int

    @property
    def deciding(self) -> str:
        return self.answer.ledger.deciding.phase

    def live(self, category: Category) -> int:
        """The most bytes of this category at any phase's peak."""
        return max(phase.at_peak.get(category, 0) for phase in self.answer.ledger.phases)


def rehearsed(
    pool: Pool, model: str, gpu: str, texts: Sequence[str], vae_dtype: Literal["fp32", "fp16"] = "fp32"
) -> list[Found]:
    """Each strategy of `texts` (as --strategy writes it) at full depth. Raises UserError for one that cannot be."""
    sample = _sample(model, gpu)
    strategies = [parse_strategy([text]) for text in texts]
    requests = [sample.request(strategy) for strategy in strategies]
    if vae_dtype != "fp32":
        encoders = online_encoders(sample.model, requests[0].batch, vae_dtype=vae_dtype)
        requests = [each.model_copy(update={"encoders": each.encoders and encoders}) for each in requests]
    found = []
    answers = pool.rehearse(requests)
    for strategy, answer in zip(strategies, answers, strict=True):
        if isinstance(answer, UserError):
            raise answer
        found.append(_found(sample, strategy, answer))
    return found


def published_came(model: str, gpu: str, text: str) -> Found:
    """`rehearsed`, with CAME as it was published, in a process of its own; not kept."""
    sample, strategy = _sample(model, gpu), parse_strategy([text])
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(sample.request(strategy).model_dump_json())
        script = Path(__file__).parent / "published_came.py"
        subprocess.run([sys.executable, script, asked, answered], check=True, stderr=subprocess.DEVNULL, timeout=300)
        (answer,) = Rehearsal.model_validate_json(answered.read_bytes()).sizes
    return _found(sample, strategy, answer)


def plan(say: Say, **options: Any) -> Plan:
    """The plan for options as `bigdit.plan` takes them."""
    return make_plan(question_for(**options, device="rehearsed"), progress=say)


def option(pool: Pool, question: Question, text: str) -> Option:
    """What shallow siblings say of one strategy. Raises UserError where they cannot be rehearsed."""
    found, rejected = explore(pool, _sample_of(question), [Proposal(text, parse_strategy([text]))])
    if rejected:
        raise UserError(rejected[0].reason)
    return found[0]


def largest(pool: Pool, question: Question, option: Option, blocks: int) -> int:
    """The largest micro-batch that FITS with so many recomputed blocks, both it and the next one rehearsed at full
    depth; 0 for none. Beyond CLOSE the next one is larger by a fiftieth."""
    best = 0
    for _ in range(6):
        room = capacity(question, option.proposal, EVIDENCE)
        size = max(_predicted(option, blocks, room), best, 1)
        sizes = (size, size + max(size // CLOSE, 1))
        candidates = [candidate(question, option, each, blocks, EVIDENCE) for each in sizes]
        this, next_one = confirm(pool, _sample_of(question), question, EVIDENCE.band, candidates)
        if next_one.verdict == "FITS":
            best = sizes[1]
        elif this.verdict == "FITS":
            return size
        elif size == 1:
            return 0
    return best


def explained(pool: Pool, found: Plan) -> tuple[Step, ...]:
    """The waterfall to the chosen strategy of a plan."""
    question, strategy = found.question, found.chosen.strategy
    sample = _sample_of(question)
    plain = strategy.settled(micro_batch_size=1, grad_accum_steps=1, checkpointed_blocks=0)
    options, _ = explore(pool, sample, [Proposal("chosen", plain.model_copy(update={"checkpointing": "full"}))])
    if strategy.checkpointing == "selective":
        options = selective(pool, sample, options)
    chosen = candidate(question, options[0], strategy.micro_batch_size, int(strategy.checkpointed_blocks), EVIDENCE)
    (confirmed,) = confirm(pool, sample, question, EVIDENCE.band, [chosen])
    return waterfall(pool, sample, question, EVIDENCE, confirmed)


def _predicted(option: Option, blocks: int, room: float) -> int:
    low, high = 0, MOST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if option.reserved(middle, blocks) <= room else (low, middle - 1)
    return low


def _sample(model: str, gpu: str) -> Sample:
    return _sample_of(question_for(model=model, gpu=gpu, device="rehearsed"))


def _sample_of(question: Question) -> Sample:
    return Sample(question.model, question.gpu, question.resolution, question.frames)


def _found(sample: Sample, strategy: Strategy, answer: RehearsedSize) -> Found:
    gpu = sample.gpu
    beside = beside_training(strategy, gpu.compute_capability, gpu.multiprocessors)
    said, taken = verdict(answer.timeline, gpu, beside, EVIDENCE.band)
    return Found(
        step=step_time(work_of(answer.timeline, strategy), strategy, sample.gpu, Cluster(gpus=strategy.world_size)),
        answer=answer,
        verdict=said,
        peaks={phase.phase: phase.peak_bytes for phase in answer.ledger.phases},
        reserved_bytes=planned(taken).wanted_bytes,
        process_bytes=process(planned(taken).wanted_bytes, taken.beside, EVIDENCE.band).high_bytes,
        usable_bytes=sample.gpu.usable_bytes,
    )


def between(found: Interval) -> str:
    return f"{found.low:.2g}–{found.high:.2g}" if found.high < 10 else f"{found.low:.3g}–{found.high:.3g}"
