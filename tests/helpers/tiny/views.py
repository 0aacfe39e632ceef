"""Which outputs of a tiny model's parts are views that were written into after they were returned."""

from torch import Tensor
from torch.utils._pytree import tree_leaves


def written_views(family, model, predict):
    """Of the units that FSDP2 shards, in a forward pass and a loss: the classes whose views were written into."""
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
