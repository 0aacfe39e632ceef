"""What a program that reads its masks hears in a rehearsal, where tensors hold no data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bigdit.rehearse.kernels.mended import Kernels

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "lengths": lambda mask: mask.to(torch.int64).sum(dim=1).tolist(),
    "length of one": lambda mask: mask.bool()[0].sum().item(),
    "longest": lambda mask: max(mask.bool().sum(1).tolist()),
    "any": lambda mask: bool(mask.bool().any()),
    "all": lambda mask: bool(torch.all(mask.bool())),
    "any padding": lambda mask: bool((mask == 0).any()),
    "any padding, inverted": lambda mask: bool((~mask.bool()).any()),
    "no padding": lambda mask: not torch.logical_not(mask.bool()).any(),
    "joined": lambda mask: torch.cat([mask.bool(), torch.ones(2, 3, dtype=torch.bool)], dim=1).sum(1).tolist(),
    "outer product": lambda mask: (mask[:, None, :] * mask[:, :, None]).sum().item(),
    "mean": lambda mask: mask.float().mean().item(),
    "all of nothing": lambda mask: bool(torch.all(mask[:, :0] == 0)),
    "rows of nothing": lambda mask: len(mask[:, :0][torch.zeros(2, 0, dtype=torch.bool)]),
    "where": lambda mask: [*torch.nonzero(mask[0]).flatten().shape, *torch.nonzero(mask).stride()],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_full_mask_says_what_a_real_one_says(read: Callable[[torch.Tensor], object]) -> None:
    real = read(torch.ones(2, 5, dtype=torch.bfloat16))
    with FakeTensorMode() as fakes, Kernels(fakes, "cpu"):
        assert read(torch.ones(2, 5, dtype=torch.bfloat16)) == real


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda ones: ones.zero_(),
    "through a view": lambda ones: ones[1:].zero_(),
    "with others": lambda ones: torch._foreach_add_([ones], 3),
    "by a name of its own": lambda ones: torch.add(ones, 1, out=ones),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_changed_in_place_is_known_no_more(change: Callable[[torch.Tensor], object]) -> None:
    with FakeTensorMode() as fakes, Kernels(fakes, "cpu"):
        ones = torch.ones(7, dtype=torch.int64)
        assert ones.sum().item() == 7
        change(ones)
        assert ones.sum().item() == 1  # as of any tensor of which nothing is known
