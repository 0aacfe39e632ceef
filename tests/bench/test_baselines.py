"""The plain loop beside a step does the same work: its losses are equal."""

from itertools import repeat

import pytest
import torch
from commands import DIGITS, SINGLE, TINY

from bigdit import engines
from bigdit.bench.step import bench_step, plain_steps
from bigdit.config.stages import load_run
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.profile.attempt import StepRequest
from bigdit.profile.steps import batch, build
from bigdit.profile.steps import prepare as prepared
from bigdit.strategy import BatchShape, EmaSpec, OptimizerSpec
from bigdit.train.prepare import prepare
from bigdit.train.step import train_step

SHAPE = BatchShape(latents=(4, 4, 4), text=(8, 64))


def asked(**changed):
    run = load_run(DIGITS, [*TINY, *SINGLE])
    spec, strategy = prepare(run), run.strategy
    return spec, strategy.model_copy(update={"optimizer": OptimizerSpec(lr=1e-2)} | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "grad_accum_steps": 2, "gradient_clipping": 0.01, "ema": EmaSpec()},
        {"precision": "fp16", "gradient_clipping": None},
        {"precision": "bf16_sr", "checkpointed_blocks": "all"},
    ],
    ids=lambda changed: changed["precision"],
)
def test_the_plain_loop_trains_as_the_engine_does(changed):
    spec, strategy = asked(**changed)
    request = StepRequest(model=spec, batch=SHAPE, strategy=strategy, objective=FlowMatchingSpec())
    plain, own = (prepared(request, build(request, 0)) for _ in range(2))
    family, device = own.family, torch.device("cpu")
    micro_batches = [batch(SHAPE, strategy)] * strategy.grad_accum_steps
    steps = plain_steps(plain, repeat(micro_batches), device)
    engine = engines.create(strategy, own.model, family, device=device)
    torch.manual_seed(0)  # for stochastic rounding
    found = [next(steps).loss for _ in range(3)]
    torch.manual_seed(0)
    expected = [float(train_step(engine, family, FlowMatchingSpec(), micro_batches, lr=1e-2).loss) for _ in range(3)]
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[2] < 0.999 * found[0]  # it trains


def test_a_step_without_room_for_a_second_model_is_timed_alone(monkeypatch):
    spec, strategy = asked(precision="fp32")
    monkeypatch.setattr("bigdit.bench.step.room", lambda device: (1 << 20, 1 << 30))
    found = bench_step(spec, SHAPE, strategy, FlowMatchingSpec(), steps=3, seed=0)
    assert found.compared is None
    assert found.alone.endswith("1.00 MiB are free; use a smaller micro-batch")
    assert found.alone.startswith("it needs about ")
    assert found.receipt.steps == 3
