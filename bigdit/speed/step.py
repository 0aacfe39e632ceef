"""Seconds of a step: kernels by a roofline, launches, collectives, copies and CPU work.

A kernel takes as long as its operator's arithmetic or its bytes, whichever takes longer. Source: Williams, Waterman &
Patterson, "Roofline", CACM 52(4), 2009. The shares of a GPU's peak that kernels reach are intervals, each with its
source. None is fitted to a measured training speed of planned models.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bigdit.catalog import Gpu
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
from bigdit.speed.work import Amount, Exchange, Keys, Load, Operation, Rows, Work, rows_at
from bigdit.strategy import Precision, Strategy

Numbers = npt.NDArray[np.float64]

HERE = "benchmarks/gpu_matrix.md"
"""Source: times of operators in steps on an H100, divided by the bytes and FLOPs that an attempt counts. They were
measured by torch's profiler (torch 2.11), without held-out points (`git show 8fa40eb:benchmarks/on_gpu/shares.py`)."""

MEASURED = (9, 0)
"""The compute capability of that GPU, whose shares were measured per operator."""

PRODUCTS = {
    (7, 0): Interval(low=0.30, high=0.85),
    (8, 0): Interval(low=0.68, high=0.87),
    (9, 0): Interval(low=0.65, high=0.84),
}
"""Share of the peak rate that matrix products of 16 bits reach on tensor cores, by compute capability.

High: the largest products of the "maximum achievable matmul FLOPS" table of stas00/ml-engineering (A100 271 of 312,
H100 795 of 989, GH200 829 of 989). Low of H100: measured in steps of seven models, 0.66 to 0.81 (HERE), which is 0.79
of its high; low of A100: OF_THE_BEST of its high. V100: 39 of 130 TFLOPS in Megatron-LM's run on one GPU
(arXiv:1909.08053); its high is assumed.
"""

OF_THE_BEST = 0.78
"""Least share of the best product's rate on the same GPU that products from 2048 x 2048 x 2048 on reach: 0.78 on an
A40, 0.81 to 0.85 on an H100 (zzc0721/torch-performance-test-data#185, #79); 0.79 in steps on an H100 (HERE)."""

BEST_PRODUCTS = {"a40": 0.82, "a6000": 0.80, "l20": 0.96, "l40s": 0.75, "h20": 0.96}
"""Share of the peak rate of the best product of 16 bits that was measured, by GPU.

Source: 122 of 150, 123 of 155, 114 of 120, 269 of 362 and 142 of 148 TFLOPS in zzc0721/torch-performance-test-data,
database.md and #185.
"""

TF32_PRODUCTS = {(8, 0): Interval(low=0.55, high=0.87), (9, 0): Interval(low=0.55, high=0.84)}
"""The same in TF32. Low: in a step on an H100 0.57 (HERE), and 0.58 of an A100 (2048 x 2048 x 2048,
zzc0721/torch-performance-test-data#108); high as of 16 bits."""

FP8_PRODUCTS = {(9, 0): Interval(low=0.40, high=0.78)}
"""Share of the FP8 peak that products of FP8 reach, by compute capability.

High: the best of a GH200, 1535 of 1979 TFLOPS, in the "maximum achievable matmul FLOPS" table of stas00/ml-engineering;
an H100's is 1403 (0.71). Low is assumed: OF_THE_BEST of that is 0.55, and products with a scale a row are slower.
"""

OTHER_FP8_PRODUCTS = Interval(low=0.25, high=0.96)
"""The same of other GPUs: low is assumed, high is that of OTHER_PRODUCTS."""

CONVOLUTIONS_MEASURED = Interval(low=0.59, high=0.84)
"""The same for convolutions of 16 bits on an H100, with conversion to channels last. Sana's reach 0.59 to 0.70, and
more, since that time includes grouped ones (HERE); high is that of products."""

OTHER_PRODUCTS = Interval(low=0.35, high=0.96)
"""The same for GPUs without such a measurement: from below all others, to cuBLAS's share of an L20's rate (115 of
119.5 TFLOPS, DefTruth/CUDA-Learn-Notes, hgemm)."""

