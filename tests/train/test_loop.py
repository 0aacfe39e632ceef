"""Training resumes where it stopped, keeps its files whole, and refuses what does not fit."""

import json
import shutil
import signal
import subprocess
import time

import pytest
import torch
from commands import BIN, DIGITS, ROOT, SINGLE, TINY, bigdit, in_process, run_command, run_ranks, with_set
from diffusers import SanaTransformer2DModel
from safetensors.torch import load_file

from bigdit.train.monitor.metrics import read_metrics

TRAIN = ROOT / "launch/train.py"

ENGINES = {
    "single": SINGLE,
    "single, 8-bit": (*SINGLE, "strategy.optimizer.name=adamw_8bit"),
    "deepspeed": (),
    "fsdp2": ("strategy.engine=fsdp2", "strategy.ds_config=null"),
    "fsdp2, FP8": ("strategy.engine=fsdp2", "strategy.ds_config=null", "strategy.float8=tensorwise"),
}


def train(features, output, *overrides, engine="single", **options):
    chosen = [*TINY, f"data.features={features}", f"output={output}", *ENGINES[engine], *overrides]
    started = ("-m", "bigdit.train", "--config", DIGITS, *with_set(chosen))
    return run_ranks(1 if "single" in engine else 2, *started, **options)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_resuming_changes_nothing(features, tmp_path, engine):
    """The same command resumes in the middle of the rate's fall. Rates, losses and weights equal those of an
    uninterrupted run to the bit."""
    more = ("train.checkpoint_every=5", "train.lr_schedule=wsd", "train.decay_steps=5", "train.min_lr=1e-5")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    done = train(features, straight, *more, engine=engine)
    assert done.returncode == 0, done.stderr
    shutil.copytree(straight, stopped)  # set back to the moment when its first checkpoint was written
    shutil.rmtree(stopped / "checkpoints/step-00000008")
    (stopped / "checkpoints/latest").write_text("step-00000005\n")
    done = train(features, stopped, *more, engine=engine)
    assert done.returncode == 0, done.stderr
    assert f"resuming from {stopped}/checkpoints/step-00000005, step 5" in " ".join(done.stderr.split())
    assert "Warning" not in done.stderr
    curves = [
        [(row["lr"], row["loss"]) for row in read_metrics(output / "metrics.jsonl")] for output in (straight, stopped)
    ]
    assert curves[0] == curves[1]
    assert len({lr for lr, _ in curves[0]}) == 6  # half the peak, the peak for three steps, and a fall of four
    weights = [
        load_file(output / "exports/step-00000008/transformer/diffusion_pytorch_model.safetensors")
        for output in (straight, stopped)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_diffusers_loads_the_export(trained):
    folder = trained / "exports/step-00000008/transformer"
    model, info = SanaTransformer2DModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_layers == 2


def test_a_finished_run_has_nothing_to_do(features, trained):
    done = train(features, trained)
    assert done.returncode == 0
    assert "has its 8 steps already; raise train.steps to continue" in done.stderr
    assert "wrote" not in done.stderr.replace(f"wrote {trained}/report.html", "")


def test_only_the_newest_checkpoints_stay(features, tmp_path):
    done = train(features, tmp_path, "train.checkpoint_every=2", "train.keep_checkpoints=2")
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000006", "step-00000008"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000008\n"


@pytest.mark.slow
def test_killed_at_any_moment_a_run_continues(features, tmp_path):
    """`kill -9` of the trainer: what `latest` names is whole, and no half checkpoint has a final name."""
    chosen = [*TINY, *SINGLE, f"data.features={features}", f"output={tmp_path}", "train.steps=400"]
    command = [
        BIN / "python",
        "-m",
        "bigdit.train",
        "--config",
        DIGITS,
        *with_set([*chosen, "train.checkpoint_every=1"]),
    ]
    for moment in range(3):
        process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stderr=subprocess.DEVNULL)
        latest = tmp_path / "checkpoints/latest"
        before = latest.read_text() if latest.exists() else ""
        deadline = time.monotonic() + 120
        while (latest.read_text() if latest.exists() else "") == before:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.07 * moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
    step = int(latest.read_text().removeprefix("step-"))
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        assert (folder / "state.json").exists()
    done = train(features, tmp_path, f"train.steps={step + 2}")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, step + 3))


def test_a_checkpoint_of_another_model_is_refused(features, trained, tmp_path):
    done = train(features, trained, "model.kwargs.num_layers=3", "train.steps=9")
    assert done.returncode == 1
    folder = trained / "checkpoints/step-00000008"
    assert done.stderr.splitlines() == [
        f"error: {folder} holds num_layers 2, and the run's model has 3; choose another output"
    ]


def test_a_damaged_checkpoint_is_refused(features, trained, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(trained, output)
    shard = output / "checkpoints/step-00000008/engine/rank-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    done = train(features, output, "train.steps=9")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"note: {shard.parent.parent} was trained with train.steps 8, and resumes with 9",
        f"error: {shard} is damaged: its checksum differs from that in state.json; "
        "there is no other; choose another output to start again",
    ]


