"""Adapters of tiny models through ComfyUI's own loader: `python benchmarks/comfyui.py CHECKOUT_OF_COMFYUI`.

ComfyUI's key maps, its conversion and its arithmetic run as they are (comfy/lora.py, lora_convert.py, utils.py and
weight_adapter). All else of ComfyUI is a stand-in. A model has the names and rows of its single file. Each weight that
ComfyUI patches is compared with the trained one. The exit status is 1 if one differs or an adapter is not loaded.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import json
import logging
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file

from bigdit import models
from bigdit.errors import UserError
from bigdit.models import comfyui, lora_files
from bigdit.models.families import family
from bigdit.models.lora import apply_lora
from bigdit.models.whole import LAYOUTS
from bigdit.strategy import LoraSpec, ModelSpec

REAL = ("comfy", "comfy.lora", "comfy.lora_convert", "comfy.lora_types", "comfy.utils", "comfy.weight_adapter")
ALL_LAYERS = "LoRA of all layers of blocks"
KINDS = {
    "LoRA": LoraSpec(rank=2, alpha=6.0),
    ALL_LAYERS: LoraSpec(rank=2, alpha=6.0),
    "DoRA": LoraSpec(rank=2, alpha=6.0, dora=True),
    "LoKr": LoraSpec(rank=2, alpha=6.0, kind="lokr"),
    "LoHa": LoraSpec(rank=2, alpha=6.0, kind="loha"),
}
_OF_FLUX = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "num_layers": 2}
_OF_FLUX |= {"num_single_layers": 2, "joint_attention_dim": 12}
_OF_SD3 = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 12}
_OF_SD3 |= {"num_attention_heads": 2, "pos_embed_max_size": 16}
_SD3 = _OF_SD3 | {"num_layers": 2, "attention_head_dim": 64, "caption_projection_dim": 128, "pooled_projection_dim": 10}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "sd3": ("SD3Transformer2DModel", _SD3),
    "sd3.5-medium": ("SD3Transformer2DModel", _SD3 | {"dual_attention_layers": [0], "qk_norm": "rms_norm"}),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        _OF_SD3
        | {"num_mmdit_layers": 1, "num_single_dit_layers": 2, "attention_head_dim": 8, "caption_projection_dim": 16},
    ),
    "flux.1": ("FluxTransformer2DModel", _OF_FLUX | {"pooled_projection_dim": 10, "axes_dims_rope": [2, 2, 4]}),
    "flux.2": ("Flux2Transformer2DModel", _OF_FLUX | {"axes_dims_rope": [2, 2, 2, 2], "timestep_guidance_channels": 8}),
    "chroma": (
        "ChromaTransformer2DModel",
        _OF_FLUX
        | {"axes_dims_rope": [2, 2, 4], "approximator_num_channels": 8, "approximator_hidden_dim": 16}
        | {"approximator_layers": 1},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_layers": 2}
        | {"attention_head_dim": 8, "num_attention_heads": 2, "cross_attention_dim": 16, "caption_channels": 12},
    ),
    "lumina-2": (
        "Lumina2Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 1}
        | {"num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 8, "cap_feat_dim": 12}
        | {"axes_dim_rope": [4, 4, 4], "axes_lens": [20, 20, 20]},
    ),
}
"""Besides those of tests/models/tiny_video.json. ComfyUI takes 64 columns for each block of SD3."""

COMFYUI = {
    "AuraFlowTransformer2DModel": "AuraFlow",
    "HiDreamImageTransformer2DModel": "HiDream",
    "HunyuanVideoTransformer3DModel": "HunyuanVideo",
    "Kandinsky5Transformer3DModel": "Kandinsky5",
    "Lumina2Transformer2DModel": "Lumina2",
    "MochiTransformer3DModel": "GenmoMochi",
    "PixArtTransformer2DModel": "PixArt",
    "QwenImageTransformer2DModel": "QwenImage",
    "SD3Transformer2DModel": "SD3",
    "ZImageTransformer2DModel": "Lumina2",
} | dict.fromkeys(("ChromaTransformer2DModel", "Flux2Transformer2DModel", "FluxTransformer2DModel"), "Flux")
"""Classes of comfy/model_base.py that choose a key map."""

_HUNYUAN = {"_attn_qkv.": "_attn.qkv.", "_attn_proj.": "_attn.proj.", "mlp.fc1.": "mlp.0.", "mlp.fc2.": "mlp.2."}
_HUNYUAN |= {"_mod.linear.": "_mod.lin.", ".modulation.linear.": ".modulation.lin."}
"""ComfyUI renames this file's layers when it loads it. Source: HunyuanVideo in comfy/supported_models.py."""


