"""`bigdit features`: what a store holds, whether every byte is right, and repair."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from commands import BIN, DIGITS, ROOT, bigdit, in_process, with_set
from running import until
from stores import make_store

from bigdit.errors import UserError
from bigdit.extract.verify import verify
from bigdit.store.lease import FOLDER, WorkerName

PART = "part-000000000000-000000000240.safetensors"


@pytest.fixture
def store(features, tmp_path):
    """A copy of the digits' store that may be damaged."""
    return shutil.copytree(features, tmp_path / "store")


def flip(file, byte):
    data = bytearray(file.read_bytes())
    data[byte] ^= 4
    file.write_bytes(data)


def left_half_written(store):
    """Files of a worker of a lost machine, and of a dead one of this machine."""
    me = WorkerName.here()
    folders = [store / FOLDER / str(worker) for worker in (replace(me, host="node7"), replace(me, started=1))]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "part-000000000000-000000000240.safetensors").write_bytes(b"half")
    return folders


def test_info_tells_what_is_there_and_who_is_at_it(store):
    gone, dead = left_half_written(store)
    done = in_process("features", "info", store, COLUMNS="160")
    assert done.returncode == 0, done.stderr
    assert f"{store}: whole; 240 of 240 images encoded, " in done.stdout
    for expected in ("source 0  folder: 240 images", "image     name identity, factor 2", "text      class_name T5"):
        assert expected in done.stdout
    assert "4x4x4 80 33.3%" in " ".join(done.stdout.split())
    assert f"{gone.name} runs or ran on another machine; leased: {PART}, 4 B" in done.stdout
    assert f"{dead.name} is dead; leased: {PART}, 4 B" in done.stdout
    assert f"`bigdit features clean {store}` removes what dead workers left" in done.stdout
    report = json.loads(in_process("features", "info", store, "--json").stdout)
    assert (report["parts_done"], report["parts"], report["encoded"], report["skipped"]) == (1, 1, 240, [])
    assert report["bytes"] == (store / PART).stat().st_size
    assert 0 < report["bytes"] - sum(report["bytes_by_column"].values()) < 2000  # the header
    assert sum(worker["images"] for worker in report["workers"]) == 240
    assert report["workers"][0]["images_per_s"] > 0
    assert {held["fate"] for held in report["at_work"]} == {"dead", "unknown"}


def test_info_reads_at_80_columns(store):
    """The lines about the store and its workers. Paths and names after them stay whole, to be copied."""
    done = in_process("features", "info", store)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{store}: whole; ")
    assert max(map(len, lines[1:])) <= 80
    (head,) = [line for line in lines if line.startswith("worker")]
    assert head.split() == [
        "worker",
        "on",
        "parts",
        "images",
        "images/s",
        "read",
        "encode",
        "wait",
        "CPU",
        "GPU",
        "disk",
        "queue",
    ]
    (worker,) = [line.split() for line in lines if " cpu " in line]
    assert [field.replace(".", "", 1).isdigit() for field in worker[-10:]] == [True] * 10
    assert not [line for line in lines if line != line.rstrip()]


def test_clean_takes_other_machines_on_demand_alone(store):
    gone, dead = left_half_written(store)
    done = in_process("features", "clean", store)
    assert done.stdout == f"removed {dead.name}: 1 part begun, 4 B\n1 folder of dead workers removed\n"
    assert (gone.exists(), dead.exists()) == (True, False)
    done = in_process("features", "clean", store, "--other-machines")
    assert done.stdout.splitlines()[-1] == "1 folder of dead workers removed"
    assert not gone.exists()


@pytest.mark.slow
def test_damage_is_found_named_and_repaired(store, images):
    whole = (store / PART).read_bytes()
    null_text = (store / "null_text.safetensors").read_bytes()
    flip(store / PART, len(whole) // 2)
    flip(store / "null_text.safetensors", -1)
    settings = with_set([f"data.images={images}", f"data.features={store}"])
    done = in_process("features", "verify", store)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"data.features: {store}/null_text.safetensors is damaged")
    assert lines[1].startswith(f"data.features: {store}/{PART} is damaged in ")
    assert lines[2].endswith("; 2 damaged, 0 missing")

    refused = in_process("features", "verify", store, "--repair")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: --repair encodes the damaged parts again")
    mended = bigdit("features", "verify", store, "--repair", "--config", DIGITS, *settings)
    assert mended.returncode == 0, mended.stderr
    assert f"{PART}: encoded again" in mended.stdout
    assert "Failed to load" not in mended.stderr  # libraries look for kernels that are not there
    assert (store / PART).read_bytes() == whole
    assert (store / "null_text.safetensors").read_bytes() == null_text
    report = verify(store, workers=2)
    assert (report.parts, report.damaged, report.missing) == (1, [], 0)
    assert report.bytes == len(whole)


def test_what_is_missing_is_counted_and_no_store_is_one_line(store, tmp_path):
    (store / PART).unlink()
    report = verify(store)
    assert (report.parts, report.damaged, report.missing) == (0, [], 1)
    with pytest.raises(UserError, match=r"there is no such folder; did you mean store\? `bigdit extract --config RUN"):
        verify(store.with_name("stor"))
    with pytest.raises(UserError, match=r"holds no latents; `bigdit extract --config RUN\.yaml` makes them"):
        verify(tmp_path)
    with pytest.raises(UserError, match=r"^s3://b/x: `bigdit features` reads folders of this machine; copy the cache"):
        verify(Path("s3://b/x"))


def test_a_wrong_name_is_told_without_encoders():
    code = "import sys, bigdit.extract.verify; sys.exit(bool({'diffusers', 'transformers'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


@contextmanager
def verifying(root):
    """Two processes of `bigdit features verify` at work: its process, and the ids of the others."""
    make_store(root, 8000)
    command = [BIN / "bigdit", "features", "verify", root, "--workers", "2"]
    environment = os.environ | {"BIGDIT_TEST": str(root)}
    main = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def others():
        mark = f"BIGDIT_TEST={root}".encode()
        found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if mark in environment_of(folder)]
        return [pid for pid in found if pid != main.pid]

    def at_work():
        assert main.poll() is None
        return len(others()) >= 4  # two readers, the server that forked them, and multiprocessing's tracker

    until(at_work, 120)
    yield main, others
    until(lambda: not others(), 60)


@pytest.mark.timeout(180)
def test_processes_that_verify_end_with_who_started_them(tmp_path):
    with verifying(tmp_path / "store") as (main, _):
        main.kill()
        main.wait()


@pytest.mark.timeout(180)
def test_a_killed_process_that_verified_is_a_line(tmp_path):
    with verifying(tmp_path / "store") as (main, others):
        os.kill(max(others()), signal.SIGKILL)  # the last to start is a reader
        printed = main.communicate()[1].decode()
    assert main.returncode == 1
    assert printed.splitlines()[-1] == (
        f"error: a process that verified {tmp_path}/store was killed, perhaps for lack of memory, or crashed. Nothing "
        "was changed; verify again, with fewer --workers"
    )


def environment_of(folder):
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return []


def test_a_folder_in_the_place_of_a_part_is_one_line(store, images):
    """Repair deletes what is damaged, and a folder may be somebody's."""
    (store / PART).unlink()
    (store / PART).mkdir()
    settings = with_set([f"data.images={images}", f"data.features={store}"])
    refused = in_process("features", "verify", store, "--repair", "--config", DIGITS, *settings)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == (
        f"error: {store / PART} cannot be removed: Is a directory; remove it, and repair again"
    )
