"""What nvidia-smi shows of a process beside torch's reserved memory: its CUDA context and NCCL's buffers.

cuBLAS and cuDNN workspaces are not here: torch takes them from the caching allocator, so they are reserved memory.
These figures move with drivers, CUDA and NCCL, so each is a low and a high; what was measured and what follows from
it is said with each.
"""

from __future__ import annotations

from pydantic import NonNegativeInt, model_validator

from bigdit.errors import UserError
from bigdit.spec import Strict
from bigdit.units import KIB, MIB


class ByteRange(Strict):
    """Between `low_bytes` and `high_bytes`, both possible."""

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


class Architecture(Strict):
    """Cards of one compute capability: `threads` resident on one of `sms` multiprocessors (fewest, most), and the
    `channels` that NCCL opens between them (over PCIe, over the most NVLinks)."""

    threads: NonNegativeInt
    sms: tuple[NonNegativeInt, NonNegativeInt]
    channels: tuple[NonNegativeInt, NonNegativeInt]


ARCHITECTURES = {
    (7, 0): Architecture(threads=2048, sms=(80, 80), channels=(2, 12)),  # V100, 6 NVLinks
    (7, 5): Architecture(threads=1024, sms=(40, 72), channels=(2, 4)),  # T4 to Quadro RTX 6000, 2 NVLinks
    (8, 0): Architecture(threads=2048, sms=(56, 108), channels=(2, 24)),  # A30 to A100, 12 NVLinks
    (8, 6): Architecture(threads=1536, sms=(10, 84), channels=(2, 8)),  # A2 to A40, 4 NVLinks
    (8, 9): Architecture(threads=1536, sms=(22, 142), channels=(2, 4)),  # RTX 2000 Ada to L40S, no NVLink
    (9, 0): Architecture(threads=2048, sms=(78, 132), channels=(2, 32)),  # H20 to H200
    (10, 0): Architecture(threads=2048, sms=(148, 148), channels=(2, 32)),  # B200
    (10, 3): Architecture(threads=2048, sms=(148, 160), channels=(2, 32)),  # B300
    (12, 0): Architecture(threads=1536, sms=(30, 188), channels=(2, 4)),  # RTX 5060 to RTX PRO 6000, no NVLink
}
"""By compute capability.

Source: threads, "Maximum number of resident threads per SM" in the CUDA C++ programming guide; multiprocessors,
NVIDIA's data sheets; both entered from memory of these, not read again. Channels measured: 2 over PCIe
(rwth-i6/returnn#1469), 24 on A100 (NVIDIA/nccl#1785), 32 on H100 (NVIDIA/nccl#1685). Channels derived: two to an
NVLink, as on A100 (NVIDIA/nccl#1225), 4 where there are two links or none, 32 on Blackwell as on Hopper.
"""

STACK = KIB
"""Bytes of stack of each thread that can be resident, which a context holds from its start.

Source: cudaLimitStackSize's default; 216 MiB on an A100 of 108 × 2048 threads (arcs-skku/EMDC_llvm#13).
"""

DRIVER = ByteRange(low_bytes=133 * MIB, high_bytes=213 * MIB)
"""The rest of a context before any kernel ran.

Derived from measurements of torch processes, less STACK: 256 MiB on an RTX 3090 of 82 × 1536 threads (torch 2.7,
CUDA 12.8; invoke-ai/InvokeAI#9413), 426 MiB on an RTX 6000 Ada of 142 × 1536 (torch 2.10, CUDA 13.0;
unslothai/unsloth-zoo#1053).
"""

KERNELS = ByteRange(low_bytes=0, high_bytes=205 * MIB)
"""Kernels and library handles that a run of a model loads into the context, each when it is first used.

Measured: 0.16 GiB on H100 (vllm-project/vllm#12126) and 0.20 GiB (vllm-project/vllm#14447) above the context.
"""

NCCL_LIBRARY = ByteRange(low_bytes=0, high_bytes=228 * MIB)
"""What NCCL holds before it connects to anyone.

Derived from a measurement: 484 MiB for one rank on an RTX 3090 (NVIDIA/nccl#2366), less its context of
256 MiB.
"""

NCCL_CHANNEL = ByteRange(low_bytes=20 * MIB, high_bytes=29 * MIB)
"""The buffers of one channel of a communicator, with rings and trees and default NCCL_BUFFSIZE.

Low derived: a buffer of 10 MiB (NVIDIA/nccl#1685) for each of a ring's two neighbours. High measured: 688 MiB
over the 24 channels of four A100, of which two alone took 544 MiB (NVIDIA/nccl#964).
"""


def cuda_context(compute_capability: tuple[int, int]) -> ByteRange:
    """The context of a process that trains on one card. Raises UserError for an unknown compute capability."""
    cards = _architecture(compute_capability)
    fewest, most = (sms * cards.threads * STACK for sms in cards.sms)
    return ByteRange(low_bytes=fewest, high_bytes=most) + DRIVER + KERNELS


def nccl_buffers(compute_capability: tuple[int, int], world_size: int, communicators: int = 1) -> ByteRange:
    """NCCL's memory on one card; none where a process is alone. Raises UserError as `cuda_context` does.

    How many processes there are does not matter beyond two nodes (NVIDIA/nccl#986).
    """
    cards = _architecture(compute_capability)
    if world_size == 1:
        return ByteRange(low_bytes=0, high_bytes=0)
    few, many = cards.channels
    channels = ByteRange(low_bytes=NCCL_CHANNEL.low_bytes * few, high_bytes=NCCL_CHANNEL.high_bytes * many)
    return NCCL_LIBRARY + channels * communicators


def beside_torch(compute_capability: tuple[int, int], world_size: int, communicators: int = 1) -> ByteRange:
    """What the process takes of a card beside torch's reserved memory. Raises UserError as `cuda_context` does."""
    return cuda_context(compute_capability) + nccl_buffers(compute_capability, world_size, communicators)


def process_bytes(
    reserved_bytes: int, compute_capability: tuple[int, int], world_size: int, communicators: int = 1
) -> ByteRange:
    """What nvidia-smi shows for a process that has reserved that much. Raises UserError as `cuda_context` does."""
    reserved = ByteRange(low_bytes=reserved_bytes, high_bytes=reserved_bytes)
    return reserved + beside_torch(compute_capability, world_size, communicators)


def _architecture(compute_capability: tuple[int, int]) -> Architecture:
    found = ARCHITECTURES.get(compute_capability)
    if found is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        asked = ".".join(map(str, compute_capability))
        raise UserError(f"what a process takes at compute capability {asked} is not known; known are {known}")
    return found
