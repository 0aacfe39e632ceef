"""The model of a run or a plan, with its VAE: a name of the catalogue, a diffusers config.json, or arguments.

Values that a user's config.json lacks come from its sibling, the most similar model of the catalogue.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bigdit.catalog.families import (
    EDITORS,
    FAMILIES,
    PACKING,
    Inputs,
    argument_problems,
    begins_with_an_image,
    can_take_first_frame,
    editor_of,
    fills,
    is_controlled,
)
from bigdit.catalog.models import CatalogModel, TextInput, Vae, latent_shape, model, models
from bigdit.catalog.names import load_json, refusal
from bigdit.config.data import DataConfig, IdentityCodec, VaeCodec, frames_of, written_bucket
from bigdit.config.run import ModelConfig
from bigdit.documents import parse_json, read_file, read_json, written
from bigdit.errors import UserError, nearest
from bigdit.files import near
from bigdit.strategy import ModelSpec

INDEX, CONFIG = "model_index.json", "config.json"
TRANSFORMER = "transformer"
"""The folder of a transformer in a pipeline's, in diffusers' layout."""


def model_spec(config: ModelConfig) -> ModelSpec:
    """The model to train. Raises UserError unless one of name, path and class_name is set, and for wrong arguments."""
    ways = [key for key in ("name", "path", "class_name") if getattr(config, key) is not None]
    if len(ways) != 1:
        found = f"{' and '.join(f'model.{way}' for way in ways)} were found" if ways else "none of them was found"
        raise UserError(f"exactly one of model.name, model.path and model.class_name was expected; {found}")
    if config.kwargs and config.class_name is None:
        raise UserError(f"model.kwargs needs model.class_name, and model.{ways[0]} was found")
    if config.name is not None:
        return model(config.name).spec
    if config.path is not None:
        return read_model_config(config.path)
    assert config.class_name is not None
    return _checked(ModelSpec(name=config.class_name, class_name=config.class_name, kwargs=config.kwargs))


def read_model_config(path: Path) -> ModelSpec:
    """The ModelSpec in a diffusers `config.json`, its folder, or a pipeline's folder, which gives the name.

    Raises UserError if the file is missing, is not JSON, names no class, or has wrong arguments.
    """
    file = config_file(path)
    try:
        document: Any = parse_json(read_file(file, str(file), near(file) or "; a diffusers config.json was expected"))
    except ValueError as error:
        raise UserError(f"{file} is not a diffusers config.json: it is {error}") from None
    class_name = document.get("_class_name") if isinstance(document, dict) else None
    if not isinstance(class_name, str):
        example = '"_class_name": "FluxTransformer2DModel"'
        if class_name is not None:
            raise UserError(f"{file} has _class_name {written(class_name)[:60]}; set it to a class, such as {example}")
        raise UserError(f"{file} has no _class_name; add the model's class, such as {example}, or give a model's name")
    kwargs = {key: value for key, value in document.items() if not key.startswith("_")}
    spec = ModelSpec(name=_name(file.absolute()) or class_name, class_name=class_name, kwargs=kwargs)
    try:
        return _checked(spec)
    except UserError as error:
        raise UserError(*(f"{file}: {line.removeprefix('model.kwargs.')}" for line in error.problems)) from None


def _name(file: Path) -> str:
    if file.name != "config.json":
        return file.stem
    return file.parent.parent.name if file.parent.name == TRANSFORMER else file.parent.name


def _checked(spec: ModelSpec) -> ModelSpec:
    if problems := argument_problems(spec):
        raise UserError(*problems)
    return spec


def config_file(path: Path) -> Path:
    """The config.json of the transformer at `path`: the file, its folder, a pipeline's folder or its index."""
    path = path.parent if path.name == INDEX else path
    if not os.path.isdir(path):  # False for a name that no file can have, where Path.is_dir raises
        return path
    inner, own = path / TRANSFORMER / "config.json", path / "config.json"
    return inner if inner.is_file() or ((path / INDEX).is_file() and not own.is_file()) else own


_IMAGE_TO_VIDEO = "ImageToVideoPipeline"
"""The end of the names of image-to-video pipelines."""


