"""Validation images: the model that trains generates them, and the CPU decodes them while training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from bigdit import log, objectives
from bigdit.config.run import SAMPLES, RunConfig, SamplesConfig
from bigdit.encoders.host_bytes import host_weights
from bigdit.encoders.load import load_image_codec
from bigdit.encoders.protocol import to_bytes
from bigdit.engines import compute_dtype
from bigdit.errors import UserError
from bigdit.files import write_bytes
from bigdit.sampling.conditions import ConditionOptions, Given, SamplingOptions, asked_image, away, encoded
from bigdit.sampling.grid import grid_png, moving_grid, small, stills_png, webp
from bigdit.store.part import Shape
from bigdit.store.schema import Known
from bigdit.strategy import ModelSpec
from bigdit.train.state import TrainState

_CPU = torch.device("cpu")
_WORDS = ConditionOptions("samples.captions", "set samples.guidance to 1")


class ValidationImages:
    """Generates the same images or videos each time; all processes call it, and share the work.

    The training engine runs forward, at most a micro-batch at once. Captions are encoded once, at the start. The main
    process decodes latents on the CPU and writes one grid.
    """

    def __init__(
        self,
        config: SamplesConfig,
        run: RunConfig,
        spec: ModelSpec,
        known: Known | None,
        state: TrainState,
        last: int,
        done: Callable[[int, Path], None],
    ) -> None:
        """`known`: the store's classes; `last`: training's last step. A thread of the main process calls `done` with a
        step and its grid.

        Raises UserError if captions cannot be encoded, or name no class.
        """
        self._last = last
        self._config, self._run, self._peers, self._done = config, run, state.peers, done
        self._engine, self._ema, self._family, self._objective = state.engine, state.ema, state.family, state.objective
        *frames, height, width = run.data.buckets[0]
        self._options = SamplingOptions(
            height, width, config.steps, config.guidance, seed=config.seed, frames=frames[0] if frames else None
        )
        if self._peers.world.is_main and (taken := host_weights(run.encoders).known) is not None:
            log.notice(f"samples: encoders in CPU memory while captions are encoded and images decoded: {taken}")
        (first, *_) = self._peers.gather(self._prepared(spec, known) if self._peers.world.is_main else None)
        if isinstance(first, str):
            raise UserError(first)
        assert first is not None
        self._given, self._begun, self._shape = first
        self._decoder = ThreadPoolExecutor(1, "validation images")

    def __enter__(self) -> ValidationImages:
        return self

    def __exit__(self, *error: object) -> None:
        stopped = error[0] is not None  # a stopped run has no time for them
        self._decoder.shutdown(wait=not stopped, cancel_futures=stopped)

    def due(self, step: int) -> bool:
        """Whether they are due after `step` steps."""
        return step % self._config.every == 0 or step == self._last

    def generate(self, step: int) -> None:
        """Generate them, and start a thread that decodes and writes them."""
        with self._ema.in_place() if self._ema is not None else nullcontext(), self._engine.evaluating():
            found = self._peers.gather(self._share())
        if self._peers.world.is_main:
            every = zip(*found[:: self._engine.strategy.cp], strict=True)
            latents = [latent for each in every for latent in each]
            self._decoder.submit(self._decode, step, latents[: len(self._config.captions)])

    def _prepared(self, spec: ModelSpec, known: Known | None) -> tuple[Given, Mapping[str, torch.Tensor], Shape] | str:
        """Conditions, extras of first frames (a row each), and the latents' shape; or the problem."""
        try:
            captions = self._config.captions
            images = [asked_image("samples.images:", path, self._run.data.max_pixels) for path in self._config.images]
            codec = load_image_codec(self._run.encoders.image, _CPU)
            found = encoded(self._run, spec, known, captions, images, self._options, codec, _CPU, _WORDS)
            given = found.texts.of(range(len(found.texts)))
            return given, found.begun, codec.latent_shape(self._options.bucket)
        except UserError as error:
            return str(error)

    def _share(self) -> list[torch.Tensor]:
        """This process's latents: images rank, rank + processes, …. All make the same number: some repeat the last
        image."""
        strategy, count = self._engine.strategy, len(self._config.captions)
        world, micro = self._peers.world.of_samples(strategy.cp), strategy.micro_batch_size
        mine = range(world.rank, world.rank + -(-count // world.world_size) * world.world_size, world.world_size)
        own = [min(number, count - 1) for number in mine]
        batches = (self._latents(own[start : start + micro]) for start in range(0, len(own), micro))
        return [latent for batch in batches for latent in batch.float().cpu()]

    def _latents(self, numbers: list[int]) -> torch.Tensor:
        device = self._engine.device
        noise = objectives.draw_noise(
            torch.empty((len(numbers), *self._shape), device=device), [self._config.seed + number for number in numbers]
        )
        asked = self._predict(self._of(numbers, numbers))
        if self._options.guided:
            others = away(numbers, len(self._config.captions), self._given.count)
            asked = _guided(asked, self._predict(self._of(others, numbers)), self._config.guidance)
        tokens = self._family.tokens(self._engine.model, noise.shape)
        sampler = objectives.default_sampler(self._objective)
        return objectives.sample(self._objective, sampler, asked, noise, self._config.steps, tokens)

    def _of(self, captions: list[int], begun: list[int]) -> Given:
        """The conditions with these numbers, and those of these videos' first frames."""
        placed = self._engine.device, compute_dtype(self._engine.strategy)
        given, first = self._given.rows(captions, *placed), Given(None, None, self._begun).rows(begun, *placed)
        return replace(given, extras={**given.extras, **first.extras})

    def _predict(self, given: Given) -> objectives.Predict:
        dtype = compute_dtype(self._engine.strategy)

        def predict(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self._family.predict(self._engine.model, latents.to(dtype), t, given).float()

        return predict

    @torch.no_grad()
    def _decode(self, step: int, latents: list[torch.Tensor]) -> None:
        """In a thread: decode one at a time, since an image takes much more memory than its latents; write the grid."""
        path = self._run.output / SAMPLES / f"step-{step:08d}.png"
        try:
            codec = load_image_codec(self._run.encoders.image, _CPU)
            pixels = [to_bytes(codec.decode(latent[None]))[0] for latent in latents]
            made = [each[0].numpy() if len(each) == 1 else each.movedim(0, -1).numpy() for each in pixels]
            if self._options.frames is None:
                write_bytes(path, grid_png(made, self._config.captions))
            else:
                assert self._run.data.fps is not None  # of a run with frames
                grid = moving_grid([small(each) for each in made])
                write_bytes(path.with_suffix(".webp"), webp(grid, self._run.data.fps, lossless=False))
                write_bytes(path, stills_png(made, self._config.captions))
            self._done(step, path)
        except (UserError, RuntimeError, MemoryError) as error:
            goes_on = "" if step == self._last else "; training continues"
            log.notice(f"note: the validation images of step {step} are not written: {error}{goes_on}")


def _guided(asked: objectives.Predict, away: objectives.Predict, guidance: float) -> objectives.Predict:
    """Classifier-free guidance with one pass for each prediction: both at once would be two micro-batches."""

    def predict(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        unconditional = away(latents, t)
        return unconditional + guidance * (asked(latents, t) - unconditional)

    return predict
