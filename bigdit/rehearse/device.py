"""The fake device: a GPU that this machine does not have, or its own CPU without touching memory.

A step runs on it as it would for real, with the memory of tensors left out. For kernels of CUDA the device is
PrivateUse1, registered as a python backend: autograd on fake `cuda` tensors aborts a CPU build of torch, and
on `meta` the host and the device are one. For kernels of the CPU it is the CPU itself.

Most of what is patched here stays patched, and with the python backend registered an interpreter does not shut
down cleanly: for a process of its own that leaves with `os._exit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from bigdit.rehearse.attention import CudaAttention
from bigdit.rehearse.kernels import CpuKernels, CudaKernels
from bigdit.rehearse.modules import convert_in_place
from bigdit.rehearse.request import Kernels

FAKE_GPU = "fakegpu"


@contextmanager
def fake_device(kernels: Kernels, compute_capability: tuple[int, int]) -> Iterator[torch.device]:
    """Tensors are fake in here; on the device given they are laid out as the kernels would lay them out."""
    nn.Module._apply = convert_in_place
    for types in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
        # torch takes the multi-tensor path for plain tensors alone, by their exact type; a fake one stands for those.
        if FakeTensor not in types:
            types.append(FakeTensor)
    rules = CudaKernels() if kernels == "cuda" else CpuKernels()
    attention = F.scaled_dot_product_attention
    if kernels == "cuda":
        _register_fake_gpu()
        # torch's own dispatcher would fall to the mathematical form, which saves quadratic tensors.
        F.scaled_dot_product_attention = CudaAttention(compute_capability)
    try:
        # Backward nodes run in this thread, in the order of the ready queue, as they do on a CPU.
        with FakeTensorMode(), rules, torch.autograd.set_multithreading_enabled(False):
            yield torch.device(FAKE_GPU if kernels == "cuda" else "cpu")
    finally:
        F.scaled_dot_product_attention = attention


class _FakeGpu:
    """What torch asks of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_autocast_enabled(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False


class _HostGenerator(torch.Generator):
    """A python backend has no generator of its own, and fake tensors draw nothing: the host's stands in."""

    def __new__(cls, device: torch.device | str = "cpu") -> torch.Generator:
        return super().__new__(cls, "cpu")


def _register_fake_gpu() -> None:
    if torch._C._get_privateuse1_backend_name() == FAKE_GPU:
        return
    _setup_privateuseone_for_python_backend(FAKE_GPU, _FakeGpu())
    torch.Generator = _HostGenerator
