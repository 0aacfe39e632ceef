"""Where a process encodes."""

from __future__ import annotations

from typing import Literal

import torch

from bigdit.errors import UserError


def encoding_device(asked: Literal["auto", "cpu", "cuda"], worker: int = 0) -> torch.device:
    """The device of the `worker`-th process of this machine: its GPUs by turns, or the CPU where auto finds none.

    Raises UserError where GPUs are asked for and there are none.
    """
    gpus = torch.cuda.device_count()
    if asked == "cpu" or (asked == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UserError("encoders.device is cuda, and torch finds no GPU here; use auto or cpu")
    return torch.device("cuda", worker % gpus)
