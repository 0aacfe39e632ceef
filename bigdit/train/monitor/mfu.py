"""Model FLOPs utilisation: the FLOPs that a model needs for what it learns from, of those that the card could do.

Source: Chowdhery et al., arXiv:2204.02311, appendix B: what is recomputed does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from bigdit import models
from bigdit.catalog.gpus import named
from bigdit.loader.batch import Batch
from bigdit.loader.stream import Micro
from bigdit.models import Family
from bigdit.spec import ModelSpec, Precision, Strategy

_META = torch.device("meta")


class Mfu:
    """`peak`: the card's FLOPs a second. Each shape of a micro-batch is counted once, on tensors without data."""

    def __init__(self, spec: ModelSpec, family: Family, peak: float, *, frozen: bool) -> None:
        """`frozen`: the model's own weights are (LoRA); what adapters add is not counted."""
        self.peak = peak
        self._family = family
        self._model = models.outline(spec).eval()
        self._passes = 2 if frozen else 3  # gradients of activations take as much as the forward pass; so do weights'
        self._known: dict[tuple[torch.Size, ...], int | None] = {}

    def flops(self, micro_batches: Sequence[Micro]) -> int | None:
        """Of a step over them, forward and backward; None of a model that reads its tensors, and so needs data, and
        where features are online: encoders are no part of the model."""
        counts = [self._forward(batch) if isinstance(batch, Batch) else None for batch in micro_batches]
        known = [count for count in counts if count is not None]
        return self._passes * sum(known) if len(known) == len(counts) else None

    def _forward(self, batch: Batch) -> int | None:
        shapes = tuple(tensor.shape for tensor in batch.tensors())
        if shapes not in self._known:
            self._known[shapes] = self._counted(batch.to(_META, torch.float32))
        return self._known[shapes]

    @torch.no_grad()
    def _counted(self, batch: Batch) -> int | None:
        with FlopCounterMode(display=False) as counter:
            try:
                self._family.predict(self._model, batch.latents, torch.zeros(len(batch.latents), device=_META), batch)
            except NotImplementedError:  # it reads values, such as a mask's lengths: no MFU is shown
                return None
        return counter.get_total_flops()


def mfu_of(spec: ModelSpec, family: Family, strategy: Strategy, device: torch.device, *, emulated: bool) -> Mfu | None:
    """None on a CPU, on a card that the catalogue does not have, and on an emulated one, which computes nothing."""
    if device.type != "cuda" or emulated:
        return None
    card = torch.cuda.get_device_properties(device)
    peak = peak_flops(card.name, card.total_memory, strategy.precision)
    return None if peak is None else Mfu(spec, family, peak, frozen=strategy.lora is not None)


def peak_flops(card: str, nbytes: int, precision: Precision) -> float | None:
    """FLOPs a second of the card that drivers call `card`, of `nbytes` as torch is told, in the catalogue; None: it is
    not there."""
    cards = named(card)
    if not cards:
        return None
    rates = min(cards, key=lambda each: abs(each.usable_bytes - nbytes)).tflops
    dtype = {"bf16": "bfloat16", "bf16_sr": "bfloat16", "fp16": "float16"}.get(precision, "float32")
    return rates.of(dtype, tf32=precision == "tf32")
