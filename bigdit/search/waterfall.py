"""From the setting that people copy to the recommended one, a change at a time: what each leaves of the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bigdit.catalog import batch_shape
from bigdit.catalog.encoders import online_encoders
from bigdit.errors import UserError
from bigdit.memory import Timeline
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import UNLIMITED
from bigdit.memory.process import ByteRange
from bigdit.rehearse import RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.anchors import Sample, grid, outline, requests
from bigdit.search.candidates import Candidate, beside
from bigdit.search.confirm import Confirmed
from bigdit.search.evidence import Evidence
from bigdit.search.plan import Step, Verdict
from bigdit.search.question import Question
from bigdit.search.space import OPTIMIZER_TITLES, settled
from bigdit.search.verdict import expected
from bigdit.spec import EmaSpec, OptimizerSpec, Precision, Strategy
from bigdit.units import gib

DEEPSPEED_BUCKET = 500_000_000
"""Elements. Source: reduce_bucket_size and allgather_bucket_size in DeepSpeed's documentation of ZeRO."""

BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
OFFLOADS = ("offload_optimizer", "offload_param")

WORTH_SAYING = 0.005
"""Of the bytes before: smaller effects are called nothing."""


class Change(NamedTuple):
    """A strategy, what is new in it, and why that takes less (or more)."""

    title: str
    why: str
    strategy: Strategy


@dataclass(frozen=True)
class Bar:
    """Allocated bytes by phase; what torch's default allocator reserves beyond their peak; bytes of encoders."""

    peaks: Mapping[str, float]
    idle_bytes: float
    encoder_bytes: int = 0

    @property
    def phase(self) -> str:
        """The phase that decides."""
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def peak_bytes(self) -> int:
        return round(max(self.peaks.values()))


def waterfall(
    pool: Pool, sample: Sample, question: Question, evidence: Evidence, chosen: Confirmed
) -> tuple[Step, ...]:
    """The bars from the naive setting to `chosen`.

    All that comes before recomputation and the recommended micro-batch is rehearsed with shallow siblings, at the
    naive micro-batch itself; those two are the search's predictions, and the last bar is `chosen` as it was
    confirmed. Bars differ by what is allocated: each takes beside that what the allocator holds idle in `chosen`, for
    idle pieces of their own would hide what a change saves; they count for the verdict, which is TIGHT for them alone.
    Raises UserError where a sibling cannot be rehearsed.
    """
    steps = changes(sample, question, chosen.candidate)
    found = bars(pool, sample, chosen.candidate, steps)
    process = chosen.footprint.process.high_bytes
    shared = process - chosen.footprint.beside.high_bytes - chosen.answer.ledger.peak_allocated_bytes
    shown = []
    for at, (change, bar) in enumerate(zip(steps, found, strict=True)):
        around = beside(question, change.strategy)
        shown.append(
            Step(
                change=change.title,
                process_bytes=bar.peak_bytes + shared + around.high_bytes,
                verdict=_verdict(question, evidence, bar, around),
                saved_by=said(change, found[at - 1] if at else None, bar),
            )
        )
    confirmed = {"process_bytes": process, "verdict": chosen.verdict}
    return (*shown[:-1], shown[-1].model_copy(update=confirmed))


def naive(sample: Sample, question: Question, target: Strategy) -> Strategy:
    """What is copied: the engine of `target` with AdamW in fp32 by torch's loop over lists of tensors, encoders and
    moving average on the card, nothing recomputed or offloaded, DeepSpeed's own buckets.

    Its micro-batch is the pinned one, or a card's whole share of the global batch, or one.
    """
    share = (question.global_batch_size or 0) // target.world_size
    size = question.pins.micro_batch_size or share or 1
    precision: Precision = "fp32" if target.lora is None else target.precision
    strategy = target.model_copy(
        update={
            "precision": precision,
            "optimizer": OptimizerSpec(implementation="foreach"),
            "checkpointing": "full",
            "ema": EmaSpec(),
            "cpu_offload": False,
            "features": "online" if _has_encoders(sample) else target.features,
            "ds_config": _document(target, precision, own_buckets=True, offloaded=False),
        }
    )
    return settled(strategy, micro_batch_size=size, grad_accum_steps=1, checkpointed_blocks=0)


