"""What DeepSpeed wants of its peers and of its device, answered where neither they nor data are there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator, utils
from deepspeed.utils import groups, nvtx
from torch import nn

from bigdit.engines.deepspeed import forget
from bigdit.rehearse.engines.deepspeed_accelerator import FakeGpuAccelerator
from bigdit.rehearse.engines.deepspeed_peers import once_for_all
from bigdit.rehearse.kernels import reads
from bigdit.rehearse.request import Kernels

# Its parent has another attribute by this name.
_comm: Any = importlib.import_module("deepspeed.comm.comm")


@contextmanager
def alone(kernels: Kernels, world_size: int) -> Iterator[None]:
    """DeepSpeed starts and steps alone in here, as one of `world_size`, on the device of these kernels."""
    set_accelerator(FakeGpuAccelerator() if kernels == "cuda" else CPU_Accelerator())
    nvtx.enable_nvtx = False  # marks for a profiler, at every call
    if utils.get_lst_from_rank0.__module__ != __name__:
        utils.get_lst_from_rank0 = _agreeing(utils.get_lst_from_rank0)
        utils.assert_lst_len_same_as_other_ranks = _agreeing_on_length
        for module in (partitioned_param_coordinator, parameter_offload):
            module.iter_params = _asked_often(module.iter_params)
    try:
        # The CPU's bytes are counted one by one, and what stands in for loops counts CUDA's blocks.
        with once_for_all(world_size) if kernels == "cuda" else nullcontext():
            yield
    finally:
        forget()
        # The next group may have another size.
        groups._release_process_group_references()
        _comm.cdb = None


def _agreeing(broadcast: Callable[[list[int]], object]) -> Callable[[list[int]], list[int]]:
    """ZeRO-3 checks that all processes gather the same parameters: the first one's list is everybody's.

    The check runs as it is, with the memory that it takes; only what it reads back is not in a fake tensor.
    """

    def answered(numbers: list[int]) -> list[int]:
        with reads.by_engine():
            broadcast(numbers)
        return numbers

    return answered


def _asked_often(
    iter_params: Callable[[nn.Module, bool], Iterable[nn.Parameter]],
) -> Callable[[nn.Module, bool], Iterable[nn.Parameter]]:
    """A module's own parameters without looking for those of others: asked of hundreds of modules after each one."""

    def own(module: nn.Module, recurse: bool = False) -> Iterable[nn.Parameter]:
        if recurse:
            return iter_params(module, True)
        params = [param for param in module._parameters.values() if param is not None]
        return [*params, *(param for _, param in module.ds_external_parameters())]

    return own


def _agreeing_on_length(numbers: list[int]) -> None:
    utils.get_lst_from_rank0([len(numbers)])  # eight bytes sent, as by the check that it stands for
