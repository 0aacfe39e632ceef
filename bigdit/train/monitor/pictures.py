"""Pictures on the way: drawn by the model that trains, decoded on the host meanwhile, and written as one grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from bigdit import log, objectives
from bigdit.checkpoint import Peers
from bigdit.config import RunConfig
from bigdit.config.run import SAMPLES, SamplesConfig
from bigdit.encoders.codecs import load_image_codec, to_bytes
from bigdit.encoders.host_bytes import host_weights
from bigdit.engines import Ema, Engine, compute_dtype
from bigdit.errors import UserError
from bigdit.files import replacing
from bigdit.models import Family
from bigdit.objective_spec import ObjectiveSpec
from bigdit.sampling.conditions import Given, SamplingOptions, Words
from bigdit.sampling.encoded import asked_image, encoded
from bigdit.sampling.grid import grid_png, moving_grid, small, stills_png, webp
from bigdit.store.part import Shape
from bigdit.store.schema import Known
from bigdit.strategy import ModelSpec

_HOST = torch.device("cpu")
_WORDS = Words("samples.captions", "set samples.guidance to 1")


class Pictures:
    """Draws the same pictures, or videos, again and again; all processes call it alike, and share them out.

    They are drawn by forward passes of the training's own engine, of no more samples than a micro-batch has. Captions
    are encoded once, at the start, and latents decoded on the main process's host while training goes on.
    """

    def __init__(
        self,
        config: SamplesConfig,
        run: RunConfig,
        spec: ModelSpec,
        known: Known | None,
        peers: Peers,
        engine: Engine,
        ema: Ema | None,
        family: Family,
        objective: ObjectiveSpec,
        last: int,
        done: Callable[[int, Path], None],
    ) -> None:
        """`known`: the store's classes; `last`: the step after which training ends; `done` is told of a step and of its
        grid, by the main process's thread. Raises UserError where captions cannot be encoded, or name no class."""
        self._last = last
        self._config, self._run, self._peers, self._done = config, run, peers, done
        self._engine, self._ema, self._family, self._objective = engine, ema, family, objective
        *frames, height, width = run.data.buckets[0]
        self._options = SamplingOptions(
            height, width, config.steps, config.guidance, seed=config.seed, frames=frames[0] if frames else None
        )
        if peers.world.is_main and (taken := host_weights(run.encoders).said) is not None:
            log.notice(f"samples: weights on this host while captions are encoded and pictures decoded: {taken}")
        (first, *_) = peers.gather(self._prepared(spec, known) if peers.world.is_main else None)
        if isinstance(first, str):
            raise UserError(first)
        assert first is not None
        self._given, self._begun, self._shape = first
        self._decoder = ThreadPoolExecutor(1, "pictures")

    def __enter__(self) -> Pictures:
        return self

    def __exit__(self, *error: object) -> None:
        stopped = error[0] is not None  # within its grace a run has no time for them
        self._decoder.shutdown(wait=not stopped, cancel_futures=stopped)

    def due(self, step: int) -> bool:
        """Whether they are to be drawn after so many steps."""
        return step % self._config.every == 0 or step == self._last

    def draw(self, step: int) -> None:
        """Draw them, and have them decoded and written while training goes on."""
        with self._ema.in_place() if self._ema is not None else nullcontext(), self._engine.evaluating():
            found = self._peers.gather(self._share())
        if self._peers.world.is_main:
            latents = [latent for each in zip(*found, strict=True) for latent in each]
            self._decoder.submit(self._decode, step, latents[: len(self._config.captions)])

    def _prepared(self, spec: ModelSpec, known: Known | None) -> tuple[Given, Mapping[str, torch.Tensor], Shape] | str:
        """Conditions, extras of first frames, a row each, and the latents' shape; or what is wrong."""
        try:
            captions = self._config.captions
            images = [asked_image("samples.images:", path, self._run.data.max_pixels) for path in self._config.images]
            codec = load_image_codec(self._run.encoders.image, _HOST)
            found = encoded(self._run, spec, known, captions, images, self._options, codec, _HOST, _WORDS)
            given = found.texts.of(range(len(captions) + self._options.guided))
            return given, found.begun, codec.latent_shape(self._options.bucket)
        except UserError as error:
            return str(error)

    def _share(self) -> list[torch.Tensor]:
        """This process's latents: pictures rank, rank + processes, …; as many on each, the last ones drawn twice."""
        world, count, micro = self._peers.world, len(self._config.captions), self._engine.strategy.micro_batch_size
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
            away = self._predict(self._of([len(self._config.captions)] * len(numbers), numbers))
            asked = _led(asked, away, self._config.guidance)
        tokens = self._family.tokens(self._engine.model, noise.shape)
        sampler = objectives.default_sampler(self._objective)
        return objectives.sample(self._objective, sampler, asked, noise, self._config.steps, tokens)

    def _of(self, captions: list[int], begun: list[int]) -> Given:
        """Conditions of these captions, of which the one after the last is what guidance leads away from, and of the
        first frames of these videos."""
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
        """In a thread: decode one at a time, since a picture takes much more than its latents; and write the grid."""
        path = self._run.output / SAMPLES / f"step-{step:08d}.png"
        try:
            codec = load_image_codec(self._run.encoders.image, _HOST)
            pixels = [to_bytes(codec.decode(latent[None]))[0] for latent in latents]
            drawn = [each[0].numpy() if len(each) == 1 else each.movedim(0, -1).numpy() for each in pixels]
            if self._options.frames is None:
                _write(path, grid_png(drawn, self._config.captions))
            else:
                assert self._run.data.fps is not None  # of a run with frames
                grid = moving_grid([small(each) for each in drawn])
                _write(path.with_suffix(".webp"), webp(grid, self._run.data.fps, lossless=False))
                _write(path, stills_png(drawn, self._config.captions))
            self._done(step, path)
        except (UserError, RuntimeError, MemoryError) as error:
            goes_on = "" if step == self._last else "; training goes on"
            log.notice(f"note: the pictures of step {step} are not written: {error}{goes_on}")


def _write(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def _led(asked: objectives.Predict, away: objectives.Predict, guidance: float) -> objectives.Predict:
    """Led away from one prediction towards the other, by a pass for each: both at once would be twice a micro-batch."""

    def predict(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        unconditional = away(latents, t)
        return unconditional + guidance * (asked(latents, t) - unconditional)

    return predict
