"""What FakeTensorMode and the kernels' rules have answered once: the same question again takes a tenth of the time.

A training step asks the same few hundred questions tens of thousands of times: an operator, shapes, strides and
dtypes. FakeTensorMode would keep answers too, under keys that take longer to make than most answers, and is told not to
(`device.py`); here a key is one flat tuple. Kept is what follows from the question alone: how each result is laid out,
and whose storage it has.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bigdit.rehearse.kernels.subclasses import MAKE_SUBCLASS

_META = torch.device("meta")
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
# Tensors that know their values come of these.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_AS_STRIDED = torch.ops.aten.as_strided.default

# The attributes of a fake tensor of which nothing is known but its device.
_BLANK = vars(FakeTensor(FakeTensorMode(), torch.empty(0, device=_META), torch.device("cpu"))) | {"fake_mode": None}
_DEVICE = "_fake_device" if "_fake_device" in _BLANK else "fake_device"  # the latter in torch 2.11


@dataclass(frozen=True, slots=True)
class _Made:
    """A result: on a storage of its own, or so many bytes behind the start of the question's tensor of this number."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    views: int | None
    behind: int

    def make(self, tensors: list[FakeTensor], fakes: FakeTensorMode) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            if self.views is None:
                plain = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=_META)
            else:
                plain = torch.empty(0, dtype=self.dtype, device=_META)
                viewed = tensors[self.views]
                offset = (viewed.storage_offset() * viewed.dtype.itemsize + self.behind) // self.dtype.itemsize
                plain.set_(viewed.untyped_storage(), offset, self.shape, self.strides)
            made = MAKE_SUBCLASS(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=self.device)
        if fakes._allow_unsafe_data_ptr_access:  # as FakeTensor.__new__ has it
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
        known = made.__dict__
        known.update(_BLANK)
        known["fake_mode"], known[_DEVICE] = fakes, self.device
        return made


@dataclass(frozen=True, slots=True)
class _Same:
    """A result that is the question's tensor of this number."""

    number: int

    def make(self, tensors: list[FakeTensor], fakes: FakeTensorMode) -> FakeTensor:
        return tensors[self.number]


@dataclass(frozen=True, slots=True)
class _Number:
    """A result that is no tensor."""

    value: bool | int | float | None

    def make(self, tensors: list[FakeTensor], fakes: FakeTensorMode) -> bool | int | float | None:
        return self.value


@dataclass(frozen=True, slots=True)
class _Answer:
    kind: type | None  # of the sequence that the results are in
    results: tuple[_Made | _Same | _Number, ...]

    def make(self, tensors: list[FakeTensor], fakes: FakeTensorMode) -> Any:
        if self.kind is None:
            return self.results[0].make(tensors, fakes)
        return self.kind([result.make(tensors, fakes) for result in self.results])


Kept = dict[tuple[Any, ...], _Answer]
"""By question; for as long as the process lives."""


