"""What the processes of one machine take of its memory."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from bigdit.encoders.host_bytes import HostWeights
from bigdit.memory import Timeline, host_memory
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
    """`process_bytes` are tensors of one process at the most (the model as it is loaded; then offloaded state, pinned
    buffers, batches read ahead), and `steps_bytes` those of its steps, of which `page_locked_bytes` are locked;
    `checkpoint_bytes` beside the latter are the copy that it saves its state from;
    `samples_bytes` are weights that the main process draws pictures on the way with; `node_bytes` is the sum over the
    processes of the machine that has it, with the libraries'."""

    process_bytes: NonNegativeInt
    steps_bytes: NonNegativeInt
    checkpoint_bytes: NonNegativeInt
    samples_bytes: NonNegativeInt
    page_locked_bytes: NonNegativeInt
    processes_per_node: PositiveInt
    node_bytes: NonNegativeInt


def host_need(
    host_timeline: Timeline, checkpoint_bytes: int, cluster: Cluster, samples: HostWeights | None = None
) -> HostNeed:
    """What a machine of `cluster` needs for processes that each did as recorded, save so many bytes, and draw
    `samples`.

    In `host_timeline` are the start, when each process holds the whole model (and the encoders, with features
    online) before it moves to the card, and two steps. The page cache of a feature store's files is not counted:
    the system takes what is free for it.
    """
    host = host_memory(host_timeline)
    return HostNeed(
        process_bytes=host.peak_bytes,
        steps_bytes=host.steps_bytes,
        checkpoint_bytes=checkpoint_bytes,
        samples_bytes=0 if samples is None else samples.known_bytes,
        page_locked_bytes=host.page_locked_bytes,
        processes_per_node=cluster.processes_per_node,
        node_bytes=node_bytes(max(host.saving(checkpoint_bytes)), cluster, samples),
    )


def node_bytes(process_bytes: int, cluster: Cluster, samples: HostWeights | None = None) -> int:
    """What the processes of the first machine take that each have tensors of so many bytes; the main one is there."""
    drawn = 0 if samples is None else samples.known_bytes
    return cluster.processes_per_node * (process_bytes + LIBRARIES_BYTES) + drawn


def uncounted(samples: HostWeights | None) -> tuple[str, ...]:
    """A line where it is not known what pictures on the way take."""
    if samples is None or samples.unknown is None:
        return ()
    return (f"samples: what the {samples.unknown} takes of the host is not known, and not counted: no weights there",)