def find_model(asked: str) -> CatalogModel:
    """The model of a catalogue name, an alias, a config.json, or a folder with one. Raises UserError for others."""
    if asked.endswith(".json") or asked.startswith((".", "/", "~")) or os.path.isdir(asked):
        return user_model(Path(os.path.expanduser(asked)))
    try:
        return model(asked)
    except UserError as error:
        if "/" not in asked or refusal("model", asked):
            raise
        if similar := near(Path(asked)):
            raise UserError(f"{asked} does not exist{similar}") from None
        raise UserError(*(f"{problem}; nor is there such a folder here" for problem in error.problems)) from None


def user_model(path: Path) -> CatalogModel:
    """The model of a diffusers config.json, with all that a plan needs; its parameters are not counted.

    The config has channels, patch size and the width of the text; the pipeline's folder has the VAE. The number of text
    tokens, and a missing VAE, come from the sibling: `unverified` lists them. Raises UserError for a class without an
    adapter, a config that lacks other values, and a VAE or text encoders that do not fit the transformer.
    """
    file = config_file(path)
    folder = pipeline_folder(file)
    _check_transformer(path, path if os.path.isdir(path) and not os.path.isfile(file) else folder)
    spec = read_model_config(path)
    if spec.class_name not in FAMILIES:
        why = refusal("model", spec.class_name) or f"; {nearest(spec.class_name, FAMILIES)}"
        raise UserError(f"{path}: no family adapter drives {spec.class_name!r}{why}")
    own = None if folder is None else folder_vae(folder / "vae")
    named = None if folder is None else str(index_of(folder).get("_class_name"))
    inputs, sibling = FAMILIES[spec.class_name], _sibling(spec, own, named)
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
        made = model_of_arguments(spec, own, named)
    except UserError as error:
        raise UserError(*(f"{path}: {line}" for line in error.problems)) from None
    pipeline, assumed = None if folder is None else str(folder), made.unverified
    if folder is not None and own is None and (other := config_of(folder / "vae" / CONFIG).get("_class_name")):
        assumed = f"vae/config.json is of {other}, which is not known here: {assumed}"
    edits = int(named in EDITORS) or made.references
    begins = named is not None and named.endswith(_IMAGE_TO_VIDEO)
    update = {"source": (str(path),), "pipeline": pipeline, "unverified": assumed, "references": edits}
    return made.model_copy(update=update | {"first_frame": begins and can_take_first_frame(made.spec)})


def model_of_arguments(spec: ModelSpec, own: Vae | None = None, named: str | None = None) -> CatalogModel:
    """The model of these arguments and its pipeline's `own` VAE, completed from its sibling.

    `named`: the class of the pipeline. Raises UserError if an argument for shapes is no valid number.
    """
    inputs, sibling = FAMILIES[spec.class_name], _sibling(spec, own, named)
    more = {"spec": spec, "params": None, "notes": None, "source": (), "pipeline": None}
    return sibling.model_copy(
        update=_read(spec, inputs, sibling, own) | more | {"references": int(is_controlled(spec)), "first_frame": False}
    )


def _read(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel, own: Vae | None) -> dict[str, Any]:
    """Fields of a model from its arguments, its sibling and the pipeline's `own` VAE."""
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
    """Raise UserError for the folder of a pipeline with a U-Net, or with inputs that are not supported."""
    index = {} if folder is None else index_of(folder)
    if "transformer" in index and (why := refusal("model", str(index.get("_class_name")))):
        raise UserError(f"{path} is a {index.get('_class_name')}{why}")
    if "transformer" not in index and "unet" in index:
        kind = index["unet"][-1] if isinstance(index["unet"], list) else "UNet2DConditionModel"
        why = refusal("model", str(index.get("_class_name"))) or refusal("model", str(kind))
        raise UserError(f"{path} is a {index.get('_class_name')} with a {kind} and no transformer{why}")


