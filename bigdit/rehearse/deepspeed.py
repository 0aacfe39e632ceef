"""What DeepSpeed reads from its peers, answered where neither peers nor data are there."""

from __future__ import annotations

from deepspeed.runtime.zero import utils


def agree_with_peers() -> None:
    """ZeRO-3 checks that all processes gather the same parameters: the first one's list is everybody's.

    The check runs as it is, with the memory that it takes; only what it reads back is not in a fake tensor.
    """
    broadcast = utils.get_lst_from_rank0
    if broadcast.__module__ == __name__:  # this process rehearsed before
        return

    def answered(numbers: list[int]) -> list[int]:
        broadcast(numbers)
        return numbers

    utils.get_lst_from_rank0 = answered
