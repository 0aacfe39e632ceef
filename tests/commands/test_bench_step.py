"""`bigdit bench step`: text and JSON agree, and errors are one line."""

import json

import pytest
import step
from commands import DIGITS, SINGLE, TINY, bigdit, in_process, with_set

from bigdit.bench import Comparison, MachineLoad, take_turns
from bigdit.receipt import Receipt


def run_of(features):
    return ("--config", DIGITS, *with_set([*TINY, *SINGLE, f"data.features={features}"]))


def test_a_step_is_held_against_a_plain_loop_and_its_receipt_stays_one(features, tmp_path):
    asked = ("bench", "step", *run_of(features), "--steps", "5", "--out", tmp_path / "receipt.json")
    done = bigdit(*asked, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    compared = printed.pop("compared")
    assert [each["name"] for each in compared["contenders"]] == ["plain PyTorch", "bigdit"]
    assert [len(each["rounds"]) for each in compared["contenders"]] == [3, 3]
    assert compared["contenders"][0]["of_baseline"] is None
    for each in compared["contenders"]:
        assert 0 < each["seconds"]["low"] <= each["seconds"]["median"] <= each["seconds"]["high"]
    assert compared["load"]["cores"] >= 1
    assert compared["versions"]["torch"]
    assert printed == json.loads((tmp_path / "receipt.json").read_text())
    receipt = Receipt.model_validate(printed)
    assert receipt.predicted_peak_allocated_bytes is receipt.error_percent is None  # no prediction on a CPU
    assert receipt.measured_peak_allocated_bytes
    assert receipt.seconds_per_step == pytest.approx(compared["contenders"][1]["seconds"]["median"], abs=1e-5)
    _, _, plain, _, own = compared["notes"][0].rpartition("losses after ")[2].replace(":", "").split()
    assert float(plain) == pytest.approx(float(own), rel=1e-3)


@pytest.mark.parametrize(
    ("own", "plain", "status"),
    [
        ([0.203, 0.204, 0.9], [0.2, 0.2, 0.2], 0),  # a slow round does not matter
        ([0.203, 0.206, 0.206], [0.2, 0.2, 0.2], 1),
        ([0.1, 0.1, 0.1], [0.19, 0.19, 0.19], 1),  # nothing is reported about so short a step
    ],
)
def test_a_step_that_is_too_far_from_the_plain_loops_fails_the_benchmark(monkeypatch, capsys, own, plain, status):
    turns = {"plain PyTorch": iter(plain).__next__, "bigdit": iter(own).__next__}
    found = Comparison(what="", load=MachineLoad.now(), contenders=tuple(take_turns(turns, 3)))
    monkeypatch.setattr(step, "compare", lambda *asked: found)
    assert step.main([]) == status
    printed = capsys.readouterr().out
    assert "; limit 2 %" in printed
    assert ("too short" in printed) == (plain[0] < 0.2)


def test_a_table_has_the_load_the_bytes_and_the_overhead(features):
    done = bigdit("bench", "step", *run_of(features), "--steps", "4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("load ")
    assert any(line.startswith("peak, measured ") for line in lines)
    assert not any("predicted" in line for line in lines)
    assert any(line.startswith("plain PyTorch ") and line.count("–") == 2 for line in lines)
    busy = "unknown, because this machine is busy"
    assert any(line.startswith("overhead of bigdit's step: ") and line.endswith((" %)", busy)) for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_what_cannot_be_asked_is_one_line():
    done = in_process("bench", "step", "--config", DIGITS, "--set", "data.features=/none")
    assert done.returncode == 1
    assert done.stderr.startswith("error: data.features: /none holds no latents")
    assert len(done.stderr.splitlines()) == 1
