"""Seconds of a step: kernels by a roofline, launches, collectives, copies and CPU work."""

from __future__ import annotations

import math

from bigdit.catalog import Gpu
from bigdit.speed.roofline import KINDS, LAUNCH_SECONDS, kernel_seconds
from bigdit.speed.seconds import (
    LAUNCHED_SECONDS,
    NO_TIME,
    Cluster,
    Handed,
    Interval,
    Launches,
    StepRatio,
    StepTime,
    bound,
)
from bigdit.speed.work import Amount, Exchange, Load, Work
from bigdit.strategy import Strategy

PARTS = (*KINDS, "launches", "CPU", "collectives", "copies to and from CPU memory")
"""Parts of a step's seconds. `launches`: the GPU waits for the next kernel. `CPU`: optimizer and EMA that run on its
cores."""


def step_time(
    work: Work,
    strategy: Strategy,
    gpu: Gpu,
    cluster: Cluster,
    calibration: StepRatio | None = None,
    launches: Launches | None = None,
) -> StepTime:
    """Seconds of a step that does `work` on each `gpu` of `cluster`.

    Data, checkpoints and validation are not included. `calibration` moves and narrows the interval by measured steps.
    `launches`: counted on an emulated GPU; None: one for each operator.
    """
    micro_batches = (work.micro * strategy.grad_accum_steps + work.last).clamped()
    parts = dict.fromkeys(PARTS, NO_TIME)
    # The update waits for all gradients, and does not overlap with micro-batches. The CPU, which launches kernels, runs
    # ahead where they last longer.
    stages = (micro_batches, work.step.clamped())
    each, counts = LAUNCH_SECONDS, tuple(load.at("device").calls for load in stages)
    if launches is not None:
        each, counts = LAUNCHED_SECONDS, (launches.micro * strategy.grad_accum_steps, launches.step)
    for load, count in zip(stages, counts, strict=True):
        for name, seconds in _stage(load, each * count, strategy, gpu, cluster).items():
            parts[name] += seconds
    waits = bound(parts["launches"], sum(parts.values(), NO_TIME))
    handed = Handed(count=sum(counts), counted=launches is not None, seconds=each * sum(counts), bound=waits)
    if calibration is not None:
        parts = calibration.applied(parts)
    shown = {name: part for name, part in parts.items() if part.high > 0}
    return StepTime(seconds=sum(parts.values(), NO_TIME), parts=shown, launches=handed)


def _stage(load: Load, launches: Interval, strategy: Strategy, gpu: Gpu, cluster: Cluster) -> dict[str, Interval]:
    """The parts of work whose kernels, launches, collectives and copies may overlap."""
    kernels = kernel_seconds(load, gpu, strategy.precision)
    host = host_seconds(load, cluster)
    overlapping = {
        # One thread computes on the CPU and launches, so both together hide behind the GPU's work.
        "CPU": host,
        "launches": launches,
        "collectives": exchange_seconds(load, strategy, gpu, cluster, waiting=False),
        "copies to and from CPU memory": copy_seconds(load, gpu),
    }
    low = sum(seconds.low for seconds in kernels.values())
    high = sum(seconds.high for seconds in kernels.values())
    parts = dict(kernels)
    for name, seconds in overlapping.items():
        waits = max(0.0, seconds.low + (host.low if name == "launches" else 0.0) - low)
        low += waits
        # Kernels that last longer always hide launches.
        whole = max(waits, seconds.high - high) if name == "launches" else seconds.high
        parts[name] = Interval(low=waits, high=whole)
    parts["collectives"] += exchange_seconds(load, strategy, gpu, cluster, waiting=True)
    return parts


NVLINK = Interval(low=0.65, high=0.82)
"""Share of NVLink's peak, one way, that a ring's bus bandwidth reaches.

8 A100: about 200 to 235 of 300 GB/s (NVIDIA/nccl-tests#149; nccl's src/graph/tuning.cc caps its model at 235); H100:
370 of 450, the protocol taking a fifth (NVIDIA/nccl-tests#212).
"""

NVLINK_SHARP = 480 / 450
"""The same of an all-reduce that the switch adds up, on whole boards of 8 from Hopper on (NVIDIA/nccl-tests#212)."""

PCIE = Interval(low=0.20, high=0.80)
"""The same over PCIe: the processor's links and memory decide.

High assumed, as one copy alone. 8 RTX 5090: 28 of 63 GB/s, 4 of them 35 (NVIDIA/nccl#1639); low for older boards
without access from GPU to GPU: assumed.
"""

_SWITCHED = ("h20", "gh200-96g", "gh200-144g", "b200", "gb200", "b300")
"""GPUs with NVLink switches, in addition to those with SXM in their name."""

NETWORK = Interval(low=0.60, high=0.95)
"""Share of what a machine sends over the network that collectives reach. Assumed."""

LATENCY = Interval(low=5e-6, high=10e-6)
"""Of each collective, before its first byte; `_HOP` of each step of its ring comes on top in the high bound.

Source: baseLat of rings in nccl's src/graph/tuning.cc, 3.6 to 10 µs.
"""
_HOP = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 9.6e-6}
"""Source: hwLat of rings with the Simple protocol, same file."""

HOST_LINK = Interval(low=0.40, high=0.85)
"""Share of the link to CPU memory that copies of page-locked memory reach.

Peaks: 12 of 15.8 GB/s (V100) and 25 of 31.5 (A100), both measured (ZaidQureshi/bam#54). Low is for GPUs that share
a root port or CPU memory: assumed.
"""

