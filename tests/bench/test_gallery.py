"""benchmarks/gallery.md: every model on every card, as gallery.json has it, and what a cell says is what runs."""

import json

import gallery
import pytest
from commands import bigdit

from bigdit import catalog

CELLS = [gallery.Cell.model_validate(cell) for cell in json.loads(gallery.FOUND.read_text())]


def test_the_page_has_every_cell():
    asked = {(model, *card, way) for model in gallery.MODELS for card in gallery.CARDS for way in gallery.WAYS}
    assert {(cell.model, cell.gpu, cell.gpus, cell.way) for cell in CELLS} == asked
    assert all(cell.strategy == gallery.strategy(cell.way, cell.gpus) for cell in CELLS)
    assert all((cell.largest is None) == (cell.why is not None) for cell in CELLS)
    assert gallery.PAGE.read_text().partition(gallery.MARK)[2] == f"\n\n{gallery.page(CELLS)}"


def test_a_curve_goes_from_one_sample_to_the_largest_below_its_card():
    for cell in CELLS:
        sizes = [point.micro_batch for point in cell.points]
        assert sizes == sorted({1, (1 + cell.largest) // 2, cell.largest} if cell.largest else ())
        taken = [point.process_bytes for point in cell.points]
        assert taken == sorted(taken)
        assert all(size <= catalog.resolve_gpu(cell.gpu).usable_bytes for size in taken)


def test_every_model_has_a_small_picture():
    pictures = {model: gallery.PICTURES / f"{model}.png" for model in gallery.MODELS}
    assert sorted(pictures.values()) == sorted(gallery.PICTURES.iterdir())
    assert all(file.stat().st_size <= 40_000 for file in pictures.values())
    assert all(f"](gallery/{model}.png)" in gallery.PAGE.read_text() for model in pictures)


def test_what_is_kept_is_not_run_again(tmp_path, monkeypatch):
    """All curves are there: no card is asked, and pictures are drawn from what is kept."""
    assert [*gallery.cells(CELLS)] == CELLS
    monkeypatch.setattr(gallery, "PICTURES", tmp_path)
    gallery.draw_all(CELLS)
    assert {file.stem for file in tmp_path.iterdir()} == {*gallery.MODELS}


@pytest.mark.slow
def test_a_cell_runs_and_one_more_runs_out():
    (cell,) = (cell for cell in CELLS if (cell.model, cell.gpu, cell.way) == ("sana-600m-1024", "rtx-3060-12g", "full"))
    sizes = f"{cell.largest},{cell.largest + 1}"
    asked = ("--model", cell.model, "--gpu", cell.gpu, "--strategy", cell.strategy, "--micro-batch", sizes)
    done = bigdit("bench", "memory", *asked, "--json", BIGDIT_DEVICE="emulated")
    assert done.returncode == 0, done.stderr
    (curve,) = json.loads(done.stdout)["curves"]
    assert [point["process"] is None for point in curve["points"]] == [False, True]
