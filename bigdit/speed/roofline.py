"""What a card's kernels take: each operator's arithmetic or its bytes, whichever lasts longer (a roofline).

Source of the model: Williams, Waterman & Patterson, "Roofline", CACM 52(4), 2009. The shares of a card's peak that
kernels reach are intervals, each with where it was read; none is fitted to a measured training speed of the models
that are planned here.
"""

from __future__ import annotations

from bigdit.catalog import Gpu
from bigdit.spec import Precision
from bigdit.speed.interval import Interval
from bigdit.speed.work import Amount, Load, Operation

HERE = "benchmarks/gpu_matrix.md"
"""What operators took in training steps on an H100, measured there with torch 2.11, of the points that are not held
out: what each of them took by torch's profiler beside the bytes and FLOPs that a rehearsal counts of it."""

MEASURED = (9, 0)
"""The compute capability of that card: its shares are those of its operators, not of others' whole runs."""

PRODUCTS = {
    (7, 0): Interval(low=0.30, high=0.85),
    (8, 0): Interval(low=0.55, high=0.87),
    (9, 0): Interval(low=0.55, high=0.84),
}
"""Share of the peak rate that matrix products reach on tensor cores, by compute capability.

High: the largest products of the "maximum achievable matmul FLOPS" table of stas00/ml-engineering (A100 271 of 312,
H100 795 of 989, GH200 829 of 989). Low of A100: the least efficient of MosaicML's runs of 1 B and 3 B models up to
8192 tokens without recomputation (llm-foundry, scripts/train/benchmarking/README.md: 0.57): a run's products are no
slower than the run. Low of H100: measured in steps of seven models, 0.70 to 0.83 in bf16 and 0.57 in TF32
(HERE). V100: 39 of 130 TFLOPS in Megatron-LM's run on one card (arXiv:1909.08053); its high is assumed, as that of
A100.
"""

OTHER_PRODUCTS = Interval(low=0.35, high=0.96)
"""Cards that no such table has: from below the others to what cuBLAS was seen to reach of an L20's rate
(115 of 119.5 TFLOPS, DefTruth/CUDA-Learn-Notes, hgemm)."""

FP32_PRODUCTS = Interval(low=0.50, high=0.95)
"""The same on CUDA cores, in fp32. Assumed: cards whose rate counts integer units twice (compute capability 8.6 and
later) stay well below it."""

ATTENTION_MEASURED = Interval(low=0.25, high=0.65)
"""Share of the tensor cores' rate that cuDNN's attention reaches on an H100, forward and backward (HERE): 0.53 to 0.61
with heads of 128 (Wan), 0.44 with 64 (SD3.5), 0.27 to 0.34 with 72, which fill no tile (PixArt)."""

ATTENTION = Interval(low=0.20, high=0.75)
"""The same of other cards.

FlashAttention-2 reaches 0.50 to 0.73 on an A100 (arXiv:2307.08691) and 0.35 on an H100, FlashAttention-3 up to 0.75
there (arXiv:2407.08608), all with heads of 64 or 128 that fill the tiles. Low is for other heads, short texts and
the kernel that takes masks: assumed.
"""

ATTENTION_FP32 = Interval(low=0.13, high=0.75)
"""The same of attention in fp32, of a third of the rate of TF32: measured 0.13 on an H100 (HERE); high as of others."""

BANDWIDTH_MEASURED = Interval(low=0.40, high=0.66)
"""Share of an H100's bandwidth that all but the optimizer's kernels reach together in a step (HERE): 0.42 to 0.64 in
seven models. GELU reaches 0.90, broadcasting products 0.52 to 0.57, copies that change the layout 0.37 to 0.6, sums 0.2
to 0.6."""

OPTIMIZER_MEASURED = Interval(low=0.80, high=0.92)
"""The same of fused AdamW (HERE): 0.86 to 0.90."""

BANDWIDTH = Interval(low=0.50, high=0.92)
"""Share of the memory's bandwidth that element-wise kernels, norms, copies and the optimizer reach.

Measured copies on the card: 0.75 of an A100's (NVIDIA/cuda-samples#311), 0.77 of an H100's (NVIDIA/nccl#1264), 0.87
of an A100-40G's (PTsolvers/gpu-workshop-JuliaCon23#7). Low is for strided and broadcast operands and reductions,
high for what stays in the cache in part: both assumed.
"""

GROUPED_MEASURED = Interval(low=0.50, high=0.80)
"""The same of grouped convolutions on an H100: Sana's, in bf16, with all others 0.66 to 0.73 (HERE)."""

