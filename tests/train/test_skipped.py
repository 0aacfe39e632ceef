"""A step with gradients that are not finite changes nothing. It is logged with its samples, and too many end the
run."""

import numpy as np
import pytest
import torch
from stepping import one_batch, started
from training import run
from two_processes import answer_of_two
from whole import whole_state

from bigdit.engines import ema_of
from bigdit.loader.stream import BatchReader
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import EmaSpec, OptimizerSpec, Strategy
from bigdit.train.monitor.metrics import LossSpikes, read_metrics
from bigdit.train.step import train_step


def after(strategy, *batches):
    """The whole state after a step on each batch, and which steps were taken."""
    torch.manual_seed(0)  # of stochastic rounding
    engine, family = started(strategy)
    ema = ema_of(engine)
    taken = []
    for micro_batches in batches:
        taken.append(train_step(engine, family, FlowMatchingSpec(), micro_batches, lr=1e-3, ema=ema).taken)
        assert all(tensor.grad is None for tensor in (*engine.model.parameters(), *engine.masters))
    return whole_state(engine, ema), taken


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(gradient_clipping=1.0, ema=EmaSpec(decay=0.9)),
        Strategy(gradient_clipping=None, ema=EmaSpec(decay=0.9)),
        Strategy(gradient_clipping=1.0, grad_accum_steps=2),
        Strategy(precision="fp32", gradient_clipping=1.0),
        Strategy(precision="fp32", gradient_clipping=None, optimizer=OptimizerSpec(name="came")),
        Strategy(precision="bf16_sr", gradient_clipping=1.0),
        Strategy(optimizer_in_backward=True, gradient_clipping=None, ema=EmaSpec(decay=0.9)),
        Strategy(precision="fp32", optimizer_in_backward=True, gradient_clipping=None),
    ],
    ids=lambda strategy: ",".join(f"{key}={getattr(strategy, key)}" for key in sorted(strategy.model_fields_set)),
)
def test_a_step_on_nan_changes_no_bit(strategy):
    first, last = ([one_batch(seed + i) for i in range(strategy.grad_accum_steps)] for seed in (1, 5))
    nan = [*first[1:], one_batch(3, poisoned=True)]
    state, taken = after(strategy, first, nan, last)
    assert taken == [True, False, True]
    without, _ = after(strategy, first, last)
    assert state.keys() == without.keys()
    assert [name for name in state if not torch.equal(state[name], without[name])] == []
    before, _ = after(strategy, first)
    assert any(not torch.equal(state[name], before[name]) for name in before if name.startswith("master."))


