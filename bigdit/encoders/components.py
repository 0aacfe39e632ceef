"""The text half of a diffusers pipeline in a folder: its encoders and tokenizers, and no transformer and no VAE."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from bigdit.documents import parse_json
from bigdit.encoders.folder import check_complete, check_pulled, read_config, weights_sample
from bigdit.encoders.recipes import RECIPES
from bigdit.encoders.tokenizer import Words, tokenizer_digest
from bigdit.errors import UserError, nearest
from bigdit.store.digest import config_digest, weights_digest

KEY = "encoders.text.pipeline"
_INDEX = "model_index.json"
_TEXT = re.compile(r"(text_encoder|tokenizer)(_\d)?")
_ASKED = {"BriaPipeline": ("vae", "transformer"), "HunyuanVideo15Pipeline": ("vae",)}
"""Parts that encode no text, and of which these pipelines ask something all the same."""


class _Absent:
    """No VAE or transformer, as far as pipelines ask one for its channels, its shift and its dtype, there or not."""

    config = SimpleNamespace(block_out_channels=(), latent_channels=None, shift_factor=0.0)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __bool__(self) -> bool:
        return False


def load_text_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The pipeline that `folder` holds, with nothing loaded but what encodes text, in eval mode on `device`.

    Weights come from safetensors and classes from transformers alone. Raises UserError where one is missing or
    incomplete, or the pipeline is not one of RECIPES.
    """
    index = read_index(KEY, folder)
    class_name = index["_class_name"]
    if class_name not in RECIPES:
        raise UserError(f"{KEY}: {folder} holds a {class_name}, which has no recipe; {nearest(class_name, RECIPES)}")
    pipeline = getattr(diffusers, class_name)
    there = {name: entry for name, entry in index.items() if _is_text(name) and isinstance(entry, list) and entry[0]}
    loaded = {name: load_part(KEY, folder, name, entry, dtype, device) for name, entry in there.items()}
    parameters = inspect.signature(pipeline.__init__).parameters
    _check_all(folder, class_name, [name for name in parameters if _is_text(name)], loaded)
    absent: dict[str, Any] = {
        name: None for name, each in parameters.items() if each.default is each.empty and name != "self"
    }
    absent |= dict.fromkeys(_ASKED.get(class_name, ()), _Absent(dtype))
    if "requires_safety_checker" in parameters:  # pictures are not its affair here
        absent["requires_safety_checker"] = False
    return pipeline(**(absent | RECIPES[class_name].said(index) | loaded))


def describe(folder: Path, pipeline: Any, dtype: str) -> dict[str, Any]:
    """Class and digests of each part that encodes text; all weights are read for it."""
    described: dict[str, Any] = {}
    for name, part in sorted(pipeline.components.items()):
        if part is None or not _is_text(name):
            continue
        if isinstance(part, torch.nn.Module):
            saved = read_config(KEY, folder / name)
            digests = {
                "config": config_digest(saved),
                "weights": weights_digest(part.state_dict()),
                "weights_sample": weights_sample(folder / name, dtype),
            }
        else:
            part = part.tokenizer if isinstance(part, Words) else part
            digests = {"vocabulary": tokenizer_digest(part)}
        described[name] = {"class_name": type(part).__name__, **digests}
    return described


def read_index(setting: str, folder: Path) -> dict[str, Any]:
    """What a pipeline's folder says that it holds; `setting` is named in errors, which are UserErrors."""
    try:
        index = parse_json((folder / _INDEX).read_bytes())
        index["_class_name"]
    except OSError as error:
        raise UserError(
            f"{setting}: {folder / _INDEX} cannot be read ({error.strerror}); a diffusers pipeline's folder was "
            "expected"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{setting}: {folder / _INDEX} does not name a pipeline's class") from None
    return index


def _is_text(name: str) -> bool:
    return _TEXT.fullmatch(name) is not None


def _check_all(folder: Path, class_name: str, wanted: Sequence[str], loaded: Mapping[str, Any]) -> None:
    """Raise UserError where a pipeline lacks one of several texts, which others can do without."""
    recipe = RECIPES[class_name]
    missing = [name for name in wanted if name not in loaded]
    if missing and (recipe.beside or recipe.streams):
        raise UserError(
            f"{KEY}: {folder / _INDEX} names no {' and no '.join(missing)}, which {class_name} encodes captions by; "
            "save them there with save_pretrained, and name their classes in it"
        )


def load_part(setting: str, folder: Path, name: str, entry: list[str], dtype: torch.dtype, device: torch.device) -> Any:
    """One part, of the class that the index names, if that is one of transformers. Raises UserError, which names
    `setting`."""
    library, class_name = entry
    found, config = _class_of(setting, library, class_name, folder / name)
    if found is None:
        asked = f"{library}.{class_name} as {name}"
        raise UserError(f"{setting}: {folder / _INDEX} asks for {asked}; transformers has none")
    key, place = f"{setting}: {name}", folder / name
    check_pulled(key, place)
    try:
        if not issubclass(found, transformers.PreTrainedModel):
            return found.from_pretrained(place, local_files_only=True)
        model, info = found.from_pretrained(
            place, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, **config
        )
    except (OSError, ValueError, RuntimeError, ImportError, TypeError) as error:
        raise UserError(f"{key}: {place} cannot be loaded: {' '.join(str(error).split())}") from None
    check_complete(key, place, info)
    config = model.config.get_text_config()
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values of a caption are not asked for again
    return model.to(device).eval()


def _class_of(setting: str, library: str, class_name: str, place: Path) -> tuple[Any, dict[str, Any]]:
    """A class of transformers, None where it has none, and what it is loaded with beside its folder's weights.

    T5Gemma's encoder alone is a class that transformers does not show, and PRX's folder names it as diffusers' own; it
    takes the encoder's config, which the folder has whole or as a part of T5Gemma's.
    """
    if class_name == "T5GemmaEncoder":
        saved = read_config(setting, place)
        return T5GemmaEncoder, {"config": transformers.T5GemmaConfig(encoder=saved.get("encoder", saved)).encoder}
    if library != "transformers":
        return None, {}
    if place.name.startswith("tokenizer") and class_name.endswith("Processor"):
        return Words, {}
    found = getattr(transformers, class_name, None)
    return (found if hasattr(found, "from_pretrained") else None), {}
