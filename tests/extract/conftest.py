"""Images of which some cannot be used."""

import pytest
from PIL import Image


@pytest.fixture
def flawed(tmp_path):
    """Four images: one damaged, one without a caption."""
    folder = tmp_path / "flawed"
    folder.mkdir()
    for name in ("a", "b", "c", "d"):
        Image.new("L", (8, 8), 77).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("a gray square")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes()[:40])
    (folder / "d.txt").unlink()
    return folder
