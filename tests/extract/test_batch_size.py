"""How many images a GPU encodes at once follows from the encode phase on an emulated one."""

import pytest

from bigdit.catalog import gpu, resolve_gpu
from bigdit.config.load import parse_run
from bigdit.extract import batch_size
from bigdit.extract.batch_size import EncodeBatch, with_batch_size
from bigdit.memory.process import cuda_context
from bigdit.profile.gpus import EmulatedGpus
from bigdit.search.dataset import EncoderBytes, EncodersNeed
from bigdit.units import GIB


def run(model, buckets=((128, 128), (256, 256)), image=None, **encoders):
    vae = {"name": "vae", "class_name": "AutoencoderKL", "path": "vae"}
    return parse_run(
        {
            "model": model,
            "data": {"images": "images", "features": "features", "buckets": buckets},
            "encoders": {"image": image or vae, "text": {"pipeline": "pipeline", "dtype": "bf16"}, **encoders},
            "strategy": {"micro_batch_size": 1},
            "train": {"steps": 1},
            "output": "run",
        },
        "run.yaml",
    )


DIT = {"name": "dit-s-8"}  # a VAE is its only encoder, which makes attempts short


def size_of(asked, gpu, processes=1):
    found = batch_size.encode_batch(asked, gpu, processes)
    return None if found is None else found.size


@pytest.fixture(scope="module")
def device():
    return resolve_gpu("a40", "8192MiB")


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_chosen(device):
    chosen = size_of(run(DIT), device)
    room = device.usable_bytes * 0.9 - cuda_context(device).high_bytes
    request = batch_size._requests(run(DIT), device)[1]
    assert (request.batch.latents, request.encoders.vae.dtype) == ((4, 32, 32), "fp32")  # the largest bucket
    sizes = [request.strategy.with_micro_batch_size(size) for size in (chosen, 2 * chosen)]
    with EmulatedGpus(device, 1) as gpus:
        answers = [gpus.attempt(request.model_copy(update={"strategy": each})) for each in sizes]
    fits, does_not = (answer.phases["images"].peak_bytes for answer in answers)
    assert fits <= room < does_not
    assert size_of(run(DIT), device, processes=2) <= chosen / 2
    assert size_of(run(DIT), resolve_gpu("a40")) > chosen
    assert size_of(run(DIT), device, processes=16) == 1


def test_what_the_catalogue_does_not_know_has_no_answer(device):
    own = {"class_name": "SanaTransformer2DModel", "kwargs": {"num_layers": 1}}
    assert size_of(run(own), device) is None
    assert size_of(run({"name": "flux.2-klein-9b"}), device) is None
    assert size_of(run(DIT, image={"name": "identity"}), device) is None


def test_a_run_takes_the_size_where_it_leaves_it_open_and_there_is_a_gpu(device, monkeypatch):
    monkeypatch.setattr(batch_size, "found_gpus", lambda: (device, gpu("h200")))  # there is no driver here
    chosen = with_batch_size(run(DIT), workers=2).encoders.batch_size
    assert chosen == size_of(run(DIT), device)  # one each, and the smaller GPU decides
    for settled in (run(DIT, batch_size=5), run(DIT, device="cpu"), run({"name": "flux.2-klein-9b"})):
        assert with_batch_size(settled, workers=2) == settled


