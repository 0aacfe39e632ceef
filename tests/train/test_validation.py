"""The validation loss: its value, equal on every engine, and without effect on training."""

import json
import shutil

import pytest
import torch
from commands import ROOT, in_process
from resuming import strategy
from stores import DIM, make_store, stream_of
from tiny_models import SANA
from training import run_to
from two_processes import run_two

from bigdit import engines, models
from bigdit.checkpoint import Peers
from bigdit.config.run import ValidationConfig
from bigdit.errors import UserError
from bigdit.loader.order import ValidationSplit
from bigdit.memory import ledger
from bigdit.objective_spec import FlowMatchingSpec
from bigdit.record.recorder import Recorder
from bigdit.store import FeatureStore
from bigdit.strategy import EmaSpec, LoraSpec
from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.monitor.monitor import Validation
from bigdit.train.step import train_step

CPU = torch.device("cpu")
SPEC = SANA.model_copy(update={"kwargs": SANA.kwargs | {"caption_channels": DIM}})
LOSSES = ("validation_loss", "ema_validation_loss")
HELD = ("validation.samples=24", "validation.times=[0.25,0.75]", "train.checkpoint_every=2", "strategy.ema.decay=0.5")


@pytest.fixture(scope="module")
def rows(features, tmp_path_factory):
    """The rows of runs that validate at every second step, at the last one alone, and with a stop between."""
    base = tmp_path_factory.mktemp("runs")
    outputs = {name: base / name for name in ("often", "once", "stopped")}
    run_to(4, outputs["often"], features, *HELD, "validation.every=2")
    run_to(4, outputs["once"], features, *HELD, "validation.every=99")
    shutil.copytree(outputs["often"], outputs["stopped"])  # set back to its first checkpoint
    shutil.rmtree(outputs["stopped"] / "checkpoints/step-00000004")
    (outputs["stopped"] / "checkpoints/latest").write_text("step-00000002\n")
    run_to(4, outputs["stopped"], features, *HELD, "validation.every=2")
    return {name: read_metrics(output / "metrics.jsonl") for name, output in outputs.items()}, outputs


def test_rows_have_the_mean_and_each_time_of_weights_and_ema(rows):
    found, _ = rows
    assert [row["step"] for row in found["often"] if LOSSES[0] in row] == [2, 4]
    assert [row["step"] for row in found["once"] if LOSSES[0] in row] == [4]
    for name in LOSSES:
        by_t = found["often"][3][f"{name}_by_t"]
        assert by_t.keys() == {"0.25", "0.75"}
        assert found["often"][3][name] == pytest.approx(sum(by_t.values()) / 2)
        assert found["often"][3][name] < found["often"][1][name]  # it learns
    assert found["often"][3][LOSSES[0]] != found["often"][3][LOSSES[1]]


def test_training_is_the_same_however_often_it_is_measured_and_continues(rows):
    found, _ = rows
    losses = {name: [row["loss"] for row in each] for name, each in found.items()}
    assert losses["often"] == losses["once"] == losses["stopped"]
    measured = {name: [[row.get(key) for key in LOSSES] for row in each] for name, each in found.items()}
    assert measured["often"] == measured["stopped"]
    assert measured["often"][3] == measured["once"][3]


def test_a_run_that_continues_holds_out_the_same(rows, features):
    output = rows[1]["once"]
    with pytest.raises(UserError, match=r"validation\.samples is 23, and .* was trained with 24:"):
        run_to(5, output, features, "strategy.ema.decay=0.5", "validation.samples=23")


def test_an_expert_of_a_part_of_t_is_measured_within_it_and_generates_nothing_alone(features, tmp_path):
    part, output = ("objective.t_range=[0.8,1.0]", "validation.every=2"), tmp_path / "run"
    run_to(2, output, features, *HELD, *part)
    assert read_metrics(output / "metrics.jsonl")[-1]["validation_loss_by_t"].keys() == {"0.85", "0.95"}
    asked = ("sample", "--checkpoint", output, "--caption", "a seven", "--out", tmp_path / "out")
    done = in_process(*asked)
    assert (done.returncode, "objective.t_range is [0.8, 1], and a model of a part" in done.stderr) == (1, True)
    assert "`bigdit export` writes it for diffusers' pipeline" in " ".join(done.stderr.split())
    with pytest.raises(UserError, match=r"samples: objective.t_range is \[0.8, 1\]"):
        run_to(3, output, features, *HELD, *part, "samples.captions=[a seven]")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "store"
    make_store(root)
    return FeatureStore.open(root)


