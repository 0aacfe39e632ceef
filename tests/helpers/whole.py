"""The training state that an engine's processes hold together."""

import torch
import torch.distributed as dist

from bigdit.engines.state import state_slices


def whole_state(engine, ema=None):
    """{name: fp32 tensor in one dimension} in CPU memory, of masters, EMA and optimizer state. All processes call
    it."""
    here = {
        name: (place.numel, place.offset, place.tensor.to("cpu", torch.float32, copy=True))
        for name, place in state_slices(engine, ema, 0).items()
        if name.startswith(("master.", "ema", "state."))
    }
    everywhere = [here]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, here)
    found = {}
    for shares in everywhere:
        for name, (numel, offset, share) in shares.items():
            found.setdefault(name, torch.full((numel,), torch.nan))[offset : offset + len(share)] = share
    return dict(sorted(found.items()))


def full_weights(engine, ema=None):
    """The whole weights, or their EMA, by parameter."""
    kind = "master." if ema is None else "ema."
    state = whole_state(engine, ema)
    return {name.removeprefix(kind): tensor for name, tensor in state.items() if name.startswith(kind)}
