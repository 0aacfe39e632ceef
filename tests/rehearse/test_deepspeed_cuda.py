"""DeepSpeed rehearsed for CUDA, against what can be said without a GPU: sums, what moves to the host, buckets."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from commands import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rehearsing import SANA, SHAPE

from bigdit import catalog, models
from bigdit.memory import Ledger, ledger
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.spec import BatchShape, ModelSpec, OptimizerSpec, Strategy

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deepspeed-cuda")]

TINY = SANA.model_copy(update={"kwargs": SANA.kwargs | {"num_layers": 1}})
OPTIMIZER = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PARAM = {"offload_param": {"device": "cpu", "pin_memory": False}}

# A worker that answers one question after another; a line each.
_ANSWERING = """
import json, sys
from bigdit.rehearse import StepRequest
from bigdit.rehearse.engines import deepspeed_peers
from bigdit.rehearse.worker import rehearse_size
for line in sys.stdin:
    asked = json.loads(line)
    deepspeed_peers.MANY = asked["many"]
    request = StepRequest.model_validate(asked["request"])
    print("answer", rehearse_size(request, 1).model_dump_json(), flush=True)
"""

Ask = Callable[..., RehearsedSize]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Rehearse a strategy of DeepSpeed's: `ask(stage, world_size, …)`."""
    process = subprocess.Popen(
        [sys.executable, "-c", _ANSWERING],
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    @cache
    def answered(line: str) -> RehearsedSize:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        for found in process.stdout:
            if found.startswith("answer "):
                return RehearsedSize.model_validate_json(found.removeprefix("answer "))
        raise AssertionError(f"the worker died of {line}")

    def ask(stage: int, world_size: int, *, many: int = 4, model: ModelSpec = TINY, **changes: object) -> RehearsedSize:
        request = _request(model, stage, world_size, **changes)
        return answered(json.dumps({"many": many, "request": request.model_dump(mode="json")}))

    yield ask
    process.kill()
    process.wait()


def _request(
    model: ModelSpec,
    stage: int,
    world_size: int,
    *,
    zero: dict[str, object] | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    grad_accum_steps: int = 1,
    batch: BatchShape = SHAPE,
    device_bytes: int | None = None,
) -> StepRequest:
    document = json.loads((ROOT / "ds_configs/zero2_bf16.json").read_text())
    document["zero_optimization"] |= {"stage": stage, "reduce_bucket_size": 4000, **(zero or {})}
    document |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": grad_accum_steps,
        "gradient_clipping": 1.0,
        **{name: {"enabled": precision == name} for name in ("bf16", "fp16")},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    strategy = Strategy(
        engine="deepspeed",
        world_size=world_size,
        grad_accum_steps=grad_accum_steps,
        precision=precision,
        optimizer=OptimizerSpec(name=optimizer),
        gradient_clipping=1.0,
        ds_config=document,
    )
    return StepRequest(
        model=model, batch=batch, strategy=strategy, micro_batch_sizes=(1,), device_bytes=device_bytes
    )


def _states(size: RehearsedSize) -> dict[str, int]:
    """Model states that live through the step, in the bytes that torch asked for."""
    at_peak = ledger(size.timeline, granularity=1).phase("step").at_peak
    return {kind: at_peak[kind] for kind in ("parameter", "master weight", "optimizer state")}


def _host(size: RehearsedSize) -> Ledger:
    return ledger(size.host_timeline, granularity=1)


@cache
def _numels() -> tuple[int, ...]:
    import torch

    return tuple(p.numel() for p in models.build(TINY, device="meta", dtype=torch.float32).parameters())


@settings(max_examples=10, deadline=None)
@given(stage=st.sampled_from([1, 2, 3]), world_size=st.one_of(st.sampled_from([1, 8, 64]), st.integers(1, 512)))
@example(stage=2, world_size=4096)
@example(stage=3, world_size=4096)
def test_model_states_are_those_of_the_zero_paper(ask: Ask, stage: int, world_size: int) -> None:
    """K = 12 bytes a parameter, of which every process keeps its share: 4 master weight, 8 of AdamW's moments.

    Source: Rajbhandari et al., arXiv:1910.02054, §5. Shares are padded: ZeRO-1 and 2 cut one flat tensor into
    parts of 4 bytes' alignment, ZeRO-3 every parameter by itself. AdamW counts its steps in a tensor of 4 bytes.
    """
    states = _states(ask(stage, world_size))
    if stage == 3 and world_size > 1:
        share = sum(math.ceil(numel / world_size) for numel in _numels())
        assert states["parameter"] == 2 * share
    else:
        share = math.ceil(sum(_numels()) / (2 * world_size)) * 2 if stage < 3 else sum(_numels())
        assert states["parameter"] == 2 * share * (world_size if stage < 3 else 1)
    assert states["master weight"] == 4 * share
    assert states["optimizer state"] == 8 * share + 4
    assert share * world_size >= sum(_numels())  # the shares cover the whole


@settings(max_examples=8, deadline=None)
@given(stage=st.sampled_from([1, 2, 3]), exponents=st.tuples(st.integers(0, 3), st.integers(1, 3)))
def test_more_shards_never_take_more_bytes(ask: Ask, stage: int, exponents: tuple[int, int]) -> None:
    """Up to the 64 processes at which padding begins to weigh in a model as small as this one."""
    few, more = 2 ** exponents[0], 2 ** sum(exponents)
    assert sum(_states(ask(stage, more)).values()) <= sum(_states(ask(stage, few)).values())


@pytest.mark.parametrize(("stage", "zero"), [(1, {}), (2, {}), (2, OPTIMIZER), (3, {}), (3, OPTIMIZER | PARAM)])
def test_loops_over_processes_may_be_done_once_for_all(ask: Ask, stage: int, zero: dict[str, object]) -> None:
    """The whole ledger is the same whether DeepSpeed's loops run, or what stands in for them; and every change of
    memory, but for ZeRO-3's paddings, which are one block together."""
    looped = ask(stage, 7, zero=zero, many=7, grad_accum_steps=2)
    once = ask(stage, 7, zero=zero, many=4, grad_accum_steps=2)
    assert once.ledger == looped.ledger
    assert _host(once) == _host(looped)
    if stage < 3:
        assert _changes(once) == _changes(looped)


def _changes(size: RehearsedSize) -> list[int]:
    """The bytes that are taken and given back on the device, in order."""
    blocks = size.timeline.blocks
    return [blocks[event - 1].nbytes if event > 0 else -blocks[-event - 1].nbytes for event in size.timeline.events]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_precision_and_stage_can_be_rehearsed(ask: Ask, stage: int, precision: str) -> None:
    answer = ask(stage, 8, precision=precision)
    assert [phase.phase for phase in answer.ledger.phases] == ["init", "forward", "backward", "step"]
    at_peak = answer.ledger.phase("step").at_peak
    if stage < 3:
        assert at_peak["parameter"] >= sum(_numels()) * (4 if precision == "tf32" else 2)
    assert ("master weight" in at_peak) == (stage > 0 or precision != "tf32")  # fp32 weights are their own


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_offloaded_leaves_the_device(ask: Ask, stage: int) -> None:
    """The masters, their gradients and the optimizer's state are on the host, and nowhere else; the weights too
    with offload_param."""
    kept, offloaded = ask(stage, 2), ask(stage, 2, zero=OPTIMIZER)
    moved = ("master weight", "optimizer state")
    on_device, on_host = offloaded.ledger.phase("step").at_peak, _host(offloaded).phase("step").at_peak
    assert not set(moved) & set(on_device)
    for category in moved:
        assert on_host[category] == _states(kept)[category]
    assert on_host["gradient"] >= on_host["master weight"]
    if stage == 3:
        whole = ask(3, 2, zero=OPTIMIZER | PARAM)
        assert "parameter" not in whole.ledger.phase("step").at_peak
        assert _host(whole).phase("step").at_peak["parameter"] == _states(kept)["parameter"]


def test_pinned_host_memory_is_marked(ask: Ask) -> None:
    pinned, pageable = (
        ask(2, 2, zero=OPTIMIZER),
        ask(2, 2, zero={"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    )
    kinds = {block.category for block in pinned.host_timeline.blocks if block.pinned}
    assert {"master weight", "gradient"} <= kinds
    masters = {block for block in pageable.host_timeline.blocks if block.category == "master weight"}
    assert masters
    assert not any(block.pinned for block in masters)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_reduce_bucket_is_there_in_the_size_that_was_asked(ask: Ask, stage: int) -> None:
    """Two of them with overlap_comm in ZeRO-1 and 2, so that one fills while the other is reduced."""
    for elements in (4000, 6500):
        blocks = ask(stage, 2, zero={"reduce_bucket_size": elements}).timeline.blocks
        found = [block for block in blocks if block.nbytes == 2 * elements]
        assert len(found) >= (1 if stage == 3 else 2)
    alone = ask(stage, 2, zero={"overlap_comm": False}).ledger.phase("backward").peak_bytes
    assert alone <= ask(stage, 2).ledger.phase("backward").peak_bytes


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_are_flattened_on_the_host_where_the_card_has_no_room_for_them_twice(ask: Ask, stage: int) -> None:
    """What this machine has itself does not count. Either way DeepSpeed empties the allocator's caches before."""
    weights = 2 * sum(_numels())
    roomy, tight = (ask(stage, 8, device_bytes=share * weights // 10) for share in (21, 19))
    assert roomy.ledger.phase("init").peak_bytes >= 2 * weights > tight.ledger.phase("init").peak_bytes
    flat = [block.nbytes for block in tight.host_timeline.blocks]
    assert max(flat) >= weights > max(block.nbytes for block in roomy.host_timeline.blocks)
    assert [len(size.timeline.emptied) for size in (roomy, tight)] == [1, 2]


def test_sana_in_zero2_on_eight(ask: Ask) -> None:
    """2 bytes of bf16 and 4 / 8 of master weights a parameter are left after the start."""
    sana = catalog.model("sana-1600m").spec
    answer = ask(2, 8, model=sana, batch=BatchShape(latents=(32, 32, 32), text=(300, 2304)))
    assert answer.params == 1604462752
    assert answer.ledger.phase("init").end_bytes == pytest.approx(2.5 * answer.params, rel=1e-3)
