"""How long a step of each optimizer takes beside torch's fused AdamW, interleaved, and what state it keeps a parameter.

    python benchmarks/optimizer_steps.py [NAME…] [--rounds 3]

It steps fp32 weights and gradients of Sana-600M with BLOCKS blocks, on this machine's GPU if there is one, else on
its CPU. The first step, which makes the state, is not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import get_args

import torch
from torch.optim import Optimizer

from bigdit import catalog, log, models, optim
from bigdit.bench import take_turns
from bigdit.engines.state import parts
from bigdit.errors import UserError
from bigdit.optim.groups import Groups
from bigdit.report.tables import DASH, table
from bigdit.strategy import OptimizerName, OptimizerSpec

MODEL, BLOCKS = "sana-600m", 2
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step of each optimizer beside torch's AdamW.")
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], help="which; all that run here where none is named")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    params = parameters()
    specs = {"AdamW, fused": OptimizerSpec(), "AdamW, for-loop": OptimizerSpec(implementation="for_loop")}
    specs |= {name: OptimizerSpec(name=name) for name in asked.names or NAMES if name != "adamw"}
    optimizers, turns = {}, {}
    for label, spec in specs.items():
        try:
            optimizers[label] = optim.build(spec, grouped(params) if spec.name == "muon" else params)
            turns[label] = turn_of(optimizers[label])
            turns[label]()
        except UserError as error:
            turns.pop(label, None)
            print(f"left out: {label}: {error}")
    elements = sum(param.numel() for param in params)
    made = table(f"a step over {elements / 1e6:.0f} M fp32 parameters", ["", "ms", "× as long", "bytes a parameter"])
    for each in take_turns(turns, asked.rounds):
        ratio = DASH if each.of_baseline is None else f"{each.of_baseline.median:.1f}"
        kept = state_bytes(optimizers[each.name]) / elements
        made.add_row(each.name, f"{1000 * each.seconds.median:.0f}", ratio, f"{kept:.2f}")
    log.out.print(made)


def parameters() -> list[torch.Tensor]:
    """Weights with gradients, in a model's sizes."""
    spec = catalog.find_model(MODEL).spec
    spec = spec.model_copy(update={"kwargs": spec.kwargs | {"num_layers": BLOCKS}})
    made = [torch.randn(param.shape, device=DEVICE).mul_(0.02) for param in models.outline(spec).parameters()]
    for param in made:
        param.grad = torch.randn_like(param).mul_(1e-3)
    return made


def grouped(params: list[torch.Tensor]) -> Groups:
    """Matrices for Muon, and the rest. The few matrices outside of blocks count as if they were within."""
    matrices = [param for param in params if param.dim() == 2]
    return [{"params": matrices, "muon": True}, {"params": [param for param in params if param.dim() != 2]}]


def turn_of(optimizer: Optimizer) -> Callable[[], float]:
    """A function that makes one step and returns its seconds."""

    def turn() -> float:
        wait()
        began = time.perf_counter()
        optimizer.step()
        wait()
        return time.perf_counter() - began

    return turn


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state, each storage counted once."""
    values = (value for state in optimizer.state.values() for value in state.values())
    tensors = (part for value in values if isinstance(value, torch.Tensor) for _, part in parts("", value))
    storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
    return sum(storages.values())


if __name__ == "__main__":
    main()