FP32_DOUBLED = Interval(low=0.45, high=0.76)
"""The same on CUDA cores, in fp32, of GPUs whose rate includes units that also compute integers: from 9.1 of an RTX
A4000's 19.2 TFLOPS to 23.4 of an A10G's 31.2 (zzc0721/torch-performance-test-data#97, #126)."""

FP32_PRODUCTS = {
    (7, 0): Interval(low=0.80, high=0.93),
    (8, 0): Interval(low=0.50, high=0.98),
    (8, 6): FP32_DOUBLED,
    (8, 9): FP32_DOUBLED,
    (9, 0): Interval(low=0.70, high=0.78),
    (12, 0): FP32_DOUBLED,
}
"""From 2048 x 2048 x 2048 on: 12.7 to 14.5 of a V100's 15.7 TFLOPS, 9.7 to 19.2 of an A100's 19.5, and from 32 of an
H20's 44 to 52.1 of an H100's 67. Source: zzc0721/torch-performance-test-data#140, #108, #79 and database.md."""

OTHER_FP32_PRODUCTS = Interval(low=0.50, high=0.97)
"""Of others: from a T4's 4.2 of 8.1 TFLOPS to an RTX 2080 Ti's 13 of 13.4 (same source, database.md)."""

ATTENTION_MEASURED = Interval(low=0.46, high=0.61)
"""Share of the tensor cores' rate that cuDNN's attention reaches on an H100, forward and backward (HERE). Zeros are
counted too: heads of more than 64 are padded to tiles of 128. 0.53 to 0.61 with heads of 128 (Wan). 0.26 to 0.34 with
heads of 72 (PixArt), which is 0.46 to 0.61 with the zeros."""

SMALL_HEADS_MEASURED = Interval(low=0.42, high=0.46)
"""The same with heads of up to 64: 0.43 to 0.45 with 64 (SD3.5), where more of the time goes to the softmax."""

ATTENTION = Interval(low=0.20, high=0.75)
"""The same of other GPUs.

FlashAttention-2 reaches 0.50 to 0.73 on an A100 (arXiv:2307.08691) and 0.35 on an H100. FlashAttention-3 reaches up to
0.75 there (arXiv:2407.08608). All have heads of 64 or 128, which fill the tiles. Low is assumed, for other heads, short
texts and the kernel with masks.
"""

ATTENTION_FP32 = Interval(low=0.13, high=0.75)
"""The same for attention in fp32, as a share of a third of TF32's rate: 0.13 on an H100 (HERE); high as for others."""

BANDWIDTH_MEASURED = Interval(low=0.40, high=0.66)
"""Share of an H100's bandwidth that all kernels except the optimizer's reach together in a step: 0.42 to 0.64 in seven
models (HERE). GELU reaches 0.90, broadcasting products 0.52 to 0.57, copies that change the layout 0.37 to 0.6, sums
0.2 to 0.6."""

OPTIMIZER_MEASURED = Interval(low=0.80, high=0.92)
"""The same of fused AdamW (HERE): 0.86 to 0.90."""

BANDWIDTH = Interval(low=0.50, high=0.92)
"""Share of the memory's bandwidth that element-wise kernels, norms, copies and the optimizer reach.

Measured copies on the GPU: 0.75 of an A100's (NVIDIA/cuda-samples#311), 0.77 of an H100's (NVIDIA/nccl#1264), 0.87
of an A100-40G's (PTsolvers/gpu-workshop-JuliaCon23#7). Low is for strided and broadcast operands and reductions,
high for what stays in the cache in part: both assumed.
"""

GROUPED_MEASURED = Interval(low=0.50, high=0.80)
"""The same of grouped convolutions on an H100: Sana's, in bf16, with all others 0.66 to 0.73 (HERE)."""

GROUPED = Interval(low=0.10, high=0.80)
"""The same on other GPUs. PyTorch's and cuDNN's kernels differ by up to 5.8 times on the same shape
(pytorch/pytorch#91735), with the faster one assumed to reach 0.6 to 0.8."""

