"""From the setting that people copy to the recommended one, a change at a time: what each of them leaves of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bigdit.catalog import batch_shape
from bigdit.catalog.encoders import online_encoders
from bigdit.errors import UserError
from bigdit.rehearse import RehearsedSize
from bigdit.rehearse.pool import Pool
from bigdit.search.anchors import Sample, outline, requests
from bigdit.search.candidates import Candidate, beside
from bigdit.search.confirm import Confirmed
from bigdit.search.evidence import Evidence
from bigdit.search.plan import Step, Verdict
from bigdit.search.question import Question
from bigdit.search.space import OPTIMIZER_TITLES, settled
from bigdit.search.verdict import expected
from bigdit.spec import EmaSpec, OptimizerSpec, Strategy
from bigdit.units import gib

DEEPSPEED_BUCKET = 500_000_000
"""Elements. Source: reduce_bucket_size and allgather_bucket_size in DeepSpeed's documentation of ZeRO."""

BUCKET_KEYS = ("reduce_bucket_size", "allgather_bucket_size")
OFFLOAD_KEYS = ("offload_optimizer", "offload_param")


class Change(NamedTuple):
    """A strategy, what is new in it, and why that takes less (or more)."""

    title: str
    why: str
    strategy: Strategy


@dataclass(frozen=True)
class _Bar:
    """What torch reserves at a strategy; the phase that decides it, and bytes of encoders on the card."""

    reserved_bytes: int
    phase: str
    encoder_bytes: int = 0


def waterfall(
    pool: Pool, sample: Sample, question: Question, evidence: Evidence, chosen: Confirmed
) -> tuple[Step, ...]:
    """The bars from the naive setting to `chosen`.

    What differs without recomputation is rehearsed with shallow siblings at the naive micro-batch itself; recomputed
    blocks and the recommended micro-batch are the search's own predictions, and the last bar is `chosen` as it was
    confirmed. Raises UserError where a sibling cannot be rehearsed.
    """
    changes = _changes(sample, question, chosen.candidate)
    bars = _bars(pool, sample, chosen.candidate, changes)
    steps: list[Step] = []
    for at, (change, bar) in enumerate(zip(changes, bars, strict=True)):
        around = beside(question, change.strategy)
        verdict: Verdict = expected(bar.reserved_bytes, question.gpu, around, evidence.band)
        steps.append(
            Step(
                change=change.title,
                process_bytes=bar.reserved_bytes + around.high_bytes,
                verdict=verdict,
                saved_by=_said(change, bars[at - 1] if at else None, bar),
            )
        )
    if len(steps) > 1:
        known = {"process_bytes": chosen.footprint.process.high_bytes, "verdict": chosen.verdict}
        steps[-1] = steps[-1].model_copy(update=known)
    return tuple(steps)


def naive(sample: Sample, question: Question, chosen: Strategy) -> Strategy:
    """What is copied: the engine of `chosen` with AdamW in fp32 by torch's loop over lists of tensors, encoders and
    moving average on the card, nothing recomputed or offloaded, DeepSpeed's own buckets.

    Its micro-batch is the pinned one, or a card's whole share of the global batch, or one.
    """
    share = (question.global_batch_size or 0) // chosen.world_size
    size = question.pins.micro_batch_size or share or 1
    strategy = chosen.model_copy(
        update={
            "precision": "fp32" if chosen.lora is None else chosen.precision,
            "optimizer": OptimizerSpec(implementation="foreach"),
            "checkpointing": "full",
            "ema": EmaSpec(),
            "cpu_offload": False,
            "features": "online" if _has_encoders(sample) else "cached",
        }
    )
    strategy = _with_ds(strategy, precision=strategy.precision, zero=_copied_zero(strategy))
    return settled(strategy, micro_batch_size=size, grad_accum_steps=1, checkpointed_blocks=0)


