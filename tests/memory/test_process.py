"""Memory outside torch: the ranges contain the measurements that they were made from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigdit.catalog.gpus import gpus
from bigdit.config.load import parse_strategy
from bigdit.errors import UserError
from bigdit.memory.process import CHANNELS, ByteRange, cuda_context, nccl_buffers, non_torch_memory, non_torch_memory_of

MIB = 2**20
KNOWN = st.sampled_from(sorted(CHANNELS))


def holds(found: ByteRange, mib: int) -> bool:
    return found.low_bytes <= mib * MIB <= found.high_bytes


@pytest.mark.parametrize(
    ("compute_capability", "mib"),
    [
        ((8, 6), 256),  # RTX 3090, torch 2.7 (invoke-ai/InvokeAI#9413)
        ((8, 9), 426),  # RTX 6000 Ada, torch 2.10 (unslothai/unsloth-zoo#1053)
        ((7, 0), 400),  # V100, torch 1.1 (pytorch/pytorch#20532)
        ((9, 0), 527),  # H100, torch 2.11, before any kernel (benchmarks/gpu_matrix.md)
        ((9, 0), 783),  # the same after training steps of Sana-Video
    ],
)
def test_contexts_that_were_measured_lie_in_the_range(compute_capability, mib):
    assert holds(cuda_context(compute_capability), mib)


def test_the_context_of_an_a100_by_hand():
    # Stacks: 56 × 2048 × 1 KiB = 112 MiB on an A30, 108 × 2048 × 1 KiB = 216 MiB on an A100.
    assert cuda_context((8, 0)) == ByteRange(low_bytes=(112 + 133) * MIB, high_bytes=(216 + 263 + 256) * MIB)


def test_the_context_of_a_known_gpu_has_its_own_stacks():
    # A compute capability's range covers its GPUs: 52 multiprocessors have 104 MiB of stacks.
    for gpu in gpus():
        own, any_gpu = cuda_context(gpu.compute_capability, gpu.multiprocessors), cuda_context(gpu.compute_capability)
        assert any_gpu.low_bytes <= own.low_bytes < own.high_bytes <= any_gpu.high_bytes
        assert own.high_bytes - own.low_bytes == (263 - 133 + 256) * MIB
    a30, a100 = cuda_context((8, 0), 56), cuda_context((8, 0), 108)
    assert a100.high_bytes - a30.high_bytes == 52 * 2 * MIB
    assert non_torch_memory((8, 0), 8, multiprocessors=56) == a30 + nccl_buffers((8, 0), 8)


@pytest.mark.parametrize("mib", [544, 688])  # two and four A100 (NVIDIA/nccl#964)
def test_communicators_that_were_measured_lie_in_the_range(mib):
    one, two = nccl_buffers((8, 0), 4), nccl_buffers((8, 0), 4, communicators=2)
    assert holds(one, mib)
    assert one.low_bytes == 2 * 20 * MIB  # two channels, if A100s have no NVLink between them
    assert two.high_bytes - one.high_bytes == 24 * 29 * MIB


def test_nccl_and_context_on_one_rtx_3090_by_hand():
    # 484 MiB with NCCL started (NVIDIA/nccl#2366): context and at least two channels.
    assert holds(non_torch_memory((8, 6), 2), 484)


def test_a_process_alone_has_no_nccl():
    assert nccl_buffers((9, 0), 1) == ByteRange(low_bytes=0, high_bytes=0)
    assert non_torch_memory((9, 0), 1) == cuda_context((9, 0))


@pytest.mark.parametrize(("engine", "mib"), [("zero2", 1347), ("fsdp2", 851), ("single", 767)])
def test_an_engine_of_one_process_has_a_communicator_all_the_same(engine, mib):
    """As an H100 had them (benchmarks/gpu_matrix.md)."""
    assert holds(non_torch_memory_of(parse_strategy([engine]), (9, 0)), mib)


def test_hsdp_has_a_communicator_for_each_of_its_two_groups():
    found = [
        non_torch_memory_of(parse_strategy(["fsdp2,world_size=16", f"dp_replicate={count}"]), (9, 0))
        for count in (1, 2)
    ]
    assert found == [non_torch_memory((9, 0), 16, communicators=count) for count in (1, 2)]


def test_processes_that_share_a_sample_have_a_communicator():
    found = [non_torch_memory_of(parse_strategy(["fsdp2,world_size=8", f"cp={cp}"]), (9, 0)) for cp in (1, 2, 8)]
    assert found == [non_torch_memory((9, 0), 8, communicators=count) for count in (1, 2, 1)]  # all are one group
    rings = non_torch_memory_of(parse_strategy(["fsdp2,world_size=8,cp=4,cp_ring=2"]), (9, 0))
    assert rings == non_torch_memory((9, 0), 8, communicators=4)


@given(KNOWN, st.integers(1, 64), st.integers(1, 4))
def test_what_lies_next_to_grows_with_communicators(compute_capability, world_size, communicators):
    beside = non_torch_memory(compute_capability, world_size, communicators)
    assert 0 < beside.low_bytes <= beside.high_bytes
    assert non_torch_memory(compute_capability, world_size, communicators + 1).high_bytes >= beside.high_bytes


def test_every_gpu_of_the_catalogue_is_known():
    for gpu in gpus():
        assert non_torch_memory(gpu.compute_capability, 8).high_bytes < gpu.usable_bytes


def test_an_unknown_compute_capability_is_an_error():
    with pytest.raises(UserError, match=r"compute capability 6\.1 is not in the catalogue, which has 7\.0, 7\.5, 8\.0"):
        non_torch_memory((6, 1), 1)


def test_a_range_goes_up():
    with pytest.raises(ValueError, match="2 to 1 is no range"):
        ByteRange(low_bytes=2, high_bytes=1)