def _check_together(
    spec: ModelSpec, inputs: Inputs, sibling: CatalogModel, vae: Vae | None, widths: dict[str, int]
) -> None:
    """Raise UserError if the VAE's latents or the text encoders' states do not fit the transformer."""
    problems = []
    usual = _packed(sibling.vae, inputs)
    taken = spec.kwargs.get("in_channels", sibling.spec.kwargs.get("in_channels", usual))
    more = sibling.spec.kwargs.get("in_channels") not in (None, usual)  # than latents
    if vae is not None and not more and taken != _packed(vae, inputs):
        how = f" in patches of {PACKING} × {PACKING}" if inputs.packs else ""
        problems.append(
            f"transformer/config.json has in_channels {taken}, and vae/config.json gives "
            f"{_packed(vae, inputs)}{how} (latents of {vae.latent_channels}): they do not fit together"
        )
    width = spec.kwargs.get(inputs.text_dim or "")
    wanted = width[0] if isinstance(width, list) and width else width
    if widths and isinstance(wanted, int) and wanted not in {each * inputs.joined for each in widths.values()}:
        given = ", ".join(f"{name}/config.json {each}" for name, each in widths.items())
        problems.append(
            f"transformer/config.json has {inputs.text_dim} {wanted}, and the text encoders' states are "
            f"as wide as {given}: they do not fit together"
        )
    if problems:
        raise UserError(*problems)


def _packed(vae: Vae, inputs: Inputs) -> int:
    """The channels of the model's input for the latents of a VAE."""
    return vae.latent_channels * (PACKING**2 if inputs.packs else 1)


def _assumed(vae: Vae | None, text: TextInput | None, sibling: CatalogModel) -> str | None:
    """Which values the sibling gave, as text; None without any."""
    taken = [] if vae is None else [f"the VAE ({vae.name}, {vae.downsample} × {vae.downsample} pixels a latent)"]
    taken += [] if text is None else [f"{text.tokens} text tokens"]
    return f"{' and '.join(taken)}, taken from {sibling.name}" if taken else None


def _block_lists(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel) -> tuple[tuple[str, int], ...]:
    """The sibling's lists of blocks, with the lengths of the config."""
    return tuple(
        (name, _whole(inputs.depths[name], spec.kwargs.get(inputs.depths[name], length)))
        if name in inputs.depths
        else (name, length)
        for name, length in sibling.block_lists
    )


_MORE_CHANNELS = (is_controlled, fills, begins_with_an_image)
"""Whether a model's input has other channels besides latents."""


def _sibling(spec: ModelSpec, vae: Vae | None, named: str | None = None) -> CatalogModel:
    """The catalogue's model of the class with the most equal arguments; of several the one with this VAE.

    If the pipeline `named` edits with a vision encoder, its own models come first.
    """
    editor = named if editor_of(named).seen else None

    def likeness(candidate: CatalogModel) -> tuple[bool, int, bool]:
        equal = sum(spec.kwargs.get(key) == value for key, value in candidate.spec.kwargs.items())
        same_inputs = (
            all(takes(spec) == takes(candidate.spec) for takes in _MORE_CHANNELS) and editor == candidate.editor
        )
        return same_inputs, equal, vae is not None and vae.name == candidate.vae.name

    return max((m for m in models() if m.spec.class_name == spec.class_name), key=likeness)


