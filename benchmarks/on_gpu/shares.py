"""What operators reached of an H100 by kind, and how many launches its steps had beside those of an emulated GPU.

The constants of speed/roofline.py and speed/launches.py that name gpu_matrix.md come from here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from bigdit import catalog
from bigdit.catalog import Gpu
from bigdit.errors import UserError
from bigdit.profile.attempt import Attempt
from bigdit.profile.cards import Cards
from bigdit.profile.lanes import WorkerError
from bigdit.profile.measured.run import Timing
from bigdit.speed.work import Amount, Load, work_of
from on_gpu.page import measured
from on_gpu.points import GPU, POINTS

KINDS = {
    "products": ("mm", "addmm"),
    "convolutions": ("convolution", "cudnn_convolution", "convolution_backward"),
    "attention": (
        *(f"_cudnn_attention_{way}" for way in ("forward", "backward")),
        *(f"_efficient_attention_{way}" for way in ("forward", "backward")),
        *(f"_scaled_dot_product_{name}_attention" for name in ("cudnn", "efficient")),
        *(f"_scaled_dot_product_{name}_attention_backward" for name in ("cudnn", "efficient")),
    ),
    "activations": ("gelu", "gelu_backward", "silu", "silu_backward", "threshold_backward", "tanh", "tanh_backward"),
    "arithmetic": ("mul", "mul_", "add", "add_", "div", "div_", "sub", "addcmul_", "lerp_", "pow", "neg"),
    "copies": ("copy_", "clone", "_to_copy", "cat", "stack"),
    "norms": ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
    "sums": ("sum", "mean", "amax", "amin", "_foreach_norm", "linalg_vector_norm"),
    "optimizer": ("_fused_adamw_",),
}
"""Operators by kind, by the profiler's names and by those of counted work."""

_KIND = {operator: kind for kind, operators in KINDS.items() for operator in operators}
_LEAST = 0.01
"""Of a step's kernels, for a kind to be shown."""


def shares(*, held_out: bool) -> None:
    """Print both for the points that were timed; those held out only to look at what was made of the others."""
    gpu, timings = catalog.resolve_gpu(GPU), {each.name: each.timing for each in measured()}
    with Cards(gpu, 1) as cards:
        for point in POINTS:
            timing = timings.get(point.name)
            if point.held_out != held_out or timing is None:
                continue
            request, _ = point.question()
            try:
                found = cards.attempt(request, gpu.usable_bytes, counted=True)
            except (UserError, WorkerError) as error:
                print(point.name, f"  not counted: {error}", sep="\n", flush=True)
                continue
            load = work_of(found.work, request.strategy).accumulated(request.strategy.grad_accum_steps)
            lines = _lines(_seconds(timing), _amounts(load), gpu)
            print(point.name, _launches(found, timing), *lines, sep="\n", flush=True)


def _launches(found: Attempt, timing: Timing) -> str:
    took = f"  {timing.seconds_per_step:.4f} s, kernels {sum(each.seconds for each in timing.kernels.values()):.4f} s"
    real = sum(each.count for each in timing.kernels.values())
    counted = sum(each.launches for each in found.launched.values())
    return f"{took}; {real} launches measured, {counted} counted ({counted / real - 1:+.0%})"


def _seconds(timing: Timing) -> dict[str, float]:
    """By kind, what its kernels took."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, spent in timing.operators.items():
        found[_KIND.get(name.removeprefix("aten::"), "others")] += spent.seconds
    return found


def _amounts(load: Load) -> dict[str, Amount]:
    """By kind, what was counted."""
    found: defaultdict[str, Amount] = defaultdict(Amount)
    for operation, amount in load.operations.items():
        if operation.place == "device":
            name, _, _ = operation.operator.removeprefix("aten.").partition(" ")
            found[_KIND.get(name, "others")] += amount
    return found


def _lines(seconds: Mapping[str, float], amounts: Mapping[str, Amount], gpu: Gpu) -> Iterable[str]:
    whole = sum(seconds.values())
    for kind in KINDS:
        took, amount = seconds.get(kind, 0.0), amounts.get(kind, Amount())
        if took > _LEAST * whole:
            rate = amount.flops / took / ((gpu.tflops.bf16 or gpu.tflops.fp32) * 1e12)
            bandwidth = amount.nbytes / took / (gpu.bandwidth_gbs * 1e9)
            reached = f"{rate:.2f} of bf16's rate, {bandwidth:.2f} of the bandwidth"
            yield f"  {kind}: {took / whole:.0%} of kernels, {reached}"
