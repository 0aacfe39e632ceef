"""What was answered once is answered as FakeTensorMode answers it, on new tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bigdit.rehearse.kernels.answers import Answers, Kept

aten = torch.ops.aten

QUESTIONS: dict[str, Callable[[], tuple[object, tuple[object, ...], dict[str, object]]]] = {
    "sum of broadcast": lambda: (aten.add.Tensor, (torch.empty(4, 1, 3), torch.empty(5, 1)), {}),
    "matrix product": lambda: (aten.mm.default, (torch.empty(4, 3), torch.empty(5, 3).t()), {}),
    "cast": lambda: (aten._to_copy.default, (torch.empty(4, 3).t(),), {"dtype": torch.bfloat16}),
    "view of a part": lambda: (aten.slice.Tensor, (torch.empty(8, 3)[2:], 0, 1, 5), {}),
    "other strides": lambda: (aten.as_strided.default, (torch.empty(40)[3:], (2, 3), (5, 1)), {}),
    "other dtype": lambda: (aten.view.dtype, (torch.empty(8)[4:], torch.bfloat16), {}),
    "several views": lambda: (aten.split.Tensor, (torch.empty(6, 3)[1:], 2), {}),
    "several results": lambda: (aten.native_layer_norm.default, (torch.empty(4, 3), [3], None, None, 1e-5), {}),
    "in place": lambda: (aten.add_.Tensor, (torch.empty(4), 1), {}),
    "into a list": lambda: (aten._foreach_add_.Scalar, ([torch.empty(4), torch.empty(2)], 1.0), {}),
    "none": lambda: (aten.zeros.default, ([4, 3],), {"dtype": torch.float16, "device": torch.device("cpu")}),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_the_second_answer_is_the_first_one_on_tensors_of_its_own(
    ask: Callable[[], tuple[object, tuple[object, ...], dict[str, object]]],
) -> None:
    with FakeTensorMode() as fakes:
        answers = Answers(fakes, {}, ())
        func, args, kwargs = ask()
        result = func(*args, **kwargs)
        assert answers.find(func, args, kwargs) is None
        answers.keep(func, args, kwargs, result)
        func, again, kwargs = ask()
        found = answers.find(func, again, kwargs)
        assert found is not None
        assert described(found[0], again) == described(result, args)
        assert described(found[0], again) == described(func(*again, **kwargs), again)


def described(result: object, args: tuple[object, ...]) -> object:
    """All that is to be known of a result but its address; for its storage, whose it is."""
    if isinstance(result, list | tuple):
        return [type(result), *(described(item, args) for item in result)]
    if not isinstance(result, torch.Tensor):
        return result
    storage = result.untyped_storage()
    tensors = [tensor for tensor in args if isinstance(tensor, torch.Tensor)]
    lies_on = [number for number, one in enumerate(tensors) if one.untyped_storage()._cdata == storage._cdata]
    layout = (result.shape, result.stride(), result.storage_offset(), result.dtype, result.device, storage.nbytes())
    return *layout, lies_on, torch._C._dispatch_key_set(result), result.requires_grad, set(vars(result))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((torch.int64, 2), (torch.int64, 2.0)),
        ((torch.int64, 1), (torch.int64, True)),
        ((torch.float32, 2), (torch.bfloat16, 2)),
    ],
)
def test_questions_that_are_equal_in_python_are_told_apart(
    one: tuple[torch.dtype, object], other: tuple[torch.dtype, object]
) -> None:
    with FakeTensorMode() as fakes:
        answers = Answers(fakes, {}, ())
        args = (torch.empty(4, dtype=one[0]), one[1])
        answers.keep(aten.mul.Tensor, args, {}, aten.mul.Tensor(*args))
        assert answers.find(aten.mul.Tensor, args, {}) is not None
        assert answers.find(aten.mul.Tensor, (torch.empty(4, dtype=other[0]), other[1]), {}) is None


def test_a_view_is_found_wherever_its_tensor_lies_in_the_storage() -> None:
    with FakeTensorMode() as fakes:
        answers = Answers(fakes, {}, ())
        storage = torch.empty(100)
        args = (storage[10:20], 0, 2, 5)
        answers.keep(aten.slice.Tensor, args, {}, aten.slice.Tensor(*args))
        found = answers.find(aten.slice.Tensor, (storage[40:50], 0, 2, 5), {})
        assert found is not None
        assert found[0].storage_offset() == 42


def test_what_depends_on_more_than_shapes_is_not_kept() -> None:
    with FakeTensorMode() as fakes:
        kept: Kept = {}
        answers = Answers(fakes, kept, {aten.topk.default})
        known = torch.tensor(3.0)  # a tensor that knows its value
        mask = torch.empty(4, dtype=torch.bool)
        shared = torch.empty(8)
        for func, args in (
            (aten.add.Tensor, (known, known)),
            (aten.topk.default, (torch.empty(4), 2)),
            (aten.resize_.default, (torch.empty(4), [8])),
            (aten._local_scalar_dense.default, (mask[0],)),
            (aten.clone.default, (torch.view_as_complex(torch.empty(4, 2)).conj(),)),
        ):
            answers.keep(func, args, {}, args[0])
            assert answers.find(func, args, {}) is None
        # How two views of one storage lie to each other is no part of the question.
        pair = (shared[:4], shared[4:])
        answers.keep(aten.add.Tensor, pair, {}, shared[2:6])
        assert kept == {}


def test_an_answer_serves_the_next_rehearsal_with_tensors_of_its_own_mode() -> None:
    kept: Kept = {}
    with FakeTensorMode() as first:
        args = (torch.empty(4), 2)
        Answers(first, kept, ()).keep(aten.mul.Tensor, args, {}, aten.mul.Tensor(*args))
    with FakeTensorMode() as second:
        answers = Answers(second, kept, ())
        assert answers.find(aten.mul.Tensor, args, {}) is None  # these are the first one's
        found = answers.find(aten.mul.Tensor, (torch.empty(4), 2), {})
        assert found is not None
        assert found[0].fake_mode is second
