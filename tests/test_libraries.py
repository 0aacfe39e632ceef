"""Libraries' warnings about their own code are not among a run's lines."""

import sys
import warnings

import pytest
import torch
from commands import run_command
from diffusers.loaders import LoraLoaderMixin

from bigdit import libraries


@pytest.fixture
def each_time():
    """Make torch warn each time, not once a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("each_time")
@pytest.mark.parametrize(("prepare", "heard"), [(lambda: None, 2), (libraries.prepare, 0)])
def test_what_no_user_can_change_is_not_reported(prepare, heard):
    """Such as in PRX's pipeline, and in norms of queries of Krea 2 and Kandinsky 5."""
    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("always")
        prepare()
        LoraLoaderMixin()
        torch.nn.functional.rms_norm(torch.ones(2, 4), (4,), torch.ones(4, dtype=torch.bfloat16))
    assert len(printed) == heard


def test_what_is_imported_is_left_out_of_collections_to_the_end_and_not_at_it():
    """Triton would report all frozen objects as leaked at exit, in forty lines."""
    code = (
        "import atexit, gc; from bigdit import libraries\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "with libraries.importing(): import decimal\n"
        "print(gc.get_freeze_count() > 0)"
    )
    assert run_command(sys.executable, "-c", code).stdout == "True\nFalse\n"
