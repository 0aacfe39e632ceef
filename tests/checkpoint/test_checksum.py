"""A checksum covers all bytes of a file, also its holes."""

from __future__ import annotations

from pathlib import Path

import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigdit.checkpoint.folder import checksum

MIB = 1 << 20
RUNS = st.lists(st.tuples(st.integers(0, 20 * MIB), st.binary(min_size=1, max_size=9000)), max_size=4)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RUNS, st.integers(0, 24 * MIB))
def test_holes_count_as_the_zeros_that_they_are_read_as(tmp_path: Path, runs: list[tuple[int, bytes]], size: int):
    file = tmp_path / "file"
    with open(file, "wb") as opened:
        for at, data in runs:
            opened.seek(at)
            opened.write(data)
        opened.truncate(size)
    assert checksum(file) == xxhash.xxh3_128_hexdigest(file.read_bytes())


def test_a_file_of_holes_alone(tmp_path: Path) -> None:
    """Larger than 32 bits can count."""
    file = tmp_path / "file"
    with open(file, "wb") as opened:
        opened.truncate(1 << 32)
    zeros, digest = bytes(MIB), xxhash.xxh3_128()
    for _ in range(1 << 12):
        digest.update(zeros)
    assert checksum(file) == digest.hexdigest()
