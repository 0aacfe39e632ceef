"""A run's stages: run through, or killed anywhere, its weights are the same to the bit."""

import json
import shutil
import signal
import subprocess

import pytest
import torch
import yaml
from commands import BIN, DIGITS, ROOT, SINGLE, TINY, bigdit, environment_with, in_process, run_ranks, with_set
from running import until
from safetensors.torch import load_file

from bigdit import cli
from bigdit.errors import guard
from bigdit.train.__main__ import main
from bigdit.train.monitor.metrics import read_metrics

ENGINES = {
    "single": SINGLE,
    # In bf16 its first step after a start rounds otherwise (tests/engines/test_curves.py): 2e-4 of a loss.
    "zero3": ("strategy.ds_config=ds_configs/zero3_bf16.json", "strategy.precision=fp32"),
    "fsdp2": ("strategy.engine=fsdp2", "strategy.ds_config=null"),
}
SMALL = [each for each in TINY if not each.startswith("train.steps=")]  # each stage has its own
BORDER, END = 8, 16
"""Steps of the first stage, and of both."""


@pytest.fixture(scope="session")
def staged(once, images, features):
    """A run's YAML: the digits as they are, and at twice their size, with half the micro-batch and another rate."""

    def make(folder):
        folder.mkdir()
        low = {"data": {"features": str(features)}, "train": {"steps": BORDER}}
        high = {"data": {"features": str(folder / "high"), "buckets": [[16, 16]]}}
        high["strategy"] = {"micro_batch_size": 4, "checkpointed_blocks": 1, "optimizer": {"lr": 1e-3}}
        high["train"] = {"steps": END - BORDER, "warmup_steps": 0}
        document = yaml.safe_load(DIGITS.read_text()) | {"stages": [low, high]}
        document["data"]["images"] = str(images)
        (folder / "run.yaml").write_text(yaml.safe_dump(document))
        done = bigdit("extract", "--config", folder / "run.yaml", *with_set(SMALL))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("240 of 240 images encoded") == 2

    return once("staged", make) / "run.yaml"


def settings(output, engine):
    return with_set([*SMALL, *ENGINES[engine], f"output={output}", "train.checkpoint_every=2"])


def through(staged, output, engine):
    """Train from the first step to the last, by one command. Returns the output."""
    if engine == "fsdp2":
        done = run_ranks(2, "-m", "bigdit.train", "--config", staged, *settings(output, engine))
    else:
        done = bigdit("train", "--config", staged, *settings(output, engine))
    assert done.returncode == 0, done.stderr
    return " ".join(done.stderr.split())


def ended(staged, output, engine, step, signum=signal.SIGKILL):
    """Send a signal to a run as soon as this step's checkpoint is there. Returns its status and output."""
    command = [BIN / "bigdit", "train", "--config", staged, *settings(output, engine)]
    latest, log = output / "checkpoints/latest", output.with_suffix(".log")
    with open(log, "w") as printed:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env=environment_with({}), stdout=printed, stderr=printed
        )
        try:
            until(lambda: process.poll() is not None or (latest.exists() and reached(output) >= step))
            assert process.poll() is None
            process.send_signal(signum)
            return process.wait(60), log.read_text()
        finally:
            process.kill()
            process.wait()


def killed(staged, output, engine, step):
    """`kill -9` of `bigdit train`, and so of its processes. Returns the newest checkpoint that it left."""
    assert ended(staged, output, engine, step)[0] == -signal.SIGKILL
    return reached(output)


def reached(output):
    return int((output / "checkpoints/latest").read_text().removeprefix("step-"))


def course(output):
    """Each step's figures, and the final weights."""
    rows = [(row["step"], row["stage"], row["lr"], row["loss"]) for row in read_metrics(output / "metrics.jsonl")]
    return rows, load_file(output / f"exports/step-{END:08d}/transformer/diffusion_pytorch_model.safetensors")


def same(first, second):
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.fixture(scope="session")
def alone(once, staged):
    """The output of one process that went through both stages."""
    return once(
        "staged alone", lambda output: (output.mkdir(), (output / "said").write_text(through(staged, output, "single")))
    )


def test_one_command_goes_through_all_stages(alone):
    printed, (rows, _) = (alone / "said").read_text(), course(alone)
    assert [row[:2] for row in rows] == [(step, int(step > BORDER)) for step in range(1, END + 1)]
    assert [row[2] for row in rows[:3]] == [1e-3, 2e-3, 2e-3]  # it warms up in the first
    assert rows[BORDER][2] == 1e-3  # the rate begins again in the second
    assert rows[BORDER + 1][2] < 1e-3
    assert "stages.0 is done; the processes restart for stages.1" in printed
    assert (
        f"resuming from {alone}/checkpoints/step-{BORDER:08d}, step {BORDER} stages.1: steps {BORDER + 1} to 16 of 16"
        in printed
    )
    receipts = [json.loads((alone / name).read_text()) for name in ("receipt-stage-0.json", "receipt.json")]
    assert [each["steps"] for each in receipts] == [BORDER, END - BORDER]
    assert [each["batch"]["latents"][1:] for each in receipts] == [[4, 6], [8, 8]]
    assert [each["strategy"]["micro_batch_size"] for each in receipts] == [8, 4]
    assert sorted(path.name for path in (alone / "exports").iterdir()) == [f"step-{BORDER:08d}", f"step-{END:08d}"]
    page = (alone / "report.html").read_text()
    assert "all of 16 steps" in page
    assert page.count(">stages.1</text>") == page.count("<figure>") > 3
    assert "<dd>stages.1: these are its settings</dd>" in page


