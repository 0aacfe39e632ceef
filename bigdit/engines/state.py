"""This process's share of the training state by parameters' names, alike for every engine and number of processes.

Masters, their EMA, and optimizer state of their shape are runs of the parameters' elements. Another engine, or another
number of processes, finds its own runs in those that were saved. Other state (quantised in blocks, or factored) depends
on how masters lie on the processes: only the same engine on as many processes can load it.

    master.<parameter>             what the optimizer steps
    ema.<parameter>                its EMA; of several the first, and the others are ema2, ema3, …
    state.<key>.<parameter>        the optimizer's state: an element for each of the master's, or one number
    local.<rank>.<i>.<key>         other state of this process's master i, and each part of a quantised one
    group.<key>                    what schedule-free and Prodigy keep of all weights together
    scaler.<key>                   of fp16
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bigdit import optim
from bigdit.engines.ema import Ema
from bigdit.engines.protocol import Engine, Shard

LOCAL = "local."
GROUP = "group."
EMA = "ema"


@dataclass(frozen=True)
class SavedSlice:
    """Elements `offset` to `offset + len(tensor)` of what is saved under a name, and has `numel`.

    `tensor` is one-dimensional, and a view of what it stands for; of a `number` it is a copy, which `adopt` puts back.
    """

    tensor: torch.Tensor
    offset: int
    numel: int
    number: bool = False


def places(engine: Engine, ema: Ema | None, rank: int) -> dict[str, SavedSlice]:
    """Everything that the next step depends on, by the names under which it is saved."""
    found = _tensors(engine, ema, rank)
    if engine.scaler is not None:
        found |= {f"scaler.{key}": _number(value) for key, value in engine.scaler.state_dict().items()}
    return found


def ema_kind(i: int) -> str:
    """The name under which EMA number i (from 0) of a parameter is saved."""
    return f"{EMA}{i + 1}" if i else EMA


@torch.no_grad()  # else autograd records each shard of a DTensor, a tenth of a recorded step's time
def checkpoint_bytes(engine: Engine, ema: Ema | None) -> int:
    """The bytes that this process copies to CPU memory to save its current state."""
    return sum(
        torch.as_tensor(value).nbytes if shard is None else shard.length * value.itemsize
        for _, value, shard in _held(engine, ema, 0)
    )


def _tensors(engine: Engine, ema: Ema | None, rank: int) -> dict[str, SavedSlice]:
    """Masters, their EMA, and the optimizer's state."""
    found: dict[str, SavedSlice] = {}
    for name, value, shard in _held(engine, ema, rank):
        if shard is not None:
            found[name] = _run(value, shard)
        elif name.startswith(LOCAL):
            found[name] = SavedSlice(value.detach().view(-1), 0, value.numel())
        else:
            found[name] = _number(value)
    return found


def _held(engine: Engine, ema: Ema | None, rank: int) -> Iterator[tuple[str, Any, Shard | None]]:
    """The same by name: a tensor and its run; or, without a run, a number or a local part."""
    for shard in engine.shards():
        master = engine.masters[shard.master]
        yield f"master.{shard.name}", _local(master), shard
        for i, averages in enumerate([] if ema is None else ema.every):
            yield f"{ema_kind(i)}.{shard.name}", averages[shard.master], shard
        for key, value in engine.optimizer.state.get(master, {}).items():
            if _is_elementwise(value, master):
                yield f"state.{key}.{shard.name}", _local(value), shard
            elif _is_number(value):
                yield f"state.{key}.{shard.name}", value, None
    for i, master in enumerate(engine.masters):
        for key, value in engine.optimizer.state.get(master, {}).items():
            if not _is_elementwise(value, master) and not _is_number(value):
                for name, part in parts(f"{LOCAL}{rank}.{i}.{key}", value):
                    yield name, part, None
    for key, value in optim.group_state(engine.optimizer).items():
        yield f"{GROUP}{key}", torch.tensor(value, dtype=torch.float64), None  # with all of its digits


def replicated(engine: Engine, ema: Ema | None) -> Iterator[tuple[str, torch.Tensor]]:
    """What `engine.replicas()` names, each storage once, by name."""
    held, seen = engine.replicas(), set[tuple[int, int]]()
    if held is None:
        return
    state = ((name, value) for name, value, _ in _held(engine, ema, 0)) if held.masters else ()
    for name, value in (*held.weights, *state):
        for each, part in parts(name, torch.as_tensor(value)):
            place = part.data_ptr(), part.nbytes
            if part.numel() and place not in seen:
                seen.add(place)
                yield each, part.detach()


def make_state(engine: Engine, saved: Collection[str], rank: int) -> None:
    """Have the optimizer allocate state for each master that has saved state, by the names of what was saved.

    A step on a zero gradient makes it sharded, quantised or paged as always. The values that this writes are
    overwritten by the saved ones.
    """
    with_state = {name.split(".", 2)[2] for name in saved if name.startswith("state.")}
    kept = {int(name.split(".")[2]) for name in saved if name.startswith(f"{LOCAL}{rank}.")}
    kept |= {shard.master for shard in engine.shards() if shard.name in with_state}
    for i in sorted(kept):
        master = engine.masters[i]
        with engine.on_device(master):
            optim.make_state(engine.optimizer, master)


def adopt(engine: Engine, filled: dict[str, SavedSlice]) -> None:
    """Put back what is no view: numbers, and the loss scale."""
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


def _run(tensor: torch.Tensor, shard: Shard) -> SavedSlice:
    return SavedSlice(tensor.detach().view(-1)[shard.start : shard.start + shard.length], shard.offset, shard.numel)


def _number(value: Any) -> SavedSlice:
    return SavedSlice(torch.as_tensor(value).detach().view(1), 0, 1, number=True)


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _is_elementwise(value: Any, master: torch.Tensor) -> bool:
    """Whether `value` has an element for each of the master's: then it can be cut where the master can. A count of
    steps is one number, though this process has one element of the master."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    value = _local(value)
    alike = value.numel() == _local(master).numel()  # Prodigy flattens some
    return alike and value.is_floating_point() and not is_traceable_wrapper_subclass(value)


def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a tensor consists of here: torchao's quantised ones hold codes, scales and a map."""
    tensor = _local(tensor)
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from parts(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
