"""Generates images or videos from captions or classes, with classifier-free guidance.

The encoders, the model and the decoder use the device in turn, because together they may not fit. If memory suffices,
the decoder runs after each batch, next to the model, so that images come early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import nn

from bigdit import log, models, objectives
from bigdit.catalog.families import class_count, objective_of, takes_classes
from bigdit.checkpoint import Checkpoint, PostHoc, load_model, load_weights, verify
from bigdit.config.data import fitting_bucket
from bigdit.config.load import parse_run
from bigdit.config.run import RunConfig
from bigdit.encoders.fit import size_misfits
from bigdit.encoders.load import load_image_codec
from bigdit.encoders.protocol import to_bytes
from bigdit.engines import compute_dtype
from bigdit.errors import UserError
from bigdit.models.swap import moved
from bigdit.objective_spec import partial
from bigdit.sampling.conditions import (
    ConditionOptions,
    EncodedConditions,
    Given,
    Labels,
    SamplingOptions,
    encoded,
    give_back,
)
from bigdit.shortage import memory_errors, ran_out, room
from bigdit.store.part import Shape
from bigdit.strategy import ModelSpec, Strategy
from bigdit.units import gib, how_many, how_many_of

Shown = Callable[[str, Iterator[torch.Tensor], int], Iterator[torch.Tensor]]
"""Passes results on one by one, to show progress: (the name of the work, results, their number)."""

_CPU = torch.device("cpu")
_LESS = "a smaller --size or fewer captions take less"
_MORE = "a device with more memory is needed"


@dataclass(frozen=True)
class Base:
    """The model of `spec` that a `run` starts from: model.init_from."""

    run: RunConfig
    spec: ModelSpec


class Sampler:
    """Generates with a checkpoint's model or a run's base model, with the run's dtype and encoders.

    `captions`: whether its conditions are captions, not classes.
    """

    def __init__(
        self, source: Checkpoint | Base, device: torch.device, *, ema: bool = False, posthoc: PostHoc | None = None
    ) -> None:
        """`ema`: use the EMA of a checkpoint's weights; `posthoc`: use this one. Loads only the decoder, in CPU memory.

        Raises UserError if it cannot be loaded, or there is no EMA.
        """
        if isinstance(source, Base):
            run, spec, strategy = source.run, source.spec, source.run.strategy
            self._name = f"model.init_from {run.model.init_from}"
            self._known: Any = (run.data.classes or class_count(spec)) if takes_classes(spec) else None
        else:
            folder, state = source.folder, source.state
            if ema and not source.has_ema:
                raise UserError(f"--ema: {folder} holds no EMA of the weights; train with strategy.ema")
            run, spec = parse_run(state["run"], str(folder)), ModelSpec.model_validate(state["model"])
            strategy = Strategy.model_validate(state["strategy"])
            self._name, self._known = f"--checkpoint {folder}", (state["data"] or {}).get("classes")
        self._source, self._run, self._spec, self._device = source, run, spec, device
        self._strategy, self._ema, self._posthoc = strategy, ema, posthoc
        self._family = models.family(spec.class_name)
        self._dtype = compute_dtype(strategy)
        self._codec = load_image_codec(run.encoders.image, _CPU)
        begins = "begins with" if run.encoders.first_frame is not None else None
        edits = "follows" if strategy.controlnet is not None else "edits"
        self._takes = edits if run.data.references else "paints in" if run.data.fill else begins
        self._counts = run.data.reference_counts or range(1, 2)  # images of a sample
        self._objective = objective_of(spec, run.objective)
        if (why := partial(self._objective)) is not None:
            raise UserError(f"{self._name}: {why}")
        self.buckets, self.fps, self.captions = run.data.buckets, run.data.fps, run.encoders.text is not None

    def model(self) -> nn.Module:
        """Load a checkpoint's model, or the one of model.init_from, whose new adapters change nothing.

        Raises UserError if weights cannot be read, or memory runs out.
        """
        source, strategy, init_from = self._source, self._strategy, self._run.model.init_from
        if isinstance(source, Checkpoint) and self._posthoc is None:  # PostHoc verified all files
            verify(source)
        swapped = strategy.blocks_to_swap if self._device.type == "cuda" else 0  # on a CPU it saves nothing
        strategy = strategy.forward_only.model_copy(update={"blocks_to_swap": swapped})
        with memory_errors(f"{self._name}: loading it", self._device, _MORE):
            if init_from is None or (isinstance(source, Checkpoint) and not self._strategy.frozen):
                model = models.skeleton(self._spec, dtype=self._dtype)
            else:
                model = load_model(self._spec, init_from, dtype=self._dtype)
            model = models.equip(model, self._family, strategy)
            if self._posthoc is not None:
                self._posthoc.load(model)
            elif isinstance(source, Checkpoint):
                load_weights(source, model, ema=self._ema)
            return moved(model, self._device).eval()

    def _adapt_text(self, encoder: Any) -> None:
        """Add the adapters of a run's text encoders, if it trains them."""
        source, strategy = self._source, self._strategy
        if not strategy.trains_text or not isinstance(source, Checkpoint):
            return
        if self._posthoc is None:
            verify(source)
        holder = nn.Module()
        models.adapt_text(holder, encoder.clips(), strategy)
        if self._posthoc is not None:
            self._posthoc.load(holder)
        else:
            load_weights(source, holder, ema=self._ema)
        holder.to(self._device)

    def check(self, options: SamplingOptions, captions: Mapping[str, Sequence[str]], images: int = 0) -> None:
        """Raise UserError for options, captions or classes by option, and a number of `images` that the model cannot
        take. Loads no weights."""
        self._check_images(images, sum(map(len, captions.values())))
        if options.sampler is not None:
            objectives.check_sampler(self._objective, options.sampler)
        self._latents(options)
        if not self.captions:
            labels = [(option, label) for option, each in captions.items() for label in each]
            Labels(self._known, self._spec, labels, options)

    def repeated(self, images: Sequence[Image.Image], count: int) -> list[Image.Image]:
        """The images for `count` samples of each caption; a single set for all captions stays as it is."""
        each = self._counts[-1]
        sets = [images[at : at + each] for at in range(0, len(images), each)]
        return [*images] if len(sets) == 1 else [image for some in sets for _ in range(count) for image in some]

    def sample(
        self,
        captions: Sequence[str],
        options: SamplingOptions,
        images: Sequence[Image.Image] = (),
        shown: Shown = lambda what, found, total: found,
    ) -> Iterator[torch.Tensor]:
        """An image for each caption, or class by its name or number: uint8 [channels, (frames,) height, width].

        Image i depends on caption i and seed + i; for image-to-video and edit models also on image i, or one set for
        all. An image comes after its batch, or after all batches if the decoder does not fit next to the model. `shown`
        passes on what is generated, and what is decoded at the end. Raises UserError as `generate` and `decode`.
        """
        waiting: list[torch.Tensor] = []
        for latents in shown("generate", self.generate(captions, options, images), len(captions)):
            pixels = None if waiting else self._decode_early(latents, options)
            if pixels is None:
                waiting.append(latents)
            else:
                yield pixels
        if waiting:
            yield from shown("decode", self.decode(waiting, options), len(waiting))

    @torch.no_grad()
    def generate(
        self, captions: Sequence[str], options: SamplingOptions, images: Sequence[Image.Image] = ()
    ) -> Iterator[torch.Tensor]:
        """The latents [C, (f,) h, w] of each image, in CPU memory; the model is freed after the last one.

        A batch that does not fit is halved. Raises UserError if an encoder, the model or a single image does not fit,
        for an unknown class, and for a wrong number of images.
        """
        self.check(options, {ConditionOptions().label: captions}, len(images))
        shape = self._latents(options)
        with memory_errors(f"{self._name}: encoding captions", self._device, _MORE):
            fed = self._run, self._spec, self._known, captions, images
            given = encoded(*fed, options, self._codec, self._device, ConditionOptions(), self._adapt_text)
        model = self.model()
        start, most = 0, options.micro_batch_size
        while start < len(captions):
            self._codec.move(_CPU)
            numbers = range(start, min(start + most, len(captions)))
            latents = self._attempt(model, given, numbers, shape, options)
            if latents is None:
                most = len(numbers) // 2
                log.notice(
                    f"note: {options.size}: memory does not suffice for {len(numbers)} at once; continuing with {most}"
                )
                give_back(self._device)  # the larger batch left fragmented memory
                continue
            yield from latents.cpu()
            start += len(numbers)

    @torch.no_grad()
    def decode(self, latents: Iterable[torch.Tensor], options: SamplingOptions) -> Iterator[torch.Tensor]:
        """Decode images one at a time, since each takes much more memory than its latents. Raises UserError if one does
        not fit."""
        give_back(self._device)
        self._codec.move(self._device)
        for each in latents:
            with memory_errors(f"{options.size}: decoding it", self._device, "a smaller --size takes less"):
                pixels = self._pixels(each)
            yield pixels

    @torch.no_grad()
    def _decode_early(self, latents: torch.Tensor, options: SamplingOptions) -> torch.Tensor | None:
        """The image of these latents, decoded next to the model; None, with a note, if memory does not suffice."""
        try:
            self._codec.move(self._device)
            return self._pixels(latents)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
        self._codec.move(_CPU)
        give_back(self._device)
        log.notice(f"note: {options.size}: no room to decode next to the model; images come when all are generated")
        return None

    def _pixels(self, latents: torch.Tensor) -> torch.Tensor:
        return to_bytes(self._codec.decode(latents[None].to(self._device)))[0].cpu()

    def _latents(self, options: SamplingOptions) -> Shape:
        """The shape of an image's latents. Raises UserError if the codec or the model does not support the size."""
        size, side = options.size, self._codec.downsample
        if options.height % side or options.width % side:
            nearest = "x".join(map(str, fitting_bucket(options.bucket, side)))
            raise UserError(f"{size} does not divide by the codec's {side}; nearest: {nearest}")
        step = self._codec.temporal_downsample
        if options.frames is not None and (options.frames - 1) % step:
            raise UserError(f"{size} has {options.frames} frames, and the codec takes one and then multiples of {step}")
        if options.frames is not None and self.fps is None:
            raise UserError(f"{size} has frames, and the run was trained on images; give HEIGHTxWIDTH")
        shape = self._codec.latent_shape(options.bucket)
        if misfits := size_misfits(self._spec, [shape]):
            raise UserError(f"{size} gives {misfits[0]}")
        return shape

    def _check_images(self, images: int, captions: int) -> None:
        if self._takes is None and images:
            raise UserError("--image: the model neither edits an image nor begins with one; leave it out")
        each = self._counts[-1]
        if self._takes is not None and images not in (*self._counts, each * captions):
            number, what = how_many_of(self._counts, "image"), "one" if each == 1 else str(each)
            raise UserError(
                f"--image: the model {self._takes} {number}: found {how_many(images, 'image')} for "
                f"{how_many(captions, 'caption')}; pass {what} for all, or {what} for each"
            )

    def _attempt(
        self, model: nn.Module, given: EncodedConditions, numbers: range, shape: Shape, options: SamplingOptions
    ) -> torch.Tensor | None:
        """Their latents; None if several do not fit. Raises UserError if one does not fit.

        The error of torch, which holds memory, ends here.
        """
        least, (free, total) = len(numbers) * _least_bytes(shape, options.guidance), room(self._device)
        if len(numbers) > 1:
            try:
                return self._generate(model, given, numbers, shape, options) if least <= free else None
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                return None
        generating = f"{options.size}: generating 1 at once"
        if least > free:
            raise UserError(
                f"{generating} takes {gib(least)} at least, and {gib(free)} of {gib(total)} are free; {_LESS}"
            )
        with memory_errors(generating, self._device, _LESS):
            return self._generate(model, given, numbers, shape, options)

    def _generate(
        self, model: nn.Module, given: EncodedConditions, numbers: range, shape: Shape, options: SamplingOptions
    ) -> torch.Tensor:
        seeds = [options.seed + number for number in numbers]
        noise = objectives.draw_noise(torch.empty((len(seeds), *shape), device=self._device), seeds)
        sampler = options.sampler or objectives.default_sampler(self._objective)
        tokens = self._family.tokens(model, noise.shape)
        predict = self._predict(model, given.of(numbers, self._device, self._dtype), options)
        return objectives.sample(self._objective, sampler, predict, noise, options.steps, tokens)

    def _predict(self, model: nn.Module, given: Given, options: SamplingOptions) -> objectives.Predict:
        """The prediction in fp32, with guidance."""

        def conditioned(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self._family.predict(model, latents.to(self._dtype), t, given).float()

        def pushed(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            conditional, unconditional = conditioned(torch.cat([latents, latents]), t.repeat(2)).chunk(2)
            return unconditional + options.guidance * (conditional - unconditional)

        return pushed if options.guided else conditioned


def _least_bytes(shape: Shape, guidance: float) -> int:
    """The fewest bytes that an image takes: latents, noise and prediction in fp32; with guidance two latents and two
    predictions. On a CPU this must be known before: allocations do not fail there, the kernel kills the process."""
    return (3 if guidance == 1 else 5) * 4 * math.prod(shape)
