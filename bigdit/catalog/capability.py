"""What a device of one compute capability reports of its multiprocessors: the same for every card that has it."""

from __future__ import annotations

from pydantic import PositiveInt

from bigdit.errors import UserError
from bigdit.spec import Strict
from bigdit.units import KIB

WARP_SIZE = 32
"""Threads that execute together, at every compute capability. Source: as of CAPABILITIES."""

THREADS_PER_BLOCK = 1024
"""The most threads of a block, at every compute capability. Source: as of CAPABILITIES."""

REGISTERS = 65536
"""Registers of 32 bits of a multiprocessor, and the most of a block, at every one here. Source: as of CAPABILITIES."""

SHARED_PER_BLOCK_BYTES = 48 * KIB
"""Shared memory that a block has without asking for more, at every one here. Source: as of CAPABILITIES."""


class Capability(Strict):
    """The most that one multiprocessor holds at a time: `threads` and `blocks`; its shared memory in bytes, and how
    much of that a single block may ask for (`shared_optin_bytes`). `cores` are its fp32 units."""

    threads: PositiveInt
    blocks: PositiveInt
    shared_bytes: PositiveInt
    shared_optin_bytes: PositiveInt
    cores: PositiveInt


def _of(threads: int, blocks: int, shared_kib: int, optin_kib: int, cores: int) -> Capability:
    shared, optin = shared_kib * KIB, optin_kib * KIB
    return Capability(threads=threads, blocks=blocks, shared_bytes=shared, shared_optin_bytes=optin, cores=cores)


CAPABILITIES = {
    (7, 0): _of(threads=2048, blocks=32, shared_kib=96, optin_kib=96, cores=64),
    (7, 5): _of(threads=1024, blocks=16, shared_kib=64, optin_kib=64, cores=64),
    (8, 0): _of(threads=2048, blocks=32, shared_kib=164, optin_kib=163, cores=64),
    (8, 6): _of(threads=1536, blocks=16, shared_kib=100, optin_kib=99, cores=128),
    (8, 9): _of(threads=1536, blocks=24, shared_kib=100, optin_kib=99, cores=128),
    (9, 0): _of(threads=2048, blocks=32, shared_kib=228, optin_kib=227, cores=128),
    (10, 0): _of(threads=2048, blocks=32, shared_kib=228, optin_kib=227, cores=128),
    (10, 3): _of(threads=2048, blocks=32, shared_kib=228, optin_kib=227, cores=128),
    (12, 0): _of(threads=1536, blocks=24, shared_kib=100, optin_kib=99, cores=128),
}
"""By compute capability.

Source: table "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide, with blocks and
shared memory as cuda_occupancy.h of CUDA 13.5 has them; cores: "Throughput of Native Arithmetic Instructions" there,
32-bit floating-point add a clock cycle and multiprocessor.
"""


def capability(compute_capability: tuple[int, int]) -> Capability:
    """Raises UserError for a compute capability that no card of the catalogue has."""
    found = CAPABILITIES.get(compute_capability)
    if found is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        asked = ".".join(map(str, compute_capability))
        raise UserError(f"compute capability {asked} is not in the catalogue, which has {known}")
    return found