def changes(sample: Sample, question: Question, chosen: Candidate) -> list[Change]:
    """The naive setting and every change that leads from it to `chosen`; the last strategy is that of `chosen`."""
    target = chosen.strategy
    start = naive(sample, question, target)
    found = [Change(_naive_title(start), "", start)]
    for title, why, update in _updates(start, target):
        before = found[-1].strategy
        after = settled(
            before.model_copy(update=update),
            micro_batch_size=start.micro_batch_size,
            grad_accum_steps=1,
            checkpointed_blocks=0,
        )
        if after != before:
            found.append(Change(title, why, after))
    return [*found, *_sizes(start.micro_batch_size, chosen)]


def _updates(start: Strategy, target: Strategy) -> list[tuple[str, str, dict[str, Any]]]:
    """Changes in their order, with those that change nothing here among them."""
    masters: Precision = "bf16" if target.precision == "bf16_sr" else target.precision
    theirs = (target.ds_config or {}).get("zero_optimization", {})
    bucket = theirs.get(BUCKETS[0], DEEPSPEED_BUCKET)
    on_host = "weights and optimizer" if target.cpu_offload or OFFLOADS[1] in theirs else "optimizer"
    lossy = "bf16 without masters" if target.precision == "bf16_sr" else OPTIMIZER_TITLES[target.optimizer.name]
    average = "no moving average" if target.ema is None else "moving average on the host"

    def document(precision: Precision, *, offloaded: bool = False) -> dict[str, Any] | None:
        return _document(target, precision, own_buckets=False, offloaded=offloaded)

    return [
        ("features cached", "VAE and text encoders leave the card", {"features": target.features}),
        (
            f"DeepSpeed's buckets of {bucket / 1e6:.0f} M elements",
            f"instead of {DEEPSPEED_BUCKET / 1e6:.0f} M, its own",
            {"ds_config": document(start.precision)},
        ),
        (
            masters if masters in ("fp32", "tf32") else f"{masters} with fp32 masters",
            "weights, gradients and activations of 2 B instead of 4, and masters of 4 beside them",
            {"precision": masters, "ds_config": document(masters)},
        ),
        (
            f"{on_host} on the host",
            "the card keeps what it computes with",
            {"cpu_offload": target.cpu_offload, "ds_config": document(masters, offloaded=True)},
        ),
        (
            "fused optimizer",
            "no temporary of the size of what is stepped",
            {"optimizer": OptimizerSpec()},
        ),
        (average, "its fp32 copy of the weights leaves the card", {"ema": target.ema}),
        (lossy, "less state beside each weight", {"optimizer": target.optimizer, "precision": target.precision}),
    ]


def _sizes(first: int, chosen: Candidate) -> list[Change]:
    """Recomputation and the micro-batch; what takes less comes last where the other takes more."""
    count, last, accum = chosen.option.arrangement.count, chosen.micro_batch_size, chosen.grad_accum_steps
    kept = ", but for matrix products and attention" if chosen.strategy.checkpointing == "selective" else ""
    recomputed = (f"{chosen.blocks} of {count} blocks recomputed{kept}", "their activations are not kept")
    why = "fewer activations at once" if last < first else "what was saved goes into activations of more samples"
    resized = (f"micro-batch {last}" + (f", {accum} of them accumulated" if accum > 1 else ""), why)
    grows = last > first
    between = settled(
        chosen.strategy,
        micro_batch_size=last if grows else first,
        grad_accum_steps=accum if grows else 1,
        checkpointed_blocks=0 if grows else chosen.blocks,
    )
    if last == first:
        return [Change(*recomputed, chosen.strategy)] if chosen.blocks else []
    if not chosen.blocks:
        return [Change(*resized, chosen.strategy)]
    order = (resized, recomputed) if grows else (recomputed, resized)
    return [Change(*order[0], between), Change(*order[1], chosen.strategy)]


def bars(pool: Pool, sample: Sample, chosen: Candidate, steps: Sequence[Change]) -> list[Bar]:
    """A bar for each of `changes`."""
    size = steps[0].strategy.micro_batch_size
    plain = [
        each.strategy
        for each in steps
        if (each.strategy.micro_batch_size, each.strategy.checkpointed_blocks) == (size, 0)
    ]
    asked = [requests(sample, strategy, (size,)) for strategy in plain]
    answers = iter(pool.rehearse([request for batch in asked for request in batch]))
    found = [_rehearsed(sample, each, [next(answers) for _ in batch]) for each, batch in zip(plain, asked, strict=True)]
    for change in steps[len(plain) :]:
        at = change.strategy.micro_batch_size, int(change.strategy.checkpointed_blocks)
        peaks = chosen.option.arrangement.peaks(*at)
        found.append(Bar(peaks, chosen.option.reserved(*at) - max(peaks.values())))
    return found


