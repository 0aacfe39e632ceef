"""Two steps of all ranks, and what is read from the history of torch's allocator."""

from __future__ import annotations

import pytest
from cards import A40
from tiny_models import SHAPE, THREE_BLOCKS

from bigdit.config.strategy import parse_strategy
from bigdit.profile.cards import Cards
from bigdit.profile.measured.ranks import run_ranks
from bigdit.profile.measured.trace import operator
from bigdit.profile.request import StepRequest


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "fsdp2"])
def test_the_first_rank_alone_takes_what_it_takes_among_all(cards: Cards, engine: str) -> None:
    strategy = parse_strategy([f"{engine},world_size=2,micro_batch_size=2,grad_accum_steps=2"])
    asked = StepRequest(model=THREE_BLOCKS, batch=SHAPE, strategy=strategy)
    among_all, alone = run_ranks(A40, asked, expandable_segments=True), cards.attempt(asked)
    assert {phase.phase for phase in among_all.phases} == set(alone.phases)
    for name, found in alone.phases.items():
        assert found.peak_bytes == max(each.peak_allocated_bytes for each in among_all.phases if each.phase == name)
    assert alone.peak_reserved_bytes == max(each.peak_reserved_bytes for each in among_all.phases)


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