def _changes(sample: Sample, question: Question, chosen: Candidate) -> list[Change]:
    """The naive setting and every change that leads from it to `chosen`."""
    target = chosen.strategy
    found = [Change("as it is copied", "", naive(sample, question, target))]
    found[0] = found[0]._replace(title=_naive_title(found[0].strategy))

    def change(title: str, why: str, **update: Any) -> None:
        before = found[-1].strategy
        after = before.model_copy(update=update)
        if after != before:
            found.append(Change(title, why, after))

    change("features cached", "VAE and text encoders leave the card", features=target.features)
    if found[-1].strategy.precision != target.precision:
        masters = "without masters" if target.precision == "bf16_sr" else "with fp32 masters"
        kind = target.precision.removesuffix("_sr")
        why = "weights, gradients and activations in 2 B instead of 4" if kind in ("bf16", "fp16") else ""
        ds_config = _with_ds(found[-1].strategy, precision=target.precision).ds_config
        change(f"{kind} {masters}", why, precision=target.precision, ds_config=ds_config)
    if target.ds_config is not None:
        _deepspeed(change, found[-1].strategy, target)
    if target.cpu_offload:
        change("weights and optimizer on the host", "the card holds what it computes with", cpu_offload=True)
    change(
        "fused optimizer",
        "the loop over lists of tensors takes as much again as the weights it steps",
        optimizer=OptimizerSpec(),
    )
    if target.ema is None:
        change("no moving average", "its fp32 copy of the weights leaves the card", ema=None)
    else:
        change("moving average on the host", "its fp32 copy of the weights leaves the card", ema=target.ema)
    change(OPTIMIZER_TITLES[target.optimizer.name], "less state for each weight", optimizer=target.optimizer)
    _sizes(found, chosen)
    return found


def _deepspeed(change: Callable[..., None], before: Strategy, target: Strategy) -> None:
    assert target.ds_config is not None
    theirs = target.ds_config["zero_optimization"]
    known = {key: theirs[key] for key in BUCKET_KEYS if key in theirs}
    smaller = _with_ds(before, zero={**_zero(before), **known})
    size = known.get("reduce_bucket_size", DEEPSPEED_BUCKET)
    change(
        f"DeepSpeed buckets of {size / 1e6:.0f} M elements",
        f"instead of its own {DEEPSPEED_BUCKET / 1e6:.0f} M",
        ds_config=smaller.ds_config,
    )
    if any(key in theirs for key in OFFLOAD_KEYS):
        what = "weights and optimizer" if "offload_param" in theirs else "optimizer"
        offloaded = _with_ds(smaller, zero=theirs)
        change(f"{what} on the host", "the card holds what it computes with", ds_config=offloaded.ds_config)


def _sizes(found: list[Change], chosen: Candidate) -> None:
    """Recomputation and the micro-batch: what takes less last, so that it says what it is for."""
    count, before = chosen.option.arrangement.count, found[-1].strategy
    first, last = before.micro_batch_size, chosen.micro_batch_size
    accumulated = f" × {chosen.grad_accum_steps} accumulated" if chosen.grad_accum_steps > 1 else ""
    why = "fewer activations at a time" if last < first else "what was saved goes into more samples at a time"
    micro_batch = (f"micro-batch {last}{accumulated}", why, last, None)
    kept = ", but for matrix products and attention" if chosen.strategy.checkpointing == "selective" else ""
    blocks = (
        f"{chosen.blocks} of {count} blocks recomputed{kept}",
        "their activations are not kept",
        None,
        chosen.blocks,
    )
    wanted = [each for each, new in ((micro_batch, last != first), (blocks, chosen.blocks > 0)) if new]
    if last < first:
        wanted.reverse()
    size, recomputed = first, 0
    for title, reason, new_size, new_blocks in wanted:
        size, recomputed = new_size or size, new_blocks or recomputed
        strategy = settled(
            chosen.strategy,
            micro_batch_size=size,
            grad_accum_steps=chosen.grad_accum_steps if size == last else 1,
            checkpointed_blocks=recomputed,
        )
        found.append(Change(title, reason, strategy))