HOST_MEMORY = Interval(low=40e9, high=300e9)
"""Bytes a second that the cores of one machine move, all its processes together.

Low: DeepSpeed's CPU Adam takes 8.2 s for 11.6 B parameters, at 28 B each (deepspeedai/DeepSpeed#735). High: three
quarters of two sockets with 8 channels of DDR4-3200: assumed. Single threads and few cores are slower.
"""

HOST_CALL = Interval(low=1e-6, high=10e-6)
"""Of each operator on the CPU. Assumed: as LAUNCH_SECONDS of roofline.py, without the launch of a kernel."""


def exchange_seconds(load: Load, strategy: Strategy, gpu: Gpu, cluster: Cluster, *, waiting: bool) -> Interval:
    """Seconds of collectives, one after the other: of those that kernels wait for, or of those that may hide behind
    kernels. Attention waits for Ulysses' tokens; what a ring sends next may hide behind attention to what it sent."""
    each = (
        _collective(*of, _stride(of[0], strategy), gpu, cluster)
        for of in load.exchanges.items()
        if (of[0].name == _ULYSSES) == waiting
    )
    return sum(each, NO_TIME)


_ULYSSES, _RING = "all_to_all", "send"  # which context parallelism alone sends


def copy_seconds(load: Load, gpu: Gpu) -> Interval:
    """Seconds of copies between GPU and CPU memory: both ways at once in the low bound."""
    there, back, peak = load.at("to device").nbytes, load.at("to host").nbytes, gpu.host_gbs * 1e9
    return Interval(low=HOST_LINK.per(max(there, back) / peak).low, high=HOST_LINK.per((there + back) / peak).high)


def host_seconds(load: Load, cluster: Cluster) -> Interval:
    """Seconds of operators on CPU tensors; the processes of a machine share its memory bandwidth."""
    on_host = load.at("host")
    return HOST_MEMORY.per(on_host.nbytes * cluster.processes_per_node) + HOST_CALL * on_host.calls


def _stride(exchange: Exchange, strategy: Strategy) -> int:
    """The distance of a group's ranks: HSDP's shards are neighbours, its replicas a shard group apart. Processes that
    exchange heads are neighbours, and those of a ring of them a group apart."""
    if exchange.name in (_ULYSSES, _RING):
        return 1 if exchange.name == _ULYSSES else strategy.cp // strategy.cp_ring
    replicas = strategy.dp_replicate > 1 and exchange.group_size == strategy.dp_replicate
    between_replicas = replicas and (exchange.name == "all_reduce" or strategy.dp_shard != strategy.dp_replicate)
    return strategy.dp_shard if between_replicas else 1


def _collective(exchange: Exchange, amount: Amount, stride: int, gpu: Gpu, cluster: Cluster) -> Interval:
    """A ring of NCCL's over the group: within machines, and between them where it spans several.

    The bus carries `_bus_share` of the bytes; low has both links busy at once, and what leaves a machine leaves it
    once; high is one ring over all GPUs, link after link.
    Source: bus bandwidth as nccl-tests define it, doc/PERFORMANCE.md.
    """
    size = exchange.group_size
    within = max(1, min(size, cluster.gpus_per_node // stride))
    nodes = math.ceil(size / within)
    rings = min(stride, cluster.gpus_per_node)  # groups that cross a machine's border at the same time
    if exchange.name == _ULYSSES:
        rings = within  # each GPU sends to all others
    seconds, link = NO_TIME, "network"
    if within > 1:
        link, bandwidth = _within(exchange.name, within, gpu)
        seconds = bandwidth.per(amount.nbytes * _bus_share(exchange.name, within if nodes > 1 else size))
    if nodes > 1:
        between = NETWORK * (cluster.network_gbs * 1e9 / rings)
        fewest = between.per(amount.nbytes * _bus_share(exchange.name, nodes)).low
        most = between.per(amount.nbytes * _bus_share(exchange.name, size)).high
        seconds = Interval(low=max(seconds.low, fewest), high=seconds.high + most)
    hops = _HOP[link] * (size - nodes) + _HOP["network"] * (nodes - 1)
    rounds = 2 if exchange.name == "all_reduce" else 1
    return seconds + LATENCY * amount.calls + Interval(low=0, high=hops * rounds * amount.calls)


def _bus_share(name: str, size: int) -> float:
    """Bytes on the bus for each byte of the largest tensor of a collective over `size` processes."""
    if name in ("broadcast", "reduce", _RING):
        return 1.0
    return (2.0 if name == "all_reduce" else 1.0) * (size - 1) / size


def _within(name: str, size: int, gpu: Gpu) -> tuple[str, Interval]:
    """The link between the GPUs of one machine, and its bus bandwidth in bytes a second."""
    pcie = PCIE * (gpu.pcie_gbs * 1e9)
    if gpu.nvlink_one_way_gbs is None:
        return "pcie", pcie
    nvlink = NVLINK * (gpu.nvlink_one_way_gbs * 1e9)
    # NVLink joins all GPUs of a board by switches, or two or four by bridges.
    if "-sxm" not in gpu.name and gpu.name not in _SWITCHED:
        # A bridge joins two GPUs, if it was bought.
        return "pcie", Interval(low=pcie.low, high=nvlink.high) if size == 2 else pcie
    if name == "all_reduce" and size == 8 and gpu.compute_capability >= (9, 0):
        nvlink = Interval(low=nvlink.low, high=NVLINK_SHARP * gpu.nvlink_one_way_gbs * 1e9)
    return "nvlink", nvlink
