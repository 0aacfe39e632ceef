"""The proof for what surrounds the step: checkpointing by operator, offload, averages and adapters, event by event."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiling import profiled_step
from rehearsing import SHAPE, rehearse_all
from rehearsing import THREE_BLOCKS as TINY
from traces import assert_same

from bigdit.dist import World
from bigdit.engines.single import LIST_BYTES
from bigdit.memory import Ledger, Timeline, ledger
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.rehearse.drive import record
from bigdit.spec import EmaSpec, LoraSpec, OptimizerSpec, Strategy

MICRO_BATCH_SIZE = 2
BLOCKS = 3  # of TINY
ADAM_8BIT = OptimizerSpec(name="adamw_8bit")

# What is rehearsed for the kernels of this CPU, and compared with what really happens on it.
ON_CPU = {
    "selective-1": {"checkpointing": "selective", "checkpointed_blocks": 1, "precision": "fp32"},
    "selective-all": {"checkpointing": "selective", "checkpointed_blocks": "all", "grad_accum_steps": 2},
    "offload": {"offload_activations": True},
    "offload-full": {"offload_activations": True, "checkpointed_blocks": 2, "grad_accum_steps": 2},
    "offload-selective": {"offload_activations": True, "checkpointing": "selective", "checkpointed_blocks": "all"},
    "compiled": {"compile_blocks": True, "checkpointed_blocks": 1},
    "ema-gpu": {"ema": EmaSpec()},
    "ema-cpu": {"ema": EmaSpec(device="cpu"), "precision": "fp32"},
    "ema-power": {"ema": EmaSpec(power=0.1)},
    "ema-widths": {"ema": EmaSpec(widths=(0.05, 0.1)), "precision": "bf16_sr"},
    "lora": {"lora": LoraSpec(rank=4)},
    "dora": {"lora": LoraSpec(rank=4, dora=True), "checkpointed_blocks": 1},
    "dora-int8": {"lora": LoraSpec(rank=4, base="int8", dora=True), "checkpointed_blocks": 1},
    "dora-nf4": {"lora": LoraSpec(rank=4, base="nf4", dora=True)},
    "lora-int8": {"lora": LoraSpec(rank=4, base="int8"), "gradient_clipping": 1.0},
    "lora-nf4": {"lora": LoraSpec(rank=4, base="nf4", targets=("to_q", "proj_out"))},
    "lora-int8-full": {"lora": LoraSpec(rank=4, base="int8"), "checkpointed_blocks": "all"},
    "swap": {"lora": LoraSpec(rank=4), "blocks_to_swap": 3, "checkpointed_blocks": "all", "grad_accum_steps": 2},
    "swap-trained": {
        "blocks_to_swap": 3,
        "checkpointed_blocks": "all",
        "precision": "bf16_sr",
        "optimizer_in_backward": True,
        "optimizer": OptimizerSpec(name="adafactor"),
        "ema": EmaSpec(device="cpu"),
    },
    "all-of-it": {
        "lora": LoraSpec(rank=4, base="nf4"),
        "checkpointing": "selective",
        "checkpointed_blocks": 2,
        "offload_activations": True,
        "ema": EmaSpec(device="cpu"),
        "optimizer": ADAM_8BIT,
        "grad_accum_steps": 2,
        "gradient_clipping": 1.0,
    },
}

# What is rehearsed for a CUDA card, and held against arithmetic.
ON_CUDA = {
    **{f"full-{k}": {"checkpointed_blocks": k} for k in range(BLOCKS + 1)},
    **{f"selective-{k}": {"checkpointed_blocks": k, "checkpointing": "selective"} for k in range(1, BLOCKS + 1)},
    "offload": {"offload_activations": True},
    "offload-full-3": {"offload_activations": True, "checkpointed_blocks": 3},
    "ema-gpu": {"ema": EmaSpec()},
    "ema-cpu": {"ema": EmaSpec(device="cpu")},
    "ema-widths": {"ema": EmaSpec(widths=(0.05, 0.1))},
    "lora": {"lora": LoraSpec()},
    "lora-int8": {"lora": LoraSpec(base="int8")},
    "lora-nf4": {"lora": LoraSpec(base="nf4")},
    "lora-int8-full": {"lora": LoraSpec(base="int8"), "checkpointed_blocks": "all"},
    "lora-nf4-full": {"lora": LoraSpec(base="nf4"), "checkpointed_blocks": "all"},
    "lora-full": {"lora": LoraSpec(), "checkpointed_blocks": "all"},
    "swap": {"lora": LoraSpec(), "blocks_to_swap": 3, "checkpointed_blocks": "all"},
}


def _strategy(policy: dict[str, object]) -> Strategy:
    return Strategy.model_validate({"micro_batch_size": MICRO_BATCH_SIZE, **policy})


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], RehearsedSize]:
    """Every rehearsal by (kernels, name), made in one process."""
    folder = tmp_path_factory.mktemp("rehearsals")
    cases = {("cpu", name): policy for name, policy in ON_CPU.items()}
    cases |= {("cuda", name): policy for name, policy in ON_CUDA.items()}
    requests = [
        StepRequest(
            model=TINY,
            batch=SHAPE,
            strategy=_strategy(policy),
            micro_batch_sizes=(MICRO_BATCH_SIZE,),
            kernels=kernels,
        )
        for (kernels, _), policy in cases.items()
    ]
    return dict(zip(cases, rehearse_all(folder, requests), strict=True))


@pytest.mark.slow
@pytest.mark.xdist_group("policies")  # one worker makes all the rehearsals, once
@pytest.mark.parametrize("name", ON_CPU)
def test_the_rehearsal_of_a_policy_is_the_real_step_to_the_byte(
    name: str, rehearsed: dict[tuple[str, str], RehearsedSize]
) -> None:
    strategy = _strategy(ON_CPU[name])
    real = record(TINY, SHAPE, strategy, FlowMatchingSpec(), torch.device("cpu"), World())
    answer = rehearsed["cpu", name]
    assert answer.params == real.params
    assert answer.ledger == ledger(real.device, 1)
    assert_same(answer.timeline, real.device)
    phases = {"init", "forward", "backward", "step"} | ({"ema"} if strategy.ema else set())
    assert {phase.phase for phase in answer.ledger.phases} == phases


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selective-all", "offload", "lora-nf4"])
def test_every_block_of_a_policy_is_one_of_the_allocator(name: str) -> None:
    """Without the recorder torch allocates the same blocks: its presence changes no policy."""
    strategy = _strategy(ON_CPU[name] | {"grad_accum_steps": 1})
    recorded = record(TINY, SHAPE, strategy, FlowMatchingSpec(), torch.device("cpu"), World()).device
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        changes, _ = profiled_step(strategy)
    finally:
        torch.set_num_threads(threads)
    real = [nbytes for _, nbytes in changes if nbytes > 0]
    missing = [block for block in recorded.blocks if block.category not in ("parameter", "input")]
    for nbytes in real:
        missing = _without_one(missing, nbytes)
    assert missing == []


def _without_one(blocks: list, nbytes: int) -> list:
    for i, block in enumerate(blocks):
        if block.nbytes == nbytes:
            return blocks[:i] + blocks[i + 1 :]
    return blocks


def _saved(found: Ledger) -> int:
    return found.phase("forward").at_peak.get("saved activation", 0)


@pytest.mark.slow
@pytest.mark.xdist_group("policies")
def test_a_card_saves_less_the_more_is_recomputed(rehearsed: dict[tuple[str, str], RehearsedSize]) -> None:
    none, selective, full = (rehearsed["cuda", name].ledger for name in ("full-0", "selective-3", "full-3"))
    for measure in (_saved, lambda found: found.phase("backward").peak_bytes):
        assert measure(none) > measure(selective) > measure(full)
    assert "recomputed activation" in selective.phase("backward").at_peak


@pytest.mark.slow
@pytest.mark.xdist_group("policies")
def test_offloaded_activations_wait_in_pinned_memory(rehearsed: dict[tuple[str, str], RehearsedSize]) -> None:
    plain, offloaded = rehearsed["cuda", "full-0"], rehearsed["cuda", "offload"]
    assert _saved(offloaded.ledger) < _saved(plain.ledger) / 10
    assert offloaded.ledger.phase("forward").peak_bytes < plain.ledger.phase("forward").peak_bytes
    assert _pinned(offloaded) - _pinned(plain) >= _saved(plain.ledger) - _saved(offloaded.ledger)
    # Of a checkpointed block its inputs wait there, and nothing else.
    both, checkpointed = rehearsed["cuda", "offload-full-3"], rehearsed["cuda", "full-3"]
    assert _saved(both.ledger) < _saved(checkpointed.ledger)
    assert _pinned(plain) < _pinned(both) < _pinned(offloaded)


def _pinned(answer: RehearsedSize) -> int:
    return sum(block.nbytes for block in answer.host_timeline.blocks if block.pinned)


@pytest.mark.slow
@pytest.mark.xdist_group("policies")
def test_an_average_costs_four_bytes_a_parameter_where_it_is_kept(
    rehearsed: dict[tuple[str, str], RehearsedSize],
) -> None:
    plain, on_gpu, on_host = (rehearsed["cuda", name] for name in ("full-0", "ema-gpu", "ema-cpu"))
    assert _of_category(on_gpu.timeline, "EMA") == 4 * plain.params
    assert _of_category(rehearsed["cuda", "ema-widths"].timeline, "EMA") == 2 * 4 * plain.params
    for phase in plain.ledger.phases:
        found = on_host.ledger.phase(phase.phase)
        assert (found.peak_bytes, found.at_peak) == (phase.peak_bytes, phase.at_peak)  # the device holds none of it
    assert "EMA" not in on_host.ledger.phase("ema").at_peak
    assert on_host.ledger.phase("ema").peak_bytes < plain.ledger.phase("step").peak_bytes
    held = [block for block in on_host.host_timeline.blocks if block.category == "EMA"]
    assert sum(block.nbytes for block in held if not block.pinned) == 4 * plain.params
    assert [block.nbytes for block in held if block.pinned] == [max(block.nbytes for block in held)]


def _of_category(timeline: Timeline, category: str) -> int:
    return sum(block.nbytes for block in timeline.blocks if block.category == category)


@pytest.mark.slow
@pytest.mark.xdist_group("policies")
def test_a_quantised_base_has_its_size(rehearsed: dict[tuple[str, str], RehearsedSize]) -> None:
    """Linear layers of blocks: 24 of 32 × 32. nf4: half a byte, an fp32 scale for 64, 16 fp32 values a layer;
    int8: a byte, and a scale in bf16 for each row."""
    plain, nf4, int8 = (rehearsed["cuda", name] for name in ("lora", "lora-nf4", "lora-int8"))
    linears, elements = 8 * BLOCKS, 32 * 32
    smaller = linears * (2 * elements - (elements // 2 + 4 * elements // 64 + 4 * 16))
    assert _weights(plain) - _weights(nf4) == smaller
    assert _weights(plain) - _weights(int8) == linears * (2 * elements - (elements + 2 * 32))
    # The adapters alone have masters and state: rank 16, two matrices a layer.
    step = nf4.ledger.phase("step").at_peak
    assert step["master weight"] == 4 * linears * 2 * 16 * 32
    # At the step all their gradients are in fp32, and still in bf16 as well: together they are less than a list takes.
    assert step["master weight"] < LIST_BYTES
    assert step["gradient"] == step["master weight"] + step["master weight"] // 2


def _weights(answer: RehearsedSize) -> int:
    """Bytes of parameters on the device, without the allocator's rounding."""
    return _of_category(answer.timeline, "parameter")


