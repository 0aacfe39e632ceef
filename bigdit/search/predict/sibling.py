"""Shallow siblings of a model: the same blocks, fewer of them. A block costs the same at any depth."""

from __future__ import annotations

from collections.abc import Mapping

from bigdit.catalog import FAMILIES, CatalogModel


def depths(model: CatalogModel) -> dict[str, int]:
    """The lists of like blocks that a sibling may have fewer of, with their lengths, in the order of the forward
    pass."""
    lists = FAMILIES[model.spec.class_name].depths
    return {name: length for name, length in model.block_lists if name in lists}


def possible(model: CatalogModel, blocks: int) -> int:
    """So many blocks of a list, or one more where the model's class takes an even number of them alone."""
    return blocks + blocks % 2 if FAMILIES[model.spec.class_name].even else blocks


def block_count(model: CatalogModel) -> int:
    """All blocks that can be checkpointed."""
    return sum(length for _, length in model.block_lists)


def sibling(model: CatalogModel, lengths: Mapping[str, int]) -> CatalogModel:
    """`model` with its lists of blocks at these lengths; what goes with single blocks goes with them."""
    arguments = FAMILIES[model.spec.class_name].depths
    kwargs = model.spec.kwargs | {arguments[name]: length for name, length in lengths.items()}
    if "dual_attention_layers" in kwargs:  # of SD3.5: the blocks with a second attention
        kept = lengths["transformer_blocks"]
        kwargs["dual_attention_layers"] = [at for at in kwargs["dual_attention_layers"] if at < kept]
    if "llama_layers" in kwargs:  # of HiDream: the layer of Llama that each block reads
        kwargs["llama_layers"] = kwargs["llama_layers"][: sum(lengths.values())]
    spec = model.spec.model_copy(update={"kwargs": kwargs})
    block_lists = tuple((name, lengths.get(name, length)) for name, length in model.block_lists)
    return model.model_copy(update={"spec": spec, "params": None, "block_lists": block_lists})