def _vae(spec: ModelSpec, inputs: Inputs, sibling: CatalogModel) -> Vae:
    """The sibling's VAE, or one with other channels. Other inputs of a model are no channels of the VAE."""
    key = "out_channels" if any(takes(spec) for takes in _MORE_CHANNELS) else "in_channels"
    found = spec.kwargs.get(key)
    if found is None or found == sibling.spec.kwargs.get(key):
        return sibling.vae
    channels, rest = divmod(_whole(key, found), PACKING**2 if inputs.packs else 1)
    if rest:
        raise UserError(
            f"{key} is {found}, and {spec.class_name} packs {PACKING} × {PACKING} latents into "
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
            "source": f"{key} of {spec.name}; {sibling.vae.downsample} pixels a latent as {sibling.vae.name}",
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
    """A positive integer; of (frames, height, width) the last."""
    if isinstance(value, list) and value:
        value = value[-1]
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{key} is {value!r}; a positive integer was expected")
    return value


class _Ratios(NamedTuple):
    """Pixels a latent, frames a latent, channels of the latents."""

    space: int
    time: int
    channels: int


def _halvings(config: dict[str, Any], key: str) -> int:
    """Pixels per side of a latent: each listed stage but the last halves the sides."""
    return 1 << (len(config[key]) - 1)


# Keys: classes of VAEs. Source: diffusers 0.42.1, `spatial_compression_ratio` and `temporal_compression_ratio` of these
# classes and `vae_scale_factor` of their pipelines.
_RATIOS: dict[str, Callable[[dict[str, Any]], _Ratios]] = {
    "AutoencoderKL": lambda c: _Ratios(_halvings(c, "block_out_channels"), 1, c["latent_channels"]),
    "AutoencoderKLFlux2": lambda c: _Ratios(_halvings(c, "block_out_channels"), 1, c["latent_channels"]),
    "AutoencoderDC": lambda c: _Ratios(_halvings(c, "encoder_block_out_channels"), 1, c["latent_channels"]),
    "AutoencoderKLQwenImage": lambda c: _Ratios(2 ** len(c["temperal_downsample"]), 1, c["z_dim"]),
    "AutoencoderKLWan": lambda c: _Ratios(c["scale_factor_spatial"], 2 ** sum(c["temperal_downsample"]), c["z_dim"]),
    "AutoencoderKLCogVideoX": lambda c: _Ratios(
        _halvings(c, "block_out_channels"), c["temporal_compression_ratio"], c["latent_channels"]
    ),
    "AutoencoderKLHunyuanVideo": lambda c: _Ratios(
        c["spatial_compression_ratio"], c["temporal_compression_ratio"], c["latent_channels"]
    ),
    "AutoencoderKLHunyuanVideo15": lambda c: _Ratios(
        c["spatial_compression_ratio"], c["temporal_compression_ratio"], c["latent_channels"]
    ),
    "AutoencoderKLHunyuanImage": lambda c: _Ratios(c["spatial_compression_ratio"], 1, c["latent_channels"]),
    "AutoencoderKLLTXVideo": lambda c: _Ratios(
        c.get("spatial_compression_ratio") or c["patch_size"] * 2 ** sum(c["spatio_temporal_scaling"]),
        c.get("temporal_compression_ratio") or c["patch_size_t"] * 2 ** sum(c["spatio_temporal_scaling"]),
        c["latent_channels"],
    ),
    "AutoencoderKLMochi": lambda c: _Ratios(
        math.prod(c["spatial_expansions"]), math.prod(c["temporal_expansions"]), c["latent_channels"]
    ),
}


def pipeline_folder(config: Path) -> Path | None:
    """The folder of the pipeline that has this transformer's config.json; None without one."""
    folder = config.absolute().parent.parent
    there = any(os.path.isfile(file) for file in (folder / INDEX, folder / "vae" / CONFIG))  # False for a name too long
    return folder if there else None


# Defaults for keys that an older config.json lacks. Source: the constructors in diffusers 0.42.1.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "AutoencoderKLFlux2": {"block_out_channels": [128, 256, 512, 512], "latent_channels": 32},
    "AutoencoderDC": {"encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024], "latent_channels": 32},
    "AutoencoderKLQwenImage": {"temperal_downsample": [False, True, True], "z_dim": 16},
    "AutoencoderKLWan": {"scale_factor_spatial": 8, "temperal_downsample": [False, True, True], "z_dim": 16},
    "AutoencoderKLCogVideoX": {
        "block_out_channels": [128, 256, 256, 512],
        "temporal_compression_ratio": 4,
        "latent_channels": 16,
    },
    "AutoencoderKLHunyuanVideo": {
        "spatial_compression_ratio": 8,
        "temporal_compression_ratio": 4,
        "latent_channels": 16,
    },
    "AutoencoderKLHunyuanVideo15": {
        "spatial_compression_ratio": 16,
        "temporal_compression_ratio": 4,
        "latent_channels": 32,
    },
    "AutoencoderKLLTXVideo": {
        "patch_size": 4,
        "patch_size_t": 1,
        "spatio_temporal_scaling": [True, True, True, False],
        "latent_channels": 128,
    },
    "AutoencoderKLMochi": {
        "spatial_expansions": [2, 2, 2],
        "temporal_expansions": [1, 2, 3],
        "latent_channels": 12,
    },
}


def folder_vae(folder: Path) -> Vae | None:
    """The VAE in this folder of a pipeline; None if it is missing or of an unknown class. Raises UserError for a
    config.json without the arguments of its class."""
    file = folder / CONFIG
    config = config_of(file)
    class_name = str(config.get("_class_name"))
    if class_name not in _RATIOS:
        return None
    try:
        space, time, channels = _RATIOS[class_name](_DEFAULTS.get(class_name, {}) | config)
        kwargs = {key: value for key, value in config.items() if not key.startswith("_")}
        known_as = _known(class_name, (space, time, channels), kwargs)
        return Vae(
            name=known_as or f"the VAE of {folder.absolute().parent.name}",
            class_name=class_name,
            kwargs=kwargs,
            downsample=space,
            temporal_downsample=time,
            latent_channels=channels,
            params=_vaes()[known_as]["params"] if known_as else None,
            source=str(file),
            notes=None,
        )
    except KeyError as error:
        raise UserError(f"{file} has no {error.args[0]}, which {class_name} needs") from None
    except (TypeError, ValueError):
        raise UserError(f"{file} has no valid arguments of {class_name}") from None


def unfit_buckets(spec: ModelSpec, codec: IdentityCodec | VaeCodec, data: DataConfig) -> list[str]:
    """The buckets that the VAE and the model's patches do not divide, as far as their configs say."""
    if isinstance(codec, IdentityCodec) or spec.class_name not in FAMILIES:
        return []  # `config.check` compares buckets with pixels as latents
    vae = folder_vae(codec.described_in)
    if vae is None:
        return []
    model, problems = model_of_arguments(spec, vae), list[str]()
    for key, buckets in data.keyed_buckets.items():
        for bucket in buckets:
            (height, width), frames = bucket[-2:], frames_of(bucket) if model.video or len(bucket) == 3 else None
            try:
                latent_shape(model, height, width, frames)
            except UserError as error:
                problems += [f"{key}: {written_bucket(bucket)}: {problem}" for problem in error.problems]
    return problems


def text_widths(folder: Path) -> dict[str, int]:
    """The width of the hidden states of each text encoder in a pipeline's folder; empty if its index leaves one out,
    whose states are then zeros."""
    if any(name.startswith("text_encoder") and entry == [None, None] for name, entry in index_of(folder).items()):
        return {}
    found = {}
    for file in sorted(folder.glob(f"text_encoder*/{CONFIG}")):
        config = config_of(file)
        config = config | config.get("text_config", {}) if isinstance(config.get("text_config"), dict) else config
        width = config.get("d_model", config.get("hidden_size"))
        if isinstance(width, int):
            found[file.parent.name] = width
    return found


def index_of(folder: Path) -> dict[str, Any]:
    """model_index.json of a pipeline's folder; empty without one."""
    return config_of(folder / INDEX)


def _vaes() -> dict[str, Any]:
    vaes: dict[str, Any] = load_json("models.json")["vaes"]
    return vaes


def _known(class_name: str, ratios: tuple[int, int, int], kwargs: dict[str, Any]) -> str | None:
    """The catalogue's VAE of that class and shape whose arguments are all among `kwargs`."""
    for name, vae in _vaes().items():
        shape, own = (vae["downsample"], vae["temporal_downsample"], vae["latent_channels"]), vae["kwargs"]
        if own is None or (vae["class_name"], shape) != (class_name, ratios):
            continue
        if own == {key: kwargs.get(key) for key in own}:
            return str(name)
    return None


def config_of(file: Path) -> dict[str, Any]:
    """A JSON object of diffusers; empty without the file. Raises UserError for anything else."""
    try:
        found = read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{file} is not a config of diffusers: it is {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is not a config of diffusers: it holds no JSON object")
    return found
