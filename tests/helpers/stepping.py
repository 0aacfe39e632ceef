"""Single-process engines over tiny models, a batch to step on, and a count of operators."""

from collections import Counter

import torch
from tiny_models import SANA, SHAPE
from torch.utils._python_dispatch import TorchDispatchMode

from bigdit import engines, models
from bigdit.loader.batch import Batch


def started(strategy, spec=SANA, seed=0):
    """An engine over fresh weights, and its family."""
    family = models.family(spec.class_name)
    model = models.build(spec, device="cpu", dtype=engines.compute_dtype(strategy), seed=seed)
    return engines.create(strategy, model, family, device=torch.device("cpu")), family


def equipped(strategy, spec=SANA, seed=0):
    """A family and its model, prepared for the strategy. `seed` initialises the adapters."""
    family = models.family(spec.class_name)
    model = models.build(spec, device="cpu", dtype=engines.compute_dtype(strategy), seed=0)
    return family, models.equip(model, family, strategy, seed=seed)


def one_batch(seed=0, *, poisoned=False):
    """Two random samples. With `poisoned`, one latent of the second is NaN."""
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(2, *SHAPE.latents, generator=generator)
    if poisoned:
        latents[1, 0, 0, 0] = torch.nan
    text = torch.randn(2, *SHAPE.text, generator=generator)
    return Batch(latents, text, torch.ones(2, SHAPE.text[0]), (seed + 1, seed + 2))


class Executed(TorchDispatchMode):
    """Count operators that run, without those whose results selective checkpointing kept."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))
