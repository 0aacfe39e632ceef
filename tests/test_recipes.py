"""Recipes at full size on their emulated GPUs: they train, take the stated bytes exactly, and what they trained can be
sampled there. benchmarks/recipes.py tries all."""

import os

import pytest
import warm
from PIL import Image
from recipes import drawn, first_of_many, receipts_of, saved_by, stages_of, trained, waiting_bytes, weights_of
from tried.extraction import asked_of, emulated_bytes, extracted

from bigdit.emulator.interpreter import cuda_build, cuda_python
from bigdit.recipes import names, recipe
from bigdit.report.recipes import needs

ALONE = [name for name in names() if recipe(name).processes == 1]
SMALL = [name for name in ALONE if recipe(name).about.gpu == "rtx-3060-12g"]
BY_ROOM = sorted(ALONE, key=lambda name: (recipe(name).took.usable_bytes, name), reverse=True)


def traits(name):
    """What a recipe sets: where two set the same, their runs differ in sizes alone."""
    found = recipe(name)
    *_, last = stages_of(found)
    strategy = last["strategy"]
    chosen = {strategy["precision"], strategy["optimizer"]["name"], strategy.get("lora", {}).get("base")}
    return {*strategy, *last["data"], *chosen, found.stages, "text" in last["encoders"]}


TRAITS = {name: traits(name) for name in BY_ROOM}
HAVING = {each: [name for name in BY_ROOM if each in TRAITS[name]] for name in BY_ROOM for each in TRAITS[name]}
TRAINED: list[str] = []
"""For each trait, one on the smallest of the GPUs. The rarest come first, since their recipes have others, too."""
for having in sorted(HAVING.values(), key=lambda names: (len(names), names)):
    if not {*having} & {*TRAINED}:
        TRAINED.append(having[-1])
DRAWN = {recipe(name).about.model: name for name in BY_ROOM if name in TRAINED and recipe(name).generates}.values()
"""One for each model."""
BY_TURNS = "sd3.5-medium-lora-rtx-3060"
"""Its encoders do not fit on the GPU together."""
MANY = [name for name in names() if name not in ALONE]


@pytest.fixture(scope="session")
def hub(once):
    return once("recipes", lambda folder: weights_of([recipe(name) for name in {*TRAINED, BY_TURNS}], folder)) / "hub"


@pytest.fixture
def folder(once, hub, name):
    """The folder where the recipe trained."""
    return once(f"recipe-{name}", lambda folder: trained(recipe(name), hub, folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_takes_what_its_figures_say(name, folder):
    found = recipe(name)
    receipts = receipts_of(found, folder)
    assert all(each.emulated for each in receipts)
    assert [each.steps for each in receipts] == [3] * found.stages
    assert max(each.measured_peak_allocated_bytes for each in receipts) == found.took.peak_allocated_bytes
    assert max(each.measured_peak_reserved_bytes for each in receipts) == found.took.peak_reserved_bytes
    assert saved_by(found, folder) == found.took.saved


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_the_last_command_draws_on_the_gpu_that_trained(name, folder):
    found = recipe(name)
    *frames, height, width = stages_of(found)[-1]["data"]["buckets"][0]
    path = drawn(found, folder)
    with Image.open(path) as image:  # all frames are equal, and written as one
        assert (image.size, path.suffix) == ((width, height), ".webp" if frames else ".png")


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_the_first_of_many_reserves_what_it_did_among_all_of_them(name):
    """benchmarks/recipes.py runs all processes, which takes ten times as long as the first alone."""
    found = recipe(name)
    took = first_of_many(found)
    assert all(each.fits for each in took.values())
    assert found.took.peak_reserved_bytes in {each.peak_reserved_bytes for each in took.values()}
    beside = found.took.process_bytes[1] - found.took.peak_reserved_bytes
    assert max(each.peak_reserved_bytes for each in took.values()) + beside < found.took.usable_bytes


@pytest.mark.slow
def test_a_recipe_extracts_on_its_gpu_by_turns(hub, tmp_path, capfd):
    """One image of each size. benchmarks/recipes.py extracts more, with all recipes."""
    found = recipe(BY_TURNS)
    run = extracted(found, hub, tmp_path, 1, values=False)
    printed = capfd.readouterr()
    assert run.exit_status == 0, printed.err
    assert "5 of 5 images encoded" in printed.out
    assert "note: text encoders and VAE do not fit on the GPU together" in printed.err
    (chosen,) = [line for line in printed.err.splitlines() if line.startswith("encoders.batch_size: ")]
    assert "which fits the NVIDIA GeForce RTX 3060 (emulated) where text encoders and VAE take turns" in chosen
    _, gpu = run.highest
    least, most = emulated_bytes(found, tmp_path, 1), found.took.extraction.peak_allocated_bytes
    assert least <= gpu.peak_allocated_bytes <= most, (least, gpu.peak_allocated_bytes, most)


@pytest.mark.slow
def test_encoders_that_no_gpu_of_the_recipe_holds_are_a_line(hub, tmp_path):
    fp32 = ("encoders.text.dtype=fp32", "encoders.batch_size=1")
    with asked_of(recipe(BY_TURNS), hub, tmp_path, 1, *fp32, values=False) as (command, environment):
        run = warm.run(command, [os.environ | environment], tmp_path, 300)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    *_, line = run.stderr.splitlines()
    assert line.startswith("error: encoders.text, whose weights take 20.79 GiB in fp32, ran out of memory: ")
    assert line.endswith("; use encoders.text.dtype: bf16 (half the bytes), fewer workers or encoders.device: cpu")


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_says_which_weights_wait(name):
    found = recipe(name)
    assert found.took.waiting_bytes == waiting_bytes(found)
    assert ("take turns on the GPU" in "\n".join(needs(found))) == (found.took.waiting_bytes > 0)


def test_all_recipes_were_tried_with_the_torch_that_emulates():
    """Another torch may take other bytes."""
    assert {recipe(name).took.torch for name in names()} == {cuda_build(cuda_python())}


@pytest.mark.parametrize("name", names())
def test_what_extraction_took_of_a_gpu_is_what_its_encoders_need(name):
    """Where all encoders fit. Where memory ran out, extraction took all that there was."""
    found = recipe(name)
    taken = found.took.extraction
    assert taken.peak_allocated_bytes <= taken.peak_reserved_bytes < found.took.usable_bytes
    if not taken.ran_out:
        assert taken.peak_allocated_bytes == pytest.approx(taken.emulated_bytes, rel=0.01)
