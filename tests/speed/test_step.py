"""Step times: laws of the arithmetic, and hand-made examples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigdit import catalog
from bigdit.profile.attempt import launched
from bigdit.search.plan import WholeRun
from bigdit.speed.seconds import LAUNCHED_SECONDS, Cluster, Interval, Launches, StepRatio, StepTime, launches_of
from bigdit.speed.step import (
    BANDWIDTH,
    FP8_PRODUCTS,
    HOST_LINK,
    HOST_MEMORY,
    KERNEL_SECONDS,
    LATENCY,
    LAUNCH_SECONDS,
    NVLINK,
    PARTS,
    PRODUCTS,
    step_time,
)
from bigdit.speed.work import NOTHING, Amount, Exchange, Load, Operation, Work
from bigdit.strategy import Strategy

A100 = catalog.gpu("a100-80g-sxm")
RTX_4090 = catalog.gpu("rtx-4090")
ONE = Strategy()
MM = Operation("forward", "aten.mm", "bfloat16", "device")

OPERATORS = ("aten.mm", "aten.add", "aten.convolution", "aten.convolution (grouped)", "aten._flash_attention_forward")
amounts = st.builds(Amount, st.floats(0, 1e5), st.floats(0, 1e16), st.floats(0, 1e13))
operations = st.builds(
    Operation,
    st.sampled_from(["encode", "forward", "backward", "step", "ema"]),
    st.sampled_from(OPERATORS),
    st.sampled_from(["bfloat16", "float16", "float32", "int8"]),
    st.sampled_from(["device", "host", "to device", "to host"]),
)
exchanges = st.builds(
    Exchange,
    st.sampled_from(["forward", "backward", "step"]),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]),
    st.sampled_from([2, 8, 16]),
)
loads = st.builds(
    Load, st.dictionaries(operations, amounts, max_size=5), st.dictionaries(exchanges, amounts, max_size=3)
)
works = st.builds(Work, loads, loads, loads)
gpus = st.sampled_from([catalog.gpu(name) for name in ("a100-80g-sxm", "v100-32g-sxm2", "rtx-4090", "a40", "h100-sxm")])
clusters = st.sampled_from([Cluster(gpus=16), Cluster(gpus=8), Cluster(gpus=16, gpus_per_node=2, network_gbs=1.0)])


def one(load: Load) -> Work:
    return Work(load, NOTHING, NOTHING)


def no_longer(first: StepTime, second: StepTime) -> bool:
    slack = 1 + 1e-9  # sums in another order
    return first.seconds.low <= second.seconds.low * slack and first.seconds.high <= second.seconds.high * slack


@settings(deadline=None)
@given(works, loads, gpus, clusters)
def test_more_work_never_takes_less_time(work, more, gpu, cluster):
    before = step_time(work, ONE, gpu, cluster)
    for added in (one(more), Work(NOTHING, more, NOTHING), Work(NOTHING, NOTHING, more)):
        assert no_longer(before, step_time(work + added, ONE, gpu, cluster))
    assert no_longer(before, step_time(work, ONE.model_copy(update={"grad_accum_steps": 3}), gpu, cluster))


@settings(deadline=None)
@given(works, gpus, clusters, st.floats(1, 10))
def test_a_faster_gpu_or_link_never_takes_longer(work, gpu, cluster, times):
    rates = gpu.tflops
    faster = rates.model_copy(
        update={name: value and value * times for name, value in rates.model_dump().items()},
    )
    before = step_time(work, ONE, gpu, cluster)
    for update in ({"bandwidth_gbs": gpu.bandwidth_gbs * times}, {"tflops": faster}, {"pcie": "6.0 x16"}):
        assert no_longer(step_time(work, ONE, gpu.model_copy(update=update), cluster), before)
    network = cluster.model_copy(update={"network_gbs": cluster.network_gbs * times})
    assert no_longer(step_time(work, ONE, gpu, network), before)


@settings(deadline=None)
@given(works, gpus, clusters)
def test_parts_add_up_to_the_whole(work, gpu, cluster):
    found = step_time(work, ONE, gpu, cluster)
    assert set(found.parts) <= set(PARTS)
    assert sum(part.low for part in found.parts.values()) == pytest.approx(found.seconds.low)
    assert sum(part.high for part in found.parts.values()) == pytest.approx(found.seconds.high)


@settings(deadline=None)
@given(works, gpus, clusters, st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e4))
def test_counted_launches_are_a_part_like_others_and_more_of_them_take_no_less(work, gpu, cluster, micro, step, more):
    found = step_time(work, ONE, gpu, cluster, launches=Launches(micro, step))
    assert sum(part.low for part in found.parts.values()) == pytest.approx(found.seconds.low)
    assert sum(part.high for part in found.parts.values()) == pytest.approx(found.seconds.high)
    assert found.seconds.low >= found.launches.seconds.low * (1 - 1e-9)
    assert no_longer(found, step_time(work, ONE, gpu, cluster, launches=Launches(micro + more, step)))


@settings(deadline=None)
@given(works, gpus, clusters, st.floats(0.2, 5), st.floats(0, 1), st.integers(1, 9))
def test_a_calibrated_interval_is_moved_and_never_wider(work, gpu, cluster, ratio, spread, count):
    reported = StepRatio(ratio=ratio, spread=spread, count=count, source="")
    plain, found = step_time(work, ONE, gpu, cluster), step_time(work, ONE, gpu, cluster, reported)
    assert plain.seconds.low * ratio <= found.seconds.low * (1 + 1e-9)
    assert found.seconds.high <= plain.seconds.high * ratio * (1 + 1e-9)
    if plain.seconds.low:
        assert found.seconds.middle == pytest.approx(plain.seconds.middle * ratio)
        more = step_time(work, ONE, gpu, cluster, reported.model_copy(update={"count": count + 5}))
        assert more.seconds.high <= found.seconds.high * (1 + 1e-9)
    assert sum(part.high for part in found.parts.values()) == pytest.approx(found.seconds.high)


@settings(deadline=None)
@given(works, works, st.floats(-3, 3))
def test_work_is_linear(first, second, times):
    mixed = (first + (second - first) * times).accumulated(2)
    by_hand = first.accumulated(2) * (1 - times) + second.accumulated(2) * times
    for key in mixed.operations.keys() | by_hand.operations.keys():
        assert mixed.operations[key].flops == pytest.approx(by_hand.operations[key].flops, rel=1e-6, abs=1e3)


def test_what_interpolates_below_zero_counts_as_nothing():
    below = Load({MM: Amount(-1, -1e12, -1e9)}, {Exchange("backward", "all_reduce", 8): Amount(-1, 0, -1e9)})
    assert step_time(one(below), ONE, A100, Cluster(gpus=8)).seconds == Interval(low=0, high=0)


def test_a_product_that_arithmetic_decides():
    work = one(Load({MM: Amount(10, 312e12, 1e9)}, {}))
    found = step_time(work, ONE, A100, Cluster())
    share = PRODUCTS[A100.compute_capability]
    assert found.seconds.low == pytest.approx(1 / share.high)
    assert found.seconds.high == pytest.approx(1 / share.low + 10 * KERNEL_SECONDS)
    assert set(found.parts) == {"matrix products"}
    accumulated = step_time(work, ONE.model_copy(update={"grad_accum_steps": 4}), A100, Cluster())
    assert accumulated.seconds.low == pytest.approx(4 / share.high)


def test_the_dtype_and_the_precision_choose_the_rate():
    single = one(Load({MM._replace(dtype="float32"): Amount(1, 1e15, 0)}, {}))
    tf32 = step_time(single, Strategy(precision="tf32"), A100, Cluster()).seconds
    fp32 = step_time(single, Strategy(precision="fp32"), A100, Cluster()).seconds
    assert fp32.low > 4 * tf32.low
    assert step_time(single, Strategy(precision="tf32"), catalog.gpu("v100-32g-sxm2"), Cluster()).seconds.low > fp32.low
    h100, fp8 = catalog.gpu("h100-sxm"), one(Load({MM._replace(dtype="float8_e4m3fn"): Amount(1, 1979e12, 0)}, {}))
    assert step_time(fp8, ONE, h100, Cluster()).seconds.low == pytest.approx(1 / FP8_PRODUCTS[9, 0].high)
    int8 = one(Load({MM._replace(dtype="int8"): Amount(1, 312e12, 0)}, {}))
    assert step_time(int8, ONE, A100, Cluster()).seconds.low == pytest.approx(1 / PRODUCTS[8, 0].high)


def test_a_gpu_whose_products_were_measured_is_reported_from_others_of_its_kind():
    work = one(Load({MM: Amount(1, 149.7e12, 0)}, {}))
    a40, a10 = (catalog.gpu(name) for name in ("a40", "a10"))
    assert a40.compute_capability == a10.compute_capability
    known, unknown = (step_time(work, ONE, gpu, Cluster()).seconds for gpu in (a40, a10))
    assert known.low == pytest.approx(1 / 0.82)
    assert known.high / known.low < 0.5 * unknown.high / unknown.low


def test_attention_takes_as_long_as_the_tiles_that_its_heads_fill():
    def seconds(gpu, heads):
        attention = Operation("forward", f"aten._scaled_dot_product_cudnn_attention{heads}", "bfloat16", "device")
        return step_time(one(Load({attention: Amount(1, 1e15, 0)}, {})), ONE, catalog.gpu(gpu), Cluster()).seconds

    of_64, of_72, of_128, of_136, any_size = (
        seconds("h100-sxm", heads)
        for heads in (" (heads of 64)", " (heads of 72)", " (heads of 128)", " (heads of 136)", "")
    )
    assert of_72.low == pytest.approx(of_128.low * 128 / 72)
    assert of_136.low == pytest.approx(of_128.low * 256 / 136)
    assert of_128.low < of_64.low < of_64.high < of_72.high
    assert any_size == of_128
    # Elsewhere nobody has measured it by heads.
    assert seconds("a100-80g-sxm", " (heads of 72)") == seconds("a100-80g-sxm", " (heads of 128)")


def test_an_operator_that_memory_decides():
    work = one(Load({MM._replace(operator="aten.add"): Amount(1, 0, A100.bandwidth_gbs * 1e9)}, {}))
    found = step_time(work, ONE, A100, Cluster())
    assert found.seconds.low == pytest.approx(1 / BANDWIDTH.high)
    assert found.seconds.high == pytest.approx(1 / BANDWIDTH.low)
    assert set(found.parts) == {"memory-bound operators"}


def test_many_small_kernels_wait_for_the_host():
    found = step_time(one(Load({MM: Amount(10_000, 1e6, 1e6)}, {})), ONE, A100, Cluster())
    assert found.seconds.low == pytest.approx(10_000 * LAUNCH_SECONDS.low)
    assert found.seconds.high == pytest.approx(10_000 * LAUNCH_SECONDS.high)
    assert found.parts["launches"].low > 0.99 * found.seconds.low


def test_a_step_is_bound_by_the_launches_that_were_counted():
    work, accumulated = one(Load({MM: Amount(10_000, 1e6, 1e6)}, {})), ONE.model_copy(update={"grad_accum_steps": 3})
    counted = step_time(work, accumulated, A100, Cluster(), launches=Launches(micro=2000, step=500)).launches
    assert (counted.count, counted.counted, counted.bound) == (6500, True, "yes")
    assert counted.seconds == LAUNCHED_SECONDS * 6500
    estimated = step_time(work, accumulated, A100, Cluster()).launches
    assert (estimated.count, estimated.counted, estimated.bound) == (30_000, False, "yes")
    # At most a second of products, which hides all of the low end and less than half of the high one.
    second = one(Load({MM: Amount(10, 312e12 * PRODUCTS[8, 0].low, 0)}, {}))
    for count, bound in ((1e4, "no"), (1e5, "possible"), (1e6, "yes")):
        assert step_time(second, ONE, A100, Cluster(), launches=Launches(count, 0)).launches.bound == bound


def test_what_a_gpu_counted_belongs_to_micro_batches_or_to_the_end_of_the_step():
    names = ("launches", "library_calls", "fills", "host_syncs", "all_reduces", "copies_to_host", "bytes_to_host")
    none = dict.fromkeys(names, 0)
    ends = none | {"launches": 7, "copies_to_host": 2, "bytes_to_host": 24, "all_reduces": 1, "host_syncs": 5}
    micro, end = (launched(none, after) for after in (none | {"launches": 30, "library_calls": 8, "fills": 2}, ends))
    assert micro.counts == {"launches": 30, "library_calls": 8, "fills": 2}
    assert launches_of({"forward": micro, "backward": micro, "step": end}, 4) == Launches(micro=20, step=10)
    assert (micro + end).launches == 50  # waits of the CPU are no launches
    assert launches_of({}, 1) is None


def test_a_ring_within_a_machine():
    gathered = one(Load({}, {Exchange("forward", "all_gather", 8): Amount(1, 0, 300e9)}))
    found = step_time(gathered, Strategy(world_size=8, engine="fsdp2"), A100, Cluster(gpus=8)).seconds
    assert found.low == pytest.approx(7 / 8 / NVLINK.high + LATENCY.low)
    assert found.high == pytest.approx(7 / 8 / NVLINK.low + LATENCY.high + 7 * 3.4e-6)
    reduced = one(Load({}, {Exchange("backward", "all_reduce", 8): Amount(1, 0, 300e9)}))
    twice = step_time(reduced, Strategy(world_size=8, engine="fsdp2"), A100, Cluster(gpus=8)).seconds
    assert twice.low == pytest.approx(2 * found.low, rel=1e-4)
    over_pcie = step_time(gathered, Strategy(world_size=8, engine="fsdp2"), RTX_4090, Cluster(gpus=8)).seconds
    assert over_pcie.low > 5 * found.low


def test_a_ring_between_machines_takes_the_network_s_time():
    gathered = one(Load({}, {Exchange("forward", "all_gather", 16): Amount(1, 0, 300e9)}))
    strategy = Strategy(world_size=16, engine="fsdp2")
    found = step_time(gathered, strategy, A100, Cluster(gpus=16, network_gbs=12.5)).seconds
    assert found.low == pytest.approx(300 / 12.5 / 2 / 0.95, rel=1e-3)
    assert found.high > 300 / 12.5 * 15 / 16 / 0.6
    fast = step_time(gathered, strategy, A100, Cluster(gpus=16, network_gbs=400)).seconds
    assert fast.high < found.low / 2
    # HSDP shards within a machine and reduces between machines: eight shards' replicas share the network.
    hybrid = Strategy(world_size=32, engine="fsdp2", dp_replicate=4)
    within = one(Load({}, {Exchange("forward", "all_gather", 8): Amount(1, 0, 300e9)}))
    between = one(Load({}, {Exchange("backward", "all_reduce", 4): Amount(1, 0, 300e9 / 8)}))
    cluster = Cluster(gpus=32, network_gbs=12.5)
    assert step_time(within, hybrid, A100, cluster).seconds.high < 2
    assert step_time(between, hybrid, A100, cluster).seconds.low == pytest.approx(
        2 * 3 / 4 * 300 / 12.5 / 0.95, rel=1e-3
    )


def test_processes_that_share_a_sample_wait_for_its_tokens():
    """Neighbours exchange tokens, however many copies HSDP has. Between machines all GPUs of one send at once."""
    product, exchanged = {MM: Amount(1, 312e12, 0)}, {Exchange("forward", "all_to_all", 4): Amount(1, 0, 30e9)}
    strategy, cluster = Strategy(world_size=16, engine="fsdp2", cp=4, dp_replicate=4), Cluster(gpus=16)
    alone, apart, both = (
        step_time(one(load), strategy, A100, cluster).seconds
        for load in (Load(product, {}), Load({}, exchanged), Load(product, exchanged))
    )
    assert apart.low == pytest.approx(30e9 * 3 / 4 / (NVLINK.high * A100.nvlink_one_way_gbs * 1e9), rel=1e-2)
    assert both.low == pytest.approx(alone.low + apart.low)
    across = step_time(one(Load({}, exchanged)), strategy, A100, Cluster(gpus=16, gpus_per_node=2)).seconds
    assert across.low == pytest.approx(2 * 30e9 / 2 / 12.5e9 / 0.95, rel=1e-2)


def test_what_a_ring_sends_hides_behind_attention_at_best():
    """A pass has a link of its own within a machine. Between machines all rings of a pass send at once."""
    product, sent = {MM: Amount(1, 312e12, 0)}, {Exchange("forward", "send", 2): Amount(1, 0, 30e9)}
    strategy, cluster = Strategy(world_size=8, engine="fsdp2", cp=8, cp_ring=2), Cluster(gpus=8)
    alone, apart, both = (
        step_time(one(load), strategy, A100, cluster).seconds
        for load in (Load(product, {}), Load({}, sent), Load(product, sent))
    )
    assert apart.low == pytest.approx(30e9 / (NVLINK.high * A100.nvlink_one_way_gbs * 1e9), rel=1e-2)
    assert both.low == pytest.approx(max(alone.low, apart.low))
    assert both.high == pytest.approx(alone.high + apart.high)
    across = step_time(one(Load({}, sent)), strategy, A100, Cluster(gpus=8, gpus_per_node=4)).seconds
    assert across.low == pytest.approx(4 * 30e9 / 12.5e9 / 0.95, rel=1e-2)


def test_collectives_hide_behind_the_products_at_best():
    product, gathered = {MM: Amount(1, 312e12, 0)}, {Exchange("forward", "all_gather", 8): Amount(1, 0, 30e9)}
    strategy, cluster = Strategy(world_size=8, engine="fsdp2"), Cluster(gpus=8)
    alone, apart, both = (
        step_time(one(load), strategy, A100, cluster).seconds
        for load in (Load(product, {}), Load({}, gathered), Load(product, gathered))
    )
    assert both.low == alone.low
    assert both.high == pytest.approx(alone.high + apart.high)


def test_the_optimizer_on_the_host_waits_for_the_gradients_and_shares_the_memory_of_its_machine():
    product = Load({MM: Amount(1, 312e12, 0)}, {})
    adam = Load({Operation("step", "aten._fused_adamw_", "float32", "host"): Amount(1, 0, 30e9)}, {})
    sent = Load({Operation("step", "aten.copy_", "bfloat16", "to device"): Amount(1, 0, A100.host_gbs * 1e9)}, {})
    alone = step_time(one(product), ONE, A100, Cluster()).seconds
    stepped = step_time(Work(product, NOTHING, adam), ONE, A100, Cluster()).seconds
    assert stepped.low == pytest.approx(alone.low + 30e9 / HOST_MEMORY.high, rel=1e-5)
    eight = step_time(Work(product, NOTHING, adam), ONE, A100, Cluster(gpus=8))
    assert eight.seconds.low == pytest.approx(alone.low + 8 * 30e9 / HOST_MEMORY.high, rel=1e-5)
    assert eight.parts["CPU"].low == pytest.approx(8 * 30e9 / HOST_MEMORY.high, rel=1e-5)
    copied = step_time(Work(NOTHING, NOTHING, sent), ONE, A100, Cluster())
    assert copied.seconds.low == pytest.approx(1 / HOST_LINK.high)
    assert set(copied.parts) == {"copies to and from CPU memory"}


def test_the_whole_training():
    step = StepTime(seconds=Interval(low=1, high=2), parts={})
    found = WholeRun.of(images=1000, epochs=1.5, global_batch_size=256, step=step, gpus=8, price=3.0)
    assert found.steps == 6
    assert found.seconds == Interval(low=6, high=12)
    assert found.gpu_hours.high == pytest.approx(12 * 8 / 3600)
    assert found.money is not None
    assert found.money.low == pytest.approx(6 * 8 / 3600 * 3)
    assert (found.samples_per_second.low, found.samples_per_second.high) == (128, 256)
    assert WholeRun.of(images=1, epochs=1, global_batch_size=256, step=step, gpus=1, price=None).money is None
