"""What kernels take inside one operation, against the allocator's own trace of the CUDA build of torch.

Every expected row was read off torch 2.13.0+cu130, its host code run on an emulated card: blocks taken (+) and given
back (-), in order. Results stay. What cuDNN works in was read off a real one.
"""

from __future__ import annotations

import pytest
from answered import answered

CARDS = {"A40": ((8, 6), 84), "A100": ((8, 0), 108), "H100": ((9, 0), 132), "RTX 5090": ((12, 0), 170)}


def bf16(*shape: int, strides: tuple[int, ...] | None = None, offset: int = 0) -> dict[str, object]:
    return {"tensor": shape, "strides": strides, "offset": offset, "dtype": "bfloat16"}


def fp32(*shape: int) -> dict[str, object]:
    return bf16(*shape) | {"dtype": "float32"}


def int64(*shape: int) -> dict[str, object]:
    return bf16(*shape) | {"dtype": "int64"}


def heads(tokens: int, dim: int, heads: int = 8) -> dict[str, object]:
    """[1, heads, tokens, dim], as transformers split them."""
    return bf16(1, heads, tokens, dim, strides=(heads * tokens * dim, dim, heads * dim, 1))


def efficient_backward(dim: int) -> list[object]:
    operands = [heads(256, dim), heads(256, dim), heads(100, dim), heads(100, dim), None, heads(256, dim)]
    return [*operands, fp32(1, 8, 256), int64(), int64(), 0.0, [True, True, True, False], False]


def convolution_backward(grad: object, input: object, weight: object, groups: int, wanted: list[bool]) -> list[object]:
    bias = [groups] if wanted[2] else None
    return [grad, input, weight, bias, [1, 1], [0, 0], [1, 1], False, [0, 0], groups, wanted]


def patches(input: object, weight: object) -> list[object]:
    return [input, weight, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1]


# card, operator, arguments, what is taken and given back
ROWS = bf16(4096, 2240)
BIAS = bf16(1, 11200, 32, 32, strides=(11468800, 1, 358400, 11200))
LAST = bf16(1, 5600, 32, 32, strides=(5734400, 1, 179200, 5600))
POINTWISE = bf16(2240, 5600, 1, 1)
CASES = {
    "sum of a linear's bias": ("A40", "sum.dim_IntList", [ROWS, [0]], [4480, 64225280, 72, -72, -64225280]),
    "sum, as many outputs at once as align": (
        "A40",
        "sum.dim_IntList",
        [bf16(2, 1024, 1536, strides=(4718592, 4608, 1), offset=1), [0, 1]],
        [3072],
    ),
    "sum of a chunk": (
        "A40",
        "sum.dim_IntList",
        [bf16(2, 1024, 1536, strides=(4718592, 4608, 1), offset=1536), [0, 1]],
        [3072, 25165824, 48, -48, -25165824],
    ),
    "sum over channels last": ("A40", "sum.dim_IntList", [BIAS, [0, 2, 3]], [22400, 68812800, 352, -352, -68812800]),
    "the same on an A100": ("A100", "sum.dim_IntList", [BIAS, [0, 2, 3]], [22400, 91750400, 352, -352, -91750400]),
    "the same on an H100": ("H100", "sum.dim_IntList", [BIAS, [0, 2, 3]], [22400, 91750400, 352, -352, -91750400]),
    "sum of rows": ("A40", "sum.dim_IntList", [ROWS, [1]], [8192]),
    "mean of the middle": ("A40", "mean.dim", [bf16(2, 1024, 4608), [1]], [18432, 66060288, 288, -288, -66060288]),
    "mean of everything": ("A40", "mean.default", [bf16(1, 1024, 2240)], [2, 1008, 4, -4, -1008]),
    "norm": ("A40", "linalg_vector_norm.default", [fp32(100000000)], [4, 3052, 4, -4, -3052]),
    "largest": ("A40", "amax.default", [ROWS, [0]], [4480, 32112640, 72, -72, -32112640]),
    "variance": ("A40", "var.correction", [ROWS, [0]], [4480, 256901120, 72, -72, -256901120]),
    "sum beyond 32-bit offsets": (
        "A40",
        "sum.dim_IntList",
        [bf16(600000, 2240), [0]],
        [4480, 8960, *[336035840, 72, -72, -336035840] * 2, -8960],
    ),
    "efficient attention, gradients in memory": (
        "A40",
        "_scaled_dot_product_efficient_attention_backward.default",
        efficient_backward(112),
        [458752, 179200, 179200, 8192, 2098176, -2098176, -8192],
    ),
    "efficient attention, shorter heads": (
        "A40",
        "_scaled_dot_product_efficient_attention_backward.default",
        efficient_backward(72),
        [294912, 115200, 115200, 8192, 1049088, -1049088, -8192],
    ),
    "efficient attention with ample shared memory": (
        "H100",
        "_scaled_dot_product_efficient_attention_backward.default",
        efficient_backward(112),
        [458752, 179200, 179200, 8192, 1048832, -1048832, -8192],
    ),
    "efficient attention, longer heads": (
        "H100",
        "_scaled_dot_product_efficient_attention_backward.default",
        efficient_backward(160),
        [655360, 256000, 256000, 8192, 3670784, -3670784, -8192],
    ),
    "flash attention splits the keys": (
        "A40",
        "_scaled_dot_product_flash_attention.default",
        [heads(1, 256), heads(257, 256), heads(257, 256)],
        [4096, 32, 160, 40960, 16, 8, -40960, -160],
    ),
    "patches of pictures": (  # measured on an H100: benchmarks/gpu_matrix.md
        "H100",
        "convolution.default",
        patches(bf16(16, 4, 128, 128), bf16(1152, 4, 2, 2)),
        [150994944, 155263123, -155263123],
    ),
    "patches of pictures with channels last": (
        "H100",
        "convolution.default",
        patches(bf16(16, 4, 128, 128, strides=(65536, 1, 512, 4)), bf16(1152, 4, 2, 2)),
        [150994944, 36864, -36864],
    ),
    "patches in fp32": (
        "H100",
        "convolution.default",
        patches(fp32(16, 4, 128, 128), fp32(1152, 4, 2, 2)),
        [301989888],
    ),
    "convolution's gradient laid out as its input": (
        "A40",
        "convolution_backward.default",
        convolution_backward(
            bf16(1, 2240, 32, 32, strides=(2240, 1, 71680, 2240)), LAST, POINTWISE, 1, [True, True, False]
        ),
        [4587520, 11468800, 25088000, -4587520],
    ),
    "depthwise convolution with a bias": (
        "A40",
        "convolution_backward.default",
        convolution_backward(BIAS, BIAS, bf16(11200, 1, 1, 1), 11200, [True, True, True]),
        [22937600, 22400, 22400, 68812800, 352, -352, -68812800],
    ),
    "layer norm of what is not contiguous": (
        "A40",
        "native_layer_norm.default",
        [bf16(1, 1024, 2240, strides=(2293760, 1, 1024)), [2240], None, None, 1e-6],
        [4587520, 4587520, 4096, 4096, -4587520],
    ),
    "layer norm's weights over many short rows": (
        "A40",
        "native_layer_norm_backward.default",
        [*[bf16(70000, 64)] * 2, [64], fp32(70000, 1), fp32(70000, 1), bf16(64), bf16(64), [True, True, True]],
        [8960000, 128, 128, 280064, 280064] + [128, 294912, 4, -4, -294912, -128] * 2 + [-280064, -280064],
    ),
    "mean squared error": (
        "A40",
        "mse_loss.default",
        [fp32(1, 16, 128, 128), fp32(1, 16, 128, 128)],
        [1048576, 1048576, 128, 4, -4, -128, -1048576],
    ),
    "norms of a list": (
        "A40",
        "_foreach_norm.Scalar",
        [[bf16(100000), bf16(10), bf16(70000)], 2, {"dtype": "float32"}],
        [24, 4, 4, 4, -24],
    ),
    "softmax's gradient": (
        "A40",
        "_softmax_backward_data.default",
        [bf16(4480, 4), bf16(4480, 4), -1, {"dtype": "bfloat16"}],
        [35840, 35840, -35840],
    ),
    "a product takes cuBLAS's workspace after its result": (
        "A40",
        "mm.default",
        [bf16(8, 8), bf16(8, 8)],
        [128, 8519680],
    ),
    "and a larger one on sm_120": ("RTX 5090", "mm.default", [bf16(8, 8), bf16(8, 8)], [128, 33554432]),
}

