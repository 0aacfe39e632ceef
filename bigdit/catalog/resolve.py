"""The model that is asked for: by catalogue name, by a diffusers config.json, or written out.

What a user's own config.json does not say, its sibling in the catalogue lends.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bigdit.catalog.families import FAMILIES, Inputs, argument_problems
from bigdit.catalog.models import CatalogModel, TextInput, Vae, model, models
from bigdit.catalog.names import refusal
from bigdit.catalog.pipeline import CONFIG, config_of, folder_vae, index_of, pipeline_folder, text_widths
from bigdit.config.run import ModelConfig
from bigdit.documents import parse_json, read_file
from bigdit.errors import UserError, nearest
from bigdit.strategy import ModelSpec

INDEX = "model_index.json"
TRANSFORMER = "transformer"
"""The folder of a transformer in a pipeline's, in diffusers' layout."""


def model_spec(config: ModelConfig) -> ModelSpec:
    """What is to be trained. Raises UserError unless exactly one of name, path and class_name is given, and for
    arguments that no class takes."""
    ways = [key for key in ("name", "path", "class_name") if getattr(config, key) is not None]
    if len(ways) != 1:
        found = " and ".join(f"model.{way}" for way in ways) or "none of them"
        raise UserError(f"one of model.name, model.path and model.class_name says what is trained; {found} was found")
    if config.kwargs and config.class_name is None:
        raise UserError(f"model.kwargs goes with model.class_name, and model.{ways[0]} was found")
    if config.name is not None:
        return model(config.name).spec
    if config.path is not None:
        return read_model_config(config.path)
    assert config.class_name is not None
    return _sensible(ModelSpec(name=config.class_name, class_name=config.class_name, kwargs=config.kwargs))


def read_model_config(path: Path) -> ModelSpec:
    """The ModelSpec in a diffusers `config.json`, in the folder that holds one, or in a pipeline's folder. It has the
    name of its folder, of the pipeline where the transformer lies in one, or of a file that is called otherwise.

    Raises UserError where the file is missing, is not JSON, names no class, or has arguments that no class takes.
    """
    file = config_file(path)
    try:
        document: Any = parse_json(read_file(file, str(file), "; a diffusers config.json was expected"))
    except ValueError as error:
        raise UserError(f"{file} is not a diffusers config.json: it is {error}") from None
    class_name = document.get("_class_name") if isinstance(document, dict) else None
    if not isinstance(class_name, str):
        raise UserError(f"{file} names no _class_name, as diffusers' config.json does")
    kwargs = {key: value for key, value in document.items() if not key.startswith("_")}
    spec = ModelSpec(name=_name(file.absolute()) or class_name, class_name=class_name, kwargs=kwargs)
    try:
        return _sensible(spec)
    except UserError as error:
        raise UserError(*(f"{file}: {line.removeprefix('model.kwargs.')}" for line in error.problems)) from None


def _name(file: Path) -> str:
    if file.name != "config.json":
        return file.stem
    return file.parent.parent.name if file.parent.name == TRANSFORMER else file.parent.name


def _sensible(spec: ModelSpec) -> ModelSpec:
    if problems := argument_problems(spec):
        raise UserError(*problems)
    return spec


def config_file(path: Path) -> Path:
    """The config.json of the transformer at `path`, which may be it, its folder, or a pipeline's or its index."""
    path = path.parent if path.name == INDEX else path
    if not os.path.isdir(path):  # False for a name that no file can have, where Path.is_dir raises
        return path
    inner = path / TRANSFORMER / "config.json"
    return inner if inner.is_file() else path / "config.json"


PACKING = 2  # latents a side that are packed into one, outside the model


def find_model(asked: str) -> CatalogModel:
    """The model of that catalogue name or alias, or of the config.json, or folder with one, at that path.

    Raises UserError where it is none of them.
    """
    if asked.endswith(".json") or asked.startswith((".", "/", "~")) or os.path.isdir(asked):
        return user_model(Path(os.path.expanduser(asked)))
    try:
        return model(asked)
    except UserError as error:
        if "/" not in asked or refusal("model", asked):
            raise
        raise UserError(*(f"{problem}; nor is there such a folder here" for problem in error.problems)) from None


