"""Pictures from captions or classes by a trained checkpoint, with classifier-free guidance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bigdit import log, models, objectives
from bigdit.catalog.classes import CLASS_LABEL, no_class
from bigdit.catalog.encoders import POOLED_TEXT
from bigdit.catalog.families import objective_of
from bigdit.checkpoint import Checkpoint, load_model, load_weights, verify
from bigdit.config import RunConfig
from bigdit.config.load import parse_run
from bigdit.config.run import TextEncoderConfig
from bigdit.encoders.codecs import load_image_codec, to_bytes
from bigdit.encoders.load import load_text_encoder
from bigdit.errors import UserError
from bigdit.loader.stream import pad_text
from bigdit.objective_spec import SamplerName
from bigdit.shortage import ran_out, room, told
from bigdit.spec import ModelSpec, Strategy
from bigdit.store.classes import Classes, Known
from bigdit.store.part import Shape
from bigdit.units import gib

_LESS = "a smaller --size or fewer captions take less"


@dataclass(frozen=True)
class SamplingOptions:
    """`height` and `width` in pixels; `guidance` 1 is none (Ho & Salimans, arXiv:2207.12598).

    `negative`: what guidance leads away from; left out, the empty caption, or no class. `sampler`: left out, the
    objective's own. `micro_batch_size`: pictures at once, where memory does for as many.
    """

    height: int
    width: int
    steps: int = 20
    guidance: float = 3.0
    negative: str | None = None
    sampler: SamplerName | None = None
    seed: int = 0
    micro_batch_size: int = 50

    @property
    def guided(self) -> bool:
        """Whether it leads away from anything."""
        return self.guidance != 1


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
        self._conditions = _conditions(checkpoint, run, spec, device)
        self._objective = objective_of(spec, run.objective)
        self.buckets = run.data.buckets

    @torch.no_grad()
    def sample(self, captions: Sequence[str], options: SamplingOptions) -> Iterator[torch.Tensor]:
        """One picture a caption, or a class by its name or number: uint8 [channels, height, width]. Picture i depends
        on caption i and seed + i.

        A batch for which memory does not do is halved. Raises UserError where it does not do for one picture,
        and for a class that is unknown.
        """
        size = f"--size {options.height}x{options.width}"
        side = self._codec.downsample
        if options.height % side or options.width % side:
            raise UserError(f"{size} does not divide by the codec's {side}")
        shape = self._codec.latent_shape((options.height, options.width))
        start, most = 0, options.micro_batch_size
        while start < len(captions):
            chosen = captions[start : start + most]
            pictures = self._attempt(chosen, shape, start, options)
            if pictures is None:
                most = len(chosen) // 2
                log.notice(f"note: {size}: memory does not do for {len(chosen)} at once; going on with {most}")
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # what the larger batch left in pieces
                continue
            yield from pictures
            start += len(chosen)

    def _attempt(
        self, captions: Sequence[str], shape: Shape, start: int, options: SamplingOptions
    ) -> torch.Tensor | None:
        """Their pictures; None where memory does not do for so many: the error, which holds what was allocated, ends
        here. Raises UserError where it does not do for one."""
        least, (free, total) = len(captions) * _least_bytes(shape, options.guidance), room(self._device)
        if len(captions) > 1:
            try:
                return self._draw(captions, shape, start, options) if least <= free else None
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                return None
        drawing = f"--size {options.height}x{options.width}: drawing 1 at once"
        if least > free:
            raise UserError(f"{drawing} takes {gib(least)} at least, and {gib(free)} of {gib(total)} are free; {_LESS}")
        with told(drawing, self._device, _LESS):
            return self._draw(captions, shape, start, options)

    def _draw(self, captions: Sequence[str], shape: Shape, start: int, options: SamplingOptions) -> torch.Tensor:
        seeds = [options.seed + start + i for i in range(len(captions))]
        noise = objectives.draw_noise(torch.empty((len(captions), *shape), device=self._device), seeds)
        sampler = options.sampler or objectives.default_sampler(self._objective)
        tokens = self._family.tokens(self._model, noise.shape)
        predict = self._predict(captions, options)
        latents = objectives.sample(self._objective, sampler, predict, noise, options.steps, tokens)
        return to_bytes(self._codec.decode(latents)).cpu()

    def _predict(self, captions: Sequence[str], options: SamplingOptions) -> objectives.Predict:
        """The prediction for the captions; with guidance, pushed away from that for the negative or empty caption."""
        conditions = self._conditions.of(captions, options)

        def conditioned(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self._family.predict(self._model, latents, t, conditions)

        def pushed(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            conditional, unconditional = conditioned(torch.cat([latents, latents]), t.repeat(2)).chunk(2)
            return unconditional + options.guidance * (conditional - unconditional)

        return pushed if options.guided else conditioned


@dataclass(frozen=True)
class _Given:
    """What a batch is conditioned on; with guidance, followed by what it is led away from."""

    text_embeds: torch.Tensor | None
    text_mask: torch.Tensor | None
    extras: Mapping[str, torch.Tensor]


class _Texts:
    """Conditions of captions, by the run's text encoder."""

    def __init__(self, config: TextEncoderConfig, device: torch.device) -> None:
        self._encoder, self._device = load_text_encoder(config, device), device
        self._null = self._encoder.null()

    def of(self, captions: Sequence[str], options: SamplingOptions) -> _Given:
        """Those of captions."""
        texts = list(self._encoder.encode(captions))
        if options.guided:
            away = self._null if options.negative is None else self._encoder.encode([options.negative])[0]
            texts += [away] * len(captions)
        texts = [text.to(self._device, torch.float32) for text in texts]
        text_embeds, text_mask = pad_text([text.states for text in texts], self._encoder.max_tokens)
        pooled = [text.pooled for text in texts if text.pooled is not None]
        return _Given(text_embeds, text_mask, {POOLED_TEXT: torch.stack(pooled)} if pooled else {})


class _Labels:
    """Conditions of classes, which a checkpoint knows by their names or their number."""

    def __init__(self, known: Known, spec: ModelSpec, device: torch.device) -> None:
        self._classes, self._no_class, self._device = Classes(known), no_class(spec), device

    def of(self, labels: Sequence[str], options: SamplingOptions) -> _Given:
        """Those of classes by their names or numbers. Raises UserError for one that is unknown."""
        numbers = [self._number("--label", label) for label in labels]
        if options.guided:
            away = self._no_class if options.negative is None else self._number("--negative", options.negative)
            if away is None:
                raise UserError("guidance leads away from no class, which this model does not know; pass --guidance 1")
            numbers += [away] * len(labels)
        return _Given(None, None, {CLASS_LABEL: torch.tensor(numbers, device=self._device)})

    def _number(self, option: str, label: str) -> int:
        try:
            return self._classes.number(label)
        except UserError as error:
            raise UserError(f"{option}: {error}") from None


def _conditions(checkpoint: Checkpoint, run: RunConfig, spec: ModelSpec, device: torch.device) -> _Texts | _Labels:
    if run.encoders.text is not None:
        return _Texts(run.encoders.text, device)
    return _Labels(checkpoint.state["data"]["classes"], spec, device)


def _least_bytes(shape: Shape, guidance: float) -> int:
    """What a picture takes at the least, in fp32: latents, noise and what the model predicts; with guidance twice what
    the model is fed and predicts, beside noise. A host's memory is not refused, but ends."""
    return (3 if guidance == 1 else 5) * 4 * math.prod(shape)


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
