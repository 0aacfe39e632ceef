"""The recorder on the CPU's tensors: what counts as an allocation and as a free, and what operators cost."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from gpus import answers

from bigdit.memory import Timeline, ledger
from bigdit.record.costs import Counting
from bigdit.record.recorder import Recorder


def _live(timeline: Timeline) -> int:
    return ledger(timeline, 1).phases[-1].end_bytes


def test_views_share_a_storage_and_the_last_reference_frees_it() -> None:
    with Recorder() as recorder, recorder.phase("forward"):
        tensor = torch.ones(4, 8)
        view = tensor[1:].t()
        del tensor
        held = _live(recorder.host_timeline())
        del view
    timeline = recorder.host_timeline()
    assert held == 128
    assert [block.nbytes for block in timeline.blocks] == [128]
    assert timeline.events == (1, -1)


def test_a_storage_resized_to_nothing_is_free_and_comes_back_as_a_new_block() -> None:
    with Recorder() as recorder, recorder.phase("forward"):
        tensor = torch.ones(16)
        recorder.mark([tensor], "parameter")
        tensor.untyped_storage().resize_(0)
        gone = _live(recorder.host_timeline())
        tensor.untyped_storage().resize_(128)
    assert gone == 0
    assert _live(recorder.host_timeline()) == 128
    assert {block.category for block in recorder.host_timeline().blocks} == {"parameter"}


def test_resizing_is_torch_s_own_again_afterwards() -> None:
    before = torch.UntypedStorage.resize_
    with Recorder():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before
    assert gc.isenabled()


def test_an_operation_that_resizes_its_output_is_seen() -> None:
    with Recorder() as recorder, recorder.phase("forward"):
        out = torch.empty(2)
        out.resize_(100)
    assert _live(recorder.host_timeline()) == 400


def test_a_storage_from_before_is_allocated_where_it_is_marked() -> None:
    early = torch.ones(10)
    with Recorder() as recorder, recorder.phase("init"):
        recorder.mark([early, None, torch.ones(1, device="meta")], "parameter")
    (block,) = recorder.host_timeline().blocks
    assert (block.nbytes, block.category, block.label) == (40, "parameter", "unseen")


def test_a_cycle_is_freed_where_its_phase_ends() -> None:
    class Holder:
        pass

    with Recorder() as recorder:
        with recorder.phase("forward"):
            holder = Holder()
            holder.itself, holder.tensor = holder, torch.ones(10)
            del holder
            held = _live(recorder.host_timeline())
        freed = _live(recorder.host_timeline())
    assert (held, freed) == (40, 0)


@contextmanager
def counted() -> Iterator[Counting]:
    with Counting() as counting:
        counting.phases.append("forward")
        yield counting


def test_operators_are_counted():
    weight, x = torch.ones(8, 4), torch.ones(2, 4)
    with counted() as counting:
        torch.nn.functional.conv2d(torch.ones(1, 6, 5, 5), torch.ones(6, 1, 3, 3), groups=6)
        x @ weight.T
    found = {cost.operator: cost for cost in counting.costs.operators()}
    assert found["aten.mm"].flops == 2 * 2 * 4 * 8
    assert found["aten.mm"].nbytes == 4 * (2 * 4 + 4 * 8 + 2 * 8)
    # depthwise: 3 x 3 positions of 6 channels, 9 products each
    assert found["aten.convolution (grouped)"].flops == 2 * 6 * 3 * 3 * 9
    assert "aten.t" not in found  # a view moves nothing


def test_attention_is_named_by_the_size_of_its_heads():
    query, key = torch.ones(1, 2, 16, 24, requires_grad=True), torch.ones(1, 2, 8, 24)
    with counted() as counting:
        torch.nn.functional.scaled_dot_product_attention(query, key, key).sum().backward()
    found = {cost.operator for cost in counting.costs.operators() if "scaled_dot_product" in cost.operator}
    kernel = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert found == {f"{kernel} (heads of 24)", f"{kernel}_backward (heads of 24)"}


def test_a_depthwise_convolution_s_gradients_cost_as_much_as_its_output_each():
    x, weight = torch.ones(1, 6, 5, 5, requires_grad=True), torch.ones(6, 1, 3, 3, requires_grad=True)
    with counted() as counting:
        torch.nn.functional.conv2d(x, weight, groups=6).sum().backward()
    found = {cost.operator: cost for cost in counting.costs.operators()}
    forward, backward = found["aten.convolution (grouped)"], found["aten.convolution_backward (grouped)"]
    assert backward.flops == 2 * forward.flops


def test_counting_changes_no_launch_and_no_byte():
    """Where torch writes a sum in place, checks no index, or adds a bias: all that a mode would do otherwise."""
    bare, counted = answers(
        "a40",
        """
        import json, torch
        from contextlib import nullcontext
        from bigdit_emulated import libraries
        from bigdit.record.costs import Counting

        linear = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
        x = torch.zeros(2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        rows = torch.zeros(32, device="cuda", dtype=torch.int64)

        def step(mode):
            torch.cuda.reset_peak_memory_stats()
            before, held = libraries.read_counts(), torch.cuda.memory_allocated()
            with mode:
                used = linear(x).sin()
                (used[:, rows].sum() + used.topk(8).values.sum() + used.cos().sum()).backward()
            now = libraries.read_counts()
            x.grad = linear.weight.grad = linear.bias.grad = None
            return torch.cuda.max_memory_allocated() - held, {name: now[name] - before[name] for name in now}

        step(nullcontext())  # what only the first one does
        print(json.dumps([step(nullcontext()), step(Counting())]))
        """,
    )
    assert counted == bare


def test_the_call_of_an_engine_names_what_it_allocates():
    with Recorder() as recorder, recorder.phase("init"):
        with recorder.call("gather", "engine buffer"):
            gathered, own = torch.ones(3), torch.ones(5)
        recorder.mark([own], "parameter")
        later = torch.ones(7)
    blocks = {block.nbytes: (block.category, block.label) for block in recorder.host_timeline().blocks}
    assert blocks == {
        12: ("engine buffer", "gather"),
        20: ("parameter", "gather"),
        28: ("temporary", "aten.ones.default"),
    }
    assert all(tensor.numel() for tensor in (gathered, own, later))
