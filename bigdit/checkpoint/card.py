"""Writes a model card: README.md next to exported weights, with the front matter of the Hugging Face hub.

It shows only the last part of sources' paths. Source: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from bigdit.catalog.families import FAMILIES
from bigdit.catalog.models import licence_of, repositories
from bigdit.checkpoint.folder import Checkpoint
from bigdit.config.run import RECEIPT, RECORD
from bigdit.documents import at, parse_yaml, read_json
from bigdit.errors import versions
from bigdit.files import read_bytes
from bigdit.strategy import OPTIMIZERS, ModelSpec, Strategy
from bigdit.units import gib, how_many

FILE = "README.md"
_LICENSE = ("license", "license_name", "license_link")
_NOT_KNOWN = "not known here: read it where the base is published"


def card(checkpoint: Checkpoint) -> str:
    """The text of a checkpoint's model card."""
    state = checkpoint.state
    spec, strategy = ModelSpec.model_validate(state["model"]), Strategy.model_validate(state["strategy"])
    run, base = state["run"], at(state["run"], ("model", "init_from"))
    published = _published(spec.name, Path(base)) if base else ()
    licence = (_licence(Path(base)) or licence_of(published)) if base else {}
    front: dict[str, Any] = {"library_name": "diffusers", "tags": _tags(spec, strategy, run)}
    if len(published) == 1:
        front["base_model"] = published[0]
    front |= licence
    if prompt := _prompt(run):
        front["instance_prompt"] = prompt
    rows = list(_rows(checkpoint, spec, strategy, published))
    if base:
        rows.insert(2, ("Licence of the base", ", ".join(licence.values()) or _NOT_KNOWN))
    kind = strategy.lora.title if strategy.lora else "ControlNet" if strategy.controlnet else ""
    title = f"{kind and f'{kind} for '}{spec.name}"
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows)
    chosen = strategy.model_dump(mode="json", exclude_defaults=True)
    settings = yaml.safe_dump({"strategy": chosen}, sort_keys=False)
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {title}\n\n"
        f"Trained with bigdit.\n\n| | |\n| --- | --- |\n{table}\n\n## Settings\n\n"
        f"Keys that are not here have their defaults.\n\n```yaml\n{settings}```\n"
    )


def _tags(spec: ModelSpec, strategy: Strategy, run: Mapping[str, Any]) -> list[str]:
    family = FAMILIES[spec.class_name]
    edits = strategy.controlnet is None and (at(run, ("data", "references")) or at(run, ("data", "fill")))
    given = "image" if edits or at(run, ("encoders", "first_frame")) else "text"
    kind = f"{given}-to-{'video' if family.video else 'image'}"
    kind = "unconditional-image-generation" if family.classes else kind
    return ["bigdit", *(["lora"] if strategy.lora else ["controlnet"] if strategy.controlnet else []), kind]


def _rows(
    checkpoint: Checkpoint, spec: ModelSpec, strategy: Strategy, published: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """The rows of the card's table."""
    state, output = checkpoint.state, checkpoint.folder.parents[1]
    record, receipt = _read(output / RECORD), _read(output / RECEIPT)
    yield "Class", spec.class_name
    base = at(state["run"], ("model", "init_from"))
    yield "Base", (" or ".join(published) or spec.name) if base else "none: it started from random weights"
    step, batch = state["step"], strategy.global_batch_size
    sources = at(state["run"], ("data", "images")) or ()
    yield "Data", ", ".join(Path(source["path"]).name for source in sources) or "not known"
    yield "Steps", f"{step:,} of {batch:,} samples: {step * batch:,} samples, counted with repeats"
    lora, controlnet = strategy.lora, strategy.controlnet
    trained = (
        "the whole transformer" if controlnet is None else f"a ControlNet of {how_many(controlnet.blocks, 'block')}"
    )
    if lora is not None:
        trained = f"{lora.title}, rank {lora.rank}, alpha {lora.alpha:g}, base {lora.base}"
    yield "Trained", trained
    optimizer = strategy.optimizer
    yield "Optimizer", f"{OPTIMIZERS[optimizer.name]}, learning rate {optimizer.lr:g}"
    if device := at(record, ("device",)):
        where = "emulated " if at(record, ("emulated",)) else ""
        yield "GPU", f"{strategy.world_size} × {where}{device}" if device != "cpu" else "none: it ran on a CPU"
    planned = at(record, ("planned", "peak_reserved_bytes")) or at(receipt, ("predicted_peak_reserved_bytes",))
    measured = at(record, ("measured", "peak_reserved_bytes")) or at(receipt, ("measured_peak_reserved_bytes",))
    if measured:
        yield "Memory", f"{f'planned {gib(planned)}, ' if planned else ''}measured {gib(measured)} reserved by torch"
    if speed := at(receipt, ("samples_per_second",)):
        yield "Speed", f"{speed:g} samples a second"
    used = state.get("versions") or versions()  # the state of a running training has none
    yield "Versions", ", ".join(f"{name} {used[name]}" for name in ("bigdit", "torch", "diffusers") if name in used)


def _published(name: str, base: Path) -> tuple[str, ...]:
    """The repositories that a base may come from: the one in its path, else all of the model."""
    found = repositories(name)
    parts = {part.replace("models--", "").replace("--", "/").lower() for part in base.parts}
    named = tuple(each for each in found if {each.lower(), each.rpartition("/")[2].lower()} & parts)
    return named or found


def _prompt(run: Mapping[str, Any]) -> str | None:
    """The caption or trigger word that all samples have."""
    sources = at(run, ("data", "images")) or ()
    found = {(each.get("caption") or each.get("caption_prefix") or "").strip(" ,") for each in sources}
    return next(iter(found)) or None if len(found) == 1 else None


def _licence(base: Path) -> dict[str, str]:
    """The licence in the model card of a base's folder, or of its pipeline; empty without one."""
    for folder in (base, base.parent):
        try:
            text = read_bytes(folder / FILE).decode()
            found = parse_yaml(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1])  # type: ignore[index]
            if isinstance(found, dict) and found.get("license"):
                return {key: str(found[key]) for key in _LICENSE if key in found}
        except (OSError, ValueError, TypeError):
            continue
    return {}


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
