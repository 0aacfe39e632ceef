"""Steps that a real H100 measured once, beside the emulated GPU's predictions, then and today."""

import importlib.metadata
import os
import re
import shutil
import statistics
import subprocess
import sys
import venv
from pathlib import Path

import gpu_matrix
import pytest
from commands import ROOT, run_command
from on_gpu.page import MEASURED, beside, errors, measured, page, replayed, report
from on_gpu.page import PAGE as MATRIX
from on_gpu.points import POINTS
from on_gpu.predicted import PREDICTED, Predictions, predicted

from bigdit import catalog
from bigdit.emulator import emulated_environment
from bigdit.emulator.interpreter import cuda_python
from bigdit.errors import UserError
from bigdit.profile.gpus import EmulatedGpus

LIBRARIES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
AGAIN = (
    "hunyuandit-v1.2 (2 blocks)",
    "sd3-medium (2 blocks)",
    "flux.2-klein-4b (2 blocks)",
    "sana-1600m-1024 (2 blocks) · zero3",
    "dit-b-4-paper",
)

# Error of the median, of 95 % and of all points, as shares of what was measured. One model decides the worst: its
# experts get tokens by their values. gpu_matrix.md names the differences and their causes.
WITHIN = {"allocated": (0, 0.0001, 0.03), "reserved": (0, 0.001, 0.011)}


@pytest.fixture(scope="module")
def predictions():
    """The emulated GPU's answers for all points, from before they were measured."""
    return Predictions.model_validate_json(PREDICTED.read_bytes())


def test_what_was_predicted_stays_once_it_is_measured(tmp_path, monkeypatch):
    before = PREDICTED.read_bytes()
    done = run_command(sys.executable, ROOT / "benchmarks/gpu_matrix.py", "predict")
    assert (done.returncode, done.stdout, PREDICTED.read_bytes()) == (0, "", before)
    monkeypatch.setattr(gpu_matrix, "PREDICTED", tmp_path / "none.json")
    late = f"{len(measured())} of {len(POINTS)} points without a prediction are measured, and predictions come before"
    with pytest.raises(UserError, match=late):
        gpu_matrix.main(["predict"])


