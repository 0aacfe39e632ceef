"""What the page's sliders and choices move over: settings in words, and the points of each that ran."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from bigdit.memory import CATEGORIES
from bigdit.report import words
from bigdit.report.svg import variable
from bigdit.search.plan import Plan, Point, Setting, alike
from bigdit.search.question import Question
from bigdit.search.space import OPTIMIZER_TITLES
from bigdit.spec import Strategy

CARDS = {"cards": "Number of GPUs"}


def whatif(plan: Plan, others: Sequence[Plan] = ()) -> dict[str, Any] | None:
    """All that the page's script is given, for JSON: what ran for the plan, and for the `others`: plans for other
    numbers of GPUs. None if the plan has no settings."""
    if not plan.settings:
        return None
    return _points([plan, *others]) | {
        "start": start(plan),
        "categories": {name: variable(name) for name in CATEGORIES},
        "samples": words.samples(plan),
    }


def start(plan: Plan) -> dict[str, Any]:
    """What is shown first: the recommended strategy."""
    chosen = plan.chosen.strategy
    setting = next(each for each in plan.settings if alike(each.strategy, chosen))
    count = max(point.checkpointed_blocks for point in setting.points)
    blocks = count if chosen.checkpointed_blocks == "all" else chosen.checkpointed_blocks
    return {
        "strategy": setting.title,
        "micro-batch": chosen.micro_batch_size,
        "blocks": blocks,
        "gpu": plan.question.gpu.title,
    }


def choices(settings: Collection[Setting]) -> dict[str, str]:
    """The choices beside sizes and GPU, by key: their names on the page."""
    found = {"engine": "Engine", "optimizer": "Optimizer", "precision": "Precision", "average": "EMA"}
    if any(each.strategy.lora for each in settings):
        found["adapters"] = "Adapters"
    if any(each.strategy.blocks_to_swap for each in settings):
        found["weights"] = "Weights"
    return found | {"kept": "Kept of recomputed blocks"}


def _points(plans: Sequence[Plan]) -> dict[str, Any]:
    settings = [(each, plan.question) for plan in plans for each in plan.settings]
    chosen = CARDS if len(plans) > 1 else {}
    chosen = chosen | choices([each for each, _ in settings])
    return {
        "choices": chosen,
        "fields": list(Point.model_fields),
        "settings": [
            _setting(each, question, chosen) | {"points": [_point(point) for point in each.points]}
            for each, question in settings
        ],
    }


def _setting(setting: Setting, question: Question, chosen: Collection[str]) -> dict[str, Any]:
    return {
        "strategy": setting.title,
        "words": {key: text for key, text in _words(setting.strategy).items() if key in chosen},
        "nonTorch": setting.non_torch.high_bytes,
        "rooms": [room.model_dump(mode="json") for room in setting.rooms],
        "hostMemory": question.host_memory_bytes,
        "hostAssumed": question.host_assumed,
    }


def _words(strategy: Strategy) -> dict[str, str]:
    adapters = strategy.lora
    return {
        "cards": str(strategy.world_size),
        "engine": words.engine(strategy),
        "optimizer": OPTIMIZER_TITLES[strategy.optimizer.name],
        "precision": words.PRECISIONS[strategy.precision],
        "average": words.average(strategy),
        "adapters": f"LoRA of rank {adapters.rank} over a frozen {adapters.base} base" if adapters else "none",
        "weights": f"{strategy.blocks_to_swap} blocks in CPU memory" if strategy.blocks_to_swap else "on the GPU",
        "kept": "nothing" if strategy.checkpointing == "full" else "matrix products and attention",
    }


def _point(point: Point) -> list[Any]:
    """The values of all fields, without their names, in a third of the bytes. Bytes by category are in the order of
    CATEGORIES, those of the process are low and high, and the speed is in words."""
    found = point.model_dump(mode="json") | {
        "at_peak": [point.at_peak.get(name, 0) for name in CATEGORIES],
        "process": [point.process.low_bytes, point.process.high_bytes],
        "samples_per_second_per_card": words.between(point.samples_per_second_per_card),
    }
    return list(found.values())