def _bars(pool: Pool, sample: Sample, chosen: Candidate, changes: Sequence[Change]) -> list[_Bar]:
    size = changes[0].strategy.micro_batch_size
    plain = [
        change.strategy
        for change in changes
        if change.strategy.micro_batch_size == size and not change.strategy.checkpointed_blocks
    ]
    asked = [requests(sample, strategy, (size,)) for strategy in plain]
    answers = iter(pool.rehearse([request for batch in asked for request in batch]))
    bars = [
        _rehearsed(sample, strategy, [next(answers) for _ in batch])
        for strategy, batch in zip(plain, asked, strict=True)
    ]
    for change in changes[len(plain) :]:
        at = change.strategy.micro_batch_size, int(change.strategy.checkpointed_blocks)
        peaks = chosen.option.arrangement.peaks(*at)
        bars.append(_Bar(round(max(chosen.option.reserved(*at), 0.0)), max(peaks, key=lambda phase: peaks[phase])))
    return bars


def _rehearsed(sample: Sample, strategy: Strategy, answers: Sequence[RehearsedSize | UserError]) -> _Bar:
    known = []
    for answer in answers:
        if isinstance(answer, UserError):
            raise answer
        known.append(answer)
    found = outline(sample.model, strategy, known)
    peaks = found.peaks(strategy.micro_batch_size)
    phase = max(peaks, key=lambda name: peaks[name])
    gap = max(float(found.gap.at(strategy.micro_batch_size)), 0.0)
    encoders = max(each.at_peak.get("encoder", 0) for each in known[0].ledger.phases)
    return _Bar(round(max(peaks[phase] + gap, 0.0)), phase, encoders)


def _said(change: Change, before: _Bar | None, bar: _Bar) -> str:
    """Why the bar has its length: `VAE and text encoders leave the card (6.02 GiB): 9.41 GiB less; step decides`."""
    held = bar.encoder_bytes if before is None else max(before.encoder_bytes - bar.encoder_bytes, 0)
    if before is None:
        return f"{bar.phase} decides" + (f"; encoders hold {gib(held)}" if held else "")
    why = f"{change.why} ({gib(held)})" if held else change.why
    less = before.reserved_bytes - bar.reserved_bytes
    if abs(less) < before.reserved_bytes * 0.001:
        effect = f"nothing at the peak, which the {bar.phase} has" if bar.phase == before.phase else "nothing"
    else:
        effect = f"{gib(abs(less))} {'less' if less > 0 else 'more'}"
    moved = "" if bar.phase == before.phase else f"; now {bar.phase} decides"
    return f"{why}: {effect}{moved}" if why else f"{effect}{moved}"


def _naive_title(strategy: Strategy) -> str:
    parts = ["fp32" if strategy.precision == "fp32" else strategy.precision, "AdamW", "average"]
    parts += ["encoders"] if strategy.features == "online" else []
    buckets = ", DeepSpeed's own buckets" if strategy.ds_config else ""
    return f"as it is copied: {', '.join(parts)} on the card{buckets}, micro-batch {strategy.micro_batch_size}"


def _has_encoders(sample: Sample) -> bool:
    try:
        online_encoders(sample.model, batch_shape(sample.model, sample.resolution, sample.frames))
    except UserError:
        return False
    return True


def _zero(strategy: Strategy) -> dict[str, Any]:
    return dict((strategy.ds_config or {}).get("zero_optimization", {}))


def _copied_zero(strategy: Strategy) -> dict[str, Any]:
    """The section as DeepSpeed fills it in: its own buckets, and everything on the card."""
    ours = {key: value for key, value in _zero(strategy).items() if key not in OFFLOAD_KEYS}
    return ours | dict.fromkeys(BUCKET_KEYS, DEEPSPEED_BUCKET)


def _with_ds(strategy: Strategy, *, precision: str | None = None, zero: dict[str, Any] | None = None) -> Strategy:
    """The strategy with DeepSpeed's document changed; as it is where the engine is another."""
    if strategy.ds_config is None:
        return strategy
    changed = dict(strategy.ds_config)
    if zero is not None:
        changed["zero_optimization"] = zero
    if precision is not None:
        for name in ("bf16", "fp16"):
            changed[name] = changed.get(name, {}) | {"enabled": precision == name}
    return strategy.model_copy(update={"ds_config": changed})
