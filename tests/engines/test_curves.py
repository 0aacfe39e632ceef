"""Every engine's loss curve equals that of one process with the same data and seed, by real launchers."""

import json

import pytest
from commands import BIN, DIGITS, HELPERS, ROOT, TINY, bigdit, run_command, run_ranks, with_set
from two_processes import run_two

from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.processes.launch import free_port

# fp32: engines sum gradients over samples and processes in different orders. After 8 steps of Adam on a loss near 2,
# that stays within fp32's last digits (2e-7 relative), with some room. bf16: each process rounds its own gradient to
# bf16 (2^-9 relative) before they are averaged, where the single process rounds once. ZeRO-3 gathers weights at other
# alignments, where kernels round differently.
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-3}


TRAIN = ROOT / "launch/train.py"


def losses(output):
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def overrides(features, output, *more):
    return with_set([*TINY, f"data.features={features}", f"output={output}", *more])


@pytest.fixture(scope="session")
def reference(features, tmp_path_factory):
    """The single process's loss curve, by precision."""
    curves = {}
    for precision in TOLERANCE:
        output = tmp_path_factory.mktemp("single")
        single = [
            "strategy.engine=single",
            "strategy.world_size=1",
            "strategy.ds_config=null",
            f"strategy.precision={precision}",
        ]
        done = run_ranks(1, TRAIN, "--config", DIGITS, *overrides(features, output, *single))
        assert done.returncode == 0, done.stderr
        curves[precision] = losses(output)
        assert len(curves[precision]) == 8
        assert curves[precision][-1] < curves[precision][0] - 0.1  # it learns, so that the curves have a shape
    return curves


def ds_config(tmp_path, stage):
    document = json.loads((ROOT / "ds_configs/zero2_bf16.json").read_text())
    document["zero_optimization"]["stage"] = stage
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(document))
    return path


# bf16 where DeepSpeed has other code for it. `bigdit train` runs stage 2 in bf16 below, and test_controlnets.py has
# stages 1 and 2 in fp32.
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (3, "fp32"), (0, "bf16"), (3, "bf16")])
def test_deepspeed(features, reference, tmp_path, stage, precision):
    output = tmp_path / "run"
    recomputed = 1 if stage == 3 else 0  # weights are gathered again, which changes no number
    arguments = overrides(
        features, output, f"strategy.precision={precision}", f"strategy.checkpointed_blocks={recomputed}"
    )
    started = ("--ds-config", ds_config(tmp_path, stage), "--config", DIGITS, *arguments)
    if (stage, precision) == (3, "fp32"):  # DeepSpeed's launcher once; it takes as long as the training
        launcher = (BIN / "deepspeed", "--num_gpus", 2, "--master_port", free_port())
        done = run_command(*launcher, TRAIN, *started)
    else:
        done = run_ranks(2, TRAIN, *started)
    assert done.returncode == 0, done.stderr
    assert losses(output) == pytest.approx(reference[precision], rel=TOLERANCE[precision])


@pytest.mark.slow
def test_fsdp2_with_two_copies_of_the_model_and_everything_on_the_host(features, reference, tmp_path):
    """HSDP sums its replicas' gradients after the last micro-batch. Offload changes no number."""
    output = tmp_path / "run"
    fsdp2 = ["strategy.engine=fsdp2", "strategy.ds_config=null", "strategy.dp_replicate=2", "strategy.cpu_offload=true"]
    fsdp2 += ["strategy.world_size=4", "strategy.precision=fp32", "strategy.micro_batch_size=2"]
    settings = overrides(features, output, *fsdp2)
    done = run_ranks(4, TRAIN, "--config", DIGITS, *settings)
    assert done.returncode == 0, done.stderr
    assert losses(output) == pytest.approx(reference["fp32"], rel=TOLERANCE["fp32"])


@pytest.fixture(scope="module")
def curves():
    """The findings of fsdp2_curves.py, in one launch."""
    return json.loads(run_two(ROOT / "tests/engines/fsdp2_curves.py").splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other", "tolerance"),
    [
        ("fsdp2", "single", TOLERANCE["fp32"]),
        ("in_backward", "fsdp2", 0.0),
        ("segments", "fsdp2", 0.0),
        ("offload", "fsdp2", 0.0),
        ("zero2 compiled", "one block", TOLERANCE["fp32"]),
        # As bf16, with three more bits.
        ("fsdp2 fp16", "single fp16", TOLERANCE["bf16"] / 8),
        # A process scales by its own activations, and weights are cast from fp32 instead of bf16.
        ("fsdp2 fp8", "single fp8", 1e-2),
        ("fsdp2 fp8 offload", "fsdp2 fp8", 0.0),
        ("fsdp2 fp8 in_backward", "fsdp2 fp8", 0.0),
        ("compiled fp8 flux", "fsdp2 fp8 flux", 0.0),
        ("fsdp2 dit", "single dit", TOLERANCE["fp32"]),
        ("in_backward dit", "fsdp2 dit", 0.0),
    ],
)
def test_fsdp2_in_all_its_ways_trains_the_same_curve(curves, one, other, tolerance):
    assert curves[one] == pytest.approx(curves[other], rel=tolerance, abs=0.0)
    assert len({*curves[one]}) == len(curves[one])


@pytest.mark.slow
def test_an_overflow_on_one_process_is_passed_over_on_all(curves):
    assert curves["overflow"] == {"kept": [True, True], "scale": [32768.0, 32768.0]}


@pytest.mark.slow
def test_accelerate_launch_checkpointing_and_accumulation(features, reference, tmp_path):
    """Recomputation changes no number. Four micro-batches of 2 on 2 processes are the same global batch."""
    output = tmp_path / "run"
    fsdp2 = [
        "strategy.engine=fsdp2",
        "strategy.ds_config=null",
        "strategy.precision=fp32",
        "strategy.micro_batch_size=2",
    ]
    done = run_command(
        *(BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1),
        *("--main_process_port", free_port(), TRAIN),
        *("--config", DIGITS, *overrides(features, output, *fsdp2, "strategy.checkpointed_blocks=1")),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((output / "receipt.json").read_text())["strategy"]["world_size"] == 2
    assert losses(output) == pytest.approx(reference["fp32"], rel=TOLERANCE["fp32"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_bigdit_train_starts_the_launcher(features, reference, tmp_path, engine):
    output = tmp_path / "run"
    chosen = [] if engine == "deepspeed" else ["strategy.ds_config=null"]
    done = bigdit("train", "--config", DIGITS, *overrides(features, output, f"strategy.engine={engine}", *chosen))
    assert done.returncode == 0, done.stderr
    assert losses(output) == pytest.approx(reference["bf16"], rel=TOLERANCE["bf16"])
    receipt = json.loads((output / "receipt.json").read_text())
    assert receipt["strategy"]["world_size"] == 2
    assert receipt["measured_peak_allocated_bytes"] > 0


@pytest.mark.slow
def test_copies_of_the_model_round_alike():
    """bf16_sr on HSDP: the copies' shards are equal to the bit, but not where seeds differ."""
    done = run_ranks(4, ROOT / "tests/engines/fsdp2_replicas.py", PYTHONPATH=HELPERS, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(share > 0.1 for share in found.pop("seeds apart"))
    assert found == {name: [0.0, 0.0] for name in ("adamw", "adafactor", "came", "adamw_4bit_ao")}
