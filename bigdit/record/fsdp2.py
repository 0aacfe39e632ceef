"""What FSDP2 allocates on its own account: gathered parameters, and what its collectives read and write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from bigdit.memory import Category


class Named(Protocol):
    """What is asked of a recorder."""

    def call(self, label: str, category: Category) -> AbstractContextManager[None]: ...

    def mark(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None: ...


@contextmanager
def watching_fsdp2(recorder: Named) -> Iterator[None]:
    """While in here, the storages of FSDP2's all-gathers and reduce-scatters are known as the engine's buffers,
    and the whole gradients that a reduce-scatter takes as gradients."""
    group, reduce = _fsdp_param_group.FSDPParamGroup, _fsdp_param_group.foreach_reduce
    unshard, wait = group.unshard, group.wait_for_unshard

    def within(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with recorder.call(label, "engine buffer"):
                return function(*args, **kwargs)

        return called

    @functools.wraps(reduce)
    def reduce_marked(params: Any, gradients: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        recorder.mark(gradients, "gradient")
        with recorder.call("FSDP2 reduce-scatter", "engine buffer"):
            return reduce(params, gradients, *args, **kwargs)

    group.unshard = within("FSDP2 all-gather", unshard)
    group.wait_for_unshard = within("FSDP2 gathered parameters", wait)
    _fsdp_param_group.foreach_reduce = reduce_marked
    try:
        yield
    finally:
        group.unshard, group.wait_for_unshard, _fsdp_param_group.foreach_reduce = unshard, wait, reduce
