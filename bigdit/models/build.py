"""A transformer from its spec with new weights, or with those of a diffusers folder or of a single file."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from bigdit.documents import weight_files
from bigdit.errors import UserError, nearest
from bigdit.files import check_regular, leads_out, lfs_pointer
from bigdit.models.families import family
from bigdit.models.families.paper_dit import PaperDiT
from bigdit.shortage import ran_out
from bigdit.strategy import ModelSpec
from bigdit.units import how_many

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def build(spec: ModelSpec, *, device: torch.device | str, dtype: torch.dtype, seed: int | None = None) -> nn.Module:
    """The model with new weights on `device` in `dtype`; the same `seed` gives the same weights.

    diffusers' own initialisers draw them in fp32, then they are cast: all precisions start from the same values. Raises
    UserError for a class without an adapter, or an argument that it does not take.
    """
    if seed is not None:
        torch.manual_seed(seed)
    on_host = torch.device(device).type == "cpu"  # the default; a context would slow each call
    with nullcontext() if on_host else torch.device(device):
        model = _constructed(spec)
    if isinstance(unused := getattr(model, "pad_token", None), nn.Parameter):
        nn.init.zeros_(unused)  # LuminaNextDiT2DModel leaves it uninitialised, maybe NaN
    return _in_training(model, dtype)


def load(spec: ModelSpec, folder: Path, *, dtype: torch.dtype) -> nn.Module:
    """The model in CPU memory with the safetensors weights of a folder or a file. Raises UserError if they do not
    fit."""
    return _in_training(_filled(spec, folder, dtype, load_file), dtype)


def check_folder(spec: ModelSpec, folder: Path) -> None:
    """Raise UserError if the names or shapes of a folder's or a file's tensors do not fit. Reads only headers."""
    _filled(spec, folder, torch.bfloat16, _without_values)


Read = Callable[[Path], dict[str, torch.Tensor]]


def _without_values(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "np") as opened:  # this reads the header only
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        return {name: torch.empty(each.get_shape(), dtype=_kind(each), device="meta") for name, each in slices.items()}


def _kind(tensor: Any) -> torch.dtype:
    """A dtype of the same kind: floating-point or integers."""
    name = tensor.get_dtype()
    return torch.bfloat16 if "F" in name else torch.int8 if name == "I8" else torch.uint8


def _filled(spec: ModelSpec, folder: Path, dtype: torch.dtype, read: Read) -> nn.Module:
    """The model with the tensors that `read` finds in files. Raises UserError if they do not fit."""
    if problem := lacking(folder):
        raise UserError(f"{folder} does not hold diffusers weights of {spec.class_name}: {problem}")
    model_class = _model_class(spec)
    try:
        config = {} if folder.is_file() else model_class.load_config(folder, local_files_only=True)
        with init_empty_weights(include_buffers=False):
            model = model_class.from_config(config, **spec.kwargs)  # the spec wins over the folder's config
        family(spec.class_name).prepare(model)
        missing, unexpected = _fill(model, folder, dtype=dtype, read=read)
    except Exception as error:  # of any class: from a constructor, or from damaged files
        if ran_out(error):
            raise
        reason = " ".join(str(error).split())[:300]
        if sizes := _MISFIT.search(reason):
            reason = f"size mismatch for {sizes[1]}: it is {sizes[2]}, and the model's {sizes[3]}"
        raise UserError(f"{folder} does not hold diffusers weights of {spec.class_name}: {reason}") from None
    if missing or unexpected:
        named = config.get("_class_name", spec.class_name)
        kind = f"another {named}" if named == spec.class_name else f"{named}, not of {spec.class_name}"
        raise UserError(f"{folder} holds {_other(kind, folder, missing, unexpected)}")
    return model


_MISFIT = re.compile(r"size mismatch for (\S+): copying .*?torch\.Size\((.*?)\) .*?torch\.Size\((.*?)\)")


def _other(kind: str, folder: Path, missing: Collection[str], unexpected: Collection[str]) -> str:
    """What tensors with other names are of, and what to do."""
    if any(".lora_" in name for name in unexpected):
        return "a LoRA; name it in model.lora_from"
    if re.search(r"-\d{5}-of-\d{5}\.", folder.name):
        return f"a part of the weights; name its folder {folder.parent}"
    first = f", the first {min(unexpected)}" if unexpected else ""
    lost = how_many(len(missing), "tensor")
    return f"weights of {kind}: {lost} missing and {len(unexpected)} unexpected{first}"


def skeleton(spec: ModelSpec, *, dtype: torch.dtype) -> nn.Module:
    """The model in CPU memory with its buffers, and uninitialised parameters, which take no memory yet.

    Raises UserError as `build` does.
    """
    with init_empty_weights(include_buffers=False):
        model = _constructed(spec)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device="cpu", dtype=dtype)
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return _in_training(model, dtype)


def outline(spec: ModelSpec) -> nn.Module:
    """The model on the meta device, without memory. Raises UserError as `build` does."""
    with torch.device("meta"):
        return _constructed(spec)


def _constructed(spec: ModelSpec) -> nn.Module:
    model_class = _model_class(spec)
    try:
        with warnings.catch_warnings():  # about widths of 0, which raise an error a moment later
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            model: nn.Module = model_class(**spec.kwargs)
    except Exception as error:  # of any class: constructors do not expect all arguments
        if ran_out(error):
            raise
        if zeros := _zeros(spec, inspect.signature(model_class).parameters):
            raise UserError(*(f"model.kwargs.{key} is 0, and 1 or more was expected" for key in zeros)) from error
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"model.kwargs: {spec.class_name} cannot be made of these arguments: {reason}") from error
    family(spec.class_name).prepare(model)
    return model


def _zeros(spec: ModelSpec, known: Mapping[str, inspect.Parameter]) -> list[str]:
    """The arguments that are 0 and whose default is above 0."""
    defaults = {key: known[key].default for key, value in spec.kwargs.items() if value == 0 and key in known}
    return [
        key
        for key, default in defaults.items()
        if isinstance(default, int | float) and not isinstance(default, bool) and default > 0
    ]


def _in_training(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    # nn.Module's own `to`: diffusers' override warns of fp32 modules that these classes do not have.
    return nn.Module.to(model, dtype).train()


def _model_class(spec: ModelSpec) -> Any:
    # Imported now, because it makes tensors, and diffusers' `to` would import it while an engine's memory is recorded.
    importlib.import_module("diffusers.hooks")
    family(spec.class_name)
    model_class = PaperDiT if spec.class_name == PaperDiT.__name__ else getattr(diffusers, spec.class_name)
    known = inspect.signature(model_class).parameters
    problems = [_problem(spec, key, value, known) for key, value in spec.kwargs.items()]
    if any(problems):
        raise UserError(*(f"model.kwargs.{problem}" for problem in problems if problem))
    return model_class


def _problem(spec: ModelSpec, key: str, value: Any, known: Mapping[str, inspect.Parameter]) -> str | None:
    """What is wrong with an argument: the class does not have it, or its type is not that of the default."""
    if key not in known:
        return f"{key}: {spec.class_name} does not take it; {nearest(key, known)}"
    for kind, words in _KINDS.items():
        if type(known[key].default) is not kind:
            continue
        if value is None and re.fullmatch(r"\w+", _annotated(known[key])):
            return f"{key} is null, and {words} was expected"
        if isinstance(value, bool | int | float | str):
            wanted = (int, float) if kind is float else kind
            if not isinstance(value, wanted) or isinstance(value, bool) != (kind is bool):
                return f"{key} is {value!r}, and {words} was expected"
    return None


def _annotated(parameter: inspect.Parameter) -> str:
    """The kind of an argument as its class writes it: `int`, or `int | None`."""
    kind = parameter.annotation
    return kind.__name__ if isinstance(kind, type) else str(kind)


_FILE = "diffusion_pytorch_model.safetensors"


def lacking(folder: Path) -> str | None:
    """What a folder lacks of diffusers' weights; None if nothing."""
    if folder.is_file():
        return not_safetensors(folder)
    if not folder.is_dir():
        return "there is no such folder; fetch it by `hf download`, or name one of diffusers, or a checkpoint"
    if not (folder / "config.json").is_file():
        runs = (folder, folder.parent, folder.parent.parent)  # one of them may be a run's output
        exported = [each for run in runs for each in run.glob("exports/step-*/transformer")]
        newest = sorted(exported, key=lambda each: (len(each.parent.name), each.parent.name), reverse=True)
        within = next((each for each in (folder / "transformer", *newest) if (each / "config.json").is_file()), None)
        return f"it has no config.json{'' if within is None else f'; {within} has'}"
    try:
        found, _ = weight_files(folder, _FILE)
    except (OSError, ValueError):
        return None  # loading it reports that
    if gone := [each.name for each in found if not each.exists()]:
        return f"its index names {how_many(len(found), 'file')}, and {', '.join(gone[:3])} is missing; fetch it again"
    return lfs_pointer(folder) if found else without_weights(folder, _FILE)


