"""This process's share of the training state as named tensors, alike for every engine.

Masters and optimizer state are saved as they lie on this process: flat, sharded or whole. So a state is read
back by the same engine on as many processes, which the checkpoint checks before it calls this.

    master.<i>              what the optimizer steps
    state.<i>.<key>         its state: a tensor, a number, or one tensor for each part of a quantised one
    scaler.<key>, rng       of fp16 and of stochastic rounding
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bigdit import optim
from bigdit.engines.protocol import Engine
from bigdit.errors import UserError

Saved = dict[str, torch.Tensor]


def local_state(engine: Engine) -> Saved:
    """Everything that the next step depends on, on the host; numbers (bitsandbytes' step) as 0-dim tensors."""
    tensors = {}
    for i, master in enumerate(engine.masters):
        tensors[f"master.{i}"] = _to_host(_local(master))
        for key, value in engine.optimizer.state.get(master, {}).items():
            tensors |= {name: _to_host(part) for name, part in _parts(f"state.{i}.{key}", torch.as_tensor(value))}
    if engine.scaler is not None:
        tensors |= {f"scaler.{key}": torch.tensor(value) for key, value in engine.scaler.state_dict().items()}
    if engine.strategy.precision == "bf16_sr":
        tensors["rng"] = _rng(engine.device).get_rng_state()
    return tensors


@torch.no_grad()
def load_local_state(engine: Engine, tensors: Saved) -> None:
    """Put a saved state in place. Raises UserError where a tensor is missing or has another shape."""
    for i, master in enumerate(engine.masters):
        if any(name.startswith(f"state.{i}.") for name in tensors):
            _make_state(engine, master)
            state = engine.optimizer.state[master]
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    for name, part in _parts(f"state.{i}.{key}", value):
                        _copy(part, tensors, name)
                else:
                    state[key] = type(value)(tensors[f"state.{i}.{key}"].item())
        _copy(_local(master), tensors, f"master.{i}")
    if engine.scaler is not None:
        keys = engine.scaler.state_dict()
        engine.scaler.load_state_dict(keys | {key: tensors[f"scaler.{key}"].item() for key in keys})
    if engine.strategy.precision == "bf16_sr":
        _rng(engine.device).set_rng_state(tensors["rng"])


def _make_state(engine: Engine, master: torch.Tensor) -> None:
    """Have the optimizer allocate the state of `master` as it always does, sharded, quantised or paged.

    It steps on a zero gradient; what that writes is overwritten by what was saved.
    """
    held = master.grad  # with offload DeepSpeed keeps this tensor, and views of it
    master.grad = torch.zeros_like(master)
    optim.step_alone(engine.optimizer, master)
    master.grad = held


def _copy(part: torch.Tensor, tensors: Saved, name: str) -> None:
    saved = tensors.get(name)
    if saved is None or saved.shape != part.shape:
        found = "nothing" if saved is None else tuple(saved.shape)
        raise UserError(
            f"the checkpoint holds {found} for {name} of the optimizer, and this run has {tuple(part.shape)}: it "
            "was made by another model, engine or number of processes"
        )
    part.copy_(saved)


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a tensor consists of here: torchao's quantised ones keep codes, scales and a map."""
    tensor = _local(tensor)
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _parts(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # A copy, also on the CPU: bitsandbytes' quantisation maps share storage, which safetensors refuses.
    return tensor.detach().to("cpu", copy=True).contiguous()


def _rng(device: torch.device) -> Any:
    """Where the generator of `device` is read and set."""
    return torch if device.type == "cpu" else torch.get_device_module(device)