def test_what_takes_turns_and_what_has_no_room_is_reported():
    small, few = resolve_gpu("rtx-3060-12g"), EncoderBytes(GIB, GIB, GIB)
    asked = run(DIT)
    by_turns, nothing = (
        EncodersNeed(few, EncoderBytes(9.5 * GIB, 0, GIB / 16)),
        EncodersNeed(few, EncoderBytes(12 * GIB, 0, 0)),
    )
    assert (by_turns.way(small), nothing.way(small), nothing.way(resolve_gpu("a40"))) == ("in turns", None, "together")
    assert by_turns.taken("in turns", 9) == max(10 * GIB, 10 * GIB)
    assert by_turns.taken("together", 1) == 11.5 * GIB
    printed = batch_size._explanation(EncodeBatch(8, "in turns", by_turns), asked, small, 1, 1)
    assert printed == (
        "which fits the NVIDIA GeForce RTX 3060 (emulated) where text encoders and VAE take turns; "
        "9.50 GiB of weights wait in CPU memory"
    )
    printed = batch_size._explanation(EncodeBatch(1, None, nothing), asked, small, 1, 1)
    assert printed == (
        "and even that does not fit the NVIDIA GeForce RTX 3060 (emulated): 12.00 GiB are needed for the text "
        "encoders, and 11.10 GiB are free; encoders.device: cpu takes nothing of a GPU"
    )
    whole = run(DIT, text={"pipeline": "pipeline", "dtype": "fp32"})
    assert batch_size._explanation(EncodeBatch(1, None, nothing), whole, small, 1, 1).endswith(
        "12.00 GiB are needed for the text encoders, and 11.10 GiB are free; encoders.text.dtype: bf16 takes half"
    )
    assert batch_size._explanation(EncodeBatch(1, None, by_turns), asked, small, 2, 2).endswith("; fewer data.workers")
    large = EncodeBatch(1, None, EncodersNeed(EncoderBytes(GIB, 20 * GIB, 0), EncoderBytes(GIB, 0, 0)))
    assert batch_size._explanation(large, asked, small, 1, 1).endswith(
        "21.00 GiB are needed for the VAE, and 11.10 GiB are free; encoders.image.dtype: bf16, encoders.image.tiling "
        "or smaller data.buckets take less"
    )


def test_a_host_that_has_less_than_what_waits_is_reported_of_before_anything_starts():
    need, half = EncodersNeed(EncoderBytes(GIB, GIB, GIB), EncoderBytes(9.5 * GIB, 0, 0)), run(DIT)
    whole = run(DIT, text={"pipeline": "pipeline", "dtype": "fp32"})
    printed = [
        batch_size._explain_waiting(need, *asked)
        for asked in ((half, 2, 20 * GIB), (half, 2, 16 * GIB), (whole, 1, GIB))
    ]
    short = "so that extraction may be killed"
    assert printed == [
        "19.00 GiB of weights of 2 workers wait in CPU memory",
        "19.00 GiB of weights of 2 workers have to wait in CPU memory, which is 16.00 GiB, "
        f"{short}; fewer data.workers take less",
        f"9.50 GiB of weights have to wait in CPU memory, which is 1.00 GiB, {short}; "
        "encoders.text.dtype: bf16 takes half",
    ]
    assert batch_size._explain_waiting(need, half, 1, GIB).endswith("; swap may hold them")


def test_videos_are_encoded_whole_and_weights_that_encode_nothing_are_counted():
    videos = EncodersNeed(EncoderBytes(0, GIB, GIB), EncoderBytes(0, 0, GIB), frames=81)
    assert [videos.images.taken(-(-size // 81)) for size in (1, 81, 82)] == [GIB, GIB, 2 * GIB]
    assert (videos.taken("in turns", 1), videos.taken("in turns", 128)) == (GIB, 127 * GIB)


@pytest.mark.parametrize("missing", ["BIGDIT_CUDA_PYTHON", "CC"])
def test_without_an_emulated_gpu_the_size_stays_and_a_line_says_why(device, missing, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(batch_size, "found_gpus", lambda: (device,))
    monkeypatch.setenv("BIGDIT_CACHE", str(tmp_path))
    monkeypatch.setenv(missing, "missing/program")
    assert with_batch_size(run(DIT), workers=1) == run(DIT)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("encoders.batch_size stays at its default: ")
    assert "missing/program" in line


def test_without_gpus_nothing_is_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # and without nvidia-smi
    assert with_batch_size(run(DIT), workers=1).encoders.batch_size == "auto"
