"""Extraction by worker processes: what they share, how they end, and which store they refuse to continue."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
from commands import BIN, DIGITS, ROOT, run_command, with_set
from extracting import BUCKETS, PART_SIZE, all_indices, configured, parts
from PIL import Image
from running import ended, until

from bigdit.config.data import SourceConfig
from bigdit.errors import UserError
from bigdit.extract.extract import encode_here, extract
from bigdit.store import FeatureStore
from bigdit.store.lease import WorkerName, all_leases
from bigdit.store.report import read_units, shares_of

COUNT = 48


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """Images so large that encoding takes a while."""
    folder = tmp_path_factory.mktemp("noise")
    random = np.random.default_rng(0)
    for i in range(COUNT):
        pixels = random.integers(0, 256, (900, 1300 if i % 3 else 900), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png", compress_level=1)
        (folder / f"{i:02d}.txt").write_text(f"noise number {i % 7}")
    return folder


@pytest.fixture(scope="module")
def one_worker(noise, tmp_path_factory):
    """The store that one process makes."""
    folder = tmp_path_factory.mktemp("one") / "features"
    report = extract(*configured(noise, folder), workers=1)
    assert (report.store.encoded, len(report.workers), report.workers[0].parts) == (COUNT, 1, COUNT // PART_SIZE)
    return folder


def encoders():
    """The worker processes of this process."""
    return [child for child in multiprocessing.active_children() if child.name.startswith("extract-")]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_workers_write_what_one_writes(noise, one_worker, tmp_path):
    report = extract(*configured(noise, tmp_path / "two"), workers=2)
    assert sum(worker.parts for worker in report.workers) == COUNT // PART_SIZE
    assert parts(tmp_path / "two") == parts(one_worker)
    assert encoders() == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_worker_is_an_error_and_the_same_call_continues(noise, one_worker, tmp_path):
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
    assert re.search(r"extraction worker \d was killed by SIGKILL.*`bigdit extract", raised[0])
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


@pytest.mark.timeout(180)
def test_workers_end_with_the_extraction_that_was_killed(tmp_path):
    """In a long unit: SIGKILL of the parent also kills them."""
    (tmp_path / "images").mkdir()
    for i in range(200):
        Image.new("L", (8, 8), i).save(tmp_path / f"images/{i}.png")
        (tmp_path / f"images/{i}.txt").write_text(f"a caption of its own, number {i}")
    slow = ["encoders.text.config.num_layers=200", "data.part_size=100", f"data.features={tmp_path}/features"]
    settings = with_set([f"data.images={tmp_path}/images", "data.buckets=[[8, 8]]", *slow])
    command = [BIN / "bigdit", "extract", "--config", DIGITS, "--workers", "2", *settings]
    main = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    def at_work():
        assert main.poll() is None
        return len([lease for lease in all_leases(tmp_path / "features") if lease.marks]) == 2

    until(at_work)
    workers = [lease.worker.pid for lease in all_leases(tmp_path / "features")]
    server = int(Path(f"/proc/{workers[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert server != main.pid
    main.kill()
    main.wait()
    until(lambda: ended((*workers, server)), 10)
    assert parts(tmp_path / "features") == {}  # they did not finish their units
    # one that saw the closed pipe before its signal has removed its folder itself
    assert {lease.fate for lease in all_leases(tmp_path / "features")} <= {"dead"}


def test_a_complete_store_is_left_as_it_is(noise, one_worker):
    before = {file.name: file.stat().st_mtime_ns for file in one_worker.iterdir() if file.is_file()}
    report = extract(*configured(noise, one_worker), workers=2)
    assert (report.store.encoded, report.parts, report.workers) == (COUNT, 0, [])
    assert {file.name: file.stat().st_mtime_ns for file in one_worker.iterdir() if file.is_file()} == before


@pytest.mark.slow
def test_uneven_splits_make_what_one_extraction_makes(noise, one_worker, tmp_path):
    """Two by index, one of them cut within a part; and one that takes what is left, as shard 1 of 1."""
    folder = tmp_path / "splits"
    first = extract(*configured(noise, folder), end=11)
    assert (first.parts, first.images, first.store) == (3, 12, None)  # the part of 8 to 11 starts before 11
    again = extract(*configured(noise, folder), end=11)
    assert (again.parts, again.workers, again.store) == (0, [], None)
    second = extract(*configured(noise, folder), start=11, end=40)
    assert (second.parts, second.store) == (7, None)
    assert not (folder / "report.json").exists()
    last = extract(*configured(noise, folder), shard="1/1")
    assert (last.parts, last.images, last.store.encoded) == (2, 8, COUNT)
    assert parts(folder) == parts(one_worker)
    assert json.loads((folder / "report.json").read_text()) == last.store.model_dump(mode="json")


@pytest.mark.slow
def test_data_added_later_is_encoded_alone(noise, flawed, tmp_path):
    folder = tmp_path / "grown"
    run, model = configured(noise, folder)
    extract(run, model)
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("part-*")}
    images = (*run.data.images, SourceConfig(path=flawed))
    grown = run.model_copy(update={"data": run.data.model_copy(update={"images": images})})
    report = extract(grown, model)
    assert (report.parts, report.store.images, report.store.encoded) == (1, COUNT + 4, COUNT + 2)
    assert {name: (folder / name).stat().st_mtime_ns for name in before} == before
    assert all_indices(folder) == [*range(COUNT), COUNT, COUNT + 2]
    with pytest.raises(UserError, match=r"it has 2 sources, and data\.images of this run has 1"):
        extract(run, model)


def test_the_speed_of_units_adds_up(one_worker):
    ((worker, units),) = read_units(one_worker).items()
    assert sorted((unit.start, unit.end) for unit in units) == [(i, i + PART_SIZE) for i in range(0, COUNT, PART_SIZE)]
    assert WorkerName.parse(worker).pid > 0
    for unit in units:
        assert 0 < unit.reading_s + unit.encoding_s + unit.waiting_s <= unit.seconds
        assert unit.writing_s > 0
        assert (unit.device, unit.gpu_s) == ("cpu", 0)
    shares = shares_of(units)
    assert 0 < shares.cpu <= 1
    assert shares.io == pytest.approx(max(1 - shares.cpu - shares.queue, 0), abs=0.002)
    with open(one_worker / "speed" / f"{worker}.jsonl", "a") as file:
        file.write('{"start": 4, "en')  # a crash of the machine cut the line off
    assert read_units(one_worker) == {worker: units}


def test_another_run_is_refused_in_one_line(noise, one_worker):
    with pytest.raises(UserError) as error:
        extract(*configured(noise, one_worker, "data.part_size=5", "encoders.text.seed=1"))
    (problem,) = error.value.problems
    assert problem.startswith(
        f"data.features: {one_worker} was encoded with other settings: part_size is 4 there and 5 in this"
    )
    assert "text_encoder.weights is " in problem


def test_what_does_not_fit_together_is_reported_before_encoding(noise, tmp_path):
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


@pytest.mark.slow
def test_weights_that_changed_after_the_claim_are_refused_by_the_worker(noise, tmp_path):
    run, model = configured(noise, tmp_path / "f")
    seeded = run.encoders.text.model_copy(update={"seed": 5})

    def changed(job, source):
        encode_here(replace(job, encoders=job.encoders.model_copy(update={"text": seeded})), source)

    with pytest.raises(UserError, match=r"was encoded with other settings: .*text_encoder\.weights is "):
        extract(run, model, engine=changed)
    assert parts(tmp_path / "f") == {}


@pytest.mark.slow
def test_a_disk_that_refuses_more_is_one_line(noise, tmp_path):
    """A limit of 64 KiB on files stands for the full disk: the write fails in its middle."""
    settings = with_set([f"data.images={noise}", f"data.features={tmp_path}/f", "data.workers=2", BUCKETS])
    arguments = ["bigdit", "extract", "--config", str(DIGITS), *settings]
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"
    limited = f"{limit}; os.execvp(sys.argv[1], sys.argv[1:])"
    done = run_command("python", "-c", limited, *arguments, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"error: data.features: cannot write {tmp_path}/f/part-\d+-\d+\.safetensors: File too large; choose another",
        last,
    )
    names = ["index", "null_text.safetensors", "schema.json", "workers"]
    assert sorted(file.name for file in (tmp_path / "f").iterdir()) == names
    assert list((tmp_path / "f/workers").iterdir()) == []


def test_a_killed_server_of_workers_is_one_line(noise, tmp_path):
    """It is stopped, and killed when it is asked for a worker, as the system does when memory runs out."""
    run, model = configured(noise, tmp_path / "features")
    server = forkserver._forkserver
    server.ensure_running()
    os.kill(server._forkserver_pid, signal.SIGSTOP)
    killer = threading.Thread(target=_kill_when_asked, args=(server._forkserver_pid, threading.get_ident()))
    killer.start()
    with pytest.raises(UserError) as refused:
        extract(run, model, workers=1)
    killer.join()
    assert str(refused.value).startswith("extraction worker 0 could not be started: the process that starts workers")
    assert str(refused.value).endswith("; `bigdit extract --config RUN.yaml` resumes from the finished parts")
    assert extract(run, model, workers=1).store.encoded == COUNT


def _kill_when_asked(pid, thread):
    """Kill the server while the thread waits for its answer."""
    deadline = time.monotonic() + 60
    while sys._current_frames()[thread].f_code.co_name != "read_signed" and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
