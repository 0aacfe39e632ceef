"""The fake GPU as DeepSpeed's accelerator: every choice that it makes for CUDA, it makes here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from bigdit.rehearse.device import FAKE_GPU
from bigdit.rehearse.engines import streams


class FakeGpuAccelerator(CPU_Accelerator):
    """Answers as DeepSpeed's CUDA accelerator does: asynchronous, with streams, and with pinned host memory."""

    # Whether bf16 and fp16 exist is the card's affair, and asked before a rehearsal.
    def is_fp16_supported(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return FAKE_GPU if device_index is None else f"{FAKE_GPU}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(FAKE_GPU, 0)

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{FAKE_GPU}:0"

    def device_count(self) -> int:
        return 1

    # ZeRO-1 and 2 flatten weights on the card where it has room for them twice, and on the host else.
    def available_memory(self, device_index: int | None = None) -> int:
        free, _ = torch.get_device_module(FAKE_GPU).mem_get_info()
        return int(free)

    def total_memory(self, device_index: int | None = None) -> int:
        _, total = torch.get_device_module(FAKE_GPU).mem_get_info()
        return int(total)

    def memory_allocated(self, device_index: int | None = None) -> int:
        return int(torch.get_device_module(FAKE_GPU).memory_allocated())

    def empty_cache(self) -> None:
        torch.get_device_module(FAKE_GPU).empty_cache()

    def communication_backend_name(self) -> str:
        return "fake"

    # CUDA's legacy constructors: numbers of the host, as a tensor of the device.
    @property
    def FloatTensor(self) -> Callable[[list[float]], torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.float32, device=self.current_device_name())

    @property
    def ByteTensor(self) -> Callable[[list[int]], torch.Tensor]:
        return functools.partial(torch.tensor, dtype=torch.uint8, device=self.current_device_name())

    # Pinned host memory is a block of its own there; the CPU's accelerator knows none.
    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory
    _torch_pin_memory = DeepSpeedAccelerator._torch_pin_memory
    _torch_empty_pinned = DeepSpeedAccelerator._torch_empty_pinned

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == FAKE_GPU

    Stream = streams.Stream
    Event = streams.Event

    def stream(self, stream: streams.Stream | None) -> AbstractContextManager[None]:
        return streams.entered(stream)

    def current_stream(self, device_index: int | None = None) -> streams.Stream:
        return streams.current()

    def default_stream(self, device_index: int | None = None) -> streams.Stream:
        return streams.DEFAULT