# Only rank 1's batch is not finite, and no process steps.
_SHARDED = """
import json, sys
import torch, torch.distributed as dist
from tiny_models import SANA
from stepping import one_batch
from whole import whole_state
from bigdit import engines, models
from bigdit.dist import world_from_env
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.strategy import EmaSpec, OptimizerSpec, Strategy
from bigdit.train.step import train_step

torch.set_num_threads(1)
dist.init_process_group("gloo")
world = world_from_env()
document = json.load(open("ds_configs/zero2_bf16.json"))


def zero(stage, precision, clipping):
    section = document["zero_optimization"] | {"stage": stage}
    return document | {"zero_optimization": section, "bf16": {"enabled": precision == "bf16"}}


def after(name, precision, clipping, steps, **more):
    engine = "fsdp2" if name == "fsdp2" else "deepspeed"
    ds_config = None if name == "fsdp2" else zero(int(name[-1]), precision, clipping)
    chosen = {"precision": precision, "gradient_clipping": clipping, "ds_config": ds_config, "ema": EmaSpec(decay=0.9)}
    strategy = Strategy(engine=engine, world_size=2, micro_batch_size=2, **chosen, **more)
    family = models.family(SANA.class_name)
    model = models.build(SANA, device="cpu", dtype=engines.compute_dtype(strategy), seed=0)
    engine = engines.create(strategy, model, family, device=torch.device("cpu"))
    ema = engines.ema_of(engine)
    taken = []
    for seed in steps:
        mine = one_batch(seed + 100 * world.rank, poisoned=seed == 3 and world.rank == 1)
        taken.append(train_step(engine, family, FlowMatchingSpec(), [mine], lr=1e-3, ema=ema).taken)
    return whole_state(engine, ema), taken


found = {}
for case in (
    ("fsdp2", "bf16", 1.0),
    ("fsdp2", "fp32", None),
    ("fsdp2 in backward", "bf16", None),
    ("zero2", "bf16", 1.0),
    ("zero1", "fp32", None),
    ("zero3", "bf16", None),
    ("zero0", "bf16", None),
    ("zero0", "fp32", 1.0),
):
    name, *rest = case
    more = {"optimizer_in_backward": True} if "backward" in name else {}
    state, taken = after(name.split()[0], *rest, (1, 3, 5), **more)
    without, _ = after(name.split()[0], *rest, (1, 5), **more)
    changed = [key for key in state if not torch.equal(state[key], without[key])]
    found[str(case)] = {"taken": taken, "changed": changed, "same_names": state.keys() == without.keys()}
everywhere = [None, None]
dist.all_gather_object(everywhere, found)
if world.is_main:
    json.dump(everywhere, open(sys.argv[1], "w"))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_no_process_steps_where_one_has_a_nan(tmp_path):
    answer = answer_of_two(_SHARDED, tmp_path)
    for found in answer:
        for case, each in found.items():
            assert each == {"taken": [True, False, True], "changed": [], "same_names": True}, case


@pytest.fixture
def poisoned(monkeypatch):
    """Each read of row 3 of the first bucket in part 0, the source's number 9, has an infinity in its text."""
    read = BatchReader.read

    def poison(self, bucket, parts, rows, seeds):
        batch = read(self, bucket, parts, rows, seeds)
        if bucket == next(iter(self._store.buckets)):
            batch.text_embeds[np.flatnonzero((parts == 0) & (rows == 3)).tolist(), 0, 0] = torch.inf
        return batch

    monkeypatch.setattr(BatchReader, "read", poison)


def test_a_skipped_step_is_reported_with_its_sample(features, tmp_path, poisoned, capfd):
    assert run(features, tmp_path, "train.steps=15") == 0  # with 16 samples; an epoch has 240
    printed = " ".join(capfd.readouterr().err.split())
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 16))
    (skipped,) = [row for row in rows if row.get("skipped")]
    assert skipped["loss"] is skipped["grad_norm"] is None
    assert f"note: step {skipped['step']} is skipped: the loss of step {skipped['step']} is nan" in printed
    assert "; values are not finite in sample 9 (row 3 of " in printed
    assert " in part-000000000000-000000000240.safetensors)" in printed
    assert f"note: 1 of 15 steps skipped; {tmp_path}/metrics.jsonl marks them" in printed


def test_too_many_skipped_steps_end_the_run(features, tmp_path, poisoned, capfd):
    assert run(features, tmp_path, "train.steps=15", "train.most_skipped_steps=1") == 1
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: training skipped 1 step in a row (train.most_skipped_steps): the loss of step ")
    assert "in sample 9 (row 3 of " in error
    assert error.endswith("or leave them out")
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["skipped"]


def test_a_loss_that_stands_out_is_noticed():
    generator = np.random.default_rng(0)
    spikes = LossSpikes()
    assert [spikes.add(loss) for loss in (9.0, *generator.normal(1.0, 0.1, 200), 0.1)] == [None] * 202
    assert spikes.add(1.3) is None
    assert "is 2.0000, " in (printed := spikes.add(2.0))
    assert "robust deviations above the median of the last 100, " in printed
    assert spikes.add(1.0) is None


def test_the_first_losses_are_no_spikes():
    spikes = LossSpikes()
    assert [spikes.add(1.0 + i % 3) for i in range(19)] == [None] * 19
    assert spikes.add(1e6) is None
    assert spikes.add(1e6) is not None