LAUNCH_SECONDS = Interval(low=5e-6, high=50e-6)
"""CPU time for each operator on the GPU: Python, dispatcher, autograd, launch.

Low: 5 µs in "PyTorch op to kernel launch" and "Tensor core throughput at scale" (jiahuanglin.xyz, factryze.ai). High:
31 to 49 µs in small models on a virtual machine with 16 cores of a Xeon and Python 3.12 (HERE).
"""

KERNEL_SECONDS = 4e-6
"""Upper bound of the shortest time of a kernel: 2 to 4 µs in a model with small tensors (HERE, dit-b-4)."""

_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention")

KINDS = ("matrix products", "attention", "convolutions", "memory-bound operators", "encoders", "optimizer")
"""Kinds of kernels in a step."""


class Pace(NamedTuple):
    """How fast a GPU runs an operator: its `efficiency`, a share of the peak `rate` (FLOPs per second), and its
    `moving`, bytes per second.

    `moves`: how many times the time of its bytes is added to the arithmetic at the high end; 0 where both overlap.
    `kinds`: the part of a step that it counts for, if it computes, and if it only moves bytes.
    """

    rate: float
    efficiency: Interval
    moving: Interval
    moves: int
    kinds: tuple[str, str]


def kernel_seconds(load: Load, gpu: Gpu, precision: Precision) -> dict[str, Interval]:
    """Seconds of the GPU's kernels by kind. They run one after the other.

    At the high end, each call takes at least KERNEL_SECONDS. Kernels that compute take these in addition, since their
    first and last tiles leave multiprocessors idle.
    """
    paces = _paces(load.operations.named, gpu, precision)
    calls, flops, nbytes = load.operations.numbers[paces.rows].T
    least, low, high = calls * KERNEL_SECONDS, nbytes / paces.moving[1], nbytes / paces.moving[0]
    arithmetic, computes = flops / paces.rate, flops > 0
    fastest, slowest = arithmetic / paces.efficiency[1], arithmetic / paces.efficiency[0]
    computed = np.where(paces.moves > 0, slowest + paces.moves * high, np.maximum(slowest, high)) + least
    kinds = np.where(computes, paces.kinds[0], paces.kinds[1])
    seconds = np.maximum(fastest, low), np.where(computes, computed, np.maximum(high, least))
    lows, highs = (np.bincount(kinds, weights=each, minlength=len(KINDS)).tolist() for each in seconds)
    return {KINDS[kind]: Interval(low=lows[kind], high=highs[kind]) for kind in sorted({*kinds.tolist()})}


class _Paces(NamedTuple):
    """The paces of the GPU's operations, which are in these `rows` of their keys. Intervals are arrays [2, rows] of
    lows and highs, all others [rows]. `kinds` are indices in KINDS."""

    rows: Rows
    rate: Numbers
    efficiency: Numbers
    moving: Numbers
    moves: Numbers
    kinds: Rows


@functools.lru_cache(maxsize=512)
def _paces(named: Keys[Operation], gpu: Gpu, precision: Precision) -> _Paces:
    """Cached: a plan times its few operators at hundreds of sizes."""
    rows = rows_at(named, "device")
    found = [_pace(named.order[row], gpu, precision) for row in rows]

    def bounds(intervals: Sequence[Interval]) -> Numbers:
        return np.array([(each.low, each.high) for each in intervals]).reshape(len(rows), 2).T

    return _Paces(
        rows=rows,
        rate=np.array([each.rate for each in found]),
        efficiency=bounds([each.efficiency for each in found]),
        moving=bounds([each.moving for each in found]),
        moves=np.array([each.moves for each in found]),
        kinds=np.array([[KINDS.index(kind) for kind in each.kinds] for each in found], np.intp).reshape(len(rows), 2).T,
    )


