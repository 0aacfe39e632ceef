"""This process's share of the training state as named tensors, alike for every engine.

Masters and optimizer state are saved as they lie on this process: flat, sharded or whole. So a state is read
back by the same engine on as many processes, which the checkpoint checks before it calls this.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from bigdit.engines.protocol import Engine
from bigdit.errors import UserError


def local_state(engine: Engine) -> dict[str, torch.Tensor]:
    """`master.<i>` and `state.<i>.<key>` on the host; numbers (bitsandbytes' step) as 0-dim tensors."""
    tensors = {}
    for i, master in enumerate(engine.masters):
        tensors[f"master.{i}"] = _to_host(master)
        for key, value in engine.optimizer.state.get(master, {}).items():
            tensors[f"state.{i}.{key}"] = _to_host(torch.as_tensor(value))
    return tensors


@torch.no_grad()
def load_local_state(engine: Engine, tensors: dict[str, torch.Tensor]) -> None:
    """Put a saved state in place. Raises UserError where a tensor is missing or has another shape."""
    for i, master in enumerate(engine.masters):
        saved = tensors.get(f"master.{i}")
        local = _local(master)
        if saved is None or saved.shape != local.shape:
            found = "nothing" if saved is None else tuple(saved.shape)
            raise UserError(
                f"the checkpoint holds {found} for tensor {i} of the optimizer, and this run has "
                f"{tuple(local.shape)}: it was made by another model, engine or number of processes"
            )
        local.copy_(saved)
        prefix = f"state.{i}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        engine.optimizer.state[master] = {key: _like(master, key, value) for key, value in state.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # A copy, also on the CPU: bitsandbytes' quantisation maps share storage, which safetensors refuses.
    return _local(tensor).detach().to("cpu", copy=True).contiguous()


def _like(master: torch.Tensor, key: str, saved: torch.Tensor) -> torch.Tensor | int:
    """A saved piece of state as the optimizer keeps it: on the master's device, sharded as it is."""
    if key == "step" and not saved.is_floating_point():
        return int(saved)
    value = saved.to(master.device)
    if isinstance(master, DTensor) and value.shape == master.to_local().shape and value.ndim:
        return DTensor.from_local(
            value, master.device_mesh, master.placements, run_check=False, shape=master.shape, stride=master.stride()
        )
    return value
