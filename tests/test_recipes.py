"""Every recipe, at full size on its emulated card: it trains, and takes what is said of it, to the byte."""

import pytest
from recipes import trained, weights_of

from bigdit.recipes.recipe import names, recipe
from bigdit.rehearse.card.client import cuda_build, cuda_python


@pytest.fixture(scope="module")
def hub(once):
    return once("recipes", lambda folder: weights_of([recipe(name) for name in names()], folder)) / "hub"


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_recipe_takes_what_it_is_said_to(name, hub, tmp_path):
    found = recipe(name)
    assert found.took is not None
    receipt = trained(found, hub, tmp_path / name)
    assert receipt.emulated
    assert receipt.steps == 3
    assert found.took.torch == cuda_build(cuda_python())
    assert receipt.measured_peak_allocated_bytes == found.took.peak_allocated_bytes
    assert receipt.measured_peak_reserved_bytes == found.took.peak_reserved_bytes
    assert found.took.process_bytes[1] < found.took.usable_bytes
