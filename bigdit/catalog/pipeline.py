"""What a folder in diffusers' layout says of the VAE and the text encoders that its transformer goes with."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bigdit.catalog.models import Vae
from bigdit.catalog.names import load_json
from bigdit.documents import read_json
from bigdit.errors import UserError

INDEX, CONFIG = "model_index.json", "config.json"


class _Ratios(NamedTuple):
    """Pixels a latent, frames a latent, channels of the latents."""

    space: int
    time: int
    channels: int


def _halvings(config: dict[str, Any], key: str) -> int:
    """How many pixels a side become one, where each of the listed stages but the last halves them."""
    return 1 << (len(config[key]) - 1)


# By the class of a VAE. Source: diffusers 0.42.1, `spatial_compression_ratio` and `temporal_compression_ratio` of these
# classes and `vae_scale_factor` of their pipelines.
_RATIOS: dict[str, Callable[[dict[str, Any]], _Ratios]] = {
    "AutoencoderKL": lambda c: _Ratios(_halvings(c, "block_out_channels"), 1, c["latent_channels"]),
    "AutoencoderKLFlux2": lambda c: _Ratios(_halvings(c, "block_out_channels"), 1, c["latent_channels"]),
    "AutoencoderDC": lambda c: _Ratios(_halvings(c, "encoder_block_out_channels"), 1, c["latent_channels"]),
    "AutoencoderKLQwenImage": lambda c: _Ratios(2 ** len(c["temperal_downsample"]), 1, c["z_dim"]),
    "AutoencoderKLWan": lambda c: _Ratios(c["scale_factor_spatial"], c["scale_factor_temporal"], c["z_dim"]),
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
    """The pipeline's folder that the folder of a transformer's config.json lies in; None where it lies in none."""
    folder = config.absolute().parent.parent
    there = any(os.path.isfile(file) for file in (folder / INDEX, folder / "vae" / CONFIG))  # False for a name too long
    return folder if there else None


# What a class takes where an older config.json does not say. Source: their constructors in diffusers 0.42.1.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "AutoencoderKLFlux2": {"block_out_channels": [128, 256, 512, 512], "latent_channels": 32},
    "AutoencoderDC": {"encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024], "latent_channels": 32},
    "AutoencoderKLQwenImage": {"temperal_downsample": [False, True, True], "z_dim": 16},
    "AutoencoderKLWan": {"scale_factor_spatial": 8, "scale_factor_temporal": 4, "z_dim": 16},
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
    """The VAE in a pipeline's folder, with its own arguments; None where there is none, or one of a class whose factor
    is not known here. Raises UserError for a config.json that does not say what its class is built from."""
    file = folder / "vae" / CONFIG
    config = config_of(file)
    class_name = str(config.get("_class_name"))
    if class_name not in _RATIOS:
        return None
    try:
        space, time, channels = _RATIOS[class_name](_DEFAULTS.get(class_name, {}) | config)
        kwargs = {key: value for key, value in config.items() if not key.startswith("_")}
        alike = _known(class_name, (space, time, channels), kwargs)
        return Vae(
            name=alike or f"the VAE of {folder.name}",
            class_name=class_name,
            kwargs=kwargs,
            downsample=space,
            temporal_downsample=time,
            latent_channels=channels,
            params=_vaes()[alike]["params"] if alike else None,
            encoder_params=_vaes()[alike]["encoder_params"] if alike else None,
            source=str(file),
            notes=None,
        )
    except KeyError as error:
        raise UserError(f"{file} has no {error.args[0]}, which {class_name} is built from") from None
    except (TypeError, ValueError):
        raise UserError(f"{file} says nothing that {class_name} can be built from") from None


def text_widths(folder: Path) -> dict[str, int]:
    """The width of the hidden states of each text encoder in a pipeline's folder, by its name there; empty where its
    index leaves one out, whose states are zeros."""
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
    """The catalogue's VAE of that class and shape whose arguments, where they are known, are all among these."""
    for name, vae in _vaes().items():
        shape, said = (vae["downsample"], vae["temporal_downsample"], vae["latent_channels"]), vae["kwargs"]
        if said is None or (vae["class_name"], shape) != (class_name, ratios):
            continue
        if said == {key: kwargs.get(key) for key in said}:
            return str(name)
    return None


def config_of(file: Path) -> dict[str, Any]:
    """A JSON object of diffusers; empty where there is no such file. Raises UserError for what is none."""
    try:
        found = read_json(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{file} is not a config of diffusers: it is {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is not a config of diffusers: it holds no JSON object")
    return found