def _pace(operation: Operation, gpu: Gpu, precision: Precision) -> Pace:
    rate, measured = _rate(operation, gpu, precision), gpu.compute_capability == MEASURED
    efficiency, moving, moves = _efficiency(operation, gpu, rate), BANDWIDTH, 0
    if measured:
        moving = OPTIMIZER_MEASURED if "_fused_adam" in operation.operator else BANDWIDTH_MEASURED
    if operation.operator.endswith("(grouped)"):
        # One channel at a time fills no tensor core.
        rate, efficiency = gpu.tflops.fp32 * 1e12, _fp32_products(gpu)
        moving = GROUPED_MEASURED if measured else GROUPED
    elif measured and _is_attention(operation):
        # With short texts, reads and writes take as long as the arithmetic.
        moves = 1
    elif "convolution" in operation.operator and not (measured and operation.dtype != "float32"):
        # cuDNN's kernels for tensor cores need channels last. A conversion reads and writes once more.
        moves = 2
    return Pace(rate, efficiency, moving * (gpu.bandwidth_gbs * 1e9), moves, _kinds(operation))


def _rate(operation: Operation, gpu: Gpu, precision: Precision) -> float:
    """Peak FLOPs per second. Attention in fp32 is the memory-efficient one: three products of TF32, in any precision.

    Source: OpMultiplyAddFastF32 in aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h.
    """
    if operation.dtype == "float32" and gpu.tflops.tf32 and _is_attention(operation):
        return gpu.tflops.tf32 * 1e12 / 3
    return gpu.tflops.of(operation.dtype, tf32=precision == "tf32")


def _is_attention(operation: Operation) -> bool:
    return any(name in operation.operator for name in _ATTENTION)


def _efficiency(operation: Operation, gpu: Gpu, rate: float) -> Interval:
    if _is_attention(operation):
        if operation.dtype == "float32":
            return ATTENTION_FP32
        return _attention_measured(operation) if gpu.compute_capability == MEASURED else ATTENTION
    if rate == gpu.tflops.fp32 * 1e12:
        return _fp32_products(gpu)
    if "convolution" in operation.operator and gpu.compute_capability == MEASURED and operation.dtype != "float32":
        return CONVOLUTIONS_MEASURED
    if operation.dtype.startswith("float8"):
        return FP8_PRODUCTS.get(gpu.compute_capability, OTHER_FP8_PRODUCTS)
    if operation.dtype == "float32":
        return TF32_PRODUCTS.get(gpu.compute_capability, OTHER_PRODUCTS)
    if gpu.name in BEST_PRODUCTS:
        return Interval(low=OF_THE_BEST, high=1) * BEST_PRODUCTS[gpu.name]
    return PRODUCTS.get(gpu.compute_capability, OTHER_PRODUCTS)


