"""Batches of images: halved when memory runs out, and no larger than guidance needs."""

import re
import resource

import pytest
import torch

from bigdit import checkpoint
from bigdit.errors import UserError
from bigdit.sampling import Sampler, SamplingOptions
from bigdit.shortage import bounded
from bigdit.units import GIB

CAPTIONS = [f"a handwritten {name}" for name in ("one", "two", "three", "four", "five")]
ONE_OF_8X8 = 4 * 5 * 4 * 4 * 4  # bytes: five times 4 × 4 × 4 numbers
ROUNDING = 1  # another batch size takes other kernels: one step of 255 at a rounding border


@pytest.fixture
def sampler(trained):
    found, _ = checkpoint.latest(trained)
    return Sampler(found, torch.device("cpu"))


def draw(sampler, captions=CAPTIONS, **chosen):
    images = sampler.sample(captions, SamplingOptions(8, 8, steps=2, **chosen))
    return torch.stack(list(images)).int()


def fed(sampler, monkeypatch, most=None, error=None):
    """How many samples the model gets at once. It fails with `error` for more than `most`."""
    sizes = []

    def before(model, args, kwargs):
        batch = next(value for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor))
        sizes.append(len(batch))
        if most is not None and len(batch) > most:
            raise error

    model = sampler.model()
    model.register_forward_pre_hook(before, with_kwargs=True)
    monkeypatch.setattr(sampler, "model", lambda: model)
    return sizes


def test_a_batch_that_runs_out_of_memory_is_halved_and_says_so(sampler, monkeypatch, capsys):
    whole = draw(sampler, seed=3)
    sizes = fed(sampler, monkeypatch, most=4, error=torch.OutOfMemoryError("CUDA out of memory."))
    halved = draw(sampler, seed=3)
    assert sizes == [10, 4, 4, 4, 4, 2, 2]  # with guidance twice 5, and by two steps twice 2, 2 and 1
    assert (halved - whole).abs().max() <= ROUNDING
    assert (whole[0] - whole[1]).abs().max() > ROUNDING
    line = "note: --size 8x8: memory does not suffice for 5 at once; continuing with 2"
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_batch_without_room_is_halved_before_it_is_drawn(sampler, monkeypatch):
    sizes = fed(sampler, monkeypatch)
    monkeypatch.setattr("bigdit.sampling.sampler.room", lambda device: (3 * ONE_OF_8X8 - 1, 2**30))
    assert len(draw(sampler)) == len(CAPTIONS)
    assert sizes == [4, 4, 4, 4, 2, 2]


def test_of_one_image_the_shortage_is_reported(sampler, monkeypatch):
    sizes = fed(
        sampler, monkeypatch, most=1, error=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    )
    with pytest.raises(
        UserError, match=r"--size 8x8: generating 1 at once ran out of memory: 2\.00 GiB were asked for, "
    ):
        draw(sampler)
    assert sizes == [10, 4, 2]


def test_another_error_is_not_taken_for_a_shortage(sampler, monkeypatch):
    sizes = fed(sampler, monkeypatch, most=1, error=RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        draw(sampler)
    assert sizes == [10]


def test_without_guidance_the_model_is_fed_the_captions_alone(sampler, monkeypatch):
    sizes = fed(sampler, monkeypatch)
    plain = draw(sampler, guidance=1.0)
    assert sizes == [5, 5]
    # Guidance of the empty caption away from itself leads nowhere.
    itself = draw(sampler, CAPTIONS[:1], guidance=3.0, negative=CAPTIONS[0])
    assert (itself - plain[:1]).abs().max() <= ROUNDING
    assert (draw(sampler, guidance=3.0)[:1] - plain[:1]).abs().max() > ROUNDING


def test_a_host_says_that_its_memory_does_not_do_where_the_kernel_would_end_the_process(sampler, monkeypatch, capsys):
    monkeypatch.setattr("bigdit.shortage.room", lambda device: (GIB, 64 * GIB))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    large = SamplingOptions(2048, 2048, steps=1)
    with pytest.raises(UserError) as found, bounded(torch.device("cpu")):
        list(sampler.sample(CAPTIONS[:2], large))
    assert re.search(
        r"^--size 2048x2048: generating 1 at once ran out of memory: \d+\.\d\d GiB more were asked for, and this "
        r"process may hold \d+\.\d\d GiB of 64\.00 GiB; a smaller --size or fewer captions take less$",
        str(found.value),
    )
    assert (
        capsys.readouterr().err == "note: --size 2048x2048: memory does not suffice for 2 at once; continuing with 1\n"
    )
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert draw(sampler).shape[0] == len(CAPTIONS)
