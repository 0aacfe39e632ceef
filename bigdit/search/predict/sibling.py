"""Shallow siblings of a model: the same blocks, fewer of them. A block costs the same at any depth."""

from __future__ import annotations

from collections.abc import Mapping

from bigdit.catalog import FAMILIES, CatalogModel

_DUAL = ", dual attention"


def kinds(model: CatalogModel) -> tuple[tuple[str, int], ...]:
    """All blocks that can be checkpointed, in the order of the forward pass: lists of like ones with their lengths. The
    first ones of SD3.5-M have a second attention, and are a list of their own."""
    dual = model.spec.kwargs.get("dual_attention_layers") or []
    first = len(dual) if dual == [*range(len(dual))] else 0
    lists = (((f"{name}{_DUAL}", first), (name, length - first)) for name, length in model.block_lists)
    return tuple((name, length) for both in lists for name, length in both if length)


def depths(model: CatalogModel) -> dict[str, int]:
    """The lists of like blocks that a sibling may have fewer of, with their lengths, in the order of the forward
    pass."""
    lists = FAMILIES[model.spec.class_name].depths
    return {name: length for name, length in kinds(model) if name.removesuffix(_DUAL) in lists}


def possible(model: CatalogModel, blocks: int) -> int:
    """So many blocks of a list, or one more where the model's class takes an even number of them alone."""
    return blocks + blocks % 2 if FAMILIES[model.spec.class_name].even else blocks


def block_count(model: CatalogModel) -> int:
    """All blocks that can be checkpointed."""
    return sum(length for _, length in model.block_lists)


def sibling(model: CatalogModel, lengths: Mapping[str, int]) -> CatalogModel:
    """`model` with its lists of like blocks at these lengths; what goes with single blocks goes with them."""
    arguments = FAMILIES[model.spec.class_name].depths
    wanted = {name: lengths.get(name, length) for name, length in kinds(model)}
    block_lists = tuple((name, wanted.get(name, 0) + wanted.get(f"{name}{_DUAL}", 0)) for name, _ in model.block_lists)
    kwargs = model.spec.kwargs | {arguments[name]: length for name, length in block_lists if name in arguments}
    if kwargs.get("dual_attention_layers"):
        first = [length for name, length in wanted.items() if name.endswith(_DUAL)]
        dual = sum(first or wanted.values())
        kwargs["dual_attention_layers"] = [at for at in kwargs["dual_attention_layers"] if at < dual]
    if "llama_layers" in kwargs:  # of HiDream: the layer of Llama that each block reads
        kwargs["llama_layers"] = kwargs["llama_layers"][: sum(length for _, length in block_lists)]
    spec = model.spec.model_copy(update={"kwargs": kwargs})
    return model.model_copy(update={"spec": spec, "params": None, "block_lists": block_lists})