def user_model(path: Path) -> CatalogModel:
    """The model of a diffusers config.json, with all that a plan asks of a catalogue model; its parameters uncounted.

    Channels, patch size and the width of the text are read from the config, the VAE from the pipeline's folder that it
    lies in. What that does not say, the number of text tokens and without a pipeline the VAE, comes from the
    catalogue's model of the same class with the most equal arguments: `unverified` says what.
    Raises UserError for a class without an adapter, where the config lacks what the sibling cannot lend, and where the
    VAE or the text encoders of the folder do not go with the transformer.
    """
    file = config_file(path)
    folder = pipeline_folder(file)
    _check_transformer(path, path if os.path.isdir(path) and not os.path.isfile(file) else folder)
    spec = read_model_config(path)
    if spec.class_name not in FAMILIES:
        why = refusal("model", spec.class_name) or f"; {nearest(spec.class_name, FAMILIES)}"
        raise UserError(f"{path}: no family adapter drives {spec.class_name!r}{why}")
    own = None if folder is None else folder_vae(folder)
    inputs, sibling = FAMILIES[spec.class_name], _sibling(spec, own)
    problems = [
        f"{path} has no {key}, which the plan needs; {sibling.name} has {sibling.spec.kwargs[key]}"
        for key in ("in_channels", "patch_size", inputs.text_dim)
        if key in sibling.spec.kwargs and key not in spec.kwargs
    ]
    if problems:
        raise UserError(*problems)
    widths = None if folder is None else text_widths(folder)
    try:
        if widths is not None:
            _check_together(spec, inputs, sibling, own, widths)
        made = of_arguments(spec, own)
    except UserError as error:
        raise UserError(*(f"{path}: {line}" for line in error.problems)) from None
    pipeline, assumed = None if folder is None else str(folder), made.unverified
    if folder is not None and own is None and (other := config_of(folder / "vae" / CONFIG).get("_class_name")):
        assumed = f"vae/config.json is of {other}, which is not known here: {assumed}"
    return made.model_copy(update={"source": (str(path),), "pipeline": pipeline, "unverified": assumed})


def of_arguments(spec: ModelSpec, own: Vae | None = None) -> CatalogModel:
    """The model of these arguments and its pipeline's `own` VAE, with what its sibling lends.

    Raises UserError where one of them that decides shapes is no number that can.
    """
    inputs, sibling = FAMILIES[spec.class_name], _sibling(spec, own)
    more = {"spec": spec, "params": None, "buffer_elems": None, "notes": None, "source": (), "pipeline": None}
    return sibling.model_copy(update=_read(spec, inputs, sibling, own) | more)


def _read(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel, own: Vae | None) -> dict[str, Any]:
    """What the arguments say of a model, the sibling lends and the pipeline's `own` VAE is."""
    vae, text = own or _vae(spec, inputs, sibling), _text(spec, inputs, sibling)
    return {
        "block_lists": _block_lists(spec, inputs, sibling),
        "text": text,
        "vae": vae,
        "patch_size": _patch_size(spec, inputs, sibling),
        "patch_frames": _whole("patch_size_t", spec.kwargs.get("patch_size_t") or 1),
        "resolution": _resolution(spec, vae, sibling),
        "unverified": _assumed(None if own else vae, None if inputs.text_tokens in spec.kwargs else text, sibling),
    }


def _check_transformer(path: Path, folder: Path | None) -> None:
    """Raise UserError for the folder of a pipeline with something else than a transformer: a U-Net."""
    index = {} if folder is None else index_of(folder)
    if "transformer" not in index and "unet" in index:
        kind = index["unet"][-1] if isinstance(index["unet"], list) else "UNet2DConditionModel"
        why = refusal("model", str(index.get("_class_name"))) or refusal("model", str(kind))
        raise UserError(f"{path} is a {index.get('_class_name')} with a {kind} and no transformer{why}")


