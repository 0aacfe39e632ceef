"""Pictures or videos from captions or classes by a trained checkpoint, with classifier-free guidance.

What encodes, draws and decodes has the device in turn, and alone: no card holds all of it that holds each of them.
Where one has room for it, what decodes comes between batches, beside the model: pictures come soon after being drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn

from bigdit import log, models, objectives
from bigdit.catalog.families import objective_of
from bigdit.checkpoint import Checkpoint, PostHoc, load_model, load_weights, verify
from bigdit.config import RunConfig
from bigdit.config.data import fitting_bucket
from bigdit.config.load import parse_run
from bigdit.encoders.fit import size_misfits
from bigdit.encoders.load import load_image_codec
from bigdit.encoders.protocol import to_bytes
from bigdit.engines import compute_dtype
from bigdit.errors import UserError
from bigdit.models.swap import moved
from bigdit.sampling.conditions import Given, Labels, SamplingOptions, Words
from bigdit.sampling.encoded import Encoded, encoded, give_back
from bigdit.shortage import ran_out, room, told
from bigdit.store.part import Shape
from bigdit.strategy import ModelSpec, Strategy
from bigdit.units import gib

Shown = Callable[[str, Iterator[torch.Tensor], int], Iterator[torch.Tensor]]
"""Passes on what is made, one by one, by the name of what makes it and how many there will be."""

_HOST = torch.device("cpu")
_LESS = "a smaller --size or fewer captions take less"
_MORE = "a device with more memory is needed"


class Sampler:
    """Draws with the model of a checkpoint, as its run computed it, and the encoders it was trained on.

    `captions`: whether it is fed captions, and not classes.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, *, ema: bool = False, posthoc: PostHoc | None = None
    ) -> None:
        """With `ema` of the moving average of the weights, with `posthoc` of that one of them. What decodes is loaded,
        on the host, and nothing else yet. Raises UserError where it cannot be, or no average was kept."""
        if ema and not checkpoint.has_average:
            raise UserError(
                f"--ema: {checkpoint.folder} holds no moving average of the weights; train with strategy.ema"
            )
        run = parse_run(checkpoint.state["run"], str(checkpoint.folder))
        spec = ModelSpec.model_validate(checkpoint.state["model"])
        self._checkpoint, self._run, self._spec, self._device = checkpoint, run, spec, device
        self._ema, self._posthoc = ema, posthoc
        self._family = models.family(spec.class_name)
        self._dtype = compute_dtype(Strategy.model_validate(checkpoint.state["strategy"]))
        self._codec = load_image_codec(run.encoders.image, _HOST)
        self._known: Any = (checkpoint.state["data"] or {}).get("classes")
        self._begins = run.encoders.first_frame is not None
        self._objective = objective_of(spec, run.objective)
        self.buckets, self.fps, self.captions = run.data.buckets, run.data.fps, run.encoders.text is not None

    def model(self) -> nn.Module:
        """The model as it draws, loaded anew. Raises UserError where weights cannot be read, or memory does not do."""
        if self._posthoc is None:  # which has verified all that it is made of
            verify(self._checkpoint)
        with told(f"--checkpoint {self._checkpoint.folder}: loading it", self._device, _MORE):
            return model_of(self._checkpoint, self._run, self._spec, self._device, ema=self._ema, posthoc=self._posthoc)

    def check(self, options: SamplingOptions, captions: Mapping[str, Sequence[str]], images: int = 0) -> None:
        """Raise UserError where captions or classes, by what a user called each of them, and so many `images` cannot be
        drawn so: known before weights are loaded."""
        self._check_images(images, sum(map(len, captions.values())))
        if options.sampler is not None:
            objectives.check_sampler(self._objective, options.sampler)
        self._latents(options)
        if self.captions:
            return
        problems: list[str] = []
        for option, each in captions.items():
            try:
                Labels(self._known, self._spec, each, options, Words(option))
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(*dict.fromkeys(problems))

    def sample(
        self,
        captions: Sequence[str],
        options: SamplingOptions,
        images: Sequence[Image.Image] = (),
        shown: Shown = lambda what, found, total: found,
    ) -> Iterator[torch.Tensor]:
        """One picture a caption, or a class by its name or number: uint8 [channels, (frames,) height, width]. Picture i
        depends on caption i and seed + i, and of a model of videos that begin with a picture on image i; one image is
        for all. Each comes when its batch is drawn; where memory does not do for what decodes beside the model, when
        all are. `shown` sees what is drawn, and what is decoded at the end. Raises UserError as `draw` and `decode`."""
        waiting: list[torch.Tensor] = []
        for latents in shown("draw", self.draw(captions, options, images), len(captions)):
            pixels = None if waiting else self._decode_beside(latents, options)
            if pixels is None:
                waiting.append(latents)
            else:
                yield pixels
        if waiting:
            yield from shown("decode", self.decode(waiting, options), len(waiting))

    @torch.no_grad()
    def draw(
        self, captions: Sequence[str], options: SamplingOptions, images: Sequence[Image.Image] = ()
    ) -> Iterator[torch.Tensor]:
        """The latents [C, (f,) h, w] of each picture, on the host; the model is gone when the last one is drawn.

        A batch for which memory does not do is halved. Raises UserError where it does not do for what encodes, for the
        model or for one picture, for a class that is unknown, and where images are missing or too many.
        """
        self.check(options, {Words().label: captions}, len(images))
        shape = self._latents(options)
        with told(f"--checkpoint {self._checkpoint.folder}: encoding captions", self._device, _MORE):
            fed = self._run, self._spec, self._known, captions, images
            given = encoded(*fed, options, self._codec, self._device, Words())
        model = self.model()
        start, most = 0, options.micro_batch_size
        while start < len(captions):
            self._codec.move(_HOST)
            numbers = range(start, min(start + most, len(captions)))
            latents = self._attempt(model, given, numbers, shape, options)
            if latents is None:
                most = len(numbers) // 2
                log.notice(f"note: {options.size}: memory does not do for {len(numbers)} at once; going on with {most}")
                give_back(self._device)  # what the larger batch left in pieces
                continue
            yield from latents.cpu()
            start += len(numbers)

    @torch.no_grad()
    def decode(self, latents: Iterable[torch.Tensor], options: SamplingOptions) -> Iterator[torch.Tensor]:
        """Their pictures, one at a time, since a picture takes much more than its latents. Raises UserError where
        memory does not do for one."""
        give_back(self._device)
        self._codec.move(self._device)
        for each in latents:
            with told(f"{options.size}: decoding it", self._device, "a smaller --size takes less"):
                pixels = self._pixels(each)
            yield pixels

    @torch.no_grad()
    def _decode_beside(self, latents: torch.Tensor, options: SamplingOptions) -> torch.Tensor | None:
        """The picture of these latents beside the model; None, and a note, where memory does not do for that."""
        try:
            self._codec.move(self._device)
            return self._pixels(latents)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
        self._codec.move(_HOST)
        give_back(self._device)
        log.notice(f"note: {options.size}: no room to decode beside the model; pictures come when all are drawn")
        return None

    def _pixels(self, latents: torch.Tensor) -> torch.Tensor:
        return to_bytes(self._codec.decode(latents[None].to(self._device)))[0].cpu()

    def _latents(self, options: SamplingOptions) -> Shape:
        """The shape of the latents of one picture. Raises UserError where the codec or the model has none of it."""
        size, side = options.size, self._codec.downsample
        if options.height % side or options.width % side:
            nearest = "x".join(map(str, fitting_bucket(options.bucket, side)))
            raise UserError(f"{size} does not divide by the codec's {side}; nearest: {nearest}")
        step = self._codec.temporal_downsample
        if options.frames is not None and (options.frames - 1) % step:
            raise UserError(f"{size} has {options.frames} frames, and the codec takes one and then multiples of {step}")
        if options.frames is not None and self.fps is None:
            raise UserError(f"{size} has frames, and the run was trained on pictures; give HEIGHTxWIDTH")
        shape = self._codec.latent_shape(options.bucket)
        if misfits := size_misfits(self._spec, [shape]):
            raise UserError(f"{size} gives {misfits[0]}")
        return shape

    def _check_images(self, images: int, captions: int) -> None:
        if not self._begins and images:
            raise UserError("--image: the model's videos begin with no picture; leave it out")
        if self._begins and images not in (1, captions):
            raise UserError(
                f"--image: the model's videos begin with a picture: {images} were given for {captions} captions; pass "
                "one for all, or one for each"
            )

    def _attempt(
        self, model: nn.Module, given: Encoded, numbers: range, shape: Shape, options: SamplingOptions
    ) -> torch.Tensor | None:
        """Their latents; None where memory does not do for so many: the error, which holds what was allocated, ends
        here. Raises UserError where it does not do for one."""
        least, (free, total) = len(numbers) * _least_bytes(shape, options.guidance), room(self._device)
        if len(numbers) > 1:
            try:
                return self._draw(model, given, numbers, shape, options) if least <= free else None
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                return None
        drawing = f"{options.size}: drawing 1 at once"
        if least > free:
            raise UserError(f"{drawing} takes {gib(least)} at least, and {gib(free)} of {gib(total)} are free; {_LESS}")
        with told(drawing, self._device, _LESS):
            return self._draw(model, given, numbers, shape, options)

    def _draw(
        self, model: nn.Module, given: Encoded, numbers: range, shape: Shape, options: SamplingOptions
    ) -> torch.Tensor:
        seeds = [options.seed + number for number in numbers]
        noise = objectives.draw_noise(torch.empty((len(seeds), *shape), device=self._device), seeds)
        sampler = options.sampler or objectives.default_sampler(self._objective)
        tokens = self._family.tokens(model, noise.shape)
        predict = self._predict(model, given.of(numbers, self._device, self._dtype), options)
        return objectives.sample(self._objective, sampler, predict, noise, options.steps, tokens)

    def _predict(self, model: nn.Module, given: Given, options: SamplingOptions) -> objectives.Predict:
        """The prediction in fp32; with guidance, pushed away from that for the negative or empty caption."""

        def conditioned(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self._family.predict(model, latents.to(self._dtype), t, given).float()

        def pushed(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            conditional, unconditional = conditioned(torch.cat([latents, latents]), t.repeat(2)).chunk(2)
            return unconditional + options.guidance * (conditional - unconditional)

        return pushed if options.guided else conditioned


def _least_bytes(shape: Shape, guidance: float) -> int:
    """What a picture takes at the least, in fp32: latents, noise and what the model predicts; with guidance twice what
    the model is fed and predicts, beside noise. A host's memory is not refused, but ends."""
    return (3 if guidance == 1 else 5) * 4 * math.prod(shape)


_FORWARD = {"checkpointed_blocks": 0, "offload_activations": False, "compile_blocks": False}
"""What of a strategy is of no use, or of too little, where nothing is trained."""


def model_of(
    checkpoint: Checkpoint, run: RunConfig, spec: ModelSpec, device: torch.device, *, ema: bool, posthoc: PostHoc | None
) -> nn.Module:
    """The model on `device`, of the weights, with `ema` of their average, or of that one. The checkpoint was verified.

    Raises UserError where weights cannot be read.
    """
    strategy = Strategy.model_validate(checkpoint.state["strategy"])
    family, dtype = models.family(spec.class_name), compute_dtype(strategy)
    swapped = strategy.blocks_to_swap if device.type == "cuda" else 0  # on a host it would save nothing
    if strategy.lora is None or run.model.init_from is None:
        model = models.skeleton(spec, dtype=dtype)
    else:
        model = load_model(spec, run.model.init_from, dtype=dtype)
    model = models.equip(model, family, strategy.model_copy(update=_FORWARD | {"blocks_to_swap": swapped}))
    if posthoc is None:
        load_weights(checkpoint, model, average=ema)
    else:
        posthoc.load(model)
    return moved(model, device).eval()