@pytest.mark.parametrize("kind", ["exports/step-00000008/transformer", "checkpoints/step-00000008"])
def test_weights_to_start_from(features, trained, tmp_path, kind):
    """A folder of diffusers', or a checkpoint."""
    folder = trained / kind
    done = train(features, tmp_path / "a", f"model.init_from={folder}", "train.steps=2")
    assert done.returncode == 0, done.stderr
    fresh = read_metrics(trained / "metrics.jsonl")[0]["loss"]
    assert read_metrics(tmp_path / "a/metrics.jsonl")[0]["loss"] < fresh
    other = train(features, tmp_path / "b", f"model.init_from={folder}", "model.kwargs.num_layers=3")
    assert other.returncode == 1
    what = (
        "cannot be read: it holds 0 elements" if "checkpoints" in kind else "holds weights of another SanaTransformer"
    )
    assert f"error: model.init_from: {folder} {what}" in other.stderr
    assert other.stderr.endswith("; they have num_layers 2, here 3\n")
    chosen = (*TINY, *SINGLE, f"data.features={features}", f"model.init_from={folder}", "model.kwargs.num_layers=3")
    checked = in_process("train", "--dry-run", "--config", DIGITS, *with_set([*chosen, f"output={tmp_path / 'b'}"]))
    assert (checked.returncode, checked.stderr) == (1, other.stderr)


def test_features_of_other_encoders_are_refused(features, tmp_path):
    other = ["encoders.text.max_tokens=16", "model.kwargs.caption_channels=32", "encoders.text.config.d_model=32"]
    done = train(features, tmp_path, *other, "encoders.text.seed=1")
    assert done.returncode == 1
    dim, tokens, another, weights = done.stderr.splitlines()
    assert "does not fit: it was encoded with config " in another
    assert weights.endswith("does not fit: it was encoded with seed 0, and encoders.text has seed 1")
    assert [dim, tokens] == [
        f"error: data.features: {features} does not fit: "
        "its text has 64 features, and the model's caption_channels is 32",
        f"error: data.features: {features} does not fit: "
        "its text has at most 32 tokens, and encoders.text.max_tokens is 16",
    ]


def test_an_output_that_cannot_be_written(features, tmp_path):
    (tmp_path / "file").write_text("")
    done = train(features, tmp_path / "file/run")
    assert done.returncode == 1
    assert done.stderr == f"error: cannot write {tmp_path}/file/run/lock: Not a directory; choose another output\n"
    assert len(done.stderr.splitlines()) == 1


def test_a_diverging_run_ends_with_the_step(features, tmp_path):
    more = ("strategy.optimizer.lr=1e30", "strategy.gradient_clipping=null", "train.most_skipped_steps=3")
    done = train(features, tmp_path, *more)
    assert done.returncode == 1
    assert "the loss of step" in done.stderr
    assert "lower strategy.optimizer.lr" in done.stderr


def test_errors_come_before_any_process_group(features, tmp_path):
    """Under a launcher one process prints, and all end with 1."""
    done = run_command(
        *(BIN / "torchrun", "--standalone", "--nproc-per-node", 2, ROOT / "launch/train.py", "--config", DIGITS),
        *with_set([*ENGINES["fsdp2"], f"output={tmp_path}", "train.seed=-1"]),
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].endswith("train.seed is -1, and 0 or more was expected")


def test_dry_run_prints_what_would_run(features, trained):
    """And a verdict in the last line, also if the run has begun."""
    begun = (*TINY, f"data.features={features}", f"output={trained}")
    known = "ok: 240 images, 3 buckets, {} steps of 16, memory not planned (`bigdit plan --config`); {}\n"
    for steps, left in ((8, "nothing is left to train"), (12, "resumes after step 8")):
        done = in_process("train", "--config", DIGITS, "--dry-run", *with_set([*begun, f"train.steps={steps}"]))
        assert done.returncode == 0
        resolved = json.loads(done.stdout)
        assert resolved["strategy"]["world_size"] == 2
        assert resolved["train"]["steps"] == steps
        assert done.stderr.endswith(known.format(steps, left))


@pytest.mark.parametrize(
    ("printed", "refused"),
    [
        (("--set", "train.steps=1", "--set", "train.steps=2"), "--set has train.steps 2 times; give it once"),
        (
            ("--ds-config", "ds_configs/zero2_bf16.json", "--set", "strategy.engine=fsdp2"),
            "--ds-config and --set strategy.engine set the same key; leave one of them out",
        ),
        (
            ("--grace", "5", "--set", "train.grace=6"),
            "--grace and --set train.grace set the same key; leave one of them out",
        ),
    ],
)
def test_a_key_is_given_once_however_training_starts(printed, refused):
    begun = [bigdit("train", "--config", DIGITS, *printed)]
    begun += [run_ranks(1, *program, "--config", DIGITS, *printed) for program in (("-m", "bigdit.train"), (TRAIN,))]
    for done in begun:
        assert (done.returncode, " ".join(done.stderr.split())) == (1, f"error: {refused}")


def test_arguments_of_a_model_that_do_not_go_together_are_a_line_before_a_step(features, tmp_path):
    """Their class accepts them. Only a forward pass of a sample's shapes shows it, and --dry-run makes one."""
    done = train(features, tmp_path, "model.kwargs.attention_head_dim=33")
    (printed,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert done.returncode == 1
    assert printed == (
        "error: model.kwargs: a step ends with a and b must have same reduction dim, but got [300, 132] X [32, 32]; "
        "the model's arguments, such as widths, may not fit each other; if they do, this is a bug in bigdit"
    )
    assert "Traceback" not in done.stderr
