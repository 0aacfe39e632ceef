"""Collectives between processes: small payloads are exchanged for real, so that what came of known values is known."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from .known import Known, tensors

_FUNCTIONAL = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
)
"""Of _c10d_functional, for which torch has one implementation for all devices: what DTensor calls."""

_RECEIVE = {"broadcast_", "scatter_", "recv_", "recv_any_source_"}
"""Collectives that bring what another process holds, which may be known only there."""

_libraries: list[Any] = []


def install(torch: Any, known: Known) -> None:
    """Follow torch's collectives; nothing where this torch was built without them."""
    if not torch.distributed.is_available():
        return
    names = [n for n in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA") if n.startswith("c10d::")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that take another's place
        for name in [*names, *(f"_c10d_functional::{name}" for name in _FUNCTIONAL)]:
            namespace, _, operator = name.partition("::")
            registered = torch.library.Library(namespace, "IMPL")
            _libraries.append(registered)
            function = _followed(torch.library.get_kernel(name, "CUDA"), operator, namespace == "c10d", known)
            registered.impl(operator, function, "CUDA", with_keyset=True, allow_override=True)


def leave() -> None:
    """Follow them no longer."""
    for registered in _libraries:
        registered._destroy()


def _followed(kernel: Any, operator: str, into_first: bool, known: Known) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        first, others = list(tensors(args[0])) if args else [], list(tensors(list(args[1:])))
        came = operator in _RECEIVE or all(map(known.holds, others if into_first and others else first))
        results = kernel.call_boxed(keys, *args, **kwargs)
        for tensor in first if into_first else tensors(results):
            known.note(tensor, came and known.small(tensor))
        return results

    return run
