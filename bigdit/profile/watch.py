"""Marks the storages of a training step for a recorder, which sees storages but not their meaning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from bigdit.engines import Ema, Engine
from bigdit.loader.batch import Batch, RawBatch
from bigdit.record.costs import replaced
from bigdit.record.recorder import Recorder


class Watch:
    """Marks the storages of an engine and of its batches while `train_step` runs with `phase=watch.phase`."""

    def __init__(self, recorder: Recorder, engine: Engine, ema: Ema | None = None) -> None:
        self._recorder = recorder
        self._engine = engine
        names = {module: name for name, module in engine.model.named_modules()}

        def entered(module: nn.Module, _: Any) -> None:
            if not torch.compiler.is_compiling():  # a compiled block runs no modules
                recorder.enter_module(names.get(module, type(module).__name__))

        def left(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                recorder.leave_module()

        self._hooks = (
            register_module_forward_pre_hook(entered),
            # always_call: a checkpoint stops its recomputation early by an exception.
            register_module_forward_hook(left, always_call=True),
            engine.optimizer.register_step_pre_hook(self._mark_stepped),
        )
        self._calls = list(engine.calls())
        for owner, name in self._calls:
            setattr(owner, name, _labelled(recorder, name, getattr(owner, name)))
        for parameter in engine.model.parameters():
            recorder.mark((parameter, *_kept_with(parameter)), "parameter")
        recorder.mark(engine.model.buffers(), "buffer")
        recorder.mark(engine.masters, "master weight")
        recorder.mark(() if ema is None else ema.tensors(), "EMA")
        recorder.mark(engine.buffers(), "engine buffer")
        recorder.mark_rest("engine buffer")  # from the engine's start

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        for owner, name in self._calls:
            delattr(owner, name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The recorder's phase, with marks at its end."""
        with self._recorder.phase(name):
            yield
            parameters = (*self._engine.model.parameters(), *self._engine.masters)
            self._recorder.mark((parameter.grad for parameter in parameters), "gradient")
            self._recorder.mark(self._engine.gradients(), "gradient")
            for state in self._engine.optimizer.state.values():
                self._recorder.mark(filter(torch.is_tensor, state.values()), "optimizer state")
            self._recorder.mark(self._engine.buffers(), "engine buffer")

    def batches(self, micro_batches: Iterable[Batch | RawBatch]) -> list[Any]:
        """The micro-batches, which mark themselves and their copies on the device as input."""
        return [_MarkedBatch(batch, self.held) for batch in micro_batches]

    def held(self, batch: Batch | RawBatch) -> None:
        """Mark a micro-batch of the loader as input."""
        self._recorder.mark(batch.tensors(), "input")

    def encoding(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its micro-batches marked as input."""

        def marked(*args: Any) -> Any:
            batch = encode(*args)
            self.held(batch)
            return batch

        return marked

    def _mark_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Mark gradients that are freed within the step: those of fp32 masters, or of one parameter in the backward
        pass."""
        # An optimizer may step hundreds of times, for one parameter each: look at those without gradient quickly.
        stepped = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._recorder.mark(stepped, "gradient")


def _kept_with(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    """Tensors in attributes of a parameter: ZeRO-3's shard, bitsandbytes' state for nf4 values."""
    held, state = vars(parameter), getattr(parameter, "quant_state", None)
    return filter(torch.is_tensor, (*held.values(), *(() if state is None else vars(state).values())))


@dataclass(frozen=True)
class _MarkedBatch:
    """A micro-batch that marks what `to` copies to the device."""

    batch: Batch | RawBatch
    mark: Callable[[Any], None]

    def __post_init__(self) -> None:
        self.mark(self.batch)

    def to(self, device: torch.device, compute_dtype: torch.dtype) -> Any:
        moved = self.batch.to(device, compute_dtype)
        self.mark(moved)
        return moved


def _labelled(recorder: Recorder, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's function, whose allocations are engine buffers unless a mark has another category."""

    @functools.wraps(function)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        with recorder.call(label, "engine buffer"):
            return function(*args, **kwargs)

    return labelled


@contextmanager
def watching_fsdp2(recorder: Recorder) -> Iterator[None]:
    """Within it, storages of FSDP2's all-gathers and reduce-scatters are engine buffers, and a reduce-scatter's inputs
    are gradients."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group  # late: half a second, for FSDP2 only

    def reducing(reduce: Callable[..., Any]) -> Callable[..., Any]:
        reduce = _labelled(recorder, "FSDP2 reduce-scatter", reduce)

        def marked(params: Any, gradients: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            recorder.mark(gradients, "gradient")
            return reduce(params, gradients, *args, **kwargs)

        return marked

    group, labelled = _fsdp_param_group.FSDPParamGroup, functools.partial(_labelled, recorder)
    with (
        replaced(group, "unshard", functools.partial(labelled, "FSDP2 all-gather")),
        replaced(group, "wait_for_unshard", functools.partial(labelled, "FSDP2 gathered parameters")),
        replaced(_fsdp_param_group, "foreach_reduce", reducing),
    ):
        yield
