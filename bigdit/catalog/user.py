"""A user's own model from its diffusers config.json; what that does not say, its sibling in the catalogue lends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bigdit.catalog.families import FAMILIES, Inputs
from bigdit.catalog.models import CatalogModel, TextInput, Vae, model, models
from bigdit.catalog.resolve import read_model_config
from bigdit.errors import UserError, nearest
from bigdit.spec import ModelSpec

PACKING = 2  # latents a side that are packed into one, outside the model


def find_model(asked: str) -> CatalogModel:
    """The model of that catalogue name or alias, or of the config.json, or folder with one, at that path.

    Raises UserError where it is none of them.
    """
    if asked.endswith(".json") or asked.startswith((".", "/", "~")) or os.path.isdir(asked):
        return user_model(Path(os.path.expanduser(asked)))
    return model(asked)


def user_model(path: Path) -> CatalogModel:
    """The model of a diffusers config.json, with all that a plan asks of a catalogue model; its parameters uncounted.

    Channels, patch size and the width of the text are read from the config. The VAE, the number of text tokens
    and what else is asked come from the catalogue's model of the same class with the most equal arguments.
    Raises UserError for a class without an adapter, and where the config lacks what the sibling cannot lend.
    """
    spec = read_model_config(path)
    if spec.class_name not in FAMILIES:
        raise UserError(f"{path}: no family adapter drives {spec.class_name!r}; {nearest(spec.class_name, FAMILIES)}")
    inputs, sibling = FAMILIES[spec.class_name], _sibling(spec)
    problems = [
        f"{path} has no {key}, which the plan needs; {sibling.name} has {sibling.spec.kwargs[key]}"
        for key in ("in_channels", "patch_size", inputs.text_dim)
        if key in sibling.spec.kwargs and key not in spec.kwargs
    ]
    if problems:
        raise UserError(*problems)
    vae = _vae(spec, inputs, sibling)
    return sibling.model_copy(
        update={
            "spec": spec,
            "params": None,
            "buffer_elems": None,
            "block_lists": _block_lists(spec, inputs, sibling),
            "text": _text(spec, inputs, sibling),
            "vae": vae,
            "patch_size": _patch_size(spec, inputs, sibling),
            "resolution": _resolution(spec, vae, sibling),
            "source": (str(path),),
            "unverified": f"the VAE and the text tokens, which are those of {sibling.name}",
            "notes": None,
        }
    )


def _block_lists(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel) -> tuple[tuple[str, int], ...]:
    """The sibling's lists, at the lengths that the config says."""
    return tuple(
        (name, _whole(spec, inputs.depths[name], spec.kwargs.get(inputs.depths[name], length)))
        if name in inputs.depths
        else (name, length)
        for name, length in sibling.block_lists
    )


def _sibling(spec: ModelSpec) -> CatalogModel:
    def alike(candidate: CatalogModel) -> int:
        return sum(spec.kwargs.get(key) == value for key, value in candidate.spec.kwargs.items())

    return max((m for m in models() if m.spec.class_name == spec.class_name), key=alike)


def _vae(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel) -> Vae:
    """The sibling's, or one of other channels. A model fed more than latents has the sibling's in_channels."""
    found = spec.kwargs.get("in_channels")
    if found is None or found == sibling.spec.kwargs.get("in_channels"):
        return sibling.vae
    channels, rest = divmod(_whole(spec, "in_channels", found), PACKING**2 if inputs.packs else 1)
    if rest:
        raise UserError(
            f"{spec.name}: in_channels is {found}, and {spec.class_name} packs {PACKING} × {PACKING} latents into "
            f"one: a multiple of {PACKING**2}, such as {max(channels, 1) * PACKING**2}"
        )
    if channels == sibling.vae.latent_channels:
        return sibling.vae
    return sibling.vae.model_copy(
        update={
            "name": f"a VAE of {channels} channels",
            "kwargs": None,
            "latent_channels": channels,
            "params": None,
            "encoder_params": None,
            "source": f"in_channels of {spec.name}; {sibling.vae.downsample} pixels a latent as {sibling.vae.name}",
        }
    )


def _text(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel) -> TextInput | None:
    if inputs.text_dim is None or sibling.text is None:
        return None
    dim, layers = spec.kwargs.get(inputs.text_dim), spec.kwargs.get(inputs.text_layers or "", 1)
    if dim is None:
        return sibling.text
    dim = _whole(spec, inputs.text_dim, dim[0] if isinstance(dim, list) and dim else dim) * layers
    return sibling.text.model_copy(update={"dim": dim})


def _patch_size(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel) -> int:
    found = spec.kwargs.get("patch_size")
    if found is None or inputs.packs:
        return sibling.patch_size
    return _whole(spec, "patch_size", found)


def _resolution(spec: ModelSpec, vae: Vae, sibling: CatalogModel) -> int | None:
    side = spec.kwargs.get("sample_size")
    if side is None or sibling.video:
        return sibling.resolution
    return _whole(spec, "sample_size", side) * vae.downsample


def _whole(spec: ModelSpec, key: str, value: Any) -> int:
    """A positive integer; of several, as (frames, height, width), the last."""
    if isinstance(value, list) and value:
        value = value[-1]
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{spec.name}: {key} is {value!r}; a positive integer was expected")
    return value
