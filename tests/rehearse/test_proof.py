"""The proof: a rehearsal for the kernels of a CPU equals the record of the real step, event by event."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from profiling import profiled_step
from rehearsing import SHAPE, rehearse_all
from rehearsing import THREE_BLOCKS as TINY
from stepping import equipped
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from traces import assert_same

from bigdit import engines, models, optim
from bigdit.dist import World
from bigdit.engines import scaling
from bigdit.memory import Timeline, ledger
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.record.in_place import InPlace
from bigdit.rehearse import StepRequest, RehearsedSize
from bigdit.profile.data import batch
from bigdit.rehearse.drive import drive
from bigdit.spec import OptimizerSpec, Strategy
from bigdit.train.step import train_step

MICRO_BATCH_SIZE = 2
CPU = torch.device("cpu")
EARLIER = ("parameter", "input")  # allocated before the recording, or while it was not asked


# Large enough for weights of 100,000 elements and more, which bitsandbytes pages.
WIDE = TINY.model_copy(
    update={
        "name": "wide-sana",
        "kwargs": TINY.kwargs
        | {"attention_head_dim": 64, "cross_attention_head_dim": 64, "cross_attention_dim": 256, "num_layers": 1},
    }
)


def _strategy(
    precision: str,
    optimizer: str = "adamw",
    implementation: str = "fused",
    decayed: str = "all",
    weight_decay: float = 0.0,
    **rest: object,
) -> Strategy:
    return Strategy(
        micro_batch_size=MICRO_BATCH_SIZE,
        precision=precision,
        optimizer=OptimizerSpec(
            name=optimizer, implementation=implementation, decayed=decayed, weight_decay=weight_decay
        ),
        **rest,
    )


def _config(*words: object, **rest: object) -> tuple[str, Strategy]:
    strategy = _strategy(*words, **rest)
    return "-".join(map(str, (*words, *(f"{key}_{value}" for key, value in rest.items())))), strategy


CONFIGS = dict(
    [
        *(
            _config(precision, "adamw", checkpointed_blocks=checkpointed, grad_accum_steps=grad_accum)
            for precision, checkpointed, grad_accum in (
                *(("fp32", 0, 1), ("fp32", 1, 2), ("fp32", "all", 1)),
                *(("bf16", 0, 1), ("bf16", 0, 2), ("bf16", 1, 1), ("bf16", "all", 1), ("bf16", "all", 2)),
            )
        ),
        _config("fp32", "adamw", gradient_clipping=1.0),
        _config("bf16", "adamw_8bit", checkpointed_blocks="all", grad_accum_steps=2, gradient_clipping=1.0),
        _config("bf16", "adamw_8bit", checkpointed_blocks=1, grad_accum_steps=2),
        _config("bf16", "adamw_8bit"),
        *(_config("bf16", "came", checkpointed_blocks=checkpointed) for checkpointed in (1, "all")),
        *(_config(precision, "adamw", "foreach") for precision in ("fp32", "bf16")),
        _config("fp32", "adamw", "for_loop"),
        *(_config("bf16", name) for name in ("lion_8bit", "adamw_8bit_ao", "adamw_4bit_ao")),
        *(_config("bf16", name) for name in ("adafactor", "came", "came_8bit")),
        _config("fp32", "came_8bit"),
        *(_config("bf16_sr", name) for name in ("adamw", "adamw_4bit_ao", "came", "came_8bit")),
        _config("tf32", "adamw", gradient_clipping=1.0),
        _config("fp16", "adamw", grad_accum_steps=2),
        _config("fp16", "came", gradient_clipping=1.0),
        *(
            _config(precision, name, implementation, decayed="matrices", weight_decay=0.1)
            for precision, name, implementation in (
                *(("fp32", "adamw", each) for each in ("fused", "foreach", "for_loop")),
                *(("bf16", name, "fused") for name in ("adamw_8bit", "adamw_8bit_ao")),
                *(("bf16_sr", name, "fused") for name in ("adamw", "came_8bit")),
            )
        ),
        *(
            _config(precision, name, checkpointed_blocks=checkpointed, optimizer_in_backward=True)
            for precision, name, checkpointed in (
                ("fp32", "adamw", 0),
                ("bf16", "adamw_8bit", "all"),
                ("bf16", "adamw_8bit_ao", 0),
                ("bf16_sr", "came_8bit", 1),
            )
        ),
    ]
)
FOR_CUDA = dict(
    [
        *(_config("fp32", "adamw", implementation) for implementation in ("fused", "foreach", "for_loop")),
        *(_config("fp32", name) for name in ("adamw_8bit", "lion_8bit", "adamw_8bit_ao", "adamw_4bit_ao")),
        *(_config("fp32", name) for name in ("adafactor", "came", "came_8bit")),
        *(_config("bf16_sr", name) for name in ("adamw", "came_8bit")),
        _config("fp16", "adamw"),
        _config("bf16", "adamw", optimizer_in_backward=True),
    ]
)
PAGED = dict([_config("bf16", "adamw_8bit"), _config("bf16", "paged_adamw_8bit")])

Answers = dict[tuple[str, str], RehearsedSize]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """By kernels and configuration: ("cpu", "fp32-adamw-…"), ("cuda", …), and ("paged", …) of the wide model."""
    folder = tmp_path_factory.mktemp("rehearsals")
    requests = {
        (group, name): StepRequest(
            model=WIDE if group == "paged" else TINY,
            batch=SHAPE,
            strategy=strategy,
            micro_batch_sizes=(MICRO_BATCH_SIZE,),
            kernels="cpu" if group == "cpu" else "cuda",
        )
        for group, strategies in (("cpu", CONFIGS), ("cuda", FOR_CUDA), ("paged", PAGED))
        for name, strategy in strategies.items()
    }
    return dict(zip(requests, rehearse_all(folder, list(requests.values())), strict=True))


def _real(strategy: Strategy) -> tuple[Timeline, int]:
    # bitsandbytes makes two tables of 64 B on the host as it is imported, which are no step's.
    optim.build(strategy.optimizer, [torch.zeros(1)], stochastic_rounding=strategy.precision == "bf16_sr")
    return drive(TINY, SHAPE, strategy, FlowMatchingSpec(), CPU, World())


@pytest.mark.slow
@pytest.mark.xdist_group("rehearsed")  # one worker makes all the rehearsals, once
@pytest.mark.parametrize("name", CONFIGS)
def test_the_rehearsal_is_the_real_step_to_the_byte(
    name: str, rehearsed: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every phase's peak, every category's bytes; and every allocation and free, in order, with its label."""
    # A rehearsal takes no overflow, and real fp16 gradients have one until the loss scale has come down.
    monkeypatch.setattr(scaling, "INITIAL_SCALE", 1.0)
    real, params = _real(CONFIGS[name])
    answer = rehearsed["cpu", name]
    assert answer.params == params
    assert_same(answer.timeline, real)
    assert answer.ledger == ledger(real, 1)
    assert {phase.phase for phase in answer.ledger.phases} == {"init", "forward", "backward", "step"}
    assert answer.ledger.peak_allocated_bytes == real.peak_allocated_bytes


