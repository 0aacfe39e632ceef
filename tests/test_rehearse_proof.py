"""The proof: a rehearsal for the kernels of a CPU equals the record of the real step, event by event."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bigdit import engines, models
from bigdit.dist import World
from bigdit.memory import Timeline, ledger
from bigdit.record.in_place import InPlace
from bigdit.rehearse import RehearsalRequest, RehearsedSize
from bigdit.rehearse.drive import STEPS, batch, drive
from bigdit.spec import BatchShape, ModelSpec, ObjectiveSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

# Three blocks; some of its weights have more than 4096 elements, so that bitsandbytes keeps them in 8 bits.
TINY = ModelSpec(
    name="tiny-sana",
    class_name="SanaTransformer2DModel",
    kwargs={
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_layers": 3,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 32,
        "caption_channels": 12,
        "mlp_ratio": 2.5,
        "sample_size": 8,
        "patch_size": 1,
    },
)
SHAPE = BatchShape(latents=(4, 8, 8), text=(6, 12))
MICRO_BATCH_SIZE = 2
CPU = torch.device("cpu")
EARLIER = ("parameter", "input")  # allocated before the recording, or while it was not asked


def _strategy(precision: str, optimizer: str, checkpointed: int | str, grad_accum: int, clip: float | None) -> Strategy:
    return Strategy(
        micro_batch_size=MICRO_BATCH_SIZE,
        precision=precision,
        optimizer=OptimizerSpec(name=optimizer),
        checkpointed_blocks=checkpointed,
        grad_accum_steps=grad_accum,
        gradient_clipping=clip,
    )


CONFIGS = [
    *(
        (*config, None)
        for config in itertools.product(("fp32", "bf16"), ("adamw", "adamw_8bit"), (0, 1, "all"), (1, 2))
    ),
    ("fp32", "adamw", 0, 1, 1.0),
    ("bf16", "adamw_8bit", "all", 2, 1.0),
]

# One process for all of them: the start of a worker is most of its time here.
_REHEARSE_ALL = """
import json, sys
from bigdit.record.in_place import InPlace
from bigdit.rehearse import RehearsalRequest
from bigdit.rehearse.worker import rehearse_size
requests = [RehearsalRequest.model_validate(value) for value in json.load(open(sys.argv[1]))]
answers = [rehearse_size(request, request.micro_batch_sizes[0]).model_dump(mode="json") for request in requests]
json.dump(answers, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[object, ...], RehearsedSize]:
    folder = tmp_path_factory.mktemp("rehearsals")
    asked, answered = folder / "requests.json", folder / "answers.json"
    requests = [
        RehearsalRequest(
            model=TINY,
            batch=SHAPE,
            strategy=_strategy(*config),
            micro_batch_sizes=(MICRO_BATCH_SIZE,),
            kernels="cpu",
        ).model_dump(mode="json")
        for config in CONFIGS
    ]
    asked.write_text(json.dumps(requests))
    done = subprocess.run(
        [sys.executable, "-c", _REHEARSE_ALL, str(asked), str(answered)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [RehearsedSize.model_validate(value) for value in json.loads(answered.read_text())]
    return dict(zip(CONFIGS, answers, strict=True))


def _real(strategy: Strategy) -> tuple[Timeline, int]:
    return drive(TINY, SHAPE, strategy, ObjectiveSpec(), CPU, World())


@pytest.mark.slow
@pytest.mark.xdist_group("rehearsed")  # one worker makes all the rehearsals, once
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config)))
def test_the_rehearsal_is_the_real_step_to_the_byte(
    config: tuple[object, ...], rehearsed: dict[tuple[object, ...], RehearsedSize]
) -> None:
    """Every phase's peak, every category's bytes; and every allocation and free, in order, with its label."""
    real, params = _real(_strategy(*config))
    answer = rehearsed[config]
    assert answer.params == params
    assert answer.ledger == ledger(real, 1)
    assert answer.timeline == real
    assert {phase.phase for phase in answer.ledger.phases} == {"init", "forward", "backward", "step"}
    assert answer.ledger.peak_allocated_bytes == real.peak_allocated_bytes


