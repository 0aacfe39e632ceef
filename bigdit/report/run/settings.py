"""The settings of a run in the words of the field."""

from __future__ import annotations

from bigdit.report import words
from bigdit.train.record import RunRecord
from bigdit.units import how_many


def settings(record: RunRecord) -> dict[str, str]:
    """A line for each thing that is set, of those that are chosen again and again."""
    strategy, run = record.strategy, record.run
    found = {
        "model": ", a ".join(dict.fromkeys((record.model.name, record.model.class_name))),
        "engine": words.engine(strategy),
        "precision": words.PRECISIONS[strategy.precision],
        "optimizer": words.OPTIMIZERS[strategy.optimizer.name],
        "learning rate": _rate(record),
        "batch": words.step_size(strategy),
        "checkpointing": words.checkpointing(strategy, None),
        "average": words.average(strategy)
        if record.device != "cpu" or strategy.ema is None
        else f"{words.emas(strategy.ema)} in fp32",
    }
    if strategy.compile_blocks:
        found["blocks"] = "compiled by torch"
    if strategy.lora is not None:
        found["adapters"] = f"LoRA of rank {strategy.lora.rank} over a frozen {strategy.lora.base} base"
    if run.validation is not None:
        held_out, every = how_many(run.validation.samples, "sample"), how_many(run.validation.every, "step")
        found["validation"] = f"{held_out} held out, every {every}"
    if record.stage is not None:
        found["stage"] = f"stages.{record.stage}, whose settings these are"
    found["seed"] = f"{run.train.seed}"
    return found


def _rate(record: RunRecord) -> str:
    train, rate = record.run.train, f"{record.run.optimizer.lr:g}"
    warm = f", from step {train.warmup_steps:,} on" if train.warmup_steps else ""
    falls = {
        "constant": "",
        "cosine": f", then down a half cosine to {train.min_lr:g}",
        "wsd": f", in the last {train.decay_steps or 0:,} steps down to {train.min_lr:g}",
    }
    return f"{rate}{warm}{falls[train.lr_schedule]}"