def without_weights(folder: Path, *names: str) -> str:
    """That a folder has no weights under these names, and what other weights it has."""
    others = (not_safetensors(each) for each in sorted(folder.iterdir()) if each.suffix.lower() in _NOT_WEIGHTS)
    return "; ".join([f"it has no {' or '.join(names)}", *filter(None, others)])


_NOT_WEIGHTS = {
    ".gguf": "is a GGUF file, whose quantised weights bigdit does not read",
    **dict.fromkeys((".bin", ".ckpt", ".pt", ".pth"), "is a pickle, which may run any code"),
}
_BEGINNINGS = {
    b"GGUF": _NOT_WEIGHTS[".gguf"],
    b"PK": _NOT_WEIGHTS[".pt"],
    b"\x80": _NOT_WEIGHTS[".pt"],
    b"<": "is a page of the web",
}
"""First bytes of other files, which a download or a new name made .safetensors."""


def not_safetensors(file: Path) -> str | None:
    """Why a file is no safetensors file, by its name and first bytes; None if it is one."""
    if not file.is_file():
        return "it is missing" if not file.exists() else "it is no file"
    if what := _NOT_WEIGHTS.get(file.suffix.lower()):
        return f"{file.name} {what}; take the .safetensors of it"
    if file.suffix.lower() == ".json":
        return f"{file.name} names the files of weights; name its folder {file.parent}"
    if problem := lfs_pointer(file):
        return problem
    try:
        check_regular(file)
        with safe_open(file, "pt"):
            return None
    except (SafetensorError, OSError) as error:
        with suppress(OSError), open(file, "rb") as opened:
            first = opened.read(4)
            if what := next((what for start, what in _BEGINNINGS.items() if first.startswith(start)), None):
                return f"{file.name} {what}; take the .safetensors of it"
        return f"{file.name} is no safetensors file, or is cut off ({error}); fetch it again"


