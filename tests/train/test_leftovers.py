"""What killed trainers leave is taken away where nobody has it in use, and named."""

import mmap
import os

import pytest

from bigdit.train.processes import leftovers


@pytest.fixture
def buffers(monkeypatch):
    """Makers of buffers, that are gone afterwards."""
    monkeypatch.setattr(leftovers, "BUFFER", f"bigdit_test_{os.getpid()}")
    monkeypatch.setattr(leftovers, "_YOUNG_S", 0.0)
    made = []

    def make(rank):
        file = leftovers.SHARED_MEMORY / f"{leftovers.BUFFER}_{os.getuid()}_127.0.0.1_29500_{rank}"
        file.write_bytes(bytes(1 << 20))
        made.append(file)
        return file

    yield make
    for file in made:
        file.unlink(missing_ok=True)


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "shm_comm").mkdir()
    (tmp_path / "py311_cpu/other").mkdir(parents=True)
    return tmp_path


def notices(capsys):
    return capsys.readouterr().err.splitlines()


def test_shared_memory_of_the_dead_goes_and_that_of_the_living_stays(buffers, extensions, capsys):
    dead, living = buffers(0), buffers(1)
    with open(living, "r+b") as file, mmap.mmap(file.fileno(), 0):
        leftovers.remove_leftovers()
    assert living.exists()
    assert not dead.exists()
    assert notices(capsys) == [f"note: removed {dead}, 1 MiB of shared memory that a killed process had left"]


def test_a_buffer_that_was_just_made_stays(buffers, extensions, capsys, monkeypatch):
    monkeypatch.setattr(leftovers, "_YOUNG_S", 60.0)
    assert buffers(0).exists()
    leftovers.remove_leftovers()
    assert notices(capsys) == []


def test_locks_of_compilations_that_were_killed_go(extensions, capsys):
    """torch waits for such a lock without end."""
    dead, living = extensions / "shm_comm/lock", extensions / "py311_cpu/other/lock"
    dead.touch()
    with open(living, "w"):
        leftovers.remove_leftovers()
        assert living.exists()
    assert not dead.exists()
    assert notices(capsys) == [f"note: removed {dead}, left by a process that was killed while it compiled"]


def test_a_lock_that_other_machines_see_is_only_named(extensions, capsys, monkeypatch):
    monkeypatch.setattr(leftovers, "_SHARED_FILE_SYSTEMS", ("",))
    lock = extensions / "shm_comm/lock"
    lock.touch()
    leftovers.remove_leftovers()
    assert lock.exists()
    assert notices(capsys) == [
        f"note: {lock} is held by another machine, or was left by a killed process: then remove it"
    ]
