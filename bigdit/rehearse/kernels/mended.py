"""Operations whose fake result is laid out otherwise than the real kernel's: what the kernel does is put right.

FakeTensorMode answers with shapes and strides; it may find them by a decomposition, and then the storage
behind the result, or the strides that decide about later copies, are not the kernel's. Each rule here was
found by a difference between the record of a real run and the rehearsal of it, or in the kernel's source.
Shown by the referee's rows of Sana on an A40: engine single (convolutions, attention, copies, the loss), fsdp2 (waits)
and zero2-offload (pinned memory).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from bigdit.rehearse.kernels import TORCH, masks, reads, strides, uniform
from bigdit.rehearse.kernels.answers import Answers, Kept

aten = torch.ops.aten

_PINNED = "_bigdit_pinned"


class Kernels(TorchDispatchMode):
    """The rules of this device, `cuda` or `cpu`. To be entered inside FakeTensorMode, and outside the recorder."""

    def __init__(self, fakes: FakeTensorMode, device: Literal["cuda", "cpu"]) -> None:
        super().__init__()
        self._rules = _RULES if device == "cpu" else _RULES | _CUDA_RULES
        self._answers = Answers(fakes, _KEPT[device], _BY_VALUE)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping the compiler out takes its time at every operation

    def known(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """What this call results in, newly made, where it was asked before: as by `__torch_dispatch__`."""
        found = self._answers.find(func, args, kwargs)
        if found is not None:
            uniform.follow(func, args, found[0])
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self.known(func, args, kwargs)
        if found is not None:
            return found[0]
        result = self._rules.get(func, func)(*args, **kwargs)
        self._answers.keep(func, args, kwargs, result)
        uniform.follow(func, args, result)
        return result


def known_answers() -> Callable[[Any, Any, Any], tuple[Any] | None] | None:
    """`Kernels.known` of the kernels that are entered here; None where there are none, and tensors are real."""
    kernels = _get_current_dispatch_mode()
    return kernels.known if isinstance(kernels, Kernels) else None


def _convolution(input: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
    return _as_cudnn(aten.convolution.default(input, weight, *options), input, weight)


def _convolution_backward(
    grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *options: Any
) -> tuple[torch.Tensor | None, ...]:
    grads = aten.convolution_backward.default(grad_output, input, weight, *options)
    return *(grad if grad is None else _as_cudnn(grad, input, weight) for grad in grads[:2]), grads[2]


def _as_cudnn(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # cuDNN writes channels last where the input or the weight is.
    # Source: cudnn_conv_suggest_memory_format in aten/src/ATen/native/ConvUtils.h.
    if result.dim() != 4:
        return result
    last = torch.channels_last in (suggest_memory_format(input), suggest_memory_format(weight))
    return torch.empty_like(result, memory_format=torch.channels_last if last else torch.contiguous_format)


def _efficient_attention(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    # The seed and offset of dropout are on the host, unless a CUDA graph is captured; since torch 2.15 on the card.
    # Source: _efficient_attention_forward in aten/src/ATen/native/transformers/cuda/attention.cu; traces of 2.15.0 on
    # emulated cards.
    out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention.default(*args, **options)
    place = "cpu" if TORCH < (2, 15) else out.device
    return out, logsumexp, torch.empty_like(seed, device=place), torch.empty_like(offset, device=place)


def _pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    # A copy with the same strides in a block of the pinned allocator's.
    # Source: _pin_memory in aten/src/ATen/native/Memory.cpp.
    pinned = torch.empty_like(tensor)
    setattr(pinned, _PINNED, True)
    return pinned


def _is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    return getattr(tensor, _PINNED, False)


def _to_copy(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    # FakeTensor knows the value of a tensor that was made of a python number, and would compute the copy's
    # on the device, which has no kernels.
    if not isinstance(tensor, FakeTensor) or tensor.constant is None:
        return aten._to_copy.default(tensor, **options)
    constant, tensor.constant = tensor.constant, None
    copy = aten._to_copy.default(tensor, **options)
    tensor.constant = constant
    return copy


def _mse_loss(input: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    # The output is allocated with the shape of the unreduced loss, then resized: a scalar that keeps all of it.
    # Source: TORCH_META_FUNC(mse_loss) in aten/src/ATen/native/Loss.cpp (CPU and CUDA alike).
    loss = torch.empty(
        torch.broadcast_shapes(input.shape, target.shape),
        dtype=torch.result_type(input, target),
        device=input.device,
    )
    return loss if reduction == 0 else loss.resize_(())


def _mse_loss_backward(
    grad_output: torch.Tensor, input: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    # zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT): contiguous whatever the input's strides.
    # Source: mse_loss_backward in aten/src/ATen/native/Loss.cpp (CPU and CUDA alike).
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _local_scalar_dense(tensor: torch.Tensor) -> bool | int | float:
    # A value that the program reads. Masks are full, and say so; no other read of a model is answered. Of what
    # optimizers and engines read nothing decides about memory: a question hears no (DeepSpeed keeps the flag of
    # an overflow in a byte), all else hears 1.
    known = uniform.value_of(tensor)
    if known is not None:
        return known
    if isinstance(tensor, FakeTensor) and tensor.constant is None:
        reads.refuse(aten._local_scalar_dense.default)
        return 0 if tensor.dtype in (torch.bool, torch.uint8) else 1.0 if tensor.is_floating_point() else 1
    return aten._local_scalar_dense.default(tensor)


def _wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    # A functional collective's result, when it is there; the meta kernel makes a tensor of its own.
    # Source: wait_tensor in torch/csrc/distributed/c10d/Functional.cpp.
    return tensor


def _normal_(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    # Drawn in place, and taking nothing; FakeTensorMode would compose it of eight operations, for each sample's noise.
    # Source: normal_impl_ in aten/src/ATen/native/DistributionTemplates.h.
    return tensor


def claim_cuda_kernels() -> torch.library.Library:
    """Let the fake GPU have the kernels that CUDA has and other devices compose; they are claimed while it lives.

    Autograd then records one operation of _fused_rms_norm, which keeps its input and a number a row, where a
    composition keeps most of its intermediate results; and the two backward kernels take one new tensor, where
    compositions take several. Source: their entries in aten/src/ATen/native/native_functions.yaml.
    """
    library = torch.library.Library("aten", "IMPL")
    for operator in ("_fused_rms_norm", "silu_backward", "mish_backward"):
        library.impl(operator, _answered_by_fake_mode, "PrivateUse1")
    return library


def _answered_by_fake_mode(*args: Any) -> None:
    # Never called while FakeTensorMode is on, which answers by the shapes: the dispatcher only wants to see a kernel.
    raise NotImplementedError("the fake device computes nothing")


_RULES: dict[Any, Callable[..., Any]] = {
    **strides.RULES,
    torch.ops._c10d_functional.wait_tensor.default: _wait_tensor,
    aten.mse_loss.default: _mse_loss,
    aten.mse_loss_backward.default: _mse_loss_backward,
    aten._local_scalar_dense.default: _local_scalar_dense,
    aten.normal_.default: _normal_,
    aten.topk.default: masks.topk,
    aten.eq.Scalar: masks.equal,
    aten.index.Tensor: masks.index,
    aten.nonzero.default: masks.nonzero,
    aten.index_put.default: masks.index_put,
    aten.index_put_.default: masks.index_put_,
}

_CUDA_RULES: dict[Any, Callable[..., Any]] = {
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten._to_copy.default: _to_copy,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
}

# What these answer, or leave behind, depends on more than shapes.
_BY_VALUE = {
    aten._local_scalar_dense.default,
    aten.topk.default,
    aten.eq.Scalar,
    aten.index.Tensor,
    aten.nonzero.default,
    aten.index_put.default,
    aten.index_put_.default,
    aten._pin_memory.default,
    aten.is_pinned.default,
}

_KEPT: dict[str, Kept] = {"cuda": {}, "cpu": {}}