def test_nothing_is_measured_without_a_gpu(tmp_path):
    done = run_command(sys.executable, ROOT / "benchmarks/gpu_matrix.py", "measure", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(
        r"^error: measure takes steps on this machine's GPU, and torch \S+ of \S+ sees none", done.stderr, re.M
    )
    assert not (tmp_path / "out").exists()


def test_an_attempt_that_failed_takes_the_place_of_no_measurement(tmp_path, monkeypatch):
    before = MEASURED.read_bytes()
    for name, path in (("MEASURED", MEASURED), ("PAGE", MATRIX)):
        monkeypatch.setattr(f"on_gpu.page.{name}", Path(shutil.copy(path, tmp_path)))
    known = measured()
    for point in POINTS:
        (tmp_path / f"{point.key}.failed").write_text("not ready after 30 s")
    report([tmp_path])
    assert {each.name for each in measured() if each.failed == "not ready after 30 s"} == {
        point.name for point in POINTS
    } - {each.name for each in known}
    assert [each for each in measured() if each.name in {one.name for one in known}] == list(known)
    assert MEASURED.read_bytes() == before


@pytest.mark.parametrize("what", WITHIN)
def test_what_was_predicted_of_every_point_is_what_an_h100_took(what, predictions, record_property):
    found = errors(beside(predictions, {each.name: each for each in measured()}), what)
    record_property("found", f"an H100's {what} bytes: {found.compared} points, {found.said}")
    assert found.compared == 55
    median, p95, worst = WITHIN[what]
    assert (found.median <= median, found.p95 <= p95, abs(found.worst) <= worst) == (True, True, True), found


def test_the_page_says_what_was_predicted_replayed_and_measured(predictions):
    assert MATRIX.read_text() == page(predictions, replayed(), {each.name: each for each in measured()})


def test_how_wide_seconds_are_is_what_the_faq_says():
    ratios = [float(high) / float(low) for low, high in re.findall(r"\| ([\d.]+) to ([\d.]+) \|", MATRIX.read_text())]
    said = f"{min(ratios):.1f} to {max(ratios):.1f} times (median {statistics.median(ratios):.1f})"
    assert said in " ".join((ROOT / "docs/errors.md").read_text().split())


@pytest.mark.slow
def test_steps_of_today_reserve_what_an_h100_did(monkeypatch):
    """With the torch of the measurement."""
    monkeypatch.setenv("BIGDIT_CUDA_PYTHON", str(ROOT / ".venv-oldest/bin/python"))
    taken = {each.name: each for each in measured()}
    asked = [point for point in POINTS if point.name.startswith(AGAIN) and point.name in taken]
    assert len(asked) == len(AGAIN)
    with EmulatedGpus(catalog.resolve_gpu("h100-sxm"), 1) as gpus:
        found = {point.name: predicted(point, gpus).emulated for point in asked}
    assert {name: each.reserved for name, each in found.items()} == {
        point.name: taken[point.name].peaks.reserved for point in asked
    }


RUN_ONE = """
import os
from bigdit import libraries
libraries.prepare()
from on_gpu.points import POINTS
from bigdit.profile.measured.steps import run
for point in os.environ["ASKED"].splitlines():
    print(next(run(each.asked()[0]).params for each in POINTS if each.name.startswith(point)))
"""


def listed(upto):
    """The packages that benchmarks/gpu_matrix.py needs, up to these words."""
    said = " ".join((ROOT / "benchmarks/gpu_matrix.py").read_text().partition('"""\n\nfrom')[0].split())
    before, found, _ = said.partition("MB of wheels:")[2].partition(upto)
    assert found
    return set(re.findall(r"[a-z][a-z0-9-]+", before.lower().replace("_", "-")))


def python_with(names, folder):
    """The interpreter of an environment with these packages, torch and torch's requirements alone."""
    places = [Path(python).parents[1] / LIBRARIES for python in (cuda_python(), sys.executable)]
    installed = {}
    for each in importlib.metadata.distributions(path=list(map(str, places))):
        installed.setdefault(each.metadata["Name"].lower().replace("_", "-"), each)
    waiting, wanted = [*names & set(installed), "torch", "numpy", "pillow"], set()
    while waiting:
        name = waiting.pop()
        wanted.add(name)
        required = (installed[name].requires or []) if name == "torch" or name not in names else []
        found = {re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in required if "extra ==" not in each}
        waiting += [each for each in found - wanted if each in installed]
    venv.create(folder, symlinks=True)
    for name in wanted:
        for top in {Path(each).parts[0] for each in installed[name].files} - {"..", "__pycache__"}:
            (folder / LIBRARIES / top).symlink_to(installed[name].locate_file(top))
    return folder / "bin/python"


@pytest.mark.parametrize(
    ("upto", "asked"),
    [
        ("Points of LoRA", ["sana-1600m-1024 (2 blocks) · zero3,world_size=1,optimizer.name=adamw_8bit"]),
        (
            "with bitsandbytes' one",
            [
                "chroma1-hd (2 blocks) · single,lora.base=int8",
                "pixart-sigma-xl-2-1024 (2 blocks) · single,features=online",
            ],
        ),
    ],
)
def test_points_run_with_the_packages_that_are_listed_alone(upto, asked, tmp_path):
    python = python_with(listed(upto), tmp_path / "environment")
    own = os.environ | emulated_environment(catalog.resolve_gpu("h100-sxm")) | {"ASKED": "\n".join(asked)}
    path = f"{own['PYTHONPATH']}:{ROOT}:{ROOT}/benchmarks"
    ran = subprocess.run(
        [python, "-W", "ignore", "-c", RUN_ONE],
        env=own | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert sum(line.isdigit() for line in ran.stdout.splitlines()) == len(asked), ran.stderr[-2000:]
