"""How much longer the slowest of eight processes takes for a pass than the mean process, for three mixes of buckets.

    python benchmarks/balance.py > benchmarks/balance.md

Work is torch's count of FLOPs in the model's forward pass, on the meta device. Micro-batches follow the loader's
order: 4 samples a process, two passes a step, five steps. Captions have 105 tokens on average.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import ASPECT_RATIO_512_BIN, ASPECT_RATIO_1024_BIN
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from bigdit import catalog, models
from bigdit.catalog import FAMILIES
from bigdit.loader.order import Ints, Order, dealt

RANKS, MICRO, PASSES, STEPS = 8, 4, 2, 5
PART, PARTS = 256, 200
SIDES = [(480, 832), (832, 480), (640, 640), (544, 736), (736, 544)]
FRAMES = [17, 33, 49, 65, 81]


Size = tuple[int | None, int, int]
"""Frames of a video, height and width in pixels."""


@dataclass(frozen=True)
class Mix:
    """`buckets`: how often each occurs."""

    title: str
    buckets: dict[Size, float]
    models: tuple[str, ...]


def aspects(bins: Mapping[str, Sequence[float]]) -> dict[Size, float]:
    """PixArt's buckets, for photos around 2:3 and 3:2."""
    of: dict[str, Size] = {ratio: (None, int(h), int(w)) for ratio, (h, w) in bins.items()}
    shares = {each: np.exp(-((abs(np.log(float(ratio))) - np.log(1.5)) ** 2) / 0.1) for ratio, each in of.items()}
    return {each: float(share) for each, share in shares.items()}


MIXES = [
    Mix("1,024 pixels by aspect", aspects(ASPECT_RATIO_1024_BIN), ("pixart-sigma-xl-2-1024", "lumina-image-2.0")),
    Mix("512 pixels by aspect", aspects(ASPECT_RATIO_512_BIN), ("lumina-image-2.0",)),
    Mix("videos by frames", {(each, 480, 832): 1.0 for each in FRAMES}, ("wan2.1-t2v-1.3b",)),
    Mix(
        "images and videos, by both",
        {(frames, *sides): 3.0 if frames == 1 else 1.0 for frames in (1, *FRAMES) for sides in SIDES},
        ("wan2.1-t2v-1.3b",),
    ),
]


class _Lengths(TorchFunctionMode):
    """Give models the lengths of texts, which the meta device does not hold."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self._lengths = [*lengths]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._lengths if func is torch.Tensor.tolist else func(*args, **(kwargs or {}))


class Samples:
    """A mix's samples: how many of each bucket are in each part, and the lengths of their captions."""

    def __init__(self, mix: Mix, title: str) -> None:
        self._entry = catalog.model(title)
        spec = self._entry.spec
        self.by_text = FAMILIES[spec.class_name].by_text
        self._family = models.family(spec.class_name)
        self._model = models.build(spec, device="meta", dtype=torch.bfloat16)
        whole = catalog.batch_shape(self._entry)
        assert whole.text is not None
        self._text = whole.text
        shapes = [catalog.batch_shape(self._entry, (h, w), frames).latents for frames, h, w in mix.buckets]
        self._shapes = shapes
        drawn = np.random.default_rng(0)
        shares = np.array([*mix.buckets.values()])
        self.counts = drawn.multinomial(PART, shares / shares.sum(), PARTS)
        self._starts = np.cumsum(self.counts, 0) - self.counts
        self._lengths = [
            np.clip(drawn.gamma(4.0, 105 / 4, total).round(), 8, self._text[0]).astype(np.int64)
            for total in self.counts.sum(0)
        ]
        self._work = functools.cache(self._count)

    def order(self, size: int) -> Order:
        """The order of training, in global batches of this many samples."""
        return Order(self.counts, self._shapes, size, seed=0)

    def lengths(self, bucket: int, parts: Ints, rows: Ints) -> Ints:
        """Lengths of these samples' captions."""
        found: Ints = self._lengths[bucket][self._starts[parts, bucket] + rows]
        return found

    def work(self, bucket: int, lengths: Ints) -> int:
        """FLOPs of a micro-batch."""
        return self._work(bucket, tuple(sorted(lengths.tolist())) if self.by_text else ())

    def _count(self, bucket: int, lengths: Sequence[int]) -> int:
        (tokens, dim), latents = self._text, self._shapes[bucket]
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter, _Lengths(lengths):
            conditions = SimpleNamespace(
                text_embeds=torch.zeros(MICRO, tokens, dim, dtype=torch.bfloat16),
                text_mask=torch.ones(MICRO, tokens, dtype=torch.bfloat16),
                extras={
                    name: torch.zeros(MICRO, *each.sample_shape(latents), dtype=each.dtype)
                    for name, each in self._family.extras(self._model).items()
                },
            )
            noisy = torch.zeros(MICRO, *latents, dtype=torch.bfloat16)
            self._family.predict(self._model, noisy, torch.full((MICRO,), 0.5), conditions)
        return int(counter.get_total_flops())


def own_buckets(samples: Samples) -> float:
    """Each process takes the next micro-batch of any bucket."""
    order = samples.order(MICRO)
    batches = (order.batch(number) for number in range(STEPS * PASSES * RANKS))
    return excess([samples.work(each.bucket, samples.lengths(each.bucket, each.parts, each.rows)) for each in batches])


def one_bucket(samples: Samples, *, by_text: bool) -> float:
    """Deal a global batch of one bucket as bigdit does. `by_text` also sorts by the lengths of captions."""
    works, size = [], MICRO * PASSES * RANKS
    order = samples.order(size)
    for step in range(STEPS):
        batch = order.batch(step)
        lengths = samples.lengths(batch.bucket, batch.parts, batch.rows)
        places = dealt(lengths, PASSES, RANKS) if by_text else np.arange(size).reshape(PASSES, RANKS, MICRO)
        works += [samples.work(batch.bucket, lengths[each]) for each in places.reshape(-1, MICRO)]
    return excess(works)


def excess(works: Sequence[int]) -> float:
    """The slowest process over the mean, where processes wait for each other in each pass."""
    of = np.array(works, float).reshape(-1, RANKS)
    return float(of.max(1).sum() / of.mean(1).sum() - 1)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    heads = ["mix", "model", "each process its own bucket", "one bucket a step", "and captions dealt by length"]
    print(f"# Work by process\n\n`python benchmarks/balance.py`\n\n{__doc__.splitlines()[0]}\n")
    print("Work is FLOPs of the model's own forward pass. 4 samples a process, two passes a step, five steps. Captions")
    print("have 105 tokens on average. Models that keep the padding of captions are not dealt by length.\n")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for mix in MIXES:
        for title in mix.models:
            samples = Samples(mix, title)
            found = [own_buckets(samples), one_bucket(samples, by_text=False)]
            found += [one_bucket(samples, by_text=True)] if samples.by_text else []
            cells = [f"{100 * each:.1f} %" for each in found] + ["—"] * (3 - len(found))
            print(f"| {mix.title}: {len(mix.buckets)} buckets | {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