@pytest.mark.slow
@pytest.mark.xdist_group("policies")
def test_swapped_weights_wait_in_pinned_memory_and_take_room_for_two_blocks(
    rehearsed: dict[tuple[str, str], RehearsedSize],
) -> None:
    """Each begins at a multiple of 512 B in both, as on the device."""
    plain, swapped = rehearsed["cuda", "lora-full"], rehearsed["cuda", "swap"]
    assert _weights(plain) > _weights(swapped)
    for one, other in zip(plain.ledger.phases, swapped.ledger.phases, strict=True):
        room = other.at_peak["engine buffer"]
        assert one.at_peak["parameter"] - other.at_peak["parameter"] == room * BLOCKS // 2
        if one.phase != "init":
            assert one.peak_bytes - other.peak_bytes == room // 2
    assert _pinned(swapped) - _pinned(plain) == room * BLOCKS // 2
    # Of a later step the last block comes in the forward pass, and the first one in the backward pass: two are there.
    _, first, block, *later = _copied(swapped)
    assert (first, later) == (BLOCKS * block, [0, block, block, 0])
    assert 0.9 * room // 2 < block <= room // 2  # but for what keeps 512 B


def _copied(answer: RehearsedSize) -> list[int]:
    """Bytes that came to the device by copies into what was there, by span: weights, and no batches."""
    copies = Counter()
    for cost in answer.timeline.operators:
        if (cost.operator, cost.place) == ("aten.copy_", "to device"):
            copies[cost.span] += cost.nbytes
    return [copies[span] for span in range(len(answer.timeline.spans))]


@pytest.mark.slow
@pytest.mark.xdist_group("policies")
@pytest.mark.parametrize("recomputed", ["", "-full"])
def test_a_quantised_base_saves_the_activations_of_one_in_bf16(
    recomputed: str, rehearsed: dict[tuple[str, str], RehearsedSize]
) -> None:
    plain, *quantised = (rehearsed["cuda", f"lora{base}{recomputed}"].timeline for base in ("", "-int8", "-nf4"))
    for timeline in quantised:
        assert _of_category(timeline, "saved activation") == _of_category(plain, "saved activation")


@pytest.mark.slow
@pytest.mark.xdist_group("policies")
@given(kind=st.sampled_from(["full", "selective"]), pair=st.tuples(*[st.integers(0, BLOCKS)] * 2).map(sorted))
def test_saved_activations_never_rise_with_the_number_of_checkpointed_blocks(
    kind: str, pair: list[int], rehearsed: dict[tuple[str, str], RehearsedSize]
) -> None:
    few, many = (_saved(rehearsed["cuda", f"{kind}-{k}" if k else "full-0"].ledger) for k in pair)
    assert many <= few
