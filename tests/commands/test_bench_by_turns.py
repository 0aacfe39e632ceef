"""`bigdit bench step | loader | extract | optimizer`: all forms say the same, nothing is left, errors are a line."""

import json
import os
import signal
import subprocess

import pytest
import step
from commands import BIN, DIGITS, SINGLE, TINY, bigdit, environment_with, with_set
from running import until

from bigdit.bench.interleaved import Comparison, Load, take_turns
from bigdit.cli import main
from bigdit.receipt import Receipt


def run_of(features, *more):
    return ("--config", DIGITS, *with_set([*TINY, *SINGLE, f"data.features={features}", *more]))


def check(found, unit, names, rounds):
    assert found["unit"] == unit
    assert [each["name"] for each in found["contenders"]] == names
    assert [len(each["rounds"]) for each in found["contenders"]] == [rounds] * len(names)
    assert found["contenders"][0]["of_baseline"] is None
    for each in found["contenders"]:
        assert 0 < each["seconds"]["low"] <= each["seconds"]["median"] <= each["seconds"]["high"]
    assert found["load"]["cores"] >= 1
    assert found["versions"]["torch"]


def test_a_step_is_held_against_a_plain_loop_and_its_receipt_stays_one(features, tmp_path):
    asked = ("bench", "step", *run_of(features), "--steps", "5", "--out", tmp_path / "receipt.json")
    done = bigdit(*asked, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    compared = printed.pop("compared")
    check(compared, "step", ["plain PyTorch", "bigdit"], 3)
    assert printed == json.loads((tmp_path / "receipt.json").read_text())
    receipt = Receipt.model_validate(printed)
    assert receipt.predicted_peak_allocated_bytes is receipt.error_percent is None  # of a CPU nothing is predicted
    assert receipt.measured_peak_allocated_bytes
    assert receipt.seconds_per_step == pytest.approx(compared["contenders"][1]["seconds"]["median"], abs=1e-5)
    _, _, plain, _, own = compared["notes"][0].rpartition("losses after ")[2].replace(":", "").split()
    assert float(plain) == pytest.approx(float(own), rel=1e-3)


@pytest.mark.parametrize(
    ("own", "plain", "status"),
    [
        ([0.203, 0.204, 0.9], [0.2, 0.2, 0.2], 0),  # a slow round is no matter
        ([0.203, 0.206, 0.206], [0.2, 0.2, 0.2], 1),
        ([0.1, 0.1, 0.1], [0.19, 0.19, 0.19], 1),  # of so short a step nothing is said
    ],
)
def test_a_step_that_is_too_far_from_the_plain_loops_fails_the_benchmark(monkeypatch, capsys, own, plain, status):
    turns = {"plain PyTorch": iter(plain).__next__, "bigdit": iter(own).__next__}
    found = Comparison(what="", unit="step", load=Load.now(), contenders=tuple(take_turns(turns, 3)))
    monkeypatch.setattr(step, "compare", lambda *asked: found)
    assert step.main([]) == status
    said = capsys.readouterr().out
    assert "; limit 2 %" in said
    assert ("too short" in said) == (plain[0] < 0.2)


def test_a_table_has_the_load_the_bytes_and_the_overhead(features):
    done = bigdit("bench", "step", *run_of(features), "--steps", "4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("load ")
    assert any(line.startswith("peak, measured ") for line in lines)
    assert not any("predicted" in line for line in lines)
    assert any(line.startswith("plain PyTorch ") and line.count("–") == 2 for line in lines)
    busy = "not told, since this machine is busy"
    assert any(line.startswith("overhead of bigdit's step: ") and line.endswith((" %)", busy)) for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_the_loader_is_held_against_torchs(features, tmp_path):
    asked = ("bench", "loader", *run_of(features), "--batches", "5", "--rounds", "2")
    done = bigdit(*asked, "--out", tmp_path / "loader.json")
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stderr
    found = json.loads((tmp_path / "loader.json").read_text())
    check(found, "batch", ["torch DataLoader, 2 processes", "bigdit, 2 threads"], 2)
    assert "batches/s" in done.stdout
    assert f"{1 / found['contenders'][1]['seconds']['median']:.0f}" in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "loader.json"]


def test_extraction_is_held_against_a_loop_and_leaves_nothing(pictures, tmp_path):
    temporary = tmp_path / ("of-a-job-" * 12)  # too long a path for sockets
    temporary.mkdir()
    asked = run_of(tmp_path / "none", f"data.images={pictures}")
    done = bigdit(
        "bench", "extract", *asked, "--pictures", "12", "--workers", "1", "--rounds", "2", "--json",
        TMPDIR=str(temporary),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check(found, "image", ["a loop, one by one", "bigdit, 1 worker"], 2)
    assert found["what"] == "the first 12 of 240 pictures, with their captions, in parts of 3"
    assert not list(temporary.iterdir())
    assert not (tmp_path / "none").exists()


def test_an_extraction_that_is_interrupted_leaves_nothing(pictures, tmp_path):
    asked = ("bench", "extract", *run_of(tmp_path / "none", f"data.images={pictures}"), "--rounds", "100000")
    process = subprocess.Popen(
        [str(part) for part in (BIN / "bigdit", *asked)],
        env=environment_with({"TMPDIR": str(tmp_path)}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until(lambda: list(tmp_path.glob("bigdit-bench-*/loop/*.pt")) or process.poll() is not None, within=120)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    assert process.stderr.read().splitlines()[-1] == "interrupted"
    assert not list(tmp_path.glob("bigdit-*"))


def test_optimizers_step_over_a_siblings_parameters():
    done = bigdit(
        "bench", "optimizer", "--model", "dit-s-2-paper", "--blocks", "1", "--optimizer", "came,adamw_8bit",
        "--rounds", "2", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check(found, "step", ["AdamW, fused", "AdamW, for-loop", "came", "adamw_8bit"], 2)
    assert "dit-s-2-paper with --blocks 1" in found["what"]
    assert [round(each["state_bytes"]) for each in found["contenders"]] == [8, 8, 4, 2]


NAMES = "adamw, adamw_8bit, paged_adamw_8bit, lion_8bit, adamw_8bit_ao, adamw_4bit_ao, adafactor, came, came_8bit"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["optimizer", "--model", "sana-600m", "--optimizer", "came,adam"],
         f"--optimizer 'adam': there is no such optimizer; known: {NAMES}"),
        (["optimizer"], "one of --model NAME and --config RUN.yaml says whose parameters are stepped; give one"),
        (["optimizer", "--config", DIGITS, "--blocks", "2"], "--blocks goes with --model, and --config was given"),
        (["optimizer", "--model", "sana-600m", "--set", "a=b"], "--set goes with --config, and --model was given"),
        (["optimizer", "--model", "dit-s-2-paper", "--blocks", "1", "--optimizer", "paged_adamw_8bit"],
         "optimizer.name paged_adamw_8bit keeps its state in CUDA's managed memory"),
        (["loader", "--config", DIGITS, "--set", "data.features=/none"], "data.features: /none holds no features"),
        (["step", "--config", DIGITS, "--set", "data.features=/none"], "data.features: /none holds no features"),
        (["extract", "--config", DIGITS, "--set", "data.images=/none"], "data.images: "),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_one_line(asked, said):
    done = bigdit("bench", *asked)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {said}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("free", "nearest"), [(48, "the largest that fits: --blocks 2; or "), (2, "")])
def test_a_model_that_is_too_large_is_said_with_the_blocks_that_fit(monkeypatch, capsys, free, nearest):
    monkeypatch.setattr("bigdit.bench.optimizer.room", lambda device: (free << 30, 64 << 30))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "optimizer", "--model", "flux.1-dev", "--optimizer", "adafactor"])
    assert ended.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: flux.1-dev: 3 optimizers side by side take up to ")
    assert f"({free}.00 GiB) are free (MemAvailable); {nearest}name fewer optimizers with --optimizer" in line


def test_a_store_without_a_usable_picture_is_said(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/broken.png").write_bytes(b"no picture")
    (tmp_path / "pictures/broken.txt").write_text("a caption")
    overrides = run_of(tmp_path / "features", f"data.images={tmp_path / 'pictures'}")
    done = bigdit("bench", "extract", *overrides)
    assert done.returncode == 1
    assert done.stderr.startswith("error: data.images: no picture of 1 can be used, the first broken.png")
