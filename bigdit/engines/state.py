"""This process's part of the training state by parameters' names, the same for every engine and number of processes.

Masters, EMA and elementwise optimizer state are saved as slices of parameters. So another engine, or another number of
processes, finds its own slices in them. Other state (quantised in blocks, or factored) depends on the distribution of
masters over processes: only the same engine on as many processes can load it.

    master.<parameter>             the tensor that the optimizer steps
    ema.<parameter>                its first EMA; others are ema2, ema3, …
    state.<key>.<parameter>        elementwise optimizer state, or one number
    local.<rank>.<i>.<key>         other state of a rank's master i, and each part of a quantised one
    group.<key>                    state of schedule-free and Prodigy for all weights together
    scaler.<key>                   the loss scaler of fp16
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bigdit import optim
from bigdit.engines.ema import Ema
from bigdit.engines.protocol import Engine, Shard
from bigdit.optim.factored import local

LOCAL = "local."
GROUP = "group."
EMA = "ema"


@dataclass(frozen=True)
class SavedSlice:
    """Elements `offset` to `offset + len(tensor)` of a saved tensor with `numel` elements.

    `tensor` is one-dimensional, and a view of the state. For a `number` it is a copy, which `restore_numbers` writes
    back.
    """

    tensor: torch.Tensor
    offset: int
    numel: int
    number: bool = False


def state_slices(engine: Engine, ema: Ema | None, rank: int) -> dict[str, SavedSlice]:
    """The state that the next step depends on, by saved names."""
    found: dict[str, SavedSlice] = {}
    for name, value, shard in _state(engine, ema, rank):
        if shard is not None:
            part = value.detach().view(-1)[shard.start : shard.start + shard.length]
            found[name] = SavedSlice(part, shard.offset, shard.numel)
        elif name.startswith(LOCAL):
            found[name] = SavedSlice(value.detach().view(-1), 0, value.numel())
        else:
            found[name] = _number(value)
    if engine.scaler is not None:
        found |= {f"scaler.{key}": _number(value) for key, value in engine.scaler.state_dict().items()}
    return found


def ema_kind(i: int) -> str:
    """The first part of the saved names of EMA number i (from 0)."""
    return f"{EMA}{i + 1}" if i else EMA


@torch.no_grad()  # else autograd records each shard of a DTensor, a tenth of a recorded step's time
def checkpoint_bytes(engine: Engine, ema: Ema | None) -> int:
    """The bytes that this process copies to CPU memory to save its current state."""
    return sum(
        torch.as_tensor(value).nbytes if shard is None else shard.length * value.itemsize
        for _, value, shard in _state(engine, ema, 0)
    )


def _state(engine: Engine, ema: Ema | None, rank: int) -> Iterator[tuple[str, Any, Shard | None]]:
    """(saved name, value, shard) of masters, EMA and optimizer state. Numbers and local parts have no shard."""
    for shard in engine.shards():
        master = engine.masters[shard.master]
        yield f"master.{shard.name}", local(master), shard
        for i, averages in enumerate([] if ema is None else ema.every):
            yield f"{ema_kind(i)}.{shard.name}", averages[shard.master], shard
        for key, value in engine.optimizer.state.get(master, {}).items():
            if _is_elementwise(value, master):
                yield f"state.{key}.{shard.name}", local(value), shard
            elif _is_number(value):
                yield f"state.{key}.{shard.name}", value, None
    for i, master in enumerate(engine.masters):
        for key, value in engine.optimizer.state.get(master, {}).items():
            if not _is_elementwise(value, master) and not _is_number(value):
                for name, part in parts(f"{LOCAL}{rank}.{i}.{key}", value):
                    yield name, part, None
    for key, value in optim.group_state(engine.optimizer).items():
        yield f"{GROUP}{key}", torch.tensor(value, dtype=torch.float64), None  # fp64 keeps all digits


def replicated(engine: Engine, ema: Ema | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `engine.replicas()` by name, each storage once."""
    held, seen = engine.replicas(), set[tuple[int, int]]()
    if held is None:
        return
    state = ((name, value) for name, value, _ in _state(engine, ema, 0)) if held.masters else ()
    for name, value in (*held.weights, *state):
        for each, part in parts(name, torch.as_tensor(value)):
            place = part.data_ptr(), part.nbytes
            if part.numel() and place not in seen:
                seen.add(place)
                yield each, part.detach()


def make_state(engine: Engine, saved: Collection[str], rank: int) -> None:
    """Let the optimizer allocate state for each master that has saved state, by the saved names.

    It steps on a zero gradient, so that state is sharded, quantised or paged as usual. Saved values overwrite it later.
    """
    with_state = {name.split(".", 2)[2] for name in saved if name.startswith("state.")}
    kept = {int(name.split(".")[2]) for name in saved if name.startswith(f"{LOCAL}{rank}.")}
    kept |= {shard.master for shard in engine.shards() if shard.name in with_state}
    for i in sorted(kept):
        master = engine.masters[i]
        with engine.on_device(master):
            optim.make_state(engine.optimizer, master)


def restore_numbers(engine: Engine, filled: dict[str, SavedSlice]) -> None:
    """Write back what is no view of the state: numbers, and the loss scale."""
    for key, value in optim.group_state(engine.optimizer).items():
        for group in engine.optimizer.param_groups:
            group[key] = type(value)(filled[f"{GROUP}{key}"].tensor.item())
    for shard in engine.shards():
        state = engine.optimizer.state.get(engine.masters[shard.master], {})
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                state[key] = type(value)(filled[f"state.{key}.{shard.name}"].tensor.item())
    if engine.scaler is not None:
        keys = engine.scaler.state_dict()
        engine.scaler.load_state_dict({key: filled[f"scaler.{key}"].tensor.item() for key in keys})


def _number(value: Any) -> SavedSlice:
    return SavedSlice(torch.as_tensor(value).detach().view(1), 0, 1, number=True)


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _is_elementwise(value: Any, master: torch.Tensor) -> bool:
    """Whether `value` has an element for each element of the master, so that it can be sliced like the master. A count
    of steps is a number, even if this process has one element of the master."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    value = local(value)
    alike = value.numel() == local(master).numel()  # Prodigy flattens some
    return alike and value.is_floating_point() and not is_traceable_wrapper_subclass(value)


def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors in a tensor's local part: torchao's quantised ones have codes, scales and a map."""
    tensor = local(tensor)
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from parts(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor
