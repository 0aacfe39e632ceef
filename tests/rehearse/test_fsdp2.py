"""The proof for FSDP2: a rehearsal of the first of N processes equals the record of N real ones, byte for byte.

On the CPU device and host are the same memory: what is offloaded is proved in one ledger with the rest.
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from proving import prove
from rehearsing import DIT, SHAPE, rehearse_all
from rehearsing import THREE_BLOCKS as TINY

from bigdit import models
from bigdit.memory import ledger
from bigdit.rehearse import StepRequest
from bigdit.spec import BatchShape, LoraSpec, OptimizerSpec, Strategy

MICRO_BATCH_SIZE = 2

ENGINES = {
    "reshard": {"world_size": 2},
    "keep": {"world_size": 2, "reshard_after_forward": False},
    "hsdp": {"world_size": 4, "dp_replicate": 2},
    "offload": {"world_size": 2, "cpu_offload": True},
}
OPTIMIZERS = ("adamw", "adamw_8bit_ao", "came")
CHECKPOINTED = (0, 1, "all")
MORE = {
    "reshard-4-adamw_8bit_ao": {"world_size": 4, "optimizer": OptimizerSpec(name="adamw_8bit_ao")},
    "keep-4-accumulated-fp32": {
        "world_size": 4,
        "reshard_after_forward": False,
        "grad_accum_steps": 2,
        "precision": "fp32",
    },
    "hsdp-accumulated": {"world_size": 4, "dp_replicate": 2, "grad_accum_steps": 2},
    "offload-accumulated-foreach": {
        "world_size": 2,
        "cpu_offload": True,
        "grad_accum_steps": 2,
        "optimizer": OptimizerSpec(implementation="foreach"),
    },
    "fp32-unclipped-for_loop": {
        "world_size": 2,
        "precision": "fp32",
        "gradient_clipping": None,
        "optimizer": OptimizerSpec(implementation="for_loop"),
    },
    "fp16-adafactor": {"world_size": 2, "precision": "fp16", "optimizer": OptimizerSpec(name="adafactor")},
    "bf16_sr-adamw_4bit_ao": {
        "world_size": 2,
        "precision": "bf16_sr",
        "optimizer": OptimizerSpec(name="adamw_4bit_ao"),
    },
    "in_backward": {"world_size": 2, "optimizer_in_backward": True, "gradient_clipping": None},
} | {
    f"{name}-in-groups": {"world_size": 2, "optimizer": OptimizerSpec(name=name, decayed="matrices", weight_decay=0.1)}
    for name in OPTIMIZERS
}


def _strategy(**said):
    return Strategy(**({"engine": "fsdp2", "micro_batch_size": MICRO_BATCH_SIZE, "gradient_clipping": 1.0} | said))


# Two blocks, as small as a k of N can be.
MODEL = TINY.model_copy(update={"kwargs": TINY.kwargs | {"num_layers": 2}})

PROVED = {
    f"{engine}-{optimizer}-{checkpointed}": _strategy(
        **ENGINES[engine], optimizer=OptimizerSpec(name=optimizer), checkpointed_blocks=checkpointed
    )
    for engine, optimizer, checkpointed in itertools.product(ENGINES, OPTIMIZERS, CHECKPOINTED)
} | {name: _strategy(**said) for name, said in MORE.items()}


def _request(strategy, kernels):
    return StepRequest(
        model=MODEL,
        batch=SHAPE,
        strategy=strategy,
        micro_batch_sizes=(strategy.micro_batch_size,),
        kernels=kernels,
    )


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """The record and the rehearsal of each strategy."""
    requests = [_request(strategy, "cpu") for strategy in PROVED.values()]
    return dict(zip(PROVED, prove(tmp_path_factory.mktemp("proved"), requests, timeout=550), strict=True))


def _bytes(block):
    return block.nbytes


@pytest.mark.slow
@pytest.mark.xdist_group("fsdp2")  # one worker of pytest's runs all the launches, once
@pytest.mark.parametrize("name", PROVED)
def test_the_rehearsal_of_fsdp2_is_the_real_step_to_the_byte(name, proved):
    """Every phase's peak and what it is made of; and every block, of its size, category and label.

    Blocks of no bytes aside: a rehearsal leaves the chunks of parameters out that fall to other processes and are
    empty.
    """
    record, answer = proved[name]
    found = ledger(record, granularity=1)
    for phase in found.phases:
        assert answer.ledger.phase(phase.phase) == phase
    assert answer.ledger == found
    assert Counter(filter(_bytes, answer.timeline.blocks)) == Counter(filter(_bytes, record.blocks))


# Everything on CUDA: one process for all.
SHARDS, MICRO_BATCHES = (1, 8, 64), (1, 2, 4)
PLANNED = {
    (shards, size): _strategy(world_size=shards, micro_batch_size=size) for shards in SHARDS for size in MICRO_BATCHES
} | {
    "offload": _strategy(world_size=8, cpu_offload=True),
    "copies": _strategy(world_size=64, dp_replicate=8),
}
ADAPTED = {"all": _strategy(world_size=8), "adapters": _strategy(world_size=8, lora=LoraSpec(rank=4))}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Rehearsals on CUDA's kernels, by one process."""
    requests = [_request(strategy, "cuda") for strategy in PLANNED.values()]
    classes = {"model": DIT, "batch": BatchShape(latents=(4, 8, 8))}
    requests += [_request(strategy, "cuda").model_copy(update=classes) for strategy in ADAPTED.values()]
    answers = rehearse_all(tmp_path_factory.mktemp("planned"), requests)
    return dict(zip((*PLANNED, *ADAPTED), answers, strict=True))


def _states(answer):
    """Bytes of parameters, gradients and optimizer state when the step is at its peak."""
    at_peak = answer.ledger.phase("step").at_peak
    return [at_peak[part] for part in ("parameter", "gradient", "optimizer state")]


@pytest.mark.slow
@pytest.mark.xdist_group("fsdp2-planned")
@pytest.mark.parametrize("size", MICRO_BATCHES)
def test_model_states_shrink_as_shards_are_added_and_shards_cover_the_whole(planned, size):
    for few, many in itertools.pairwise(SHARDS):
        fewer, more = planned[few, size], planned[many, size]
        assert all(less <= before for less, before in zip(_states(more), _states(fewer), strict=True))
        assert more.params == fewer.params
    for shards in SHARDS:
        held = planned[shards, size].timeline
        parameters = sum(block.nbytes for block in held.blocks if block.category == "parameter")
        assert parameters * shards >= 4 * planned[shards, size].params
    assert _states(planned["copies"]) == _states(planned[8, MICRO_BATCH_SIZE])


@pytest.mark.slow
@pytest.mark.xdist_group("fsdp2-planned")
@pytest.mark.parametrize("shards", SHARDS)
def test_no_peak_falls_as_the_micro_batch_grows(planned, shards):
    for small, large in itertools.pairwise(MICRO_BATCHES):
        smaller, larger = planned[shards, small].ledger, planned[shards, large].ledger
        for phase in ("forward", "backward"):
            assert larger.phase(phase).peak_bytes >= smaller.phase(phase).peak_bytes
        assert _states(planned[shards, large]) == _states(planned[shards, small])


@pytest.mark.slow
@pytest.mark.xdist_group("fsdp2-planned")
@pytest.mark.parametrize("shards", SHARDS)
def test_the_engine_starts_with_its_shards_and_one_whole_unit(planned, shards):
    """Before and after a unit is sharded: what is held are the shards up to it, and it."""
    model = models.build(MODEL, device="meta", dtype=torch.float32)
    units, seen = [], set()
    for unit in (*model.transformer_blocks, model):
        params = [param for param in unit.parameters() if param not in seen]
        seen.update(params)
        whole = sum(4 * param.numel() for param in params)
        # FSDP2 gives each process the rows of a parameter, rounded up.
        shard = sum(4 * math.ceil(param.shape[0] / shards) * param[0].numel() for param in params)
        units.append((whole, shard))
    held = peak = 0
    for whole, shard in units:
        peak, held = max(peak, held + whole + shard), held + shard
    start = ledger(planned[shards, 1].timeline, granularity=1).phase("init")
    assert (start.peak_bytes, start.end_bytes) == (peak, held)


@pytest.mark.slow
@pytest.mark.xdist_group("fsdp2-planned")
def test_offload_keeps_shards_gradients_and_optimizer_on_the_host_in_pinned_memory(planned):
    kept, offloaded = planned[8, MICRO_BATCH_SIZE], planned["offload"]
    assert offloaded.ledger.phase("init").end_bytes == 0
    assert not {"parameter", "optimizer state"} & {part for phase in offloaded.ledger.phases for part in phase.at_peak}
    on_host = ledger(offloaded.host_timeline, granularity=1).phase("step").at_peak
    on_device = ledger(kept.timeline, granularity=1).phase("step").at_peak
    for part in ("parameter", "gradient", "optimizer state"):
        assert on_host[part] == on_device[part]
    pinned = [block for block in offloaded.host_timeline.blocks if block.pinned and block.category == "parameter"]
    assert len(pinned) == len(list(models.build(MODEL, device="meta", dtype=torch.float32).parameters()))


@pytest.mark.slow
@pytest.mark.xdist_group("fsdp2-planned")
def test_gathered_parameters_and_buffers_of_collectives_are_the_engine_s(planned):
    """They come from FSDP2's own streams' pools where it copies in and reduces, and are no activations."""
    blocks = [block for block in planned[8, 1].timeline.blocks if block.nbytes]
    labels = {block.label for block in blocks if block.category == "engine buffer"}
    assert labels == {"FSDP2 all-gather", "FSDP2 gathered parameters", "FSDP2 reduce-scatter"}
    for block in blocks:
        if block.label == "FSDP2 gathered parameters":
            assert (block.category, block.stream) == ("engine buffer", 0)
        if block.label == "FSDP2 reduce-scatter" and block.category == "gradient":
            assert block.stream > 0
    assert {block.category for block in blocks if block.label == "FSDP2 reduce-scatter"} == {
        "engine buffer",
        "gradient",
    }


@pytest.mark.slow
@pytest.mark.xdist_group("fsdp2-planned")
def test_beside_adapters_units_are_gathered_for_gradients_that_they_do_not_have(planned):
    whole, adapters = _states(planned["all"]), _states(planned["adapters"])
    assert 0 < adapters[1] < whole[1]
    assert 0 < adapters[2] < whole[2]
