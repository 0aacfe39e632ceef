"""Models of videos that begin with a picture: which are trained so, and what a run and a store must have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigdit.catalog.families import FAMILIES, begins_with_an_image
from bigdit.config.run import RunConfig
from bigdit.spec import ModelSpec

IMAGE_CONDITION = "image_condition"
"""Among a batch's extras: a mask, 1 where a latent frame is given, over the latents of the first frame."""
IMAGE_EMBEDS = "image_embeds"
"""Among them: what an image encoder sees in that frame."""
IMAGE_ENCODER = "image_encoder"
"""The part of a pipeline's folder that sees it."""
CLIP_TOKENS = 257
"""CLIP ViT-H/14 on 224 × 224 pixels: 16² patches and the class token."""
TEXT_TOKENS = 512
"""Where a model is fed embeddings of an image its blocks take so many states for text, and those before for the image.
Source: diffusers 0.42.1, WanAttnProcessor."""


def takes_first_frame(model: ModelSpec) -> bool:
    """Whether the model is fed the first frame of its videos, as a store keeps it."""
    return model.class_name in FAMILIES and FAMILIES[model.class_name].first_frame and begins_with_an_image(model)


def fed_more(model: ModelSpec) -> bool:
    """Whether the model's input has more channels than latents have: a first frame's, or zeros in their place."""
    return takes_first_frame(model) or (model.class_name in FAMILIES and FAMILIES[model.class_name].blank)


def first_frame_problems(run: RunConfig, model: ModelSpec) -> list[str]:
    """What keeps the model from the first frame that the run would condition it on."""
    asked, takes = run.encoders.first_frame, takes_first_frame(model)
    if asked is None:
        example = "{pipeline: FOLDER}" if model.kwargs.get("image_dim") is not None else "{}"
        missing = f"{model.name} is fed the first frame, and encoders.first_frame is missing; set it to {example}"
        return [missing] if takes else []
    if not takes:
        return [f"encoders.first_frame is set, and {model.name} is not fed one; leave it out"]
    if (asked.pipeline is None) != (model.kwargs.get("image_dim") is None):
        wants = "no image encoder's" if asked.pipeline else "an image encoder's"
        found = "set" if asked.pipeline else "missing"
        return [f"encoders.first_frame.pipeline is {found}, and {model.name} is fed {wants} embeddings (image_dim)"]
    return []


def first_frame_misfits(
    model: ModelSpec, channels: int, found: Mapping[str, Any] | None, text_tokens: int | None
) -> list[str]:
    """What keeps the model from a first frame as StoreSchema.first_frame describes it, None without; latents have so
    many channels, and a caption so many states."""
    if found is None or not takes_first_frame(model):
        missing = [f"no first frame, which {model.name} is fed"] if takes_first_frame(model) else []
        return missing if found is None else [f"a first frame, which {model.name} is not fed"]
    problems, given = [], found["mask"] + channels
    taken, out = (model.kwargs.get(key) for key in ("in_channels", "out_channels"))
    if isinstance(taken, int) and isinstance(out, int) and taken - out != given:
        problems.append(
            f"{given} channels of the first frame ({found['mask']} of its mask), and the model takes {taken - out} "
            f"(in_channels {taken} − out_channels {out})"
        )
    if (dim := model.kwargs.get("image_dim")) is not None:
        if (found.get("tokens"), found.get("dim")) != (CLIP_TOKENS, dim):
            there = f"{found['tokens']} × {found['dim']}" if "dim" in found else "no"
            problems.append(f"{there} embeddings of the first frame, and the model is fed {CLIP_TOKENS} × {dim}")
        if text_tokens not in (None, TEXT_TOKENS):
            problems.append(f"{text_tokens} states of text, and with an image the model's blocks take {TEXT_TOKENS}")
    return problems
