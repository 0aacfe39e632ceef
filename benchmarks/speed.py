"""Published speeds of training against what the roofline says of them: writes benchmarks/speed.md.

python benchmarks/speed.py [ID ...]

Each claim is a step's time that somebody published, with the strategy that comes nearest to what was run and what
differs in it. It is a report: no constant of the roofline is fitted to it. No receipt calibrates these intervals.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bigdit import catalog
from bigdit.config.strategy import parse_strategy
from bigdit.rehearse import rehearse
from bigdit.rehearse.ask import request_for
from bigdit.speed.cluster import Cluster
from bigdit.speed.interval import Interval
from bigdit.speed.step import StepTime, step_time
from bigdit.speed.work import work_of

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Claim:
    """`seconds` of one optimizer step, as published at `source`; `differs`: what theirs does otherwise."""

    name: str
    source: str
    seconds: float
    model: str
    resolution: int
    gpu: str
    strategy: str
    differs: str


DIT, FAST_DIT = "https://github.com/facebookresearch/DiT/issues/22", "https://github.com/chuanyangjin/fast-DiT"
KREA = "https://github.com/bghira/SimpleTuner/blob/bc8e6ab7738ce457a2ed8eb2d26cadd91c6442cb/documentation/quickstart/KREA2.md"
UNFUSED = "attention of timm as it was then: products and softmax apart, in memory"
AUTOCAST = "autocast: weights and activations are kept in fp32, and cast at each use"
CLAIMS = (
    Claim(
        "dit-fp32",
        DIT,
        1 / 0.51,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "zero0,world_size=8,micro_batch_size=32,precision=fp32,ema.device=gpu,features=online",
        f"DDP; {UNFUSED}; pictures decoded beside",
    ),
    Claim(
        "dit-tf32",
        DIT,
        1 / 0.81,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "zero0,world_size=8,micro_batch_size=32,precision=tf32,ema.device=gpu,features=online",
        f"DDP; {UNFUSED}; pictures decoded beside, which may decide: from features (dic-dit-xl) it takes half",
    ),
    Claim(
        "fast-dit-tf32",
        FAST_DIT,
        1 / 0.43,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "single,micro_batch_size=128,precision=tf32,checkpointed_blocks=all,ema.device=gpu,features=online",
        f"{UNFUSED}; pictures decoded beside",
    ),
    Claim(
        "fast-dit-fp16-online",
        FAST_DIT,
        1 / 0.56,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "single,micro_batch_size=128,precision=fp16,checkpointed_blocks=all,ema.device=gpu,features=online",
        f"its VAE's convolutions run in TF32, cuDNN's default, and ours in plain fp32; {AUTOCAST}; {UNFUSED}",
    ),
    Claim(
        "fast-dit-fp16",
        FAST_DIT,
        1 / 0.84,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "single,micro_batch_size=128,precision=fp16,checkpointed_blocks=all,ema.device=gpu",
        f"{AUTOCAST}; {UNFUSED}",
    ),
    Claim(
        "krea2-lora-1",
        KREA,
        0.99,
        "krea2",
        1024,
        "h100-sxm",
        "single,micro_batch_size=1,lora.rank=16,checkpointed_blocks=all",
        "Lion, query, key and value in one product; form factor of the H100 and rank not stated",
    ),
    Claim(
        "krea2-lora-8",
        KREA,
        7.69,
        "krea2",
        1024,
        "h100-sxm",
        "single,micro_batch_size=8,lora.rank=16,checkpointed_blocks=all",
        "Lion, query, key and value in one product; form factor of the H100 and rank not stated",
    ),
    Claim(
        "dic-dit-xl",
        "https://github.com/YuchuanTian/DiC/issues/6",
        1 / 1.71,
        "dit-xl-2-paper",
        256,
        "a100-80g-sxm",
        "zero0,world_size=8,micro_batch_size=32,precision=tf32,ema.device=gpu",
        f"only speed and card are stated: 8 cards, 256 pictures a step and TF32 are DiT's usual setting; {UNFUSED}",
    ),
    Claim(
        "flux-lora-a40-1",
        "https://github.com/ostris/ai-toolkit/issues/145",
        6.5,
        "flux.1-dev",
        1024,
        "a40",
        "single,micro_batch_size=1,lora.rank=16,checkpointed_blocks=all",
        "the default config: weights in 8 bits that are unpacked at each use, pictures of 512, 768 and 1024 mixed",
    ),
    Claim(
        "flux-lora-a40-4",
        "https://github.com/ostris/ai-toolkit/issues/145",
        22.0,
        "flux.1-dev",
        1024,
        "a40",
        "single,micro_batch_size=4,lora.rank=16,checkpointed_blocks=all",
        "the default config: weights in 8 bits that are unpacked at each use, pictures of 512, 768 and 1024 mixed",
    ),
)


def main(wanted: list[str]) -> None:
    lines = []
    for claim in CLAIMS:
        if not wanted or claim.name in wanted:
            lines.append(_line(claim, _predicted(claim)))
            print(lines[-1], flush=True)
    if not wanted:
        (HERE / "speed.md").write_text(_document(lines))


def _predicted(claim: Claim) -> StepTime:
    gpu, strategy = catalog.gpu(claim.gpu), parse_strategy([claim.strategy])
    request = request_for(catalog.model(claim.model), gpu, strategy, resolution=claim.resolution)
    work = work_of(rehearse(request, timeout_s=600).sizes[0].timeline, strategy)
    return step_time(work, strategy, gpu, Cluster(gpus=strategy.world_size))


def _line(claim: Claim, found: StepTime) -> str:
    seconds = found.seconds
    most = sorted(found.parts.items(), key=lambda part: -part[1].high)[:3]
    where = ", ".join(f"{name} {_range(part)}" for name, part in most)
    return (
        f"| [{claim.name}]({claim.source}) | {claim.model} {claim.resolution} px, {claim.gpu}, `{claim.strategy}` | "
        f"{claim.seconds:.2f} | {_range(seconds)} | {_verdict(claim.seconds, seconds)} | {where} | {claim.differs} |"
    )


def _verdict(measured: float, seconds: Interval) -> str:
    if measured > seconds.high:
        return f"slower, {measured / seconds.high:.2f} × high"
    return f"faster, {measured / seconds.low:.2f} × low" if measured < seconds.low else "inside"


def _range(seconds: Interval) -> str:
    return f"{seconds.low:.2f} to {seconds.high:.2f}"


def _document(lines: list[str]) -> str:
    inside = sum("| inside |" in line for line in lines)
    return "\n".join(
        [
            "# Published speeds of training against the roofline",
            "",
            "Made by `python benchmarks/speed.py`, which has the claims. Seconds of one optimizer step; nothing is",
            "fitted to them, and no receipt calibrates the intervals. What a claim does otherwise than the strategy",
            "beside it stands in the last column; for those outside it is the likely reason, which was not measured.",
            "",
            f"{inside} of {len(lines)} are inside.",
            "",
            "| claim | rehearsed as | published | ours | | most of it | what differs |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