def _fill(model: nn.Module, folder: Path, *, dtype: torch.dtype, read: Read) -> tuple[Collection[str], Collection[str]]:
    """Load the tensors of a folder or a single file into the model, by name, in `dtype`.

    Returns the names of missing tensors and of unexpected ones. Tensors that are in `dtype` already stay mapped:
    processes share the pages of the file until they write to them. Raises OSError, ValueError or RuntimeError if a file
    cannot be read or a tensor has another shape.
    """
    lacking, unexpected = set(model.state_dict()), set()
    if folder.is_file():
        tensors = read_single_file(type(model).__name__, folder, model.state_dict(), dtype=dtype, read=read)
        found = model.load_state_dict(tensors, strict=False, assign=True)
        return found.missing_keys, found.unexpected_keys
    for file in weight_files(folder, _FILE)[0]:
        check_regular(file)
        if leads_out(folder, file):
            raise OSError(f"{file.name} is a link out of its folder; copy there what it leads to")
        try:
            tensors = read(file)
        except SafetensorError as error:
            raise OSError(f"{file.name}: {error}") from error
        found = model.load_state_dict(dequantised(tensors, dtype), strict=False, assign=True)
        unexpected.update(found.unexpected_keys)
        lacking -= tensors.keys()
    return lacking, unexpected


