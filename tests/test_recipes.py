"""Every recipe, at full size on its emulated card: it trains, and takes what is said of it, to the byte; and what it
trained is drawn with there."""

import pytest
from PIL import Image
from recipes import drawn, first_of_many, receipts_of, stages_of, trained, weights_of

from bigdit.recipes.recipe import names, recipe
from bigdit.rehearse.card.client import cuda_build, cuda_python

ALONE = [name for name in names() if recipe(name).processes == 1]
MANY = [name for name in names() if name not in ALONE]


@pytest.fixture(scope="module")
def hub(once):
    return once("recipes", lambda folder: weights_of([recipe(name) for name in ALONE], folder)) / "hub"


@pytest.fixture
def folder(once, hub, name):
    """Where the recipe trained."""
    return once(f"recipe-{name}", lambda folder: trained(recipe(name), hub, folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_recipe_takes_what_it_is_said_to(name, folder):
    found = recipe(name)
    assert found.took is not None
    receipts = receipts_of(found, folder)
    assert all(each.emulated for each in receipts)
    assert [each.steps for each in receipts] == [3] * found.stages
    assert found.took.torch == cuda_build(cuda_python())
    assert max(each.measured_peak_allocated_bytes for each in receipts) == found.took.peak_allocated_bytes
    assert max(each.measured_peak_reserved_bytes for each in receipts) == found.took.peak_reserved_bytes
    assert found.took.process_bytes[1] < found.took.usable_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_the_last_command_draws_on_the_card_that_trained(name, folder):
    found = recipe(name)
    *frames, height, width = stages_of(found)[-1]["data"]["buckets"][0]
    path = drawn(found, folder)
    with Image.open(path) as picture:  # all of its frames are alike, and written as one
        assert (picture.size, path.suffix) == ((width, height), ".webp" if frames else ".png")


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_the_first_of_many_reserves_what_it_did_among_all_of_them(name):
    """That all of them train is seen where figures are made: they take ten times as long as the first alone."""
    found = recipe(name)
    assert found.took is not None
    took = first_of_many(found)
    assert found.took.torch == cuda_build(cuda_python())
    assert all(each.fits for each in took.values())
    assert found.took.peak_reserved_bytes in {each.peak_reserved_bytes for each in took.values()}
    beside = found.took.process_bytes[1] - found.took.peak_reserved_bytes
    assert max(each.peak_reserved_bytes for each in took.values()) + beside < found.took.usable_bytes
