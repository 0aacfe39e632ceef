"""Online features: the encoders of a run on the device that trains, and its images instead of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bigdit.catalog.conditions import class_count, takes_classes
from bigdit.config import RunConfig
from bigdit.config.plan_file import PlanFile
from bigdit.encoders.fit import plan_misfits, size_misfits, unfit_model
from bigdit.encoders.load import load_image_codec, load_text_encoder
from bigdit.encoders.protocol import EncodedBatch, TextEncoder, shapes_of, to_unit_range
from bigdit.errors import UserError
from bigdit.loader.batch import Captions
from bigdit.loader.buffers import padded
from bigdit.loader.raw_store import RawStore
from bigdit.sources.open import SourceList, open_source
from bigdit.store.schema import StoreSchema
from bigdit.store.text import Cut, Text, summed
from bigdit.strategy import ModelSpec
from bigdit.units import gib

_ROUNDED = 1.01
"""A plan's bytes are those of the GPU's allocator, which rounds."""


class RunEncoders:
    """The encoders of `bigdit extract`, for at most `chunk` samples at once. On a CPU features are the same to the
    bit."""

    def __init__(self, run: RunConfig, device: torch.device, chunk: int, source: SourceList) -> None:
        """Raises UserError if the encoders cannot be loaded."""
        config, self._device, self._source = run.encoders, device, source
        self.captions, self.cuts = 0, list[Cut]()
        self.image = load_image_codec(config.image, device, chunk)
        # One by one on a CPU, as in extraction: matrix products of other shapes round differently.
        captions = 1 if device.type == "cpu" else chunk
        self.text = None if config.text is None else load_text_encoder(config.text, device, captions)
        # In CPU memory, as a store's: it replaces a dropped caption, and is copied to the device then.
        self._null = None if self.text is None else self.text.null().to("cpu", torch.bfloat16)

    def tensors(self) -> list[torch.Tensor]:
        """All weights and buffers."""
        modules = [*self.image.modules(), *(self.text.modules() if self.text else ())]
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor, captions: Captions, indices: Sequence[int]) -> EncodedBatch:
        """Encode pixels [B, 1 or 3, (F,) H, W] uint8, and captions if the model has text; rounded as in a store."""
        latents = self.image.encode(to_unit_range(pixels), indices).to(self.image.stored_dtype).float()
        if self.text is None or self._null is None:
            return EncodedBatch(latents, None, None, {})
        encoded = iter(self._counted(captions, indices, self.text))
        texts = [
            (self._null if caption is None else next(encoded)).to(self._device, torch.bfloat16) for caption in captions
        ]
        most = {name: tokens for name, (tokens, _) in shapes_of(self.text).items()}
        return EncodedBatch(latents, *padded(texts, most))

    def _counted(self, captions: Captions, indices: Sequence[int], encoder: TextEncoder) -> list[Text]:
        """The texts of captions that are not dropped. `captions` and `cuts` count them and their cuts."""
        kept = [(index, caption) for index, caption in zip(indices, captions, strict=True) if caption is not None]
        texts = encoder.encode([caption for _, caption in kept])
        self.captions += len(texts)
        for (index, _), text in zip(kept, texts, strict=True):
            if text.cuts:
                (item,) = self._source.items(index, index + 1)
                self.cuts = summed([*self.cuts, *(replace(cut, samples=[item.name]) for cut in text.cuts)])
        return texts


def more_than_planned(plan: PlanFile, encoders: RunEncoders) -> list[str]:
    """A note if the encoders take more memory than planned."""
    planned = max((phase.at_peak.get("encoder", 0) for phase in plan.ledger.phases), default=0)
    found = sum(tensor.nbytes for tensor in encoders.tensors())
    if found <= planned * _ROUNDED:
        return []
    return [
        f"the encoders take {gib(found)}, and the plan has {gib(planned)} for them; compare encoders.image.dtype and "
        "encoders.text.dtype with the plan"
    ]


def open_online(
    run: RunConfig, spec: ModelSpec, plan: PlanFile | None, device: torch.device, chunk: int
) -> tuple[RawStore, RunEncoders]:
    """The run's images, and its encoders on the device.

    Raises UserError if encoders cannot be loaded, or their features do not fit the model or the plan.
    """
    source = open_source(run.data)
    classes = (source.class_names or class_count(spec)) if takes_classes(spec) else None
    encoders = RunEncoders(run, device, chunk, source)
    image, text = encoders.image, encoders.text
    (bucket,) = run.data.all_buckets
    shape, tokens = image.latent_shape(bucket), 0 if text is None else text.max_tokens
    problems = unfit_model(spec, image, text, classes)
    problems += [f"data.buckets gives {each}" for each in size_misfits(spec, [shape])]
    if plan is not None:
        problems += [f"strategy.features is online: {each}" for each in plan_misfits(plan, [shape], tokens)]
    if problems:
        raise UserError(*problems)
    schema = StoreSchema(
        codec={},
        text_encoder={},
        buckets=[bucket],
        sources=source.identity["sources"],
        part_size=run.data.part_size,
        classes=classes,
        fps=run.data.fps,
    )
    text_shape = None if text is None else (tokens, text.dim)
    return RawStore(source, schema, shape, image.color, image.stored_dtype, text_shape), encoders