class _StandIn(ModuleType):
    """A module of ComfyUI that does nothing. Each name in it is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        methods = {
            "__init__": lambda *args, **named: None,
            "__call__": lambda self, *args, **named: args[0] if args else None,  # as a decorator
            "__class_getitem__": classmethod(lambda kind, item: kind),
        }
        made = type(name, (), methods)
        setattr(self, name, made)
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        own = name.startswith("comfy.") and name not in REAL and not name.startswith("comfy.weight_adapter")
        return ModuleSpec(name, self, is_package=True) if own or name.startswith("comfy_execution") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        if spec.name == "comfy.cli_args":
            vars(module)["args"] = _Options()
            vars(module)["enables_dynamic_vram"] = lambda: False
        if spec.name == "comfy.model_management":
            vars(module)["cast_to_device"] = lambda tensor, device, dtype, copy=False: tensor.to(dtype=dtype)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _Options:
    """All options of ComfyUI are off."""

    def __getattr__(self, name: str) -> bool:
        return False


class _Lines(logging.Handler):
    """What ComfyUI logs, such as keys that it does not load."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def held(name: str, kind: str, comfy: SimpleNamespace, lines: _Lines) -> tuple[int, int, int]:
    """How many weights changed, how many differ from the trained ones, and how many lines report unloaded keys.

    Raises UserError for adapters that ComfyUI cannot be given.
    """
    class_name, kwargs = TINY[name]
    spec, lora = ModelSpec(name=name, class_name=class_name, kwargs=kwargs), KINDS[kind]
    model = models.build(spec, device="cpu", dtype=torch.float32, seed=0)
    _draw(model)
    before = {key: each.clone() for key, each in model.state_dict().items()}
    if kind == ALL_LAYERS:
        linear = [each.sources[0].removesuffix(".weight") for each in models.single_file_layout(spec) if each.linear]
        lora = lora.model_copy(update={"targets": linear})
    apply_lora(model, family(class_name), lora, seed=0)
    weights = {key: each.detach() for key, each in model.named_parameters() if each.requires_grad}
    _draw(model, only=weights)
    with tempfile.TemporaryDirectory() as folder:
        lora_files.save_adapters(Path(folder), lora, weights)
        frozen = models.build(spec, device="cpu", dtype=torch.float32, seed=0)
        frozen.load_state_dict(before)
        models.save_for_comfyui(Path(folder), spec, lora, weights, lambda: frozen)
        own = Path(folder, comfyui.FILE)
        file = load_file(own if own.exists() else Path(folder, lora_files.FILE))
    for layer in (each for each in model.modules() if isinstance(each, BaseTunerLayer)):
        layer.merge()
    merged = {key.replace(".base_layer.", "."): each for key, each in model.state_dict().items()}
    pieces = models.single_file_layout(spec)
    base, wanted = ({_renamed(class_name, each.name): each.of(of) for each in pieces} for of in (before, merged))
    found, lines.lines = dict(base), []
    patches = comfy.lora.load_lora(
        comfy.convert.convert_lora(file), comfy.lora.model_lora_keys_unet(_model(spec, base, comfy), {})
    )
    for key, patch in patches.items():
        at, *how = key if isinstance(key, tuple) else (key,)
        offset, function = [*how, None, None][:2]
        if at in found:  # key maps also have layers that other models of the class have
            asked = [(1.0, patch, 1.0, offset, function)]
            found[at] = comfy.lora.calculate_weight(asked, found[at].clone(), at, intermediate_dtype=torch.float32)
    changed = [key for key in wanted if not torch.equal(base[key], wanted[key])]
    wrong = [key for key in wanted if not torch.allclose(found[key], wanted[key], rtol=1e-4, atol=1e-4)]
    return len(changed), len(wrong), sum("not loaded" in line for line in lines.lines)


def _draw(model: torch.nn.Module, only: Any = None) -> None:
    """Draw all parameters, or `only` these: no row is zero, for which DoRA has no scale."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if only is None or name in only:
                each.normal_(std=0.5).add_(each.sign(), alpha=0.1)


def _renamed(class_name: str, name: str) -> str:
    if class_name == "HunyuanVideoTransformer3DModel" and "_blocks." in name:
        for here, there in _HUNYUAN.items():
            name = name.replace(here, there)
    return f"diffusion_model.{name}"


def _model(spec: ModelSpec, state: dict[str, torch.Tensor], comfy: SimpleNamespace) -> Any:
    """What ComfyUI's key maps ask of a model: its class, its names and its sizes."""
    sizes, kind = spec.kwargs, getattr(comfy.classes, COMFYUI.get(spec.class_name, "BaseModel"))
    double, single = sizes.get("num_mmdit_layers", 0), sizes.get("num_single_dit_layers", 0)
    width = sizes.get("dim", sizes.get("num_attention_heads", 1) * sizes.get("attention_head_dim", 1))
    blocks = sizes.get("num_layers", sizes.get("n_layers", 0))
    config = {"depth": blocks, "num_layers": blocks, "depth_single_blocks": sizes.get("num_single_layers", 0)}
    config |= {"n_double_layers": double, "n_layers": double + single or blocks, "dim": width, "hidden_size": width}
    config |= {"n_refiner_layers": sizes.get("n_refiner_layers", 1)}
    made = kind()
    made.state_dict, made.model_config = lambda: state, SimpleNamespace(unet_config=config)
    return made


def main(checkout: Path) -> int:
    """Print a row for each model. Returns 1 if ComfyUI's weights differ from the trained ones."""
    package = ModuleType("comfy")
    package.__path__ = [str(checkout / "comfy")]
    sys.modules["comfy"] = package
    sys.meta_path.insert(0, _StandIns())
    loaded = [importlib.import_module(f"comfy.{name}") for name in ("lora", "lora_convert", "model_base")]
    comfy, lines = SimpleNamespace(**dict(zip(("lora", "convert", "classes"), loaded, strict=True))), _Lines()
    logging.getLogger().addHandler(lines)
    known = json.loads((Path(__file__).parents[1] / "tests/models/tiny_video.json").read_text())
    TINY.update(
        {name: (each["class_name"], each["kwargs"]) for name, each in known.items() if each["class_name"] in LAYOUTS}
    )
    failed = False
    print(f"| model | {' | '.join(KINDS)} |\n| --- |{' --- |' * len(KINDS)}")
    for name in TINY:
        cells = []
        for kind in KINDS:
            try:
                changed, wrong, unloaded = held(name, kind, comfy, lines)
            except UserError as error:
                cells.append(f"refused: {error}")
                continue
            failed |= bool(wrong or unloaded)
            cells.append(f"{changed} equal" if not (wrong or unloaded) else f"{wrong} of {changed} differ")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    sys.exit(main(parser.parse_args().checkout))