def _check_together(
    spec: ModelSpec, inputs: Inputs, sibling: CatalogModel, vae: Vae | None, widths: dict[str, int]
) -> None:
    """Raise UserError where the VAE's latents, or the text encoders' states, are none that the transformer takes."""
    problems = []
    usual = _packed(sibling.vae, inputs)
    taken = spec.kwargs.get("in_channels", sibling.spec.kwargs.get("in_channels", usual))
    more = sibling.spec.kwargs.get("in_channels") not in (None, usual)  # than latents
    if vae is not None and not more and taken != _packed(vae, inputs):
        how = f" in patches of {PACKING} × {PACKING}" if inputs.packs else ""
        problems.append(
            f"transformer/config.json has in_channels {taken}, and vae/config.json gives "
            f"{_packed(vae, inputs)}{how} (latents of {vae.latent_channels}): they do not go together"
        )
    width = spec.kwargs.get(inputs.text_dim or "")
    wanted = width[0] if isinstance(width, list) and width else width
    if widths and isinstance(wanted, int) and wanted not in {each * inputs.joined for each in widths.values()}:
        given = ", ".join(f"{name}/config.json {each}" for name, each in widths.items())
        problems.append(
            f"transformer/config.json has {inputs.text_dim} {wanted}, and the text encoders' states are "
            f"as wide as {given}: they do not go together"
        )
    if problems:
        raise UserError(*problems)


def _packed(vae: Vae, inputs: Inputs) -> int:
    """The channels in which the latents of a VAE go into the model."""
    return vae.latent_channels * (PACKING**2 if inputs.packs else 1)


def _assumed(vae: Vae | None, text: TextInput | None, sibling: CatalogModel) -> str | None:
    """What was taken from the sibling, in words; None where nothing was."""
    taken = [] if vae is None else [f"the VAE ({vae.name}, {vae.downsample} × {vae.downsample} pixels a latent)"]
    taken += [] if text is None else [f"{text.tokens} text tokens"]
    return f"{' and '.join(taken)}, taken from {sibling.name}" if taken else None


def _block_lists(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel) -> tuple[tuple[str, int], ...]:
    """The sibling's lists, at the lengths that the config says."""
    return tuple(
        (name, _whole(inputs.depths[name], spec.kwargs.get(inputs.depths[name], length)))
        if name in inputs.depths
        else (name, length)
        for name, length in sibling.block_lists
    )


def _sibling(spec: ModelSpec, vae: Vae | None) -> CatalogModel:
    """The catalogue's model of that class with the most equal arguments, and of several the one with that VAE."""

    def alike(candidate: CatalogModel) -> tuple[int, bool]:
        equal = sum(spec.kwargs.get(key) == value for key, value in candidate.spec.kwargs.items())
        return equal, vae is not None and vae.name == candidate.vae.name

    return max((m for m in models() if m.spec.class_name == spec.class_name), key=alike)


def _vae(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel) -> Vae:
    """The sibling's, or one of other channels. A model fed more than latents has the sibling's in_channels."""
    found = spec.kwargs.get("in_channels")
    if found is None or found == sibling.spec.kwargs.get("in_channels"):
        return sibling.vae
    channels, rest = divmod(_whole("in_channels", found), PACKING**2 if inputs.packs else 1)
    if rest:
        raise UserError(
            f"in_channels is {found}, and {spec.class_name} packs {PACKING} × {PACKING} latents into "
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
    dim = _whole(inputs.text_dim, dim[0] if isinstance(dim, list) and dim else dim) * layers
    tokens = spec.kwargs.get(inputs.text_tokens or "", sibling.text.tokens)
    return sibling.text.model_copy(update={"dim": dim, "tokens": tokens})


def _patch_size(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel) -> int:
    found = spec.kwargs.get("patch_size")
    if found is None or inputs.packs:
        return sibling.patch_size
    return _whole("patch_size", found)


def _resolution(spec: ModelSpec, vae: Vae, sibling: CatalogModel) -> int | None:
    side = spec.kwargs.get("sample_size")
    if side is None or sibling.video:
        return sibling.resolution
    return _whole("sample_size", side) * vae.downsample


def _whole(key: str, value: Any) -> int:
    """A positive integer; of several, as (frames, height, width), the last."""
    if isinstance(value, list) and value:
        value = value[-1]
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{key} is {value!r}; a positive integer was expected")
    return value
