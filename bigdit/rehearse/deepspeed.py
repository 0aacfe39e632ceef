"""What DeepSpeed wants of its peers, answered where neither peers nor data are there."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed.comm import torch as backend
from deepspeed.runtime.zero import utils


def do_without_peers() -> None:
    """Let DeepSpeed start and step alone in a group of any size. To be called before it is initialised."""
    # Its shared-memory collectives serve inference on CPUs; they are compiled at first use, and wait for the others.
    backend.build_shm_op = _no_shm_op
    if utils.get_lst_from_rank0.__module__ != __name__:
        utils.get_lst_from_rank0 = _agreeing(utils.get_lst_from_rank0)


def _no_shm_op() -> None:
    return None


def _agreeing(broadcast: Callable[[list[int]], object]) -> Callable[[list[int]], list[int]]:
    """ZeRO-3 checks that all processes gather the same parameters: the first one's list is everybody's.

    The check runs as it is, with the memory that it takes; only what it reads back is not in a fake tensor.
    """

    def answered(numbers: list[int]) -> list[int]:
        broadcast(numbers)
        return numbers

    return answered
