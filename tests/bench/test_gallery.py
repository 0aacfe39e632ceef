"""benchmarks/gallery.md: every model on every card, as gallery.json has it, and what a cell says is what runs."""

import json

import gallery
import pytest
from commands import bigdit

CELLS = [gallery.Cell.model_validate(cell) for cell in json.loads(gallery.FOUND.read_text())]


def test_the_page_has_every_cell():
    asked = {(model, *card, way) for model in gallery.MODELS for card in gallery.CARDS for way in gallery.WAYS}
    assert {(cell.model, cell.gpu, cell.gpus, cell.way) for cell in CELLS} == asked
    assert all(cell.strategy == gallery.strategy(cell.way, cell.gpus) for cell in CELLS)
    assert all((cell.largest is None) == (cell.why is not None) for cell in CELLS)
    assert gallery.PAGE.read_text().partition(gallery.MARK)[2] == f"\n\n{gallery.page(CELLS)}"


@pytest.mark.slow
def test_a_cell_runs_and_one_more_runs_out():
    (cell,) = (cell for cell in CELLS if (cell.model, cell.gpu, cell.way) == ("sana-600m-1024", "rtx-3060-12g", "full"))
    sizes = f"{cell.largest},{cell.largest + 1}"
    asked = ("--model", cell.model, "--gpu", cell.gpu, "--strategy", cell.strategy, "--micro-batch", sizes)
    done = bigdit("bench", "memory", *asked, "--json", BIGDIT_DEVICE="emulated")
    assert done.returncode == 0, done.stderr
    (curve,) = json.loads(done.stdout)["curves"]
    assert [point["process"] is None for point in curve["points"]] == [False, True]
