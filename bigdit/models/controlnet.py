"""A ControlNet beside a frozen transformer: diffusers' class, which starts as the transformer's first blocks.

Source: Zhang et al., arXiv:2302.05543; diffusers' ControlNets of transformers, their `from_transformer`, and its
scripts train_controlnet_flux.py, train_controlnet_sd3.py and train_controlnet_sana.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from torch import nn

from bigdit.catalog.conditions import CONTROLNET
from bigdit.catalog.families import FAMILIES
from bigdit.errors import UserError
from bigdit.models.build import outline
from bigdit.models.families import family as family_of
from bigdit.models.family import CONTROL_IMAGE, Family, arguments
from bigdit.strategy import ControlNetSpec, ModelSpec

_ZEROS = ("controlnet_", "pos_embed_input.", "input_block.")
"""What of a ControlNet starts as zeros."""
_OTHER = {"controlnet_block_samples": "block_controlnet_hidden_states"}
"""What SD3's transformer calls the residuals."""


def add_controlnet(model: nn.Module, family: Family, spec: ControlNetSpec) -> None:
    """Freeze the model, and add a ControlNet in its dtype, which it runs before itself where it is given an image.

    Raises UserError where the model has no ControlNet, or fewer blocks.
    """
    device = next(model.parameters()).device
    controlnet = _outline(model, family, spec, device)
    theirs, own = model.state_dict(), controlnet.state_dict()
    started = {
        name: theirs[name] if name in theirs else torch.zeros_like(tensor, device=device)
        for name, tensor in own.items()
    }
    for name, tensor in own.items():
        if not (name in theirs or name.startswith(_ZEROS)) or started[name].shape != tensor.shape:
            raise UserError(
                f"strategy.controlnet cannot start as the first blocks of this {family.CLASS_NAME}, which has no such "
                f"{name}; set fewer layers than it has, or take another model"
            )
    controlnet.load_state_dict(started, assign=True)
    nn.Module._apply(controlnet, torch.clone)  # copies, which are not written where an emulated GPU needs none
    model.requires_grad_(False)
    setattr(model, CONTROLNET, controlnet.requires_grad_(True))
    taken = inspect.signature(controlnet.forward).parameters.keys(), inspect.signature(model.forward).parameters.keys()
    model.forward = functools.partial(_controlled, model.forward, controlnet, *taken)  # an engine's hooks surround it


def controlnet(model: ModelSpec, spec: ControlNetSpec) -> nn.Module:
    """The ControlNet of a model in CPU memory and fp32, with its buffers, and parameters on the meta device."""
    return _outline(outline(model), family_of(model.class_name), spec, torch.device("cpu"))


def _outline(model: nn.Module, family: Family, spec: ControlNetSpec, device: torch.device) -> nn.Module:
    """The ControlNet of the model in its dtype, with its buffers on `device`, and parameters on the meta device."""
    inputs = FAMILIES[family.CLASS_NAME]
    if inputs.controlnet is None:
        raise UserError(f"strategy.controlnet: diffusers has no ControlNet of {family.CLASS_NAME}; leave it out")
    sizes, there = (spec.layers, spec.single_layers), [len(getattr(model, name)) for name in inputs.depths]
    for size, most in zip(sizes, (*there, 0), strict=False):
        if size > most:
            raise UserError(f"strategy.controlnet has {size} blocks of a kind of which the model has {most}; set fewer")
    made_by = getattr(diffusers, inputs.controlnet)
    layers = dict(zip(inputs.depths.values(), sizes, strict=False))
    # Its pipeline then shifts the image's latents as all latents, and feeds it the pooled text (SD3).
    made = {**arguments(model), **layers, "force_zeros_for_pooled_projection": False}
    with torch.device(device), init_empty_weights(include_buffers=False):
        known = inspect.signature(made_by).parameters
        controlnet: nn.Module = made_by(**{key: each for key, each in made.items() if key in known})
    return nn.Module.to(controlnet, next(model.parameters()).dtype).train()


def _controlled(
    forward: Callable[..., Any], controlnet: nn.Module, taken: Any, known: Any, *args: Any, **given: Any
) -> Any:
    """The transformer's own `forward`, with what the ControlNet adds to its blocks where there is an image."""
    if CONTROL_IMAGE not in given:
        return forward(*args, **given)
    found = controlnet(**{name: each for name, each in given.items() if name in taken} | {"return_dict": True})
    residuals = {name if name in known else _OTHER[name]: each for name, each in found.items()}
    return forward(*args, **{name: each for name, each in given.items() if name != CONTROL_IMAGE}, **residuals)
