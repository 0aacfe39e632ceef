"""Observe a tiny model: views that are written to, rows of linear layers, and FLOPs."""

import re

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


def written_views(family, model, predict):
    """Classes of FSDP2's units whose output is a view that is changed later, in a forward and a backward pass."""
    returned = []

    def note(module, _, output):
        views = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each._is_view()]
        returned.extend((type(module).__name__, each, each._version) for each in views)

    units = [*family.shared(model), *family.blocks(model), model]
    hooks = [unit.register_forward_hook(note) for unit in units]
    try:
        loss = predict().square().mean()
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, each, version in returned if each._version != version]


def rows_of_linears(family, model, predict):
    """By name of each linear layer in a block, without a router's: the rows of its inputs."""
    rows = {}
    named = [
        (name, layer)
        for block in family.blocks(model)
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and not re.search(r"\bexperts\b", name)
    ]

    def note(name):
        return lambda layer, inputs: rows.setdefault(name, set()).add(inputs[0][..., 0].numel())

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in named]
    try:
        predict()
    finally:
        for hook in hooks:
            hook.remove()
    return rows


def counted_flops(predict):
    """FLOPs of the calls by torch's counter, which does not know the CPU's fused attention."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predict()
    return counter.get_total_flops()
