"""Claims about PixArt-Σ, a function each, and why our answer differs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bigdit.speed.seconds import Interval, StepTime
from bigdit.units import gib
from claims.answers import Case, Say, between, case, plan, ran

DAY = 86_400
IMAGES = 30_000_000


def pixart_batch_20(say: Say) -> Case:
    """PixArt-Σ at batch 20 on an A800, with features cached and online."""
    asked: dict[str, Any] = {
        "model": "pixart-sigma-xl-2-1024",
        "gpu": "a800-80g-sxm",
        "precision": "fp16",
        "micro_batch": 20,
    }
    cached, online = (plan(say, **asked, features=features) for features in ("cached", "online"))
    text = "precision=fp16,micro_batch_size=20,checkpointed_blocks=all,features=online,encode_chunk=null"
    (theirs,) = ran(asked["model"], asked["gpu"], [text], vae_dtype="fp16")
    rows = [["features", "strategy", "process", "verdict", "step", "of that"]]
    for name, title, process, said, step in (
        ("cached", cached.chosen.title, cached.chosen.process.high_bytes, cached.verdict, cached.chosen.step),
        ("online", online.chosen.title, online.chosen.process.high_bytes, online.verdict, online.chosen.step),
        (
            "online",
            "as in its repository: VAE in fp16, 20 images encoded at once, all blocks recomputed",
            theirs.process_bytes,
            theirs.verdict,
            theirs.step,
        ),
    ):
        parts = "; ".join(f"{part} {between(seconds)} s" for part, seconds in _largest_parts(step))
        rows.append([name, title, gib(process), said, f"{between(step.seconds)} s", parts])
    seconds = theirs.step.seconds
    return case(
        "pixart_batch_20",
        rows,
        step=between(seconds),
        low=f"{seconds.low / 360:.1%}",
        high=f"{seconds.high / 360:.1%}",
        steps=between(seconds * 20),
        low_of_20=f"{seconds.low * 20 / 360:.0%}",
        high_of_20=f"{seconds.high * 20 / 360:.0%}",
        faster=f"{theirs.step.seconds.middle / cached.chosen.step.seconds.middle:.1f}",
    )


def pixart_days(say: Say) -> Case:
    """How long 32 V100 take for 30 M images."""
    rows = [["resolution", "strategy", "verdict", "images/s a GPU", "days for one epoch", "epochs in 17 days"]]
    for model in ("pixart-sigma-xl-2-256", "pixart-sigma-xl-2-512", "pixart-sigma-xl-2-1024"):
        found = plan(say, model=model, gpu="v100-32g-sxm2", gpus=32, images=IMAGES)
        assert found.run is not None
        days = found.run.seconds * (1 / DAY)
        rate = found.chosen.samples_per_second_per_gpu
        rows.append([f"{found.request.resolution[0]}", found.chosen.title, found.verdict, between(rate),
                     between(days), between(days.per(17))])  # fmt: skip
    recipe = "zero0,world_size=32,precision=fp16,checkpointed_blocks=all"
    found_days = []
    for size, features in ((12, "cached"), (3, "online")):
        text = f"{recipe},micro_batch_size={size},features={features}"
        (theirs,) = ran("pixart-sigma-xl-2-1024", "v100-32g-sxm2", [text], vae_dtype="fp16")
        days = theirs.step.seconds * (IMAGES / (32 * size) / DAY)
        found_days.append(days)
        title = f"as in its repository: data parallel, micro-batch {size}, all blocks recomputed, features {features}"
        rows.append(["1024", title, f"{theirs.verdict}, {gib(theirs.process_bytes)}",
                     between(theirs.step.seconds.per(size)), between(days), between(days.per(17))])  # fmt: skip
    cached_days, online_days = found_days
    return case("pixart_days", rows, cached=_place(17, cached_days), online=_place(17, online_days))


def _largest_parts(step: StepTime) -> Iterable[tuple[str, Interval]]:
    return sorted(step.parts.items(), key=lambda part: -part[1].high)[:4]


def _place(number: float, found: Interval) -> str:
    return "less than" if number < found.low else "more than" if number > found.high else "within"