def _attention_measured(operation: Operation) -> Interval:
    """By the size of the heads, which the operator's name ends with."""
    match = re.search(r"\(heads of (\d+)\)$", operation.operator)
    size = int(match[1]) if match else 128
    if size <= 64:
        return SMALL_HEADS_MEASURED * (size / 64)
    return ATTENTION_MEASURED * (size / (-(-size // 128) * 128))


def _fp32_products(gpu: Gpu) -> Interval:
    return FP32_PRODUCTS.get(gpu.compute_capability, OTHER_FP32_PRODUCTS)


def _kinds(operation: Operation) -> tuple[str, str]:
    if operation.phase == "encode":
        return "encoders", "encoders"
    if operation.phase in ("step", "ema"):
        return "optimizer", "optimizer"
    if _is_attention(operation):
        return "attention", "attention"
    if "convolution" in operation.operator:
        return "convolutions", "convolutions"
    return "matrix products", "memory-bound operators"


PARTS = (*KINDS, "launches", "CPU", "collectives", "copies to and from CPU memory")
"""Parts of a step's seconds. `launches`: the GPU waits for the next kernel. `CPU`: optimizer and EMA on the CPU."""


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
    # The update waits for all gradients, and does not overlap with micro-batches. While kernels take longer than
    # launches, the CPU runs ahead.
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
"""The same for an all-reduce in the switch, on whole boards of 8 from Hopper on (NVIDIA/nccl-tests#212)."""

PCIE = Interval(low=0.20, high=0.80)
"""The same over PCIe, where the CPU's links and memory decide.

8 RTX 5090: 28 of 63 GB/s, 4 of them 35 (NVIDIA/nccl#1639). High is assumed, as for a single copy. Low is assumed, for
older boards without peer access between GPUs.
"""

_SWITCHED = ("h20", "gh200-96g", "gh200-144g", "b200", "gb200", "b300")
"""GPUs with NVLink switches, in addition to those with SXM in their name."""

NETWORK = Interval(low=0.60, high=0.95)
"""Share of a machine's network bandwidth that collectives reach. Assumed."""

LATENCY = Interval(low=5e-6, high=10e-6)
"""Seconds of each collective before its first byte. The high bound adds `_HOP` for each step of its ring.

Source: baseLat of rings in nccl's src/graph/tuning.cc, 3.6 to 10 µs.
"""
_HOP = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 9.6e-6}
"""Seconds. Source: hwLat of rings with the Simple protocol, same file."""

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
"""Seconds of each operator on the CPU. Assumed: LAUNCH_SECONDS without the launch of a kernel."""


def exchange_seconds(load: Load, strategy: Strategy, gpu: Gpu, cluster: Cluster, *, waiting: bool) -> Interval:
    """Seconds of collectives, one after the other: those that kernels wait for, or those that may overlap with kernels.

    Attention waits for Ulysses' all-to-all. A ring's next message may overlap with attention to the last one.
    """
    each = (
        _collective(*of, _stride(of[0], strategy), gpu, cluster)
        for of in load.exchanges.items()
        if (of[0].name == _ULYSSES) == waiting
    )
    return sum(each, NO_TIME)


_ULYSSES, _RING = "all_to_all", "send"  # which context parallelism alone sends


def copy_seconds(load: Load, gpu: Gpu) -> Interval:
    """Seconds of copies between GPU and CPU memory. In the low bound, both directions overlap."""
    there, back, peak = load.at("to device").nbytes, load.at("to host").nbytes, gpu.host_gbs * 1e9
    return Interval(low=HOST_LINK.per(max(there, back) / peak).low, high=HOST_LINK.per((there + back) / peak).high)


def host_seconds(load: Load, cluster: Cluster) -> Interval:
    """Seconds of operators on CPU tensors; the processes of a machine share its memory bandwidth."""
    on_host = load.at("host")
    return HOST_MEMORY.per(on_host.nbytes * cluster.processes_per_node) + HOST_CALL * on_host.calls


def _stride(exchange: Exchange, strategy: Strategy) -> int:
    """The distance of a group's ranks. HSDP's shards are neighbours, and its replicas have the distance of a shard
    group. In context parallelism, Ulysses' ranks are neighbours, and a ring's have the distance of a Ulysses group."""
    if exchange.name in (_ULYSSES, _RING):
        return 1 if exchange.name == _ULYSSES else strategy.cp // strategy.cp_ring
    replicas = strategy.dp_replicate > 1 and exchange.group_size == strategy.dp_replicate
    between_replicas = replicas and (exchange.name == "all_reduce" or strategy.dp_shard != strategy.dp_replicate)
    return strategy.dp_shard if between_replicas else 1


def _collective(exchange: Exchange, amount: Amount, stride: int, gpu: Gpu, cluster: Cluster) -> Interval:
    """Seconds of a ring of NCCL over the group, within machines and, if it spans several, between them.

    The bus carries `_bus_share` of the bytes. Low: both links are busy at once, and bytes leave a machine once. High:
    one ring over all GPUs, one link after the other. Source: bus bandwidth as in nccl-tests, doc/PERFORMANCE.md.
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
    """Bytes on the bus per byte of the largest tensor of a collective over `size` processes."""
    if name in ("broadcast", "reduce", _RING):
        return 1.0
    return (2.0 if name == "all_reduce" else 1.0) * (size - 1) / size


def _within(name: str, size: int, gpu: Gpu) -> tuple[str, Interval]:
    """The link between the GPUs of one machine, and its bus bandwidth in bytes per second."""
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
