"""Receipts: what a run writes, which files of a folder are refused, and what plans learn from them."""

import json
import math
from pathlib import Path

import pytest
from commands import DIGITS, SINGLE, TINY, with_set
from commands import bigdit as command
from made_receipts import receipt_of
from tiny_models import SANA, SHAPE

from bigdit import catalog, receipt
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.receipt import Receipt
from bigdit.search import calibration as receipts
from bigdit.search.calibration import UNPROVED, Calibration, check, own_receipts
from bigdit.search.resolve import resolve_request
from bigdit.speed.seconds import Cluster
from bigdit.speed.step import step_time
from bigdit.speed.work import work_of

A100 = catalog.gpu("a100-80g-sxm")
GIB = 1 << 30


@pytest.fixture(scope="module")
def gpus():
    """Emulated A100s."""
    with EmulatedGpus(A100, 1) as found:
        yield found


def test_a_gpu_s_receipt_is_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("BIGDIT_RECEIPTS", str(tmp_path / "kept"))
    written = receipt_of()
    receipt.write(written, tmp_path / "run/receipt.json")
    found, notices = receipts.read([receipt.folder()])
    assert (found, notices) == ([written], [])
    assert Receipt.model_validate_json((tmp_path / "run/receipt.json").read_bytes()) == written
    (name,) = [path.name for path in receipt.folder().iterdir()]
    assert name.startswith("2026-01-02-tiny-sana-NVIDIA-A100-SXM4-80GB-")


def test_a_cpu_s_receipt_is_of_no_use_to_plans(tmp_path, monkeypatch):
    monkeypatch.setenv("BIGDIT_RECEIPTS", str(tmp_path / "kept"))
    receipt.write(receipt_of(device="cpu", compute_capability=None), tmp_path / "receipt.json")
    assert not receipt.folder().exists()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BIGDIT_RECEIPTS", str(tmp_path / "file"))
    receipt.write(receipt_of(), tmp_path / "receipt.json")
    assert "the receipt was not kept for plans: cannot write" in capsys.readouterr().err
    assert (tmp_path / "receipt.json").exists()


