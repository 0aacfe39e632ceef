"""The fake device: a GPU that this machine does not have, or its own CPU without touching memory.

A step runs on it as it would for real, with the memory of tensors left out. For kernels of CUDA the device is
PrivateUse1, registered as a python backend: autograd on fake `cuda` tensors aborts a CPU build of torch, and
on `meta` the host and the device are one. For kernels of the CPU it is the CPU itself.

Most of what is patched here stays patched, and with the python backend registered an interpreter does not shut
down cleanly: for a process of its own that leaves with `os._exit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from bigdit.rehearse.engines import streams
from bigdit.rehearse.kernels import masks
from bigdit.rehearse.kernels.attention import CudaAttention
from bigdit.rehearse.kernels.mended import Kernels as KernelRules
from bigdit.rehearse.kernels.mended import claim_cuda_kernels
from bigdit.rehearse.kernels.modules import assignable_data, convert_in_place
from bigdit.rehearse.kernels.subclasses import make_subclass
from bigdit.rehearse.request import A100_MULTIPROCESSORS, Kernels

FAKE_GPU = "fakegpu"

_AMPLE = 1 << 50


@contextmanager
def fake_device(
    kernels: Kernels,
    compute_capability: tuple[int, int],
    device_bytes: int | None = None,
    multiprocessors: int = A100_MULTIPROCESSORS,
) -> Iterator[torch.device]:
    """Tensors are fake in here; on the device given they are laid out as the kernels would lay them out.

    `device_bytes`: what engines that ask are told the card has; None: more than they want.
    """
    fakes = FakeTensorMode()  # imports what looks at the things patched below
    fakes.cache_enabled = False  # answers are kept under cheaper keys, and making its entries takes a sixth of the time
    supports = fakes.cpp_meta_supports_symint
    fakes.cpp_meta_supports_symint = lambda func: supports(func) or _is_laid_out_in_cpp(func)  # type: ignore[method-assign]
    nn.Module._apply = convert_in_place
    FakeTensor.data = assignable_data
    torch.Tensor._make_subclass = staticmethod(make_subclass)
    for types in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
        # torch takes the multi-tensor path for plain tensors alone, by their exact type; a fake one stands for those.
        if FakeTensor not in types:
            types.append(FakeTensor)
    rules = KernelRules(fakes, kernels)
    attention, one_hot = F.scaled_dot_product_attention, F.one_hot
    F.one_hot = masks.one_hot
    if kernels == "cuda":
        _register_fake_gpu()
        streams.count_anew()
        card = torch.get_device_module(FAKE_GPU)
        card.compute_capability, card.device_bytes = compute_capability, device_bytes
        card.multiprocessors = multiprocessors
        # torch's own dispatcher would fall to the mathematical form, which saves quadratic tensors.
        F.scaled_dot_product_attention = CudaAttention(compute_capability)
    try:
        # Backward nodes run in this thread, in the order of the ready queue, as they do on a CPU.
        with fakes, rules, torch.autograd.set_multithreading_enabled(False):
            yield torch.device(FAKE_GPU if kernels == "cuda" else "cpu")
    finally:
        F.scaled_dot_product_attention, F.one_hot = attention, one_hot


@functools.cache
def _is_laid_out_in_cpp(func: torch._ops.OpOverload) -> bool:
    """Whether torch has a kernel that only lays the results out, as those of CUDA do: FakeTensorMode would rather take
    a decomposition in python, which takes up to twenty times as long.

    Source: _dispatch_impl in torch/_subclasses/fake_tensor.py, torch 2.13.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta")


class _FakeGpu:
    """What torch asks of a device's module. `compute_capability` and the like are of the card it stands for."""

    compute_capability = (8, 0)
    multiprocessors = A100_MULTIPROCESSORS
    device_bytes: int | None = None
    kernels: torch.library.Library

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    Stream = streams.Stream
    Event = streams.Event

    def current_stream(self, device: object = None) -> streams.Stream:
        return streams.current()

    def default_stream(self, device: object = None) -> streams.Stream:
        return streams.DEFAULT

    def stream(self, stream: streams.Stream | None) -> AbstractContextManager[None]:
        return streams.entered(stream)

    # The recorder knows of both.
    def empty_cache(self) -> None: ...

    def memory_allocated(self, device: object = None) -> int:
        return 0

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Bytes free and in all."""
        total = _AMPLE if self.device_bytes is None else self.device_bytes
        return max(total - self.memory_allocated(), 0), total

    def set_device(self, device: object) -> None: ...

    def synchronize(self, device: object = None) -> None: ...

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


def _from_host(tensor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor` and `as_tensor` make a tensor of the host and copy it with all modes off: fakes do not survive."""

    @functools.wraps(tensor)
    def build(data: Any, *, device: torch.device | str | None = None, **options: Any) -> torch.Tensor:
        made = tensor(data, **options)
        return made if device is None else made.to(device)

    return build


def _register_fake_gpu() -> None:
    if torch._C._get_privateuse1_backend_name() == FAKE_GPU:
        return
    _setup_privateuseone_for_python_backend(FAKE_GPU, _FakeGpu())
    _FakeGpu.kernels = claim_cuda_kernels()
    torch.Generator = _HostGenerator
    torch.tensor, torch.as_tensor = _from_host(torch.tensor), _from_host(torch.as_tensor)
    FakeTensor.record_stream = lambda tensor, stream: None
