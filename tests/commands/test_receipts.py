"""`bigdit receipts` lists what was measured, and compares it with emulated memory and predicted seconds."""

import json
import math

import pytest
from commands import in_process
from made_receipts import GIB, receipt_of

from bigdit.files import write_json
from bigdit.search.calibration import UNPROVED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two receipts of an A100, one of an emulated A100, one of an unknown GPU, one of a CPU, and a file that is no
    receipt."""
    folder = tmp_path_factory.mktemp("receipts")
    made = {
        "one": receipt_of(),
        "two": receipt_of(seconds_per_step=None, measured_peak_reserved_bytes=None),
        "emulated": receipt_of(emulated=True, seconds_per_step=7.654, measured_peak_reserved_bytes=3 * GIB),
        "unknown": receipt_of(device="Nobody's Card"),
        "cpu": receipt_of(device="cpu", compute_capability=None),
    }
    for name, receipt in made.items():
        write_json(folder / f"{name}.json", receipt.model_dump(mode="json"))
    (folder / "other.json").write_text("[]")
    return folder


def test_they_are_listed(folder):
    done = in_process("receipts", "list", "--receipts", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2026-01-02") == 5
    assert done.stdout.count("emulated") == 1
    assert "7.654" not in done.stdout
    assert "2.00 GiB  0.100 s" in done.stdout
    assert f"note: {folder}/other.json is no receipt and was ignored: it is no mapping of keys" in done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert len(json.loads(in_process("receipts", "list", "--receipts", folder, "--json").stdout)) == 5


def test_those_of_a_gpu_are_listed_alone(folder):
    done = in_process("receipts", "list", "--receipts", folder, "--gpu", "a100-80g-sxm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("A100-SXM4-80GB") == done.stdout.count("2026-01-02") == 3
    assert "note: receipts of Nobody's Card are left out: " in done.stderr
    listed = json.loads(in_process("receipts", "list", "--receipts", folder, "--gpu", "a100-80g-sxm", "--json").stdout)
    assert {each["device"] for each in listed} == {"NVIDIA A100-SXM4-80GB"}
    done = in_process("receipts", "list", "--receipts", folder, "--gpu", "a40")
    assert (done.returncode, done.stdout) == (0, "")
    assert "5 receipts, none of a40" in done.stderr
    assert in_process("receipts", "list", "--receipts", folder, "--gpu", "a4000000").returncode == 1


@pytest.mark.slow
def test_they_are_compared_with_an_emulated_gpu(folder):
    document = json.loads(in_process("receipts", "compare", "--receipts", folder, "--json").stdout)
    assert [row["device"] for row in document] == ["NVIDIA A100-SXM4-80GB"] * 3
    assert [row["emulated"] for row in document] == [False, False, True]
    assert document[2]["seconds_per_step"] is None
    first = document[0]
    off = first["predicted_peak_reserved_bytes"] / (2 * GIB) - 1
    done = in_process("receipts", "compare", "--receipts", folder, "--gpu", "a100-80g-sxm")
    assert done.returncode == 0, done.stderr
    assert f"{100 * off:+.2f} %" in done.stdout
    assert f"reserved bytes off by {-off:.2%} (median), {-off:.2%} (P95), {-off:.2%} (worst) in 1" in done.stdout
    emulated = 1 - document[2]["predicted_peak_reserved_bytes"] / (3 * GIB)
    assert f"reserved bytes of emulated GPUs off by {emulated:.2%} (median)" in " ".join(done.stdout.split())
    assert "7.654" not in done.stdout
    assert "0 of 1 step inside the estimated interval; ! marks those outside" in done.stdout
    assert "0.100 s !" in done.stdout
    assert "plans for this GPU have" in done.stdout
    assert "their speed is calibrated:" in done.stdout
    assert "note: receipts of Nobody's Card are left out: " in done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.slow
def test_what_plans_take_from_them_is_shown_by_gpu(folder):
    """The emulated one, which was slower and took more, does not count."""
    (row,) = json.loads(in_process("receipts", "compare", "--receipts", folder, "--json").stdout)[:1]
    printed = " ".join(in_process("receipts", "compare", "--receipts", folder).stdout.split())
    # One receipt has bytes: the margin is twice its error and half of the default. One has seconds: the factor is
    # measured over predicted.
    off = abs(2 * GIB / row["predicted_peak_reserved_bytes"] - 1)
    assert f"a safety margin of {min(2 * off + UNPROVED.share / 2, 0.99):.1%}: 1 receipt of this GPU" in printed
    seconds = row["predicted_seconds_per_step"]
    factor = 0.1 / math.sqrt(seconds["low"] * seconds["high"])
    assert f"one GPU: steps took {factor:.2f} times the middle of the roofline, once" in printed


def test_none_of_a_gpu_and_none_at_all_are_lines(folder, tmp_path):
    done = in_process("receipts", "compare", "--receipts", folder, "--gpu", "a40")
    assert done.returncode == 0
    assert "5 receipts, none of a40 with one shape of batches" in done.stderr
    done = in_process("receipts", "list", "--receipts", tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"no receipts in {tmp_path}; `bigdit train` writes one" in done.stderr
    done = in_process("receipts", "compare", "--receipts", tmp_path / "nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --receipts: {tmp_path}/nowhere is no folder")