GROUPED = Interval(low=0.10, high=0.80)
"""The same on other cards. PyTorch's and cuDNN's kernels differ by up to 5.8 times on the same shape
(pytorch/pytorch#91735), with the faster one assumed to reach 0.6 to 0.8."""

LAUNCH_SECONDS = Interval(low=5e-6, high=50e-6)
"""Of the host, for each operator it hands to the card: Python, dispatcher, autograd, launch.

From 5 µs: "PyTorch op to kernel launch" and "Tensor core throughput at scale" (jiahuanglin.xyz, factryze.ai). To 50 µs:
31 to 49 µs in small models on a virtual machine with 16 cores of a Xeon and Python 3.12 (HERE).
"""

KERNEL_SECONDS = 4e-6
"""The least that a kernel occupies the card, at most: 2 to 4 µs in a model whose tensors are small (HERE, dit-b-4)."""

_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention")
_STEP = ("step", "ema")


def kernel_seconds(load: Load, gpu: Gpu, precision: Precision) -> dict[str, Interval]:
    """Seconds of the card's kernels by kind: they run one after the other."""
    parts: dict[str, Interval] = {}
    for operation, amount in load.operations.items():
        if operation.place == "device":
            part = _part(operation, amount)
            parts[part] = parts.get(part, Interval(low=0, high=0)) + _seconds(operation, amount, gpu, precision)
    return parts


def operators(load: Load) -> float:
    """How many the host hands to the card: it runs ahead where kernels last longer."""
    return sum(amount.calls for operation, amount in load.operations.items() if operation.place == "device")


def _seconds(operation: Operation, amount: Amount, gpu: Gpu, precision: Precision) -> Interval:
    """At the high end each call takes what a kernel takes at least."""
    least = Interval(low=0, high=amount.calls * KERNEL_SECONDS)
    return _longer(_busy(operation, amount, gpu, precision), least)


def _busy(operation: Operation, amount: Amount, gpu: Gpu, precision: Precision) -> Interval:
    rate, bandwidth = _rate(operation, gpu, precision), gpu.bandwidth_gbs * 1e9
    measured = gpu.compute_capability == MEASURED
    if operation.operator.endswith("(grouped)"):
        # One channel at a time fills no tensor core.
        arithmetic = FP32_PRODUCTS.per(amount.flops / (gpu.tflops.fp32 * 1e12))
        return _longer(arithmetic, (GROUPED_MEASURED if measured else GROUPED).per(amount.nbytes / bandwidth))
    moved = _bandwidth(operation, measured).per(amount.nbytes / bandwidth)
    if amount.flops == 0:
        return moved
    arithmetic = _efficiency(operation, gpu, rate).per(amount.flops / rate)
    if "convolution" in operation.operator:
        # cuDNN's kernels for tensor cores want channels last, and convert what comes otherwise: read and written
        # once more.
        return Interval(low=max(arithmetic.low, moved.low), high=arithmetic.high + 2 * moved.high)
    return _longer(arithmetic, moved)


def _rate(operation: Operation, gpu: Gpu, precision: Precision) -> float:
    """Attention in fp32 is the memory-efficient one, which multiplies by three products of TF32, whatever is allowed.

    Source: OpMultiplyAddFastF32 in aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h.
    """
    if operation.dtype == "float32" and gpu.tflops.tf32 and _is_attention(operation):
        return gpu.tflops.tf32 * 1e12 / 3
    return gpu.tflops.of(operation.dtype, tf32=precision == "tf32")


def _bandwidth(operation: Operation, measured: bool) -> Interval:
    if not measured:
        return BANDWIDTH
    return OPTIMIZER_MEASURED if "_fused_adam" in operation.operator else BANDWIDTH_MEASURED


def _is_attention(operation: Operation) -> bool:
    return any(name in operation.operator for name in _ATTENTION)


def _efficiency(operation: Operation, gpu: Gpu, rate: float) -> Interval:
    if _is_attention(operation):
        if operation.dtype == "float32":
            return ATTENTION_FP32
        return ATTENTION_MEASURED if gpu.compute_capability == MEASURED else ATTENTION
    if rate == gpu.tflops.fp32 * 1e12:
        return FP32_PRODUCTS
    return PRODUCTS.get(gpu.compute_capability, OTHER_PRODUCTS)


def _part(operation: Operation, amount: Amount) -> str:
    if operation.phase == "encode":
        return "encoders"
    if operation.phase in _STEP:
        return "optimizer"
    if _is_attention(operation):
        return "attention"
    if "convolution" in operation.operator:
        return "convolutions"
    return "matrix products" if amount.flops else "memory-bound operators"


def _longer(first: Interval, second: Interval) -> Interval:
    return Interval(low=max(first.low, second.low), high=max(first.high, second.high))
