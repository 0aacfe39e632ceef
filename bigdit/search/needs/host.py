"""What the processes of one machine take of its memory."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from bigdit.memory import Timeline
from bigdit.memory.host import host_memory
from bigdit.spec import Strict
from bigdit.speed.cluster import Cluster
from bigdit.units import MIB

LIBRARIES_BYTES = 3100 * MIB
"""What Python, torch and the other libraries take in a process that trains on a card, beside its tensors.

Without CUDA, 494 MiB: resident set after the imports of a training process on Linux x86-64 (Python 3.11,
torch 2.13.0+cpu, DeepSpeed 0.19.8, diffusers 0.42.1, transformers 5.23, bitsandbytes 0.50.2), of which 110 MiB are
shared between processes; torch alone is 218 MiB of it. With CUDA, 2.746 GiB where the same program takes 358 MiB
without (pytorch/pytorch#70416, libtorch of 2021): 2454 MiB more for the driver's and the libraries' host side. CUDA
has loaded its kernels lazily since 11.7, and takes less: rounded up, this is a bound and no measurement of today's
builds.
"""


class HostNeed(Strict):
    """`process_bytes` are tensors of one process (offloaded state, pinned buffers, batches read ahead), of which
    `page_locked_bytes` are locked, and `checkpoint_bytes` beside them the copy that it saves its state from;
    `node_bytes` is the sum over the processes of a machine with the libraries'."""

    process_bytes: NonNegativeInt
    checkpoint_bytes: NonNegativeInt
    page_locked_bytes: NonNegativeInt
    processes_per_node: PositiveInt
    node_bytes: NonNegativeInt


def host_need(host_timeline: Timeline, checkpoint_bytes: int, cluster: Cluster) -> HostNeed:
    """What a machine of `cluster` needs for processes that each did as rehearsed, and save so many bytes.

    In `host_timeline` are the start, when each process holds the whole model (and the encoders, with features
    online) before it moves to the card, and two steps. The page cache of a feature store's files is not counted:
    the system takes what is free for it.
    """
    host = host_memory(host_timeline)
    return HostNeed(
        process_bytes=host.peak_bytes,
        checkpoint_bytes=checkpoint_bytes,
        page_locked_bytes=host.page_locked_bytes,
        processes_per_node=cluster.processes_per_node,
        node_bytes=node_bytes(host.peak_bytes + checkpoint_bytes, cluster),
    )


def node_bytes(process_bytes: int, cluster: Cluster) -> int:
    """What a machine's processes take that each have tensors of so many bytes."""
    return cluster.processes_per_node * (process_bytes + LIBRARIES_BYTES)