def test_the_user_s_folder_is_where_data_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("BIGDIT_RECEIPTS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert receipt.folder() == tmp_path / "bigdit" / "receipts"
    assert receipts.folders()[-1] == receipt.folder()


def test_tests_keep_no_receipts_among_the_user_s():
    own = Path.home() / ".local/share/bigdit/receipts"
    assert own not in receipts.folders()


def test_files_that_are_no_receipts_are_named_and_passed_over(tmp_path):
    good = receipt_of()
    receipt.write(good.model_copy(update={"device": "cpu"}), tmp_path / "a.json")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text(json.dumps(good.model_dump(mode="json") | {"speed": 1}))
    (tmp_path / "short.json").write_text(json.dumps({"kind": "train"}))
    found, notices = receipts.read([tmp_path, tmp_path / "nowhere"])
    assert len(found) == 1
    assert [line.split(" is no receipt")[0] for line in notices] == [
        str(tmp_path / name) for name in ("broken.json", "other.json", "short.json")
    ]
    assert "speed: Extra inputs are not permitted" in notices[1]
    assert "model: Field required" in notices[2]


def test_only_receipts_of_the_gpu_and_of_one_shape_count():
    mine = receipt_of()
    others = [
        receipt_of(device="NVIDIA A40"),
        receipt_of(device="a GPU of 2031"),
        receipt_of(device="cpu"),
        receipt_of(buckets=5),
    ]
    assert receipts.of_gpu([*others, mine], A100) == [mine]
    many = [receipt_of(seconds=float(i)) for i in range(12)]
    assert receipts.of_gpu(many, A100) == many[-receipts.NEWEST :]


def test_an_emulated_gpu_s_receipt_teaches_nothing_of_the_real_one(gpus, tmp_path):
    mine = receipt_of()
    emulated = [receipt_of(emulated=True, seconds_per_step=each) for each in (9.0, 9.5)]
    assert receipts.of_gpu([mine, *emulated], A100) == [mine]
    assert receipts.of_gpu([mine, *emulated], A100, emulated=True) == emulated
    checked, _ = check(emulated, gpus)
    assert (
        len(checked),
        Calibration(checked).measured_margin,
        Calibration(checked).ratio(mine.strategy),
    ) == (
        2,
        None,
        None,
    )
    for number, each in enumerate([mine, *emulated]):
        receipt.write(each, tmp_path / f"{number}.json")
    request = resolve_request("dit-s-2-paper", "a100-80g-sxm", receipts=tmp_path)
    assert own_receipts(request.gpu, request.receipts) == (
        [mine],
        ["2 receipts left out, made on emulated GPUs: plans learn from real ones alone"],
    )
    other = resolve_request("dit-s-2-paper", "a40", receipts=tmp_path)
    assert own_receipts(other.gpu, other.receipts) == ([], [])


def test_measured_steps_move_and_narrow_the_prediction(gpus):
    strategy = receipt_of().strategy
    request = StepRequest(model=SANA, batch=SHAPE, strategy=strategy)
    work = work_of(gpus.attempt(request, counted="step").work, strategy)
    plain = step_time(work, strategy, A100, Cluster()).seconds
    measured = [receipt_of(seconds_per_step=plain.middle * times) for times in (1.5, 1.6, 1.7)]
    checked, notices = check(measured, gpus)
    assert notices == []
    reported = Calibration(checked).ratio(strategy)
    assert reported is not None
    assert (reported.count, reported.ratio) == (3, pytest.approx(1.6))
    assert reported.spread == pytest.approx(math.log(1.6 / 1.5))
    assert reported.source.startswith("3 receipts of NVIDIA A100-SXM4-80GB, one GPU: steps took 1.60 times")
    found = step_time(work, strategy, A100, Cluster(), reported).seconds
    assert found.low < 1.5 * plain.middle < 1.7 * plain.middle < found.high
    assert found.high / found.low < plain.high / plain.low


def test_receipts_speak_for_strategies_like_theirs(gpus):
    offloaded = receipt_of("zero2-offload,world_size=8")
    checked, _ = check([offloaded], gpus)
    assert Calibration(checked).ratio(receipt_of().strategy) is None
    reported = Calibration(checked).ratio(offloaded.strategy)
    assert reported is not None
    assert "several GPUs, optimizer in CPU memory" in reported.source
    untimed, _ = check([receipt_of(seconds_per_step=None)], gpus)
    assert Calibration(untimed).ratio(receipt_of().strategy) is None


def test_measured_peaks_give_the_margin(gpus):
    (seen,), _ = check([receipt_of()], gpus)
    assert Calibration([]).measured_margin is None
    assert Calibration(check([receipt_of(measured_peak_reserved_bytes=None)], gpus)[0]).measured_margin is None
    measured = [round(seen.peak_reserved_bytes * times) for times in (1.02, 0.99, 1.01)]
    checked, _ = check([receipt_of(measured_peak_reserved_bytes=each) for each in measured], gpus)
    margin = Calibration(checked).measured_margin
    assert margin is not None
    assert margin.share == pytest.approx(0.02 * 4 / 3 + UNPROVED.share / 4, rel=1e-3)
    assert (
        margin.source == "3 receipts of this GPU, off by 2.0% at most, and 1/4 of the 0.3% that is assumed without any"
    )


def test_one_receipt_that_is_met_to_the_byte_leaves_half_of_what_is_assumed(gpus):
    (seen,), _ = check([receipt_of()], gpus)
    met = receipt_of(measured_peak_reserved_bytes=seen.peak_reserved_bytes)
    checked, _ = check([met], gpus)
    margin = Calibration(checked).measured_margin
    assert margin is not None
    assert margin.share == UNPROVED.share / 2
    assert (
        margin.source == "1 receipt of this GPU, off by 0.0% at most, and 1/2 of the 0.3% that is assumed without any"
    )
    calibrated = Calibration(checked).ratio(met.strategy)
    assert calibrated is not None
    assert calibrated.source.endswith("times the middle of the roofline, once")


def test_a_receipt_is_held_against_the_allocator_as_it_was_set(gpus):
    whole, expandable = check([receipt_of(), receipt_of(expandable_segments=True)], gpus)[0]
    request = StepRequest(model=SANA, batch=SHAPE, strategy=receipt_of().strategy)
    assert expandable.peak_reserved_bytes == gpus.attempt(request).peak_reserved_bytes
    with EmulatedGpus(A100, 1, expandable_segments=False) as others:
        assert whole.peak_reserved_bytes == others.attempt(request).peak_reserved_bytes


def test_a_receipt_that_cannot_be_run_is_reported(gpus):
    lost = receipt_of().model_copy(update={"model": SANA.model_copy(update={"class_name": "NoSuchModel"})})
    checked, (notice,) = check([lost], gpus)
    assert checked == []
    assert notice.startswith("the receipt of tiny-sana, 2026-01-02, is left out: ")


def test_the_trainer_s_receipt_says_what_a_plan_needs(trained):
    found = Receipt.model_validate_json((trained / "receipt.json").read_bytes())
    assert (found.kind, found.device, found.steps, found.gpus_per_node) == ("train", "cpu", 8, 1)
    assert found.measured_peak_allocated_bytes
    assert found.measured_peak_reserved_bytes is None
    assert found.samples_per_second > 0
    assert found.versions["torch"]
    assert found.batch.latents[0] == found.model.kwargs["in_channels"]


@pytest.mark.slow
def test_the_benchmark_s_receipt_says_it_too(tmp_path, features):
    out = tmp_path / "bench.json"
    done = command(
        *("bench", "step"),
        "--config",
        DIGITS,
        "--steps",
        4,
        "--out",
        out,
        "--json",
        *with_set([*TINY, *SINGLE, f"data.features={features}"]),
    )
    assert done.returncode == 0, done.stderr
    found = Receipt.model_validate_json(out.read_bytes())
    printed = json.loads(done.stdout)
    assert printed.pop("compared")["contenders"]
    assert found == Receipt.model_validate(printed)
    assert found.predicted_peak_allocated_bytes is None  # on a CPU nothing is predicted
    assert found.measured_peak_allocated_bytes
    assert found.seconds_per_step
