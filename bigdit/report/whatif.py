"""What the page's sliders and choices move over: the plan's settings in words, and the points of each."""

from __future__ import annotations

from typing import Any

from bigdit.memory import CATEGORIES
from bigdit.report import words
from bigdit.report.svg import variable
from bigdit.search.finding.space import OPTIMIZER_TITLES
from bigdit.search.plan import Plan, Point, Setting
from bigdit.spec import Strategy

FOUND = {
    "run": "run exactly so on an emulated card",
    "rehearsed": "rehearsed exactly so",
    "predicted": "predicted from shallower siblings",
}


def whatif(plan: Plan) -> dict[str, Any] | None:
    """All that the script of the page is given, for JSON; None where the plan has no settings."""
    if not plan.settings:
        return None
    chosen, start = plan.chosen.strategy, _start(plan)
    count = max(point.checkpointed_blocks for point in start.points)
    blocks = count if chosen.checkpointed_blocks == "all" else chosen.checkpointed_blocks
    return {
        "choices": choices(plan),
        "fields": list(Point.model_fields),
        "settings": [_setting(each, plan) for each in plan.settings],
        "start": {
            "strategy": start.title,
            "micro-batch": chosen.micro_batch_size,
            "blocks": blocks,
            "card": start.rooms[0].card,
        },
        "categories": {name: variable(name) for name in CATEGORIES},
        "found": FOUND,
        "hostMemory": plan.question.host_memory_bytes,
        "samples": words.samples(plan),
    }


def choices(plan: Plan) -> dict[str, str]:
    """What is chosen beside the sizes and the card: its key, and what it is called."""
    found = {"engine": "Engine", "optimizer": "Optimizer", "precision": "Precision", "average": "EMA"}
    if any(each.strategy.lora for each in plan.settings):
        found["adapters"] = "Adapters"
    return found | {"kept": "Kept of recomputed blocks"}


def _start(plan: Plan) -> Setting:
    """The setting of the recommended strategy."""
    return next(each for each in plan.settings if each.holds(plan.chosen.strategy))


def _setting(setting: Setting, plan: Plan) -> dict[str, Any]:
    return {
        "strategy": setting.title,
        "words": {key: text for key, text in _words(setting.strategy).items() if key in choices(plan)},
        "beside": setting.beside.high_bytes,
        "rooms": [room.model_dump(mode="json") for room in setting.rooms],
        "points": [_point(each) for each in setting.points],
    }


def _words(strategy: Strategy) -> dict[str, str]:
    adapters = strategy.lora
    return {
        "engine": words.engine(strategy),
        "optimizer": OPTIMIZER_TITLES[strategy.optimizer.name],
        "precision": words.PRECISIONS[strategy.precision],
        "average": words.average(strategy),
        "adapters": f"LoRA of rank {adapters.rank} over a frozen {adapters.base} base" if adapters else "none",
        "kept": "nothing" if strategy.checkpointing == "full" else "matrix products and attention",
    }


def _point(point: Point) -> list[Any]:
    """As in the plan's JSON, a value for each of its fields, which take a third of the bytes without their names: bytes
    in the order of CATEGORIES, those of the process as low and high, and the speed in words."""
    found = point.model_dump(mode="json") | {
        "at_peak": [point.at_peak.get(name, 0) for name in CATEGORIES],
        "process": [point.process.low_bytes, point.process.high_bytes],
        "images_per_second_per_card": words.between(point.images_per_second_per_card),
    }
    return list(found.values())
