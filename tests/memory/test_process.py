"""Memory outside torch: the ranges contain the measurements that they were made from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigdit.catalog.gpus import gpu, gpus
from bigdit.config.strategy_text import parse_strategy
from bigdit.errors import UserError
from bigdit.memory.process import ByteRange, cuda_context, nccl_buffers, non_torch_memory, non_torch_memory_of

MIB = 2**20
KNOWN = st.sampled_from(gpus())
A30, A100, RTX_3090, H100 = map(gpu, ("a30", "a100-80g-sxm", "rtx-3090", "h100-80g-sxm"))


def holds(found: ByteRange, mib: int) -> bool:
    return found.low_bytes <= mib * MIB <= found.high_bytes


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("rtx-3090", 256),  # RTX 3090, torch 2.7 (invoke-ai/InvokeAI#9413)
        ("rtx-6000-ada", 426),  # RTX 6000 Ada, torch 2.10 (unslothai/unsloth-zoo#1053)
        ("v100-16g-sxm2", 400),  # V100, torch 1.1 (pytorch/pytorch#20532)
        ("h100-80g-sxm", 527),  # H100, torch 2.11, before any kernel (benchmarks/gpu_matrix.md)
        ("h100-80g-sxm", 783),  # the same after training steps of Sana-Video
    ],
)
def test_contexts_that_were_measured_lie_in_the_range(name, mib):
    assert holds(cuda_context(gpu(name)), mib)


def test_the_contexts_of_an_a30_and_of_an_a100_by_hand():
    # Stacks: 56 × 2048 × 1 KiB = 112 MiB on an A30, 108 × 2048 × 1 KiB = 216 MiB on an A100.
    a30, a100 = cuda_context(A30), cuda_context(A100)
    assert a30 == ByteRange(low_bytes=(112 + 133) * MIB, high_bytes=(112 + 263 + 256) * MIB)
    assert a100 == ByteRange(low_bytes=(216 + 133) * MIB, high_bytes=(216 + 263 + 256) * MIB)
    assert non_torch_memory(A30, 8) == a30 + nccl_buffers(A30, 8)


@pytest.mark.parametrize("mib", [544, 688])  # two and four A100 (NVIDIA/nccl#964)
def test_communicators_that_were_measured_lie_in_the_range(mib):
    one, two = nccl_buffers(A100, 4), nccl_buffers(A100, 4, communicators=2)
    assert holds(one, mib)
    assert one.low_bytes == 2 * 20 * MIB  # two channels, if A100s have no NVLink between them
    assert two.high_bytes - one.high_bytes == 24 * 29 * MIB


def test_nccl_and_context_on_one_rtx_3090_by_hand():
    # 484 MiB with NCCL started (NVIDIA/nccl#2366): context and at least two channels.
    assert holds(non_torch_memory(RTX_3090, 2), 484)


def test_a_process_alone_has_no_nccl():
    assert nccl_buffers(H100, 1) == ByteRange(low_bytes=0, high_bytes=0)
    assert non_torch_memory(H100, 1) == cuda_context(H100)


@pytest.mark.parametrize(("engine", "mib"), [("zero2", 1347), ("fsdp2", 851), ("single", 767)])
def test_an_engine_of_one_process_has_a_communicator_all_the_same(engine, mib):
    """As an H100 had them (benchmarks/gpu_matrix.md)."""
    assert holds(non_torch_memory_of(parse_strategy([engine]), H100), mib)


def test_hsdp_has_a_communicator_for_each_of_its_two_groups():
    found = [
        non_torch_memory_of(parse_strategy(["fsdp2,world_size=16", f"dp_replicate={count}"]), H100) for count in (1, 2)
    ]
    assert found == [non_torch_memory(H100, 16, communicators=count) for count in (1, 2)]


def test_processes_that_share_a_sample_have_a_communicator():
    found = [non_torch_memory_of(parse_strategy(["fsdp2,world_size=8", f"cp={cp}"]), H100) for cp in (1, 2, 8)]
    assert found == [non_torch_memory(H100, 8, communicators=count) for count in (1, 2, 1)]  # all are one group
    rings = non_torch_memory_of(parse_strategy(["fsdp2,world_size=8,cp=4,cp_ring=2"]), H100)
    assert rings == non_torch_memory(H100, 8, communicators=4)


@given(KNOWN, st.integers(1, 64), st.integers(1, 4))
def test_what_lies_next_to_grows_with_communicators(known, world_size, communicators):
    beside = non_torch_memory(known, world_size, communicators)
    assert 0 < beside.low_bytes <= beside.high_bytes
    assert non_torch_memory(known, world_size, communicators + 1).high_bytes >= beside.high_bytes


def test_every_gpu_of_the_catalogue_is_known():
    for each in gpus():
        assert non_torch_memory(each, 8).high_bytes < each.usable_bytes


def test_an_unknown_compute_capability_is_an_error():
    with pytest.raises(UserError, match=r"compute capability 6\.1 is not in the catalogue, which has 7\.0, 7\.5, 8\.0"):
        non_torch_memory(A100.model_copy(update={"compute_capability": (6, 1)}), 1)


def test_a_range_goes_up():
    with pytest.raises(ValueError, match="2 to 1 is no range"):
        ByteRange(low_bytes=2, high_bytes=1)
