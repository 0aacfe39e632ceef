"""benchmarks/gallery.md shows gallery.json, with every model on every GPU, and a cell's figures are those of a run."""

import json
import random

import curves
import gallery
import pytest
from commands import ROOT, in_process
from PIL import Image, ImageColor

from bigdit import catalog
from bigdit.bench.memory import Curve
from bigdit.config.strategy_text import LARGEST_MICRO_BATCH, parse_strategy
from bigdit.memory.process import non_torch_memory
from bigdit.profile.attempt import AttemptJob

CELLS = [gallery.Cell.model_validate(cell) for cell in json.loads(gallery.FOUND.read_text())]

RETRIED = ("pixart-sigma-xl-2-1024", "a40", 1, "full")
"""In these, one more sample than the largest fits, because torch's allocator frees its cache."""


def test_the_page_has_every_cell():
    asked = {(model, *gpu, way) for model in gallery.MODELS for gpu in gallery.GPUS for way in gallery.WAYS}
    assert {(cell.model, cell.gpu, cell.gpus, cell.way) for cell in CELLS} == asked
    assert all(cell.strategy == gallery.strategy(cell.way, cell.gpus) for cell in CELLS)
    assert all((cell.largest is None) == (cell.why is not None) for cell in CELLS)
    assert gallery.PAGE.read_text().partition(gallery.MARK)[2] == f"\n\n{gallery.page(CELLS)}"


def test_a_curve_goes_from_one_sample_to_the_largest_below_its_gpu():
    for cell in CELLS:
        sizes = [point.micro_batch for point in cell.points]
        assert sizes == sorted({1, (1 + cell.largest) // 2, cell.largest} if cell.largest else ())
        taken = [point.process_bytes for point in cell.points]
        assert taken == sorted(taken)
        assert all(size <= catalog.resolve_gpu(cell.gpu).usable_bytes for size in taken)


def test_the_page_has_a_command_of_each_kind_that_bench_memory_takes():
    """The two ways, on one GPU and on several."""
    text = gallery.PAGE.read_text()
    shown = [line.split() for line in text.splitlines() if line.startswith("    bigdit bench memory ")]
    options = [dict(zip(words[3::2], words[4::2], strict=True)) for words in shown]
    assert {each["--strategy"] for each in options} == {cell.strategy for cell in CELLS}
    for each in options:
        sizes = [int(size) for size in each["--micro-batch"].split(",")]
        asked = (each["--model"], each["--gpu"], each["--strategy"])
        (cell,) = (cell for cell in CELLS if (cell.model, cell.gpu, cell.strategy) == asked)
        assert sizes == [cell.largest, cell.largest + 1]
        assert parse_strategy([each["--strategy"]]).world_size == cell.gpus


def test_every_model_has_a_small_image():
    images = {model: gallery.IMAGES / f"{model}.png" for model in gallery.MODELS}
    assert sorted(images.values()) == sorted(gallery.IMAGES.iterdir())
    assert all(file.stat().st_size <= 40_000 for file in images.values())
    assert all(f"](gallery/{model}.png)" in gallery.PAGE.read_text() for model in images)


@pytest.mark.parametrize("model", gallery.MODELS)
def test_a_gpus_curve_has_its_own_colour_in_every_image(model):
    """Also if it is a single point. H100's lies below A100's, and is not seen."""
    with Image.open(gallery.IMAGES / f"{model}.png") as image:
        found = [colour for _, colour in image.convert("RGB").getcolors()]
    drawn = {gallery.named(cell.gpu, cell.gpus) for cell in CELLS if cell.model == model and cell.points} - {"h100-sxm"}
    assert drawn
    looks = dict(zip((gallery.named(*gpu) for gpu in gallery.GPUS), curves.LOOKS, strict=True))
    for gpu in drawn:
        wanted = ImageColor.getrgb(looks[gpu][0])
        assert min(max(abs(a - b) for a, b in zip(wanted, each, strict=True)) for each in found) <= 8, gpu


def test_what_is_kept_is_not_run_again(tmp_path, monkeypatch):
    """All curves are there: no GPU is asked, and images are drawn from the file."""
    assert [*gallery.cells(CELLS)] == CELLS
    monkeypatch.setattr(gallery, "IMAGES", tmp_path)
    gallery.draw_all(CELLS)
    assert {file.stem for file in tmp_path.iterdir()} == {*gallery.MODELS}


def test_cells_stay_until_they_are_found_again(tmp_path, monkeypatch):
    """Also if the command is interrupted. --help runs nothing."""
    kept = tmp_path / "gallery.json"
    kept.write_bytes(gallery.FOUND.read_bytes())
    monkeypatch.setattr(gallery, "FOUND", kept)

    def interrupted(known):
        assert known == []
        yield CELLS[0].model_copy(update={"largest": 1})
        raise KeyboardInterrupt

    monkeypatch.setattr(gallery, "cells", interrupted)
    monkeypatch.setattr("sys.argv", ["gallery.py", "--help"])
    with pytest.raises(SystemExit):
        gallery.main()
    assert kept.read_bytes() == (ROOT / "benchmarks/gallery.json").read_bytes()
    monkeypatch.setattr("sys.argv", ["gallery.py"])
    with pytest.raises(KeyboardInterrupt):
        gallery.main()
    first, *others = (gallery.Cell.model_validate(each) for each in json.loads(kept.read_text()))
    assert first.largest == 1
    assert others == CELLS[1:]


@pytest.mark.slow
def test_a_cell_is_what_bench_memory_finds_where_one_more_runs_by_retries_alone():
    (cell,) = (each for each in CELLS if each.asked == RETRIED)
    sizes = f"{cell.largest},{cell.largest + 1}"
    asked = ("--model", cell.model, "--gpu", cell.gpu, "--strategy", cell.strategy, "--micro-batch", sizes)
    done = in_process("bench", "memory", *asked, "--json")
    assert done.returncode == 0, done.stderr
    (curve,) = (Curve.model_validate(each) for each in json.loads(done.stdout)["curves"])
    assert [(point.emulated.ran_out, point.emulated.retries > 0) for point in curve.points] == [
        (None, False),
        (None, True),
    ]
    assert [point.peaks.fits for point in curve.points] == [True, False]
    assert curve.largest == cell.largest


@pytest.mark.slow
def test_cells_run_and_one_more_sample_does_not_fit():
    """Some cells of a GPU, drawn by a seed."""
    gpu = catalog.resolve_gpu("rtx-4090")
    room = gpu.usable_bytes - non_torch_memory(gpu, 1).high_bytes
    found = [
        each for each in CELLS if (each.gpu, each.gpus) == (gpu.name, 1) and 0 < each.largest < LARGEST_MICRO_BATCH
    ]
    with gallery.EmulatedGpus(gpu) as gpus:
        for cell in random.Random(gpu.name).sample(found, 2):
            request = gallery.sized(cell.model, gpu, cell.strategy)
            attempts = gpus.attempts(
                [AttemptJob(request=request(cell.largest + more), capacity_bytes=room) for more in (0, 1)]
            )
            assert [attempt.fits for attempt in attempts] == [True, False], (cell, gpus.unanswered)