@pytest.mark.parametrize(
    "strategy",
    [
        _strategy("fp32"),
        _strategy("bf16", "adamw_8bit", checkpointed_blocks=1, grad_accum_steps=2),
        _strategy("bf16_sr", "came_8bit", optimizer_in_backward=True),
    ],
    ids=["fp32-adamw", "bf16-adamw_8bit", "bf16_sr-came_8bit-in-backward"],
)
def test_the_record_is_what_the_allocator_reports_where_phases_begin(strategy: Strategy) -> None:
    """Between the phases no kernel holds scratch memory: there the recorder counts what torch's allocator counts.

    The allocator is asked in a run without the recorder, by the profiler. Forward and step are compared: while
    a graph is alive, autograd also keeps scalars that C++ made of python numbers, on the host for any device.
    """
    recorded, params = _real(strategy)
    weights = params * (4 if strategy.precision == "fp32" else 2)
    level, levels = 0, []
    for span in recorded.spans:
        if span.phase in ("forward", "step"):
            levels.append(level)
        level += sum(change for _, change in recorded.changes(span))
    assert _allocator_levels(strategy, weights) == levels


@pytest.mark.parametrize("checkpointed", [0, "all"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_block_of_the_record_is_one_of_the_allocator(precision: str, checkpointed: int | str) -> None:
    """The recorder's presence allocates nothing: not even where torch, under a mode, stops adding in place."""
    strategy = _strategy(precision, checkpointed_blocks=checkpointed)
    recorded, _ = _real(strategy)
    blocks = Counter(block.nbytes for block in recorded.blocks if block.nbytes and block.category not in EARLIER)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels that split a reduction take scratch memory a thread, which could hide one
    try:
        changes, _ = profiled_step(strategy)
    finally:
        torch.set_num_threads(threads)
    assert blocks - Counter(nbytes for _, nbytes in changes if nbytes > 0) == Counter()


@pytest.mark.parametrize("checkpointed", [0, "all"])
def test_gradients_are_added_in_place_where_autograd_does(checkpointed: int | str) -> None:
    """The sums that the recorder takes for in-place are, by shape, those that the engine runs as `add_`."""
    strategy = _strategy("fp32", checkpointed_blocks=checkpointed)
    engine, family = _engine(strategy)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        train_step(engine, family, FlowMatchingSpec(), [batch(SHAPE, strategy)], lr=1e-4)
    sums = [event for event in profiled.events() if event.name in ("aten::add", "aten::add_")]
    by_engine = [event for event in sums if event.cpu_parent and "evaluate_function" in event.cpu_parent.name]
    real = Counter((event.name == "aten::add_", *event.input_shapes[0]) for event in by_engine)

    seen: Counter[tuple[object, ...]] = Counter()
    in_place = InPlace()

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.add.Tensor and in_backward() and not torch.is_grad_enabled():
                seen[in_place.is_in_place(func, args), *args[0].shape] += 1
            return func(*args, **(kwargs or {}))

    def in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    with Sums():
        train_step(engine, family, FlowMatchingSpec(), [batch(SHAPE, strategy)], lr=1e-4)
    assert seen == real
    assert {key[0] for key in seen} == {True, False}


def _allocator_levels(strategy: Strategy, weights: int) -> list[int]:
    """Allocated bytes at the start of each forward and step, the weights and host batches counted in."""
    changes, starts = profiled_step(strategy)
    return [weights + sum(nbytes for at, nbytes in changes if at < start) for start in starts]


def _engine(strategy: Strategy) -> tuple[engines.Engine, models.Family]:
    family, model = equipped(strategy, TINY)
    return engines.create(strategy, model, family, device=CPU, world=World()), family


def _weights() -> list[torch.Tensor]:
    return list(models.build(TINY, device="meta", dtype=torch.float32).parameters())


@pytest.mark.slow
@pytest.mark.xdist_group("rehearsed")
def test_categories_are_what_arithmetic_says(rehearsed: Answers) -> None:
    """AdamW in bf16: 2 B a parameter, 4 B a master, 4 B a gradient at the step, two fp32 moments and step counts."""
    answer = rehearsed["cpu", "bf16-adamw-checkpointed_blocks_0-grad_accum_steps_1"]
    step = answer.ledger.phase("step")
    assert step.at_peak["parameter"] == 2 * answer.params
    assert step.at_peak["master weight"] == 4 * answer.params
    assert step.at_peak["optimizer state"] == 8 * answer.params + 4 * len(_weights())
    assert answer.ledger.phase("forward").at_peak["saved activation"] > 0
    checkpointed = rehearsed["cpu", "bf16-adamw-checkpointed_blocks_all-grad_accum_steps_1"].ledger
    assert (
        checkpointed.phase("forward").at_peak["saved activation"]
        < answer.ledger.phase("forward").at_peak["saved activation"]
    )
    assert "recomputed activation" in checkpointed.phase("backward").at_peak
    assert "recomputed activation" not in answer.ledger.phase("backward").at_peak


LOSS = 4  # the mean loss, which outlives the backward pass
DECIDING = 16  # numbers that say whether the step is taken: losses side by side, their sum, what is asked of it
# Temporaries at the step's peak: of all parameters, and of the largest weight; smaller ones of rows and columns.
TEMPORARY = {
    "fp32-adamw-fused": (0, 0, DECIDING),
    "fp32-adamw-foreach": (4, 0, 0),
    "fp32-adamw-for_loop": (0, 8, 256),
    "fp32-adamw_8bit": (0, 0, DECIDING),
    "fp32-lion_8bit": (0, 0, DECIDING),
    "fp32-adafactor": (0, 4, 2048),
    "fp32-came": (0, 4, 2048),
    "fp32-came_8bit": (0, 9, 2048),  # the update and the momentum in fp32, and the new codes
    "bf16_sr-came_8bit": (0, 9, 2048),
    "fp32-adamw_8bit_ao": (0, 53, 256),  # codes are searched for in int64
    "fp32-adamw_4bit_ao": (0, 53, 256),
    "bf16_sr-adamw": (0, 41, 256),
}


@pytest.mark.slow
@pytest.mark.xdist_group("rehearsed")
@pytest.mark.parametrize("name", TEMPORARY)
def test_temporaries_of_the_step_on_a_gpu(name: str, rehearsed: Answers) -> None:
    whole, of_largest, small = TEMPORARY[name]
    answer = rehearsed["cuda", name]
    largest = max(weight.numel() for weight in _weights())
    rest = ledger(answer.timeline, 1).phase("step").at_peak["temporary"]
    rest -= whole * answer.params + of_largest * largest + LOSS
    assert 0 <= rest <= small


@pytest.mark.slow
@pytest.mark.xdist_group("rehearsed")
def test_8_bit_state_on_a_gpu_is_2_03125_bytes_a_parameter_from_4096_elements_on(rehearsed: Answers) -> None:
    """On the device, in blocks of 256 with an fp32 scale each; smaller tensors in fp32, the maps shared."""
    small, large = (
        sum(weight.numel() for weight in _weights() if (weight.numel() < 4096) == wanted) for wanted in (True, False)
    )
    for name, moments in (("adamw_8bit", 2), ("lion_8bit", 1)):
        state = ledger(rehearsed["cuda", f"fp32-{name}"].timeline, 1).phase("step").at_peak["optimizer state"]
        assert state == moments * (large * (1 + 4 / 256) + 4 * small + 256 * 4)


@pytest.mark.slow
@pytest.mark.xdist_group("rehearsed")
def test_gradients_that_are_used_in_the_backward_pass_are_not_there_at_the_step(rehearsed: Answers) -> None:
    """One weight's gradient at a time: in bf16 as it comes, and in fp32 for its master."""
    within = rehearsed["cuda", "bf16-adamw-optimizer_in_backward_True"]
    largest = max(weight.numel() for weight in _weights())
    assert "gradient" not in within.ledger.phase("step").at_peak
    blocks = [block for block in within.timeline.blocks if block.category == "gradient"]
    assert max(block.nbytes for block in blocks) == 4 * largest


@pytest.mark.slow
@pytest.mark.xdist_group("rehearsed")
def test_paged_state_is_on_the_host(rehearsed: Answers) -> None:
    """Both moments of weights of 100,000 elements and more; their scales and all the rest stay on the device."""
    plain, paged = (rehearsed["paged", f"bf16-{name}"] for name in ("adamw_8bit", "paged_adamw_8bit"))
    weights = models.build(WIDE, device="meta", dtype=torch.float32).parameters()
    moved = sum(2 * weight.numel() for weight in weights if weight.numel() >= 1e5)

    def state(timeline: Timeline) -> int:
        return sum(block.nbytes for block in timeline.blocks if block.category == "optimizer state")

    assert moved > state(plain.timeline) / 2
    assert state(plain.timeline) - state(paged.timeline) == moved
    assert plain.packed_host_timeline is not None
    assert paged.packed_host_timeline is not None
    host = [Timeline.unpack(size.packed_host_timeline) for size in (plain, paged)]
    assert state(host[1]) - state(host[0]) == moved
