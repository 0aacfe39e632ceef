"""The ledger of a recorded run with each policy: checkpointing, offload, EMA, adapters, block swap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_models import SHAPE
from tiny_models import THREE_BLOCKS as TINY

from bigdit.engines.single import LIST_BYTES
from bigdit.memory import Ledger, PhasePeak, Timeline
from bigdit.profile.attempt import Profile, StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.strategy import EmaSpec, LoraSpec, SegmentSpec, Strategy

BLOCKS = 3  # of TINY
POLICIES: Mapping[str, dict[str, object]] = {
    "plain": {},
    "full": {"checkpointed_blocks": BLOCKS},
    "selective": {"checkpointed_blocks": BLOCKS, "checkpointing": "selective"},
    "segment": {"checkpointed_segments": SegmentSpec(blocks=BLOCKS)},
    "offload": {"offload_activations": True},
    "offload-full": {"offload_activations": True, "checkpointed_blocks": BLOCKS},
    "ema-gpu": {"ema": EmaSpec()},
    "ema-cpu": {"ema": EmaSpec(device="cpu")},
    "ema-widths": {"ema": EmaSpec(widths=(0.05, 0.1))},
    "lora": {"lora": LoraSpec()},
    "lora-int8": {"lora": LoraSpec(base="int8")},
    "lora-nf4": {"lora": LoraSpec(base="nf4")},
    "lora-full": {"lora": LoraSpec(), "checkpointed_blocks": "all"},
    "swap": {"lora": LoraSpec(), "blocks_to_swap": 3, "checkpointed_blocks": "all"},
}
Profiles = Mapping[str, Profile]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def profiles(gpus: EmulatedGpus) -> Profiles:
    def profile(policy: dict[str, object]) -> Profile:
        strategy = Strategy.model_validate({"micro_batch_size": 2, **policy})
        return gpus.profile(StepRequest(model=TINY, batch=SHAPE, strategy=strategy))

    with ThreadPoolExecutor(2) as aside:
        return dict(zip(POLICIES, aside.map(profile, POLICIES.values()), strict=True))


def _phase(found: Ledger, name: str) -> PhasePeak:
    return {phase.phase: phase for phase in found.phases}[name]


def _saved(found: Ledger) -> int:
    return _phase(found, "forward").at_peak.get("saved activation", 0)


def _of_category(timeline: Timeline, category: str) -> int:
    return sum(block.nbytes for block in timeline.blocks if block.category == category)


def _weights(found: Profile) -> int:
    """Bytes of parameters on the GPU, without the allocator's rounding."""
    return _of_category(found.timeline, "parameter")


def _pinned(found: Profile) -> int:
    return sum(block.nbytes for block in found.host_timeline.blocks if block.pinned)


def test_bytes_of_weights_follow_from_their_dtypes(profiles: Profiles) -> None:
    """bf16 on the GPU: 2 B a parameter, 4 B a master. Batches wait in CPU memory. Each block is rounded up to 512 B."""
    found = profiles["plain"]
    assert (found.ledger.granularity, found.notices) == (512, ())
    assert "input" not in _phase(found.ledger, "init").at_peak
    assert _weights(found) == 2 * found.params
    assert _of_category(found.timeline, "master weight") == 4 * found.params
    assert all(phase.peak_bytes % 512 == 0 for phase in found.ledger.phases)


def test_a_gpu_saves_less_the_more_is_recomputed(profiles: Profiles) -> None:
    none, selective, full = (profiles[name].ledger for name in ("plain", "selective", "full"))
    for measure in (_saved, lambda found: _phase(found, "backward").peak_bytes):
        assert measure(none) > measure(selective) > measure(full)
    assert "recomputed activation" in _phase(selective, "backward").at_peak


def test_offloaded_activations_wait_in_pinned_memory(profiles: Profiles) -> None:
    plain, offloaded = profiles["plain"], profiles["offload"]
    assert _saved(offloaded.ledger) < _saved(plain.ledger) / 10
    assert _phase(offloaded.ledger, "forward").peak_bytes < _phase(plain.ledger, "forward").peak_bytes
    assert _pinned(offloaded) - _pinned(plain) >= _saved(plain.ledger) - _saved(offloaded.ledger)
    # Only the inputs of a checkpointed block wait there.
    both, checkpointed = profiles["offload-full"], profiles["full"]
    assert _saved(both.ledger) < _saved(checkpointed.ledger)
    assert _pinned(plain) < _pinned(both) < _pinned(offloaded)


