"""What the referee says of two timelines, and how it reads a card's history: without a card."""

import sys

import pytest
import torch
from torch import nn

from bigdit import catalog
from bigdit.bench.against_card import Against, Reserved, against, by_replay
from bigdit.errors import UserError
from bigdit.memory import Block, Span, Timeline
from bigdit.rehearse.card.client import Card
from bigdit.profile.measured.trace import operator
from bigdit.profile.unwritten import unwritten_weights
from bigdit.units import GIB, MIB


def timeline(*sizes: int, freed: tuple[int, ...] = (), labels: str = "mm") -> Timeline:
    """Blocks of these sizes in one forward pass; those freed are gone at its end."""
    blocks = tuple(Block(size, "temporary", labels) for size in sizes)
    events = (*range(1, len(sizes) + 1), *(-at for at in freed))
    return Timeline(blocks, events, (Span("forward", 0, len(events)),))


def held(rehearsed: Timeline, card: Timeline) -> Against:
    return against(rehearsed, card, by_replay(card, GIB), GIB)


def test_equal_timelines_have_no_difference() -> None:
    found = held(timeline(MIB, 1000), timeline(MIB, 1024))  # the same blocks of 512 B
    assert found.phases[0].allocated_difference == found.phases[0].reserved_difference == 0
    assert not found.differences
    assert found.allocator_exact


def test_a_block_that_only_the_card_has_is_named_by_its_operator() -> None:
    found = held(timeline(MIB), timeline(MIB, 3 * MIB, labels="sum < convolution_backward"))
    assert found.phases[0].allocated_difference == -3 * MIB
    assert found.phases[0].reserved_difference < 0
    assert {(each.side, each.operator, each.nbytes, each.at_peak) for each in found.differences} == {
        ("card", "sum < convolution_backward", 3 * MIB, True),
        ("card", "sum < convolution_backward", 3 * MIB, False),
    }


def test_a_block_below_the_peak_is_named_beside_no_difference() -> None:
    plain = Timeline(
        tuple(Block(size, "temporary", "mm") for size in (MIB, 4 * MIB)),
        (1, -1, 2),
        (Span("step", 0, 3),),
    )
    found = held(Timeline((plain.blocks[1],), (1,), (Span("step", 0, 1),)), plain)
    assert found.phases[0].allocated_difference == 0
    assert [(each.nbytes, each.at_peak) for each in found.differences] == [(MIB, False)]


def test_what_lives_on_counts_in_the_next_phase() -> None:
    two = Timeline(
        (Block(MIB, "parameter", "init"), Block(MIB, "temporary", "mm")),
        (1, 2, -2),
        (Span("init", 0, 1), Span("forward", 1, 3)),
    )
    assert [phase.card_allocated_bytes for phase in held(two, two).phases] == [MIB, 2 * MIB]


def test_an_allocator_that_counts_otherwise_is_noticed() -> None:
    card = timeline(MIB)
    assert not against(card, card, [Reserved(allocated_bytes=1, reserved_bytes=2)], GIB).allocator_exact


def test_other_phases_are_refused() -> None:
    with pytest.raises(ValueError, match="the rehearsal has the phases"):
        held(timeline(MIB), Timeline((), (), (Span("step", 0, 0),)))


def frame(name: str, filename: str = "??") -> dict[str, str]:
    return {"name": name, "filename": filename}


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], ""),
        ([frame("at::_ops::mm::call(at::Tensor const&)"), frame("forward", "/x/linear.py")], "mm in linear.py:forward"),
        (
            [
                frame("at::_ops::empty_strided::call"),
                frame("at::_ops::sum_dim_IntList::redispatch"),
                frame("run", "/x/bigdit/emulator/inside/values.py"),
                frame("at::_ops::convolution_backward::call"),
                frame("torch::autograd::generated::ConvolutionBackward0::apply(std::vector)"),
                frame("backward", "/x/graph.py"),
            ],
            "sum_dim_IntList < convolution_backward in ConvolutionBackward0",
        ),
        (
            [frame("at::_ops::empty_strided::call"), frame("_init_group", "/x/adam.py")],
            "empty_strided in adam.py:_init_group",
        ),
    ],
)
def test_an_allocation_is_named_by_its_stack(frames: list[dict[str, str]], said: str) -> None:
    assert operator(frames) == said


def test_unwritten_weights_have_their_shapes_and_no_pages() -> None:
    before = nn.init.kaiming_uniform_, nn.Module._apply
    with unwritten_weights():
        layer = nn.Linear(1 << 16, 1 << 16).to(torch.bfloat16)  # 8 GiB that nobody writes
    assert layer.weight.shape == (1 << 16, 1 << 16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert (nn.init.kaiming_uniform_, nn.Module._apply) == before


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python", "/nowhere/python is no interpreter"),
        (sys.executable, r"which is no CUDA build; `make cuda`"),
    ],
)
def test_an_environment_without_cuda_is_a_line_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, python: str, said: str
) -> None:
    monkeypatch.setenv("BIGDIT_CUDA_PYTHON", python)
    with pytest.raises(UserError, match=said):
        Card(catalog.gpu("a40"))
