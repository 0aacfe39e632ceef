"""Pictures or videos from captions or classes by a trained checkpoint, with classifier-free guidance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from PIL import Image

from bigdit import log, models, objectives
from bigdit.catalog.families import objective_of
from bigdit.checkpoint import Checkpoint, PostHoc, load_model, load_weights, verify
from bigdit.config import RunConfig
from bigdit.config.load import parse_run
from bigdit.encoders.codecs import load_image_codec, to_bytes
from bigdit.encoders.first_frame import FirstFrames, load_first_frames
from bigdit.encoders.fit import size_misfits
from bigdit.errors import UserError
from bigdit.sampling.conditions import Labels, SamplingOptions, Texts, conditions_of
from bigdit.sampling.first_frame import first_frame_extras
from bigdit.shortage import ran_out, room, told
from bigdit.spec import ModelSpec, Strategy
from bigdit.store.part import Shape
from bigdit.units import gib

_LESS = "a smaller --size or fewer captions take less"


class Sampler:
    """The model of a checkpoint, in fp32, with the encoders it was trained on.

    `captions`: whether it is fed captions, and not classes.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, *, ema: bool = False, posthoc: PostHoc | None = None
    ) -> None:
        """With `ema` of the moving average of the weights, with `posthoc` of that one of them. What decodes is loaded,
        and nothing else yet. Raises UserError where it cannot be, or no average was kept."""
        if ema and not checkpoint.has_average:
            raise UserError(f"--ema: {checkpoint.folder} holds no moving average of the weights; train with train.ema")
        run = parse_run(checkpoint.state["run"], str(checkpoint.folder))
        spec = ModelSpec.model_validate(checkpoint.state["model"])
        self._device, self._spec = device, spec
        self._family = models.family(spec.class_name)
        self._of = checkpoint, run, ema, posthoc
        self._codec = load_image_codec(run.encoders.image, device)
        self._begins = run.encoders.first_frame is not None
        self._objective = objective_of(spec, run.objective)
        self.buckets, self.fps, self.captions = run.data.buckets, run.data.fps, run.encoders.text is not None

    @cached_property
    def _model(self) -> torch.nn.Module:
        checkpoint, run, ema, posthoc = self._of
        return _load(checkpoint, run, self._spec, self._family, ema=ema, posthoc=posthoc).to(self._device).eval()

    @cached_property
    def _conditions(self) -> Texts | Labels:
        checkpoint, run, *_ = self._of
        return conditions_of(run, self._spec, (checkpoint.state["data"] or {}).get("classes"), self._device)

    @cached_property
    def _frames(self) -> FirstFrames | None:
        return load_first_frames(self._of[1].encoders.first_frame, self._codec, self._device)

    def load(self) -> None:
        """Load weights and encoders, which drawing does else. Raises UserError where they cannot be loaded."""
        _ = self._model, self._conditions, self._frames

    def check(self, options: SamplingOptions, captions: int, images: int = 0) -> None:
        """Raise UserError where so many `captions` and `images` cannot be drawn so: known before weights are loaded."""
        self._check_images(images, captions)
        if options.sampler is not None:
            objectives.check_sampler(self._objective, options.sampler)
        self._latents(options)

    @torch.no_grad()
    def sample(
        self, captions: Sequence[str], options: SamplingOptions, images: Sequence[Image.Image] = ()
    ) -> Iterator[torch.Tensor]:
        """One picture a caption, or a class by its name or number: uint8 [channels, (frames,) height, width]. Picture i
        depends on caption i and seed + i, and of a model of videos that begin with a picture on image i; one image is
        for all.

        A batch for which memory does not do is halved. Raises UserError where it does not do for one picture, for a
        class that is unknown, and where images are missing or too many.
        """
        self.check(options, len(captions), len(images))
        size, shape = options.size, self._latents(options)
        start, most = 0, options.micro_batch_size
        while start < len(captions):
            chosen = captions[start : start + most]
            first = images if len(images) == 1 else images[start : start + most]
            pictures = self._attempt(chosen, shape, start, options, first)
            if pictures is None:
                most = len(chosen) // 2
                log.notice(f"note: {size}: memory does not do for {len(chosen)} at once; going on with {most}")
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # what the larger batch left in pieces
                continue
            yield from pictures
            start += len(chosen)

    def _latents(self, options: SamplingOptions) -> Shape:
        """The shape of the latents of one picture. Raises UserError where the codec or the model has none of it."""
        size, side = options.size, self._codec.downsample
        if options.height % side or options.width % side:
            raise UserError(f"{size} does not divide by the codec's {side}")
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
        self, captions: Sequence[str], shape: Shape, start: int, options: SamplingOptions, first: Sequence[Image.Image]
    ) -> torch.Tensor | None:
        """Their pictures; None where memory does not do for so many: the error, which holds what was allocated, ends
        here. Raises UserError where it does not do for one."""
        least, (free, total) = len(captions) * _least_bytes(shape, options.guidance), room(self._device)
        if len(captions) > 1:
            try:
                return self._draw(captions, shape, start, options, first) if least <= free else None
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                return None
        drawing = f"{options.size}: drawing 1 at once"
        if least > free:
            raise UserError(f"{drawing} takes {gib(least)} at least, and {gib(free)} of {gib(total)} are free; {_LESS}")
        with told(drawing, self._device, _LESS):
            return self._draw(captions, shape, start, options, first)

    def _draw(
        self, captions: Sequence[str], shape: Shape, start: int, options: SamplingOptions, first: Sequence[Image.Image]
    ) -> torch.Tensor:
        seeds = [options.seed + start + i for i in range(len(captions))]
        noise = objectives.draw_noise(torch.empty((len(captions), *shape), device=self._device), seeds)
        sampler = options.sampler or objectives.default_sampler(self._objective)
        tokens = self._family.tokens(self._model, noise.shape)
        predict = self._predict(captions, options, first)
        latents = objectives.sample(self._objective, sampler, predict, noise, options.steps, tokens)
        return to_bytes(self._codec.decode(latents)).cpu()

    def _predict(
        self, captions: Sequence[str], options: SamplingOptions, first: Sequence[Image.Image]
    ) -> objectives.Predict:
        """The prediction for the captions; with guidance, pushed away from that for the negative or empty caption, of
        the same first frames."""
        conditions = self._conditions.of(captions, options)
        if self._frames is not None:
            begun = first_frame_extras(self._frames, first, options.bucket, len(captions), self._device)
            twice = {name: torch.cat([each, each]) if options.guided else each for name, each in begun.items()}
            conditions = replace(conditions, extras={**conditions.extras, **twice})

        def conditioned(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self._family.predict(self._model, latents, t, conditions)

        def pushed(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            conditional, unconditional = conditioned(torch.cat([latents, latents]), t.repeat(2)).chunk(2)
            return unconditional + options.guidance * (conditional - unconditional)

        return pushed if options.guided else conditioned


def _least_bytes(shape: Shape, guidance: float) -> int:
    """What a picture takes at the least, in fp32: latents, noise and what the model predicts; with guidance twice what
    the model is fed and predicts, beside noise. A host's memory is not refused, but ends."""
    return (3 if guidance == 1 else 5) * 4 * math.prod(shape)


def _load(
    checkpoint: Checkpoint,
    run: RunConfig,
    spec: ModelSpec,
    family: models.Family,
    *,
    ema: bool,
    posthoc: PostHoc | None,
) -> torch.nn.Module:
    if posthoc is None:  # which has verified all that it is made of
        verify(checkpoint)
    lora, base = run.train.lora, run.model.init_from
    if lora is None or base is None:
        model = models.skeleton(spec, dtype=torch.float32)
    else:
        # The adapters stand over the base as it was loaded, whatever it was quantised to in training.
        whole = Strategy(lora=lora.model_copy(update={"base": "bf16"}))
        model = models.equip(load_model(spec, base, dtype=torch.float32), family, whole)
    if posthoc is None:
        load_weights(checkpoint, model, average=ema)
    else:
        posthoc.load(model)
    return model