def test_an_ema_costs_four_bytes_a_parameter_where_it_is_kept(profiles: Profiles) -> None:
    plain, on_gpu, on_host = (profiles[name] for name in ("plain", "ema-gpu", "ema-cpu"))
    assert _of_category(on_gpu.timeline, "EMA") == 4 * plain.params
    assert _of_category(profiles["ema-widths"].timeline, "EMA") == 2 * 4 * plain.params
    for phase in plain.ledger.phases:
        found = _phase(on_host.ledger, phase.phase)
        assert (found.peak_bytes, found.at_peak) == (phase.peak_bytes, phase.at_peak)  # the GPU holds none of it
    assert "EMA" not in _phase(on_host.ledger, "ema").at_peak
    assert _phase(on_host.ledger, "ema").peak_bytes < _phase(plain.ledger, "step").peak_bytes
    held = [block for block in on_host.host_timeline.blocks if block.category == "EMA"]
    assert sum(block.nbytes for block in held if not block.pinned) == 4 * plain.params
    assert [block.nbytes for block in held if block.pinned] == [max(block.nbytes for block in held)]


def test_a_quantised_base_has_its_size(profiles: Profiles) -> None:
    """Linear layers of blocks: 24 of 32 × 32. nf4: half a byte, an fp32 scale for 64, 16 fp32 values a layer. int8: a
    byte, and a bf16 scale for each row."""
    plain, nf4, int8 = (profiles[name] for name in ("lora", "lora-nf4", "lora-int8"))
    linears, elements = 8 * BLOCKS, 32 * 32
    smaller = linears * (2 * elements - (elements // 2 + 4 * elements // 64 + 4 * 16))
    assert _weights(plain) - _weights(nf4) == smaller
    assert _weights(plain) - _weights(int8) == linears * (2 * elements - (elements + 2 * 32))
    # Only the adapters have masters and state: rank 16, two matrices a layer.
    step = _phase(nf4.ledger, "step").at_peak
    assert step["master weight"] == 4 * linears * 2 * 16 * 32
    # At the optimizer's step all their gradients are in fp32 and in bf16. Together they take less than a list.
    assert step["master weight"] < LIST_BYTES
    assert step["gradient"] == step["master weight"] + step["master weight"] // 2


def test_swapped_weights_wait_in_pinned_memory_and_take_room_for_two_blocks(profiles: Profiles) -> None:
    """Each begins at a multiple of 512 B in both, as on the device."""
    plain, swapped = profiles["lora-full"], profiles["swap"]
    assert _weights(plain) > _weights(swapped)
    for one, other in zip(plain.ledger.phases, swapped.ledger.phases, strict=True):
        room = other.at_peak["engine buffer"]
        assert one.at_peak["parameter"] - other.at_peak["parameter"] == room * BLOCKS // 2
        if one.phase != "init":
            assert one.peak_bytes - other.peak_bytes == room // 2
    assert _pinned(swapped) - _pinned(plain) == room * BLOCKS // 2
    # In a later step the last block is copied in the forward pass, and the first in the backward pass: two are there.
    _, first, block, *later = _copied(swapped)
    assert (first, later) == (BLOCKS * block, [0, block, block, 0])
    assert 0.9 * room // 2 < block <= room // 2  # except what takes 512 B


def _copied(answer: Profile) -> list[int]:
    """Bytes copied to the device into existing tensors, by span: weights without batches."""
    copies = Counter()
    for cost in answer.timeline.operators:
        if (cost.operator, cost.place) == ("aten.copy_", "to device"):
            copies[cost.span] += cost.nbytes
    return [copies[span] for span in range(len(answer.timeline.spans))]


def test_a_quantised_base_saves_the_activations_of_one_in_bf16(profiles: Profiles) -> None:
    plain, *quantised = (profiles[f"lora{base}"].timeline for base in ("", "-int8", "-nf4"))
    for timeline in quantised:
        assert _of_category(timeline, "saved activation") == _of_category(plain, "saved activation")