@pytest.mark.slow
def test_killed_in_either_stage_or_between_a_run_continues(staged, alone, tmp_path):
    """Order, rates and weights equal those of an undisturbed run."""
    assert killed(staged, tmp_path, "single", 2) < BORDER
    assert killed(staged, tmp_path, "single", BORDER) == BORDER
    assert BORDER < killed(staged, tmp_path, "single", BORDER + 2) < END
    assert "starts again" not in through(staged, tmp_path, "single")
    same(course(tmp_path), course(alone))


@pytest.mark.slow
def test_several_processes_start_again_together(staged, tmp_path):
    """Killed at the border. They have no launcher: the store in the first process, where they meet, starts again,
    too."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert through(staged, straight, "fsdp2").count("restart for stages.1") == 1
    assert BORDER <= killed(staged, stopped, "fsdp2", BORDER) < END
    through(staged, stopped, "fsdp2")
    same(course(stopped), course(straight))


@pytest.mark.slow
def test_zero3_goes_over_a_border_and_continues_after_a_kill(staged, tmp_path):
    """Its weights are sharded over both processes, which DeepSpeed's launcher starts. It is killed within the second
    stage."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert through(staged, straight, "zero3").count("restart for stages.1") == 1
    assert BORDER < killed(staged, stopped, "zero3", BORDER + 2) < END
    through(staged, stopped, "zero3")
    same(course(stopped), course(straight))


@pytest.mark.slow
def test_a_signal_between_two_stages_ends_the_run(staged, tmp_path):
    """At the border, where it saves, or while the processes start again."""
    status, printed = ended(staged, tmp_path / "run", "single", BORDER, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert "Traceback" not in printed
    assert reached(tmp_path / "run") == BORDER


def refused(capsys, staged, output, *overrides):
    assert guard(lambda: main(["--config", str(staged), *settings(output, "single"), *with_set(overrides)])) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "begins"),
    [(9, 9), (7, 7), (END, 0)],  # seven: fewer in all than were taken; all: up to the checkpoint
)
def test_a_border_does_not_move_beneath_a_checkpoint(staged, alone, tmp_path, capsys, steps, begins):
    """Its order would change."""
    output = tmp_path / "run"
    shutil.copytree(alone, output)
    moved = f"stages.0.train.steps={steps}"
    with pytest.raises(SystemExit):
        cli.main(["train", "--dry-run", "--config", str(staged), *settings(output, "single"), *with_set([moved])])
    foreseen = capsys.readouterr().err
    assert foreseen == refused(capsys, staged, output, moved)
    assert foreseen == (
        f"error: stages: {output}/checkpoints/step-{END:08d} was saved in a stage that began at step 8, and that "
        f"stage begins at {begins} now; make earlier stages 8 steps long again, or choose another "
        "output\n"
    )


def test_a_stage_without_its_store_is_an_error_before_the_first(staged, tmp_path, capsys):
    assert refused(capsys, staged, tmp_path, f"stages.1.data.features={tmp_path}") == (
        f"error: stages.1: data.features: {tmp_path} holds no latents; `bigdit extract --config RUN.yaml` makes them\n"
    )
    assert "stages.1: data.features: " in refused(capsys, staged, tmp_path, "stages.1.encoders.text.max_tokens=16")


def test_extract_fills_all_stores_or_one(staged):
    """They are whole, and it says so."""
    asked = ("extract", "--config", staged, "--json", *with_set(SMALL))
    found = [json.loads(bigdit(*asked, *more).stdout) for more in ((), ("--stage", 1))]
    assert [each["store"]["buckets"] for each in found[0]] == [{"4x4x4": 80, "4x4x6": 80, "4x6x4": 80}, {"4x8x8": 240}]
    assert found[1] | {"seconds": 0} == found[0][1] | {"seconds": 0}
    assert found[0][0]["parts"] == 0


def test_a_dry_run_prints_each(staged):
    done = in_process("train", "--config", staged, "--dry-run", *with_set([*SMALL, *SINGLE]))
    assert done.returncode == 0, done.stderr
    low, high = json.loads(done.stdout)["stages"]
    assert (low["strategy"]["grad_accum_steps"], high["strategy"]["grad_accum_steps"]) == (2, 4)
    assert high["data"]["buckets"] == [[16, 16]]
    assert high["stages"] == []
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ok: stages.0: ")
    assert "; stages.1: " in last
