"""What it costs to compare replicas: seconds of a step, and of a comparison, in two processes on the CPU.

    python benchmarks/replicas.py [--model MODEL] [--blocks BLOCKS] [--rounds N]

HSDP with two copies: each process holds all weights, masters and moments. Comparisons come every 100 steps, and
before each checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from on_gpu.points import few_blocks

from bigdit import catalog, checkpoint, engines, libraries, models
from bigdit.config.strategy_text import parse_strategy
from bigdit.dist import world_from_env
from bigdit.engines.state import replicated
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.attempt import request_for
from bigdit.profile.steps import batch
from bigdit.train.processes.alike import ReplicaCheck
from bigdit.train.processes.launch import Ranks
from bigdit.train.processes.process import process_group
from bigdit.train.step import train_step

EVERY = 100


def main() -> None:
    parser = argparse.ArgumentParser(description="What comparing replicas costs.")
    parser.add_argument("--model", default="sana-600m-512")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    world = world_from_env()
    if world.world_size == 1:
        sys.exit(Ranks([sys.executable, *sys.argv], 10.0).run(2))
    libraries.prepare()
    model = few_blocks(catalog.find_model(options.model), options.blocks)
    strategy = parse_strategy(["engine=fsdp2,world_size=2,dp_replicate=2"])
    request = request_for(model, catalog.resolve_gpu("a100-80g-sxm"), strategy)
    family = models.family(model.spec.class_name)
    with process_group(world, needed=True) as device:
        module = models.build(model.spec, device="cpu", dtype=engines.compute_dtype(strategy), seed=0)
        engine = engines.create(strategy, module, family, device=device)
        check = ReplicaCheck(engine, None, checkpoint.Peers(world), EVERY)

        def step() -> None:
            train_step(engine, family, FlowMatchingSpec(), [batch(request.batch, strategy)], lr=1e-6)

        step()
        steps = [timed(step) for _ in range(options.rounds)]
        checks = [timed(lambda: check.add(EVERY, saved=True)) for _ in range(options.rounds)]
        nbytes = sum(each.nbytes for _, each in replicated(engine, None))
    if world.is_main:
        one, other = statistics.median(steps), statistics.median(checks)
        print(
            f"{nbytes / 2**20:,.0f} MiB on each process: a step {one:.2f} s, a comparison {other:.3f} s "
            f"({nbytes / other / 1e9:.1f} GB/s), {100 * other / one / EVERY:.4f} % of {EVERY} steps, "
            f"torch {torch.__version__}"
        )


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
