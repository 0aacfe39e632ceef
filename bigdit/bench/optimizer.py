"""Optimizers by name over a model's parameters, by turns with torch's own AdamW: seconds and bytes of state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch.optim import Optimizer

from bigdit import models, optim
from bigdit.bench.interleaved import Comparison, Load, take_turns
from bigdit.emulator import on_emulated_card
from bigdit.engines.state import parts
from bigdit.errors import UserError
from bigdit.shortage import room, told
from bigdit.spec import ModelSpec, OptimizerName, OptimizerSpec
from bigdit.units import count, gib

BASELINE = "AdamW, fused"
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
TEMPORARY_BYTES = 57
"""An element of the largest weight, at most: torchao's 4-bit AdamW. Source: bigdit/optim/libraries.py."""
SLACK = 1.4
"""What a process takes by its tensors: a heap keeps what was freed between them. Seen: 1.21 on a CPU, with all
optimizers over 96 M parameters of Sana; the rest is for what else runs, as Linux kills when memory is over."""
SAMPLE_SIDE = 512
"""Of the tensors that tell what an optimizer keeps: factors and blocks of 8 bits are at work, and a step is quick."""

Shapes = Sequence[torch.Size]


def shapes_of(spec: ModelSpec) -> list[torch.Size]:
    """Of all parameters of a model, which is built on the meta device. Raises UserError as models.build does."""
    return [param.shape for param in models.outline(spec).parameters()]


@dataclass(frozen=True)
class Contestants:
    """Optimizers by what tables call them, and those of `left_out`, with the reason; `state`: bytes that each keeps of
    an element of tensors of each shape, as a step of one such tensor, cut to SAMPLE_SIDE a side, has shown."""

    device: torch.device
    specs: Mapping[str, OptimizerSpec]
    left_out: Mapping[str, str]
    state: Mapping[str, Mapping[torch.Size, float]]

    def bytes_for(self, shapes: Shapes) -> int:
        """What all of them take side by side, at most: fp32 weights and gradients, which they share, their states, and
        the temporaries of the one that is at work."""
        largest = max(map(torch.Size.numel, shapes))
        states = sum(by_shape.get(shape, 8.0) * shape.numel() for by_shape in self.state.values() for shape in shapes)
        return math.ceil(SLACK * (8 * _elements(shapes) + states + TEMPORARY_BYTES * largest))


def contestants(names: Sequence[OptimizerName], shapes: Shapes) -> Contestants:
    """torch's AdamW, fused and for-loop, and the optimizers of these names, on this machine's card or its CPU; where
    none is named all that run here.

    Raises UserError where one that is named does not run here, and on an emulated card.
    """
    if on_emulated_card():
        raise UserError("bench optimizer times a card's kernels, and on an emulated card none runs; use a real one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    specs = {BASELINE: OptimizerSpec(), "AdamW, for-loop": OptimizerSpec(implementation="for_loop")}
    specs |= {name: OptimizerSpec(name=name) for name in names or NAMES if name != "adamw"}
    left_out, state = {}, {}
    for label, spec in specs.items():
        try:
            state[label] = _state_by_shape(spec, list(dict.fromkeys(shapes)), device)
        except UserError as error:
            if names:
                raise
            left_out[label] = str(error)
    return Contestants(device, {label: specs[label] for label in state}, left_out, state)


def check_room(asked: Contestants, shapes: Shapes, what: str, nearest: Callable[[int], str]) -> None:
    """Raise UserError where memory cannot hold all of them at once; `nearest(free)` says what would fit."""
    free, _ = room(asked.device)
    if (wanted := asked.bytes_for(shapes)) > free:
        place = "of the card are free" if asked.device.type == "cuda" else "are free (MemAvailable)"
        raise UserError(
            f"{what}: {len(asked.specs)} optimizers side by side take up to {wanted} bytes ({gib(wanted)}), and {free} "
            f"({gib(free)}) {place}; {nearest(free)}"
        )


def bench_optimizers(
    asked: Contestants,
    shapes: Shapes,
    what: str,
    *,
    rounds: int,
    load: Load,
    said: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Steps of each by turns over the same fp32 weights and gradients, as an engine's masters are; each has its own
    state, which its first step, that is not counted, has made."""
    with told(
        "bench optimizer", asked.device, "--blocks N of fewer blocks, or --optimizer with fewer names, takes less"
    ):
        params = _parameters(shapes, asked.device)
        optimizers = {label: optim.build(spec, params) for label, spec in asked.specs.items()}
        turns = {label: _turn(optimizer, asked.device) for label, optimizer in optimizers.items()}
        for label, turn in turns.items():
            said(f"first step: {label}")
            turn()
        found = take_turns(turns, rounds, said)
    elements = _elements(shapes)
    return Comparison(
        what=f"a step over {what}: {count(elements)} fp32 parameters in {len(shapes)} tensors, {_name(asked.device)}",
        unit="step",
        load=load,
        contenders=tuple(
            each.model_copy(update={"state_bytes": state_bytes(optimizers[each.name]) / elements}) for each in found
        ),
        notes=tuple(f"left out: {label}: {why}" for label, why in asked.left_out.items()),
    )


def state_bytes(optimizer: Optimizer) -> int:
    """Of all storages that an optimizer's state lies in, each counted once."""
    return _distinct_bytes(value for state in optimizer.state.values() for value in state.values())


def _distinct_bytes(values: Iterable[object]) -> int:
    tensors = (part for value in values if isinstance(value, torch.Tensor) for _, part in parts("", value))
    storages = {id_of: storage for storage in (t.untyped_storage() for t in tensors) if (id_of := storage.data_ptr())}
    return sum(storage.nbytes() for storage in storages.values())


def _state_by_shape(spec: OptimizerSpec, shapes: Shapes, device: torch.device) -> dict[torch.Size, float]:
    params = _parameters([torch.Size(min(side, SAMPLE_SIDE) for side in shape) for shape in shapes], device)
    optimizer = optim.build(spec, params)
    optimizer.step()
    return {
        shape: _distinct_bytes(optimizer.state[param].values()) / param.numel()
        for shape, param in zip(shapes, params, strict=True)
    }


def _parameters(shapes: Shapes, device: torch.device) -> list[torch.Tensor]:
    """fp32 weights with gradients, of about the sizes that a training's are."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for shape in shapes:
        param = torch.empty(shape, device=device).normal_(std=0.02, generator=generator)
        param.grad = torch.empty_like(param).normal_(std=1e-3, generator=generator)
        made.append(param)
    return made


def _turn(optimizer: Optimizer, device: torch.device) -> Callable[[], float]:
    def turn() -> float:
        _wait(device)
        began = time.perf_counter()
        optimizer.step()
        _wait(device)
        return time.perf_counter() - began

    return turn


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _elements(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes)


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"
