"""Images that tables name."""

import pytest
from tiny_sources import png


@pytest.fixture
def folder(tmp_path):
    """Images 0.png to 9.png, each filled with its number."""
    (tmp_path / "images").mkdir()
    for number in range(10):
        (tmp_path / f"images/{number}.png").write_bytes(png(number))
    return tmp_path