_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "first_stage_model.", "vae.")
"""Two prefixes for a transformer in a file, two for a VAE; others are of text encoders."""
SCALES = ("scale_weight", "weight_scale")
_UNUSED = (*SCALES, "scale_input", "input_scale", "scaled_fp8", "comfy_quant", "spiece_model")
"""Further tensors that ComfyUI stores for fp8 weights, and a tokenizer."""


_NONE: Mapping[str, Any] = MappingProxyType({})


def read_single_file(
    class_name: str,
    file: Path,
    wanted: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    config: Mapping[str, Any] = _NONE,
    read: Read = load_file,
) -> dict[str, torch.Tensor]:
    """The tensors of a file by diffusers' names, in `dtype`. `wanted`: the model's, by name; `config`: a VAE's.

    Raises UserError if diffusers has no converter, or the file is of another model.
    """
    tensors = dequantised(read(file), dtype)
    prefixes = _PREFIXES[2:] if config else _PREFIXES[:2]
    prefix = next((each for each in prefixes if any(name.startswith(each) for name in tensors)), "")
    tensors = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    wrapped = _wrapped(tensors, wanted)
    if len(wrapped) == 1:
        return {name.removeprefix(wrapped[0]): each for name, each in tensors.items() if name.startswith(wrapped[0])}
    if class_name not in SINGLE_FILE_LOADABLE_CLASSES:
        raise UserError(f"diffusers converts no single file of {class_name}; take its folder in diffusers' format")
    if not config and tensors.keys() < set(wanted):
        return tensors  # in the model's own names; some are missing
    first, convert = next(iter(tensors), "none"), SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"]
    try:
        converted = convert(checkpoint=tensors, config=config)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
        raise UserError(
            f"diffusers finds none of it there, or other sizes than the published ones; its first tensor is {first}; "
            "take a folder in diffusers' format"
        ) from None
    return {name: each for name, each in converted.items() if each is not None}


def _wrapped(tensors: Mapping[str, Any], wanted: Iterable[str]) -> list[str]:
    """The beginnings of names behind which all `wanted` ones are; those that FSDP, torch.compile and averages add."""
    wanted = list(wanted)
    found = {name.removesuffix(wanted[0]) for name in tensors if f".{name}".endswith(f".{wanted[0]}")}
    fitting = [each for each in found if all(f"{each}{name}" in tensors for name in wanted)]
    return [""] if "" in fitting else fitting


def dequantised(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floating-point tensors in `dtype`, those in fp8 times their scales. Raises UserError for other quantisation."""
    found = {}
    for name, tensor in tensors.items():
        parent, _, last = name.rpartition(".")
        if last in _UNUSED:
            continue
        scales = [
            tensors[key] for key in (f"{parent}.{each}" for each in SCALES) if last == "weight" and key in tensors
        ]
        if last == "weight" and not tensor.is_floating_point():
            raise UserError(
                f"{name} is quantised in {str(tensor.dtype).removeprefix('torch.')}; fp8, 16 and 32 bits are read"
            )
        if scales:
            scale = scales[0].float()
            tensor = tensor.float() * (scale.view(-1, *[1] * (tensor.ndim - 1)) if scale.numel() > 1 else scale)
        found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return found
