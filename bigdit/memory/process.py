"""Non-torch memory of a process, as in nvidia-smi: its CUDA context and NCCL's buffers.

cuBLAS and cuDNN workspaces are not included: torch takes them from its caching allocator. The figures vary with
drivers, CUDA and NCCL, so each is a range; each has its measurement or derivation.
"""

from __future__ import annotations

from pydantic import NonNegativeInt, model_validator

from bigdit.catalog.gpus import Gpu, capability
from bigdit.strategy import Strategy, Strict
from bigdit.units import KIB, MIB


class ByteRange(Strict):
    """A range from `low_bytes` to `high_bytes`, both possible."""

    low_bytes: NonNegativeInt
    high_bytes: NonNegativeInt

    @model_validator(mode="after")
    def _low_is_low(self) -> ByteRange:
        if self.low_bytes > self.high_bytes:
            raise ValueError(f"{self.low_bytes} to {self.high_bytes} is no range")
        return self

    def __add__(self, other: ByteRange) -> ByteRange:
        return ByteRange(low_bytes=self.low_bytes + other.low_bytes, high_bytes=self.high_bytes + other.high_bytes)

    def __mul__(self, times: int) -> ByteRange:
        return ByteRange(low_bytes=self.low_bytes * times, high_bytes=self.high_bytes * times)


CHANNELS = {
    (7, 0): (2, 12),  # V100, 6 NVLinks
    (7, 5): (2, 4),  # T4 to Quadro RTX 6000, 2 NVLinks
    (8, 0): (2, 24),  # A30 to A100, 12 NVLinks
    (8, 6): (2, 8),  # A2 to A40, 4 NVLinks
    (8, 9): (2, 4),  # RTX 2000 Ada to L40S, no NVLink
    (9, 0): (2, 32),  # H20 to H200
    (10, 0): (2, 32),  # B200
    (10, 3): (2, 32),  # B300
    (12, 0): (2, 4),  # RTX 5060 to RTX PRO 6000, no NVLink
}
"""Channels that NCCL opens between GPUs of one compute capability: over PCIe, over the most NVLinks.

Source: measured: 2 over PCIe (rwth-i6/returnn#1469), 24 on A100 (NVIDIA/nccl#1785), 32 on H100 (NVIDIA/nccl#1685).
Derived: two to an NVLink, as on A100 (NVIDIA/nccl#1225), 4 where there are two links or none, 32 on Blackwell as on
Hopper.
"""

STACK = KIB
"""Bytes of stack that a context reserves for each thread that can be resident.

Source: cudaLimitStackSize's default; 216 MiB on an A100 of 108 × 2048 threads (arcs-skku/EMDC_llvm#13).
"""

DRIVER = ByteRange(low_bytes=133 * MIB, high_bytes=263 * MIB)
"""The rest of a context before the first kernel.

Derived from measurements of torch processes, less STACK: 256 MiB on an RTX 3090 of 82 × 1536 threads (torch 2.7,
CUDA 12.8; invoke-ai/InvokeAI#9413), 426 MiB on an RTX 6000 Ada of 142 × 1536 (torch 2.10, CUDA 13.0;
unslothai/unsloth-zoo#1053), 527 MiB on an H100 of 132 × 2048 (torch 2.11, CUDA 13.0, driver 580.159;
benchmarks/gpu_matrix.md).
"""

KERNELS = ByteRange(low_bytes=0, high_bytes=256 * MIB)
"""Kernels and library handles that a run loads into the context at first use.

Measured above the context: 0.16 GiB on H100 (vllm-project/vllm#12126) and 0.20 GiB (vllm-project/vllm#14447); 240 to
256 MiB in training steps of 22 families on an H100 (benchmarks/gpu_matrix.md).
"""

NCCL_LIBRARY = ByteRange(low_bytes=0, high_bytes=228 * MIB)
"""NCCL's memory before it connects to other processes.

Derived from a measurement: 484 MiB for one rank on an RTX 3090 (NVIDIA/nccl#2366), less its context of
256 MiB.
"""

NCCL_ALONE = {
    "single": ByteRange(low_bytes=0, high_bytes=0),
    "deepspeed": ByteRange(low_bytes=0, high_bytes=580 * MIB),
    "fsdp2": ByteRange(low_bytes=0, high_bytes=84 * MIB),
}
"""The communicator of a single process by engine: DeepSpeed makes and uses one, FSDP2 only makes one.

Measured on an H100 (torch 2.11, NCCL of CUDA 13.0; benchmarks/gpu_matrix.md) in ZeRO-2 and FSDP2. Collectives alone
took 564 MiB with the first communicator, and 388 MiB with a second.
"""

NCCL_CHANNEL = ByteRange(low_bytes=20 * MIB, high_bytes=29 * MIB)
"""The buffers of one channel of a communicator, with rings and trees and default NCCL_BUFFSIZE.

Low is derived: a buffer of 10 MiB (NVIDIA/nccl#1685) for each of a ring's two neighbours. High is measured: 688 MiB
for 24 channels on four A100. With two A100 it was 544 MiB (NVIDIA/nccl#964).
"""


def cuda_context(gpu: Gpu) -> ByteRange:
    """The context of a process that trains on this GPU. Raises UserError for an unknown compute capability."""
    stacks = gpu.multiprocessors * capability(gpu.compute_capability).threads * STACK
    return ByteRange(low_bytes=stacks, high_bytes=stacks) + DRIVER + KERNELS


def nccl_buffers(gpu: Gpu, world_size: int, communicators: int = 1) -> ByteRange:
    """NCCL's memory on the GPU with this number of communicators; none for a single process.

    The number of processes does not matter beyond two nodes (NVIDIA/nccl#986).
    """
    if world_size == 1:
        return ByteRange(low_bytes=0, high_bytes=0)
    few, many = CHANNELS[gpu.compute_capability]
    channels = ByteRange(low_bytes=NCCL_CHANNEL.low_bytes * few, high_bytes=NCCL_CHANNEL.high_bytes * many)
    return NCCL_LIBRARY + channels * communicators


def non_torch_memory(gpu: Gpu, world_size: int, communicators: int = 1) -> ByteRange:
    """The non-torch memory of a process on the GPU, whatever it runs; a single process has no communicator.

    Raises UserError as `cuda_context` does.
    """
    return cuda_context(gpu) + nccl_buffers(gpu, world_size, communicators)


def non_torch_memory_of(strategy: Strategy, gpu: Gpu) -> ByteRange:
    """The non-torch memory of a process that trains by `strategy`. HSDP has a communicator for each of its two groups,
    and context parallelism one for those that share a sample; two more with rings. Raises as `cuda_context` does."""
    if strategy.world_size == 1:
        return cuda_context(gpu) + NCCL_ALONE[strategy.engine]
    communicators = 2 if 1 < strategy.dp_replicate < strategy.world_size else 1
    communicators += (1 < strategy.cp < strategy.world_size) + 2 * (1 < strategy.cp_ring < strategy.cp)
    return non_torch_memory(gpu, strategy.world_size, communicators)