def rounded(average):
    """Round to bf16 as the exchange does: to the nearest, with ties away from zero."""
    steps = (average.view(torch.int32) + (1 << 15)) >> 16
    return (steps << 16).view(torch.float32)


def measured(store, chosen, *, taken_from=None):
    """An engine after a step, or with its EMA; its EMA and its validation."""
    lora = chosen.lora is not None
    family = models.family(SPEC.class_name)
    model = models.build(SPEC, device="cpu", dtype=engines.compute_dtype(chosen), seed=0)
    engine = engines.create(chosen, models.equip(model, family, chosen), family, device=CPU)
    ema, held = engines.ema_of(engine), ValidationSplit(store.index, len(store.index.parts), 9)
    assert bool(lora) == (len(engine.masters) < len(list(engine.model.parameters())))
    if taken_from is None:
        batch = stream_of(store, micro=chosen.micro_batch_size).micro_batches(0)
        train_step(engine, family, FlowMatchingSpec(), batch, lr=1e-2, ema=ema)
    else:
        for master, average in zip(engine.masters, taken_from.averages, strict=True):
            master.detach().copy_(rounded(average) if master.dtype == torch.bfloat16 else average)
        engine.publish()
    config = ValidationConfig(samples=9, times=(0.2, 0.8))
    return engine, ema, Validation(config, store, held, Peers(), engine, ema, family, FlowMatchingSpec(), 99)


@pytest.mark.parametrize("printed", [{"precision": "fp32"}, {}, {"precision": "bf16_sr"}, {"lora": LoraSpec(rank=2)}])
def test_the_loss_of_the_ema_is_that_of_a_model_with_these_weights(store, printed):
    chosen = strategy(micro_batch_size=4, ema=EmaSpec(decay=0.9), **printed)
    _, ema, validation = measured(store, chosen)
    found = validation.measure()
    assert found == validation.measure()
    _, _, of_average = measured(store, chosen, taken_from=ema)
    assert found["ema_validation_loss_by_t"] == of_average.measure()["validation_loss_by_t"]
    assert found["ema_validation_loss"] != found["validation_loss"]


def test_it_takes_less_memory_than_a_step(store):
    """It needs neither gradients nor what a backward pass saves. The EMA is swapped in by chunks."""
    engine, ema, validation = measured(store, strategy(micro_batch_size=4, precision="fp32"))
    batch = stream_of(store, micro=4).micro_batches(1)
    peaks = []
    family = models.family(SPEC.class_name)
    for work in (
        lambda: train_step(engine, family, FlowMatchingSpec(), batch, lr=1e-2, ema=ema),
        validation.measure,
    ):
        recorder = Recorder()
        with recorder, recorder.phase("step"):
            work()
        peaks.append(ledger(recorder.host_timeline(), 1).peak_allocated_bytes)
    assert 0 < peaks[1] < 0.5 * peaks[0]


@pytest.fixture(scope="module")
def everywhere(store, tmp_path_factory):
    """The findings of validation_losses.py, in one launch."""
    answer = tmp_path_factory.mktemp("answers") / "answer.json"
    run_two(ROOT / "tests/train/validation_losses.py", store.root, answer)
    return json.loads(answer.read_text())


# test_curves.py's tolerances for bf16: engines round gradients and gathered weights differently.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "one"),
    [
        ("fsdp2", "single"),
        ("fsdp2 kept", "fsdp2"),
        ("zero0", "single"),
        ("zero2", "single"),
        ("zero3", "single"),
    ],
)
def test_two_processes_find_what_one_does(everywhere, engine, one):
    for here, there in zip(everywhere[engine], everywhere[one], strict=True):
        for name in LOSSES:
            assert here[name] == pytest.approx(there[name], rel=3e-3)
            assert here[f"{name}_by_t"] == pytest.approx(there[f"{name}_by_t"], rel=3e-3)


@pytest.mark.slow
def test_state_and_random_numbers_are_left_as_they_were(everywhere):
    """Also where updates are rounded by random numbers, which each process draws for itself."""
    assert all(row["kept"] for rows in everywhere.values() for row in rows)
    assert all(name in row for name in LOSSES for row in everywhere["fsdp2 sr"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["single", "fsdp2", "zero3"])
def test_what_comes_after_is_as_if_it_had_not_been_measured(everywhere, engine):
    losses = [[row["loss"] for row in everywhere[name]] for name in (engine, f"{engine}, not measured")]
    assert losses[0] == losses[1]
    assert not any(name in row for name in LOSSES for row in everywhere[f"{engine}, not measured"])
