"""`bigdit extract`: real pictures through worker processes into a store."""

import json
import os
import re
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from conftest import DIGITS, bigdit, run_command, with_set
from PIL import Image

from bigdit.catalog.resolve import model_spec
from bigdit.config import load_run
from bigdit.errors import UserError
from bigdit.features import FeatureStore
from bigdit.features.extract import extract

COUNT, PART_SIZE = 48, 4
BUCKETS = "data.buckets=[[128, 128], [128, 192]]"


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """Pictures large enough that encoding takes a while."""
    folder = tmp_path_factory.mktemp("noise")
    random = np.random.default_rng(0)
    for i in range(COUNT):
        pixels = random.integers(0, 256, (900, 1300 if i % 3 else 900), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png", compress_level=1)
        (folder / f"{i:02d}.txt").write_text(f"noise number {i % 7}")
    return folder


def configured(images, features, *overrides):
    settings = [f"data.images={images}", f"data.features={features}", f"data.part_size={PART_SIZE}", BUCKETS]
    run = load_run(DIGITS, [*settings, *overrides])
    return run, model_spec(run.model)


@pytest.fixture(scope="module")
def one_worker(noise, tmp_path_factory):
    """The store that one process makes."""
    folder = tmp_path_factory.mktemp("one") / "features"
    report = extract(*configured(noise, folder), workers=1)
    assert (report.encoded, len(report.workers), report.workers[0].parts) == (COUNT, 1, COUNT // PART_SIZE)
    return folder


def parts(folder):
    return {file.name: file.read_bytes() for file in folder.glob("part-*")}


def all_indices(folder):
    store = FeatureStore.open(folder)
    return sorted(index for bucket, rows in store.buckets.items() for index in store.read(bucket, range(len(rows)))[2])


def encoders():
    """The worker processes of this process; multiprocessing's own bookkeeping is left alone."""
    children = psutil.Process().children()
    return [child for child in children if any("spawn_main" in word for word in child.cmdline())]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_workers_write_what_one_writes(noise, one_worker, tmp_path):
    report = extract(*configured(noise, tmp_path / "two"), workers=2)
    assert sum(worker.parts for worker in report.workers) == COUNT // PART_SIZE
    assert parts(tmp_path / "two") == parts(one_worker)
    assert encoders() == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_worker_is_an_error_and_the_same_call_goes_on(noise, one_worker, tmp_path):
    folder = tmp_path / "features"
    raised = []

    def run():
        try:
            extract(*configured(noise, folder), workers=2)
        except UserError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not parts(folder):
        time.sleep(0.002)
    victim = encoders()[-1]
    os.kill(victim.pid, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    assert re.search(r"extraction worker \d was killed by SIGKILL at pictures \d+ to \d+ .*`bigdit extract", raised[0])
    assert encoders() == []
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("part-*")}
    whole = parts(one_worker)
    assert 0 < len(before) < len(whole)
    assert parts(folder).items() <= whole.items()  # nothing half-written
    with pytest.raises(UserError, match="lacks"):
        FeatureStore.open(folder)

    report = extract(*configured(noise, folder), workers=2)
    assert sum(worker.parts for worker in report.workers) == len(whole) - len(before)
    assert all((folder / name).stat().st_mtime_ns == written for name, written in before.items())
    assert parts(folder) == whole
    assert all_indices(folder) == list(range(COUNT))


def test_a_complete_store_is_left_as_it_is(noise, one_worker):
    before = {file.name: file.stat().st_mtime_ns for file in one_worker.iterdir()}
    report = extract(*configured(noise, one_worker), workers=2)
    assert (report.encoded, report.workers) == (COUNT, [])
    assert {file.name: file.stat().st_mtime_ns for file in one_worker.iterdir()} == before


def test_abandoned_files_are_removed_and_young_ones_are_not(noise, one_worker):
    old, young = (one_worker / f".tmp-part-{name}" for name in ("old", "young"))
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    extract(*configured(noise, one_worker))
    assert (old.exists(), young.exists()) == (False, True)
    young.unlink()


def test_another_run_is_refused_in_one_line(noise, one_worker):
    with pytest.raises(UserError) as error:
        extract(*configured(noise, one_worker, "data.part_size=5", "encoders.text.seed=1"))
    (problem,) = error.value.problems
    assert problem.startswith(f"data.features: {one_worker} was encoded otherwise: part_size is 4 there, and 5 in this")
    assert "text_encoder.weights is " in problem


def test_what_does_not_fit_together_is_said_before_encoding(noise, tmp_path):
    run, model = configured(noise, tmp_path / "x", "data.buckets=[[127, 128]]")
    wider = model.model_copy(update={"kwargs": {"in_channels": 16, "caption_channels": 2304}})
    with pytest.raises(UserError) as error:
        extract(run, wider)
    assert error.value.problems == (
        "data.buckets: 127 × 128 does not divide by 2, the pixels a side of one latent; nearest: 128 × 128",
        "encoders.image gives 4 channels, and the model's in_channels is 16",
        "encoders.text gives 64 features, and the model's caption_channels is 2304",
    )
    assert not (tmp_path / "x").exists()


@pytest.fixture
def flawed(tmp_path):
    """Four pictures: one damaged, one without a caption."""
    folder = tmp_path / "flawed"
    folder.mkdir()
    for name in ("a", "b", "c", "d"):
        Image.new("L", (8, 8), 77).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("a gray square")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes()[:40])
    (folder / "d.txt").unlink()
    return folder


def command(images, features, *more, **options):
    settings = with_set([f"data.images={images}", f"data.features={features}", "data.workers=1"])
    return bigdit("extract", "--config", DIGITS, *settings, *more, **options)


@pytest.mark.slow
def test_the_command_reports_what_was_skipped_and_why(flawed, tmp_path):
    done = command(flawed, tmp_path / "f", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["pictures"], report["encoded"], report["buckets"]) == (4, 2, {"4x4x4": 2})
    assert [(item["index"], item["name"]) for item in report["skipped"]] == [(1, "b.png"), (3, "d.png")]
    assert report["skipped"][0]["reason"].startswith("damaged picture: ")
    assert report["skipped"][1]["reason"] == "caption d.txt is missing"
    assert report == json.loads((tmp_path / "f/report.json").read_text())
    assert all_indices(tmp_path / "f") == [0, 2]

    again = command(flawed, tmp_path / "f", "--workers", "2")
    assert f"{tmp_path}/f: 2 of 4 pictures encoded (2 of 4x4x4)" in again.stdout
    assert "nothing was left to do" in again.stdout
    assert "2 skipped:\n  b.png: damaged picture" in again.stdout


@pytest.mark.slow
def test_a_source_without_one_usable_picture_is_an_error(flawed, tmp_path):
    for caption in flawed.glob("*.txt"):
        caption.unlink()
    with pytest.raises(UserError, match=r"all 4 pictures were skipped, the first a\.png: caption a\.txt is mis"):
        extract(*configured(flawed, tmp_path / "f", "data.buckets=[[8, 8]]"), workers=1)
    with pytest.raises(UserError, match=r"all pictures of .* were skipped; report\.json there says why"):
        FeatureStore.open(tmp_path / "f")


@pytest.mark.slow
def test_a_picture_that_vanishes_stops_the_unit_and_is_no_skip(flawed, tmp_path):
    (flawed / "a.png").unlink()
    (flawed / "a.png").symlink_to("/proc/self/mem")  # a file that is there, and cannot be read from its start
    with pytest.raises(UserError, match=r"data\.images: .*a\.png cannot be read: Input/output error; run again"):
        extract(*configured(flawed, tmp_path / "f", "data.buckets=[[8, 8]]"), workers=1)
    assert parts(tmp_path / "f") == {}


def test_a_folder_that_cannot_be_made_is_one_line(flawed, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    done = command(flawed, tmp_path / "file/features")
    assert done.returncode == 1
    assert done.stderr == f"error: cannot write {tmp_path}/file/features/schema.json: Not a directory\n"


@pytest.mark.slow
def test_a_disk_that_refuses_more_is_one_line(noise, tmp_path):
    """A limit on the size of files, of 64 KiB, stands for the full disk: the write fails in its middle."""
    settings = with_set([f"data.images={noise}", f"data.features={tmp_path}/f", "data.workers=2", BUCKETS])
    arguments = ["bigdit", "extract", "--config", str(DIGITS), *settings]
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"
    limited = f"{limit}; os.execvp(sys.argv[1], sys.argv[1:])"
    done = run_command("python", "-c", limited, *arguments, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(rf"error: cannot write {tmp_path}/f/part-\d+-\d+\.safetensors: File too large", last)
    assert sorted(file.name for file in (tmp_path / "f").iterdir()) == ["null_text.safetensors", "schema.json"]