@pytest.mark.parametrize("config", [("fp32", "adamw", 0, 1, None), ("bf16", "adamw_8bit", 1, 2, None)])
def test_the_record_is_what_the_allocator_reports_where_phases_begin(config: tuple[object, ...]) -> None:
    """Between the phases no kernel holds scratch memory: there the recorder counts what torch's allocator counts.

    The allocator is asked in a run without the recorder, by the profiler. Forward and step are compared: while
    a graph is alive, autograd also keeps scalars that C++ made of python numbers, on the host for any device.
    """
    strategy = _strategy(*config)
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
    strategy = _strategy(precision, "adamw", checkpointed, 1, None)
    recorded, _ = _real(strategy)
    blocks = Counter(block.nbytes for block in recorded.blocks if block.category not in EARLIER)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels that split a reduction take scratch memory a thread, which could hide one
    try:
        changes, _ = _profiled(strategy)
    finally:
        torch.set_num_threads(threads)
    assert blocks - Counter(nbytes for _, nbytes in changes if nbytes > 0) == Counter()


@pytest.mark.parametrize("checkpointed", [0, "all"])
def test_gradients_are_added_in_place_where_autograd_does(checkpointed: int | str) -> None:
    """The sums that the recorder takes for in-place are, by shape, those that the engine runs as `add_`."""
    strategy = _strategy("fp32", "adamw", checkpointed, 1, None)
    engine, family = _engine(strategy)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        train_step(engine, family, ObjectiveSpec(), [batch(SHAPE, strategy)], lr=1e-4)
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
        train_step(engine, family, ObjectiveSpec(), [batch(SHAPE, strategy)], lr=1e-4)
    assert seen == real
    assert {key[0] for key in seen} == {True, False}


def _allocator_levels(strategy: Strategy, weights: int) -> list[int]:
    """Allocated bytes at the start of each forward and step, the weights and host batches counted in."""
    changes, starts = _profiled(strategy)
    return [weights + sum(nbytes for at, nbytes in changes if at < start) for start in starts]


def _profiled(strategy: Strategy) -> tuple[list[tuple[int, int]], list[int]]:
    """The allocator's own report of two steps without a recorder: (time, bytes), and where phases start."""
    family, model = _model(strategy)
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            engine = engines.create(strategy, model, family, device=CPU, world=World())
            for _ in range(STEPS):
                micro_batches = [batch(SHAPE, strategy) for _ in range(strategy.grad_accum_steps)]
                train_step(engine, family, ObjectiveSpec(), micro_batches, lr=1e-4)
                del micro_batches
    finally:
        gc.enable()
    events = profiled.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return changes, sorted(event.start_ns() for event in events if event.name() in ("forward", "step"))


def _model(strategy: Strategy) -> tuple[models.Family, torch.nn.Module]:
    family = models.family(TINY.class_name)
    model = models.build(TINY, device="cpu", dtype=engines.compute_dtype(strategy))
    models.equip(model, family, strategy)
    return family, model


def _engine(strategy: Strategy) -> tuple[engines.Engine, models.Family]:
    family, model = _model(strategy)
    return engines.create(strategy, model, family, device=CPU, world=World()), family


@pytest.mark.slow
@pytest.mark.xdist_group("rehearsed")
def test_categories_are_what_arithmetic_says(rehearsed: dict[tuple[object, ...], RehearsedSize]) -> None:
    """AdamW in bf16: 2 B a parameter, 4 B a master, 4 B a gradient at the step, two fp32 moments and step counts."""
    answer = rehearsed["bf16", "adamw", 0, 1, None]
    step = answer.ledger.phase("step")
    with torch.device("meta"):
        tensors = len(list(models.build(TINY, device="meta", dtype=torch.float32).parameters()))
    assert step.at_peak["parameter"] == 2 * answer.params
    assert step.at_peak["master weight"] == 4 * answer.params
    assert step.at_peak["optimizer state"] == 8 * answer.params + 4 * tensors
    assert answer.ledger.phase("forward").at_peak["saved activation"] > 0
    checkpointed = rehearsed["bf16", "adamw", "all", 1, None].ledger
    assert (
        checkpointed.phase("forward").at_peak["saved activation"]
        < answer.ledger.phase("forward").at_peak["saved activation"]
    )
    assert "recomputed activation" in checkpointed.phase("backward").at_peak
    assert "recomputed activation" not in answer.ledger.phase("backward").at_peak
