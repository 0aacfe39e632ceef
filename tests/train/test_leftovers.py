"""What killed trainers leave is taken away where nobody has it in use, and named."""

import pytest

from bigdit.train.processes import process


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "shm_comm").mkdir()
    (tmp_path / "py311_cpu/other").mkdir(parents=True)
    return tmp_path


def notices(capsys):
    return capsys.readouterr().err.splitlines()


def test_locks_of_compilations_that_were_killed_go(extensions, capsys):
    """torch waits for such a lock without end."""
    dead, living = extensions / "shm_comm/lock", extensions / "py311_cpu/other/lock"
    dead.touch()
    with open(living, "w"):
        process.remove_leftovers()
        assert living.exists()
    assert not dead.exists()
    assert notices(capsys) == [f"note: removed {dead}, left by a process that was killed while it compiled"]


def test_a_lock_that_other_machines_see_is_only_named(extensions, capsys, monkeypatch):
    monkeypatch.setattr(process, "_SHARED_FILE_SYSTEMS", ("",))
    lock = extensions / "shm_comm/lock"
    lock.touch()
    process.remove_leftovers()
    assert lock.exists()
    assert notices(capsys) == [
        f"note: {lock} is held by another machine, or was left by a killed process: then remove it"
    ]