class Answers:
    """Of one FakeTensorMode. `kept` are those of one kind of kernels; `unlike` are operators that look at more."""

    def __init__(self, fakes: FakeTensorMode, kept: Kept, unlike: Container[Any]) -> None:
        self._fakes = fakes
        self._unlike = unlike
        self._kept = kept
        self._names: dict[Any, str | None] = {}

    def find(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """The result, newly made; None where this was not asked before, or its answer follows from more."""
        name = self._name(func)
        if name is None:
            return None
        tensors: list[FakeTensor] = []
        key = self._key(name, func, args, kwargs, tensors)
        answer = None if key is None else self._kept.get(key)
        return None if answer is None else (answer.make(tensors, self._fakes),)

    def keep(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember this answer, if it follows from the question."""
        name = self._name(func)
        if name is None:
            return
        tensors: list[FakeTensor] = []
        key = self._key(name, func, args, kwargs, tensors)
        if key is None:
            return
        kind = type(result) if isinstance(result, list | tuple) else None
        asked = {id(tensor): number for number, tensor in enumerate(tensors)}
        storages = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(tensors)}
        described = [_describe(item, tensors, asked, storages) for item in ((result,) if kind is None else result)]
        results = tuple(item for item in described if item is not None)
        if kind not in (None, list, tuple) or len(results) < len(described) or _share(described, result):
            return
        answer = _Answer(kind, results)
        if _keys(answer.make(tensors, self._fakes)) == _keys(result):
            self._kept[key] = answer

    def _name(self, func: Any) -> str | None:
        """What stands for the operator in keys, since an operator takes long to hash; None where nothing is kept."""
        try:
            return self._names[func]
        except KeyError:
            name = None if func in self._unlike or not _repeats(func) else func.name()
            return self._names.setdefault(func, name)

    def _key(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> tuple[Any, ...] | None:
        parts = [name, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if func is _AS_STRIDED:  # counts from the start of the storage
            parts.append(args[0].storage_offset())
        if not self._add(parts, tensors, args):
            return None
        if kwargs:
            parts += kwargs
            if not self._add(parts, tensors, kwargs.values()):
                return None
        for tensor in tensors:
            if tensor.constant is not None:
                if func._schema.is_mutable or all(each.constant is not None for each in tensors):
                    return None  # FakeTensorMode computes with them, or forgets what they are
                break
        return tuple(parts)

    def _add(self, parts: list[Any], tensors: list[FakeTensor], values: Any) -> bool:
        """Whether these values are such that an answer to them can be kept; they are added to a key."""
        for value in values:
            kind = value.__class__
            if kind is FakeTensor:
                if value.fake_mode is not self._fakes or not _is_plain(value):
                    return False
                tensors.append(value)
                parts += (value.shape, value.stride(), value.dtype, value.__dict__[_DEVICE], value.requires_grad)
            elif kind in _PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are the same key, and not the same question
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._add(parts, tensors, value):
                    return False
            else:
                return False
        return True


@functools.cache
def _repeats(func: Any) -> bool:
    """Whether the operator's results follow from shapes, and it changes none."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func in _LIFTS:
        return False
    return not any(tag in func.tags for tag in _TAGS)


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


def _describe(
    item: Any, tensors: list[FakeTensor], asked: dict[int, int], storages: dict[int, int]
) -> _Made | _Same | _Number | None:
    """How this result is made again; None where that is not known.

    `asked` and `storages` are the numbers of the question's tensors, by their address and that of their storage.
    """
    if item is None or type(item) in (bool, int, float):
        return _Number(item)
    if id(item) in asked:
        return _Same(asked[id(item)])
    if type(item) is not FakeTensor or item.constant is not None or item.requires_grad or not _is_plain(item):
        return None
    shape, strides, storage = tuple(item.shape), item.stride(), item.untyped_storage()
    start, views = item.storage_offset() * item.dtype.itemsize, storages.get(storage._cdata)
    if views is not None and len(storages) < len(tensors):
        return None  # how those on one storage lie to each other is not in the question
    if views is not None:
        start -= tensors[views].storage_offset() * tensors[views].dtype.itemsize
    elif start or storage.nbytes() != _extent(shape, strides) * item.dtype.itemsize:
        return None
    if vars(item) != _BLANK | {"fake_mode": item.fake_mode, _DEVICE: item.fake_device}:
        return None
    return _Made(shape, strides, item.dtype, item.fake_device, views, start)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def _share(described: list[Any], result: Any) -> bool:
    """Whether two results lie on one new storage."""
    if not isinstance(result, list | tuple):
        return False
    made = zip(described, result, strict=True)
    new = [item.untyped_storage()._cdata for how, item in made if isinstance(how, _Made) and how.views is None]
    return len(set(new)) < len(new)


def _keys(result: Any) -> list[Any]:
    """The dispatcher's keys of each tensor."""
    items = result if isinstance(result, list | tuple) else (result,)
    return [torch._C._dispatch_key_set(item) for item in items if isinstance(item, torch.Tensor)]