def _rehearsed(sample: Sample, strategy: Strategy, answers: Sequence[RehearsedSize | UserError]) -> Bar:
    known = []
    for answer in answers:
        if isinstance(answer, UserError):
            raise answer
        known.append(answer)
    peaks = outline(sample.model, strategy, known).peaks(strategy.micro_batch_size)
    # Flat partitions and temporaries as large as they leave pieces that grow with the depth, as the bytes do.
    idle = [_idle(answer.timeline) for answer in known]
    encoders = max(phase.at_peak.get("encoder", 0) for phase in known[0].ledger.phases)
    return Bar(peaks, max(float(np.dot(grid(sample.model).weights, idle)), idle[-1]), encoders)


def _idle(timeline: Timeline) -> int:
    return replay(timeline, UNLIMITED).peak_reserved_bytes - timeline.peak_allocated_bytes


def _verdict(question: Question, evidence: Evidence, bar: Bar, around: ByteRange) -> Verdict:
    """As `expected`; TIGHT where what is allocated fits, and idle pieces do not."""
    found = expected(bar.peak_bytes + bar.idle_bytes, question.gpu, around, evidence.band)
    if found == "DOES NOT FIT" and bar.peak_bytes <= question.gpu.usable_bytes - around.low_bytes:
        return "TIGHT"
    return found


def said(change: Change, before: Bar | None, bar: Bar) -> str:
    """Why the bar is as long as it is: `VAE and text encoders leave the card (6.03 GiB): 8.55 GiB less`."""
    if before is None:
        held = f"; the encoders hold {gib(bar.encoder_bytes)}" if bar.encoder_bytes else ""
        return f"the {bar.phase} decides{held}"
    left = before.encoder_bytes - bar.encoder_bytes
    less = before.peak_bytes - bar.peak_bytes
    least = before.peak_bytes * WORTH_SAYING
    effect = f"{gib(abs(less))} {'less' if less > 0 else 'more'}" if abs(less) >= least else "nothing at the peak"
    drops = {phase: before.peaks[phase] - peak for phase, peak in bar.peaks.items() if phase in before.peaks}
    most = max(drops, key=lambda phase: drops[phase])
    parts = [f"{change.why}{f' ({gib(left)})' if left > 0 else ''}: {effect}"]
    if most != bar.phase and drops[most] > max(less, 0) + least:
        parts.append(f"{gib(drops[most])} less in the {most}, which does not decide")
    if bar.phase != before.phase:
        parts.append(f"now the {bar.phase} decides")
    return "; ".join(parts)


def _naive_title(strategy: Strategy) -> str:
    precision = "bf16" if strategy.precision == "bf16_sr" else strategy.precision
    encoders = "encoders and average" if strategy.features == "online" else "average"
    buckets = ", DeepSpeed's own buckets" if strategy.ds_config else ""
    return f"as copied: {precision}, AdamW, {encoders} on the card{buckets}, micro-batch {strategy.micro_batch_size}"


def _has_encoders(sample: Sample) -> bool:
    try:
        online_encoders(sample.model, batch_shape(sample.model, sample.resolution, sample.frames))
    except UserError:
        return False
    return True


def _document(target: Strategy, precision: Precision, *, own_buckets: bool, offloaded: bool) -> dict[str, Any] | None:
    """DeepSpeed's document of `target`, changed; None where the engine is another."""
    if target.ds_config is None:
        return None
    zero = {
        key: value for key, value in target.ds_config["zero_optimization"].items() if offloaded or key not in OFFLOADS
    }
    if own_buckets:
        zero |= dict.fromkeys(BUCKETS, DEEPSPEED_BUCKET)
    enabled = {name: target.ds_config.get(name, {}) | {"enabled": precision == name} for name in ("bf16", "fp16")}
    return target.ds_config | {"zero_optimization": zero} | enabled
