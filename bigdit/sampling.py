"""Pictures from captions by a trained checkpoint, with classifier-free guidance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bigdit import models, objectives
from bigdit.catalog.encoders import POOLED_TEXT
from bigdit.catalog.families import objective_of
from bigdit.checkpoint import Checkpoint, load_model, load_weights, verify
from bigdit.config import RunConfig
from bigdit.config.load import parse_run
from bigdit.encoders.codecs import load_image_codec, to_bytes
from bigdit.encoders.load import load_text_encoder
from bigdit.errors import UserError
from bigdit.loader.batch import Batch
from bigdit.loader.stream import pad_text
from bigdit.objective_spec import SamplerName
from bigdit.shortage import room, told
from bigdit.spec import ModelSpec, Strategy
from bigdit.store.part import Shape
from bigdit.units import gib

_LESS = "a smaller --size or fewer captions take less"


@dataclass(frozen=True)
class SamplingOptions:
    """`height` and `width` in pixels; `guidance` 1 is none (Ho & Salimans, arXiv:2207.12598).

    `sampler`: left out, the objective's default.
    """

    height: int
    width: int
    steps: int = 20
    guidance: float = 3.0
    sampler: SamplerName | None = None
    seed: int = 0
    micro_batch_size: int = 50


class Sampler:
    """The model of a checkpoint, in fp32, with the encoders it was trained on."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, *, ema: bool = False) -> None:
        """Load everything; with `ema` the moving average of the weights.

        Raises UserError where weights or encoders cannot be loaded, or no average was kept.
        """
        run = parse_run(checkpoint.state["run"], str(checkpoint.folder))
        spec = ModelSpec.model_validate(checkpoint.state["model"])
        self._device = device
        self._family = models.family(spec.class_name)
        self._model = _load(checkpoint, run, spec, self._family, ema=ema).to(device).eval()
        self._codec = load_image_codec(run.encoders.image, device)
        self._text = load_text_encoder(run.encoders.text, device)
        self._null = self._text.null()
        self._objective = objective_of(spec, run.objective)
        self.buckets = run.data.buckets

    @torch.no_grad()
    def sample(self, captions: Sequence[str], options: SamplingOptions) -> Iterator[torch.Tensor]:
        """One picture a caption: uint8 [channels, height, width]. Picture i depends on caption i and seed + i.

        Raises UserError where memory runs out.
        """
        size = f"--size {options.height}x{options.width}"
        side = self._codec.downsample
        if options.height % side or options.width % side:
            raise UserError(f"{size} does not divide by the codec's {side}")
        shape = self._codec.latent_shape((options.height, options.width))
        for start in range(0, len(captions), options.micro_batch_size):
            chosen = captions[start : start + options.micro_batch_size]
            drawing = f"{size}: drawing {len(chosen)} at once"
            _check_room(drawing, len(chosen) * math.prod(shape), self._device)
            with told(drawing, self._device, _LESS):
                pictures = self._draw(chosen, shape, start, options)
            yield from pictures

    def _draw(self, captions: Sequence[str], shape: Shape, start: int, options: SamplingOptions) -> torch.Tensor:
        seeds = [options.seed + start + i for i in range(len(captions))]
        noise = objectives.draw_noise(torch.empty((len(captions), *shape), device=self._device), seeds)
        sampler = options.sampler or objectives.default_sampler(self._objective)
        tokens = self._family.tokens(self._model, noise.shape)
        predict = self._guided(captions, options.guidance)
        latents = objectives.sample(self._objective, sampler, predict, noise, options.steps, tokens)
        return to_bytes(self._codec.decode(latents)).cpu()

    def _guided(self, captions: Sequence[str], guidance: float) -> objectives.Predict:
        """The prediction for the captions, pushed away from that for the empty caption."""
        texts = [*self._text.encode(captions), *[self._null] * len(captions)]
        texts = [text.to(self._device, torch.float32) for text in texts]
        text_embeds, text_mask = pad_text([text.states for text in texts], self._text.max_tokens)
        pooled = [text.pooled for text in texts if text.pooled is not None]
        extras = {POOLED_TEXT: torch.stack(pooled)} if pooled else {}

        def predict(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            doubled = Batch(torch.cat([latents, latents]), text_embeds, text_mask, seeds=(), extras=extras)
            both = self._family.predict(self._model, doubled.latents, t.repeat(2), doubled)
            conditional, unconditional = both.chunk(2)
            return unconditional + guidance * (conditional - unconditional)

        return predict


def _check_room(drawing: str, elems: int, device: torch.device) -> None:
    """Raise UserError where there is no room for latents of `elems` in fp32 and what stands beside them: noise, and
    twice over, for guidance, what the model is fed and what it predicts. A host's memory is not refused, but ends."""
    least, (free, total) = 5 * 4 * elems, room(device)
    if least > free:
        raise UserError(f"{drawing} takes {gib(least)} at least, and {gib(free)} of {gib(total)} are free; {_LESS}")


def _load(
    checkpoint: Checkpoint, run: RunConfig, spec: ModelSpec, family: models.Family, *, ema: bool
) -> torch.nn.Module:
    if ema and not checkpoint.has_average:
        raise UserError(f"--ema: {checkpoint.folder} holds no moving average of the weights; train with train.ema")
    verify(checkpoint)
    lora, base = run.train.lora, run.model.init_from
    if lora is None or base is None:
        model = models.skeleton(spec, dtype=torch.float32)
    else:
        # The adapters stand over the base as it was loaded, whatever it was quantised to in training.
        whole = Strategy(lora=lora.model_copy(update={"base": "bf16"}))
        model = models.equip(load_model(spec, base, dtype=torch.float32), family, whole)
    load_weights(checkpoint, model, average=ema)
    return model
