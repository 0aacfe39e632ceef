"""Whether a model takes what a run's encoders give."""

from __future__ import annotations

from bigdit.catalog import FAMILIES
from bigdit.spec import ModelSpec


def latent_misfits(model: ModelSpec, channels: int) -> list[str]:
    """What keeps the model from latents of so many channels; arguments left at the class's defaults are not judged."""
    packs = model.class_name in FAMILIES and FAMILIES[model.class_name].packs
    given, how = (4 * channels, " in patches of 2 × 2") if packs else (channels, "")
    taken = model.kwargs.get("in_channels")
    return [] if taken in (None, given) else [f"{given} channels{how}, and the model's in_channels is {taken}"]


def text_misfits(model: ModelSpec, dim: int, pooled_dim: int | None) -> list[str]:
    """What keeps the model from hidden states of `dim` and a pooled vector of `pooled_dim`, None without."""
    family = FAMILIES.get(model.class_name)
    if family is None:
        return []
    problems = []
    width = model.kwargs.get(family.text_dim or "")
    if isinstance(width, int) and width != dim and family.text_layers is None:
        problems.append(f"{dim} features, and the model's {family.text_dim} is {width}")
    if "pooled_text" in family.extras:
        vector = model.kwargs.get("pooled_projection_dim")
        if pooled_dim is None:
            problems.append(f"no pooled vector, and {model.class_name} is fed one")
        elif vector not in (None, pooled_dim):
            problems.append(f"{pooled_dim} pooled features, and the model's pooled_projection_dim is {vector}")
    return problems
