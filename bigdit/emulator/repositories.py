"""Repositories of the hub as the catalogue can write them: the configs of a pipeline, or of one component alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from bigdit.catalog.models import CatalogModel, Vae, model
from bigdit.catalog.names import load_json
from bigdit.errors import UserError, nearest


class Repository(NamedTuple):
    """What a repository holds beside weights.

    `configs`: JSON documents by their path in it; `tokenizers`: by folder, `""` the repository itself, the kind of
    each (`tokenizers` of repositories.json); `dtype` of the files with weights, as torch writes it without `torch.`.
    """

    configs: dict[str, dict[str, Any]]
    tokenizers: dict[str, str]
    dtype: str


@cache
def document() -> dict[str, Any]:
    """repositories.json, as it is shipped."""
    found: dict[str, Any] = json.loads((resources.files(__package__) / "repositories.json").read_text("utf-8"))
    return found


def known() -> tuple[str, ...]:
    """The names of the repositories that can be written."""
    return tuple(document()["repositories"])


def option_for(name: str) -> str:
    """The option that lays a repository out: by its name alone, or with a folder that holds its configs."""
    is_known = name.casefold() in (each.casefold() for each in known())
    return f"--fake-weights {name}" + ("" if is_known else "=FOLDER")


def repository(name: str) -> Repository:
    """The repository of that name, whatever its letters' case. Raises UserError where the catalogue has none."""
    entries = {known.casefold(): entry for known, entry in document()["repositories"].items()}
    entry = entries.get(name.casefold())
    if entry is None:
        raise UserError(
            f"--fake-weights {name}: the catalogue does not know this repository; {nearest(name, known())}; of any "
            f"other, a folder with its configs does: {option_for(name)}"
        )
    dtype: str = entry["dtype"]
    if "model" in entry:
        return _pipeline(entry, dtype)
    if "vae" in entry:
        return Repository(
            {"config.json": _vae(Vae(name=entry["vae"], **_catalogue()["vaes"][entry["vae"]]))}, {}, dtype
        )
    encoder = _text_encoder(entry["text_encoder"], None, dtype)
    return Repository({"config.json": encoder}, {"": entry["tokenizer"]}, dtype)


def _pipeline(entry: dict[str, Any], dtype: str) -> Repository:
    found: CatalogModel = model(entry["model"])
    recipe = document()["pipelines"][found.spec.class_name]
    scheduler = {**recipe["scheduler"], **entry.get("scheduler", {})}
    configs: dict[str, dict[str, Any]] = {
        "transformer/config.json": {"_class_name": found.spec.class_name, **found.spec.kwargs},
        "vae/config.json": _vae(found.vae),
        "scheduler/scheduler_config.json": scheduler,
    }
    tokenizers = {}
    for suffix, (encoder, class_name, tokenizer) in zip(_suffixes(), recipe["text"], strict=False):
        configs[f"text_encoder{suffix}/config.json"] = _text_encoder(encoder, class_name, dtype)
        tokenizers[f"tokenizer{suffix}"] = tokenizer
    configs["model_index.json"] = _index(entry.get("pipeline", recipe["pipeline"]), configs, tokenizers)
    return Repository(configs, tokenizers, dtype)


def _suffixes() -> Iterator[str]:
    """How diffusers tells the text encoders of a pipeline apart: the first has no number."""
    yield ""
    number = 2
    while True:
        yield f"_{number}"
        number += 1


def _index(pipeline: str, configs: dict[str, dict[str, Any]], tokenizers: dict[str, str]) -> dict[str, Any]:
    """diffusers' model_index.json: the library and the class of each component."""
    parts: dict[str, list[str]] = {}
    for path, config in configs.items():
        folder = path.split("/")[0]
        if "_class_name" in config:
            parts[folder] = ["diffusers", config["_class_name"]]
        else:
            parts[folder] = ["transformers", config["architectures"][0]]
    for folder, kind in tokenizers.items():
        parts[folder] = ["transformers", document()["tokenizers"][kind]["class"]]
    return {"_class_name": pipeline, "_diffusers_version": "0.31.0", **dict(sorted(parts.items()))}


def _vae(vae: Vae) -> dict[str, Any]:
    if vae.kwargs is None:
        raise UserError(f"the catalogue has no constructor arguments of {vae.name}: name a folder with its configs")
    return {"_class_name": vae.class_name, **vae.kwargs}


def _text_encoder(name: str, class_name: str | None, dtype: str) -> dict[str, Any]:
    """Of the configs that transformers has read from version 4 on; what is left out is its classes' default."""
    entry = _catalogue()["text_encoders"][name]
    if class_name in document()["around"]:
        around = document()["around"][class_name]
        inner = {"text_config": {**entry["kwargs"], **around["text_config"]}}
        return {"architectures": [class_name], "torch_dtype": dtype, **around, **inner}
    model_type = entry["config_class"].removesuffix("Config").replace("CLIPText", "clip_text_model").lower()
    return {
        "architectures": [class_name or entry["class_name"]],
        "model_type": model_type,
        "torch_dtype": dtype,
        **entry["kwargs"],
    }


def _catalogue() -> dict[str, Any]:
    return load_json("models.json")
