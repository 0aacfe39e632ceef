"""How many processes rehearse side by side: as many as the machine has cores and memory for."""

import pytest

from bigdit.rehearse import pool
from bigdit.units import GIB


@pytest.mark.parametrize(
    ("cores", "memory", "workers"),
    [(1, 2 * GIB, 2), (2, 64 * GIB, 2), (3, 64 * GIB, 3), (16, 64 * GIB, 4), (16, 6 * GIB, 3), (16, 3 * GIB, 2)],
)
def test_workers_follow_cores_and_memory(monkeypatch, cores, memory, workers):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(pool, "memory_bytes", lambda: memory)
    assert pool.workers_here() == workers