_RUN = """
import json, os, sys
import torch
from bigdit.record import Recorder
from bigdit.rehearse.device import fake_device
from bigdit.rehearse.scratch import scratch_of

def made(value):
    if isinstance(value, list):
        return [made(each) for each in value]
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, value["dtype"])
    if "tensor" not in value:
        return dtype
    if value["strides"] is None:
        return torch.empty(value["tensor"], dtype=dtype, device=device)
    last = sum((n - 1) * step for n, step in zip(value["tensor"], value["strides"])) + value["offset"]
    whole = torch.empty(last + 1, dtype=dtype, device=device)
    return whole.as_strided(value["tensor"], value["strides"], value["offset"])

answers = {}
for name, (capability, multiprocessors, operator, arguments) in json.load(open(sys.argv[1])).items():
    packet, overload = operator.split(".")
    with fake_device("cuda", tuple(capability), multiprocessors=multiprocessors) as device, torch.no_grad():
        recorder = Recorder(device.type, scratch_of(device))
        with recorder:
            with recorder.phase("operands"):
                operands = made(arguments)
            with recorder.phase("operator"):
                kept = getattr(getattr(torch.ops.aten, packet), overload)(*operands)
            timeline = recorder.timeline()
    span = timeline.spans[1]
    taken = [(event, timeline.blocks[abs(event) - 1].nbytes) for event in timeline.events[span.start : span.stop]]
    answers[name] = [nbytes if event > 0 else -nbytes for event, nbytes in taken if nbytes]
json.dump(answers, open(sys.argv[2], "w"))
os._exit(0)
"""


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    questions = {name: (*CARDS[card], operator, args) for name, (card, operator, args, _) in CASES.items()}
    return answered(_RUN, questions, tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("name", CASES)
def test_an_operation_takes_what_cuda_takes_in_its_order(taken: dict[str, list[int]], name: str) -> None:
    assert [size for size in taken[name] if size] == CASES[name][3]
