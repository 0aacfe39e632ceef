"""How many pictures a card encodes at once, as the rehearsed encode phase says."""

import pytest

from bigdit.catalog import gpu, resolve_gpu
from bigdit.config.load import parse_run
from bigdit.memory.process import cuda_context
from bigdit.rehearse import rehearse
from bigdit.search.needs import encode_batch
from bigdit.search.needs.encode_batch import encode_batch_size, with_batch_size


def run(model, buckets=((128, 128), (256, 256)), image=None, **encoders):
    vae = {"name": "vae", "class_name": "AutoencoderKL", "path": "vae"}
    return parse_run(
        {
            "model": model,
            "data": {"images": "pictures", "features": "features", "buckets": buckets},
            "encoders": {"image": image or vae, "text": {"pipeline": "pipeline", "dtype": "bf16"}, **encoders},
            "train": {"steps": 1, "micro_batch_size": 1},
            "output": "run",
        },
        "run.yaml",
    )


DIT = {"name": "dit-s-8"}  # its only encoder is a VAE, which makes the rehearsal short


@pytest.fixture(scope="module")
def card():
    return resolve_gpu("a40", "8192MiB")


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_chosen(card):
    chosen = encode_batch_size(run(DIT), card)
    room = card.usable_bytes * 0.9 - cuda_context(card.compute_capability, card.multiprocessors).high_bytes
    request = encode_batch._request(run(DIT), card)
    assert (request.batch.latents, request.encoders.vae.dtype) == ((4, 32, 32), "fp32")  # the largest bucket
    answers = rehearse(request.model_copy(update={"micro_batch_sizes": (chosen, 2 * chosen)})).sizes
    fits, does_not = (answer.ledger.phase("encode").peak_bytes for answer in answers)
    assert fits <= room < does_not
    assert encode_batch_size(run(DIT), card, processes=2) <= chosen / 2
    assert encode_batch_size(run(DIT), resolve_gpu("a40")) > chosen
    assert encode_batch_size(run(DIT), card, processes=16) == 1


def test_what_the_catalogue_does_not_know_has_no_answer(card):
    own = {"class_name": "SanaTransformer2DModel", "kwargs": {"num_layers": 1}}
    assert encode_batch_size(run(own), card) is None
    assert encode_batch_size(run({"name": "flux.2-dev"}), card) is None
    assert encode_batch_size(run(DIT, image={"name": "identity"}), card) is None


def test_a_run_takes_the_size_where_it_leaves_it_open_and_there_is_a_card(card, monkeypatch):
    monkeypatch.setattr(encode_batch, "found_gpus", lambda: (card, gpu("h200")))  # there is no driver to ask here
    chosen = with_batch_size(run(DIT), workers=2).encoders.batch_size
    assert chosen == encode_batch_size(run(DIT), card)  # one each, and the smaller card decides
    for settled in (run(DIT, batch_size=5), run(DIT, device="cpu"), run({"name": "flux.2-dev"})):
        assert with_batch_size(settled, workers=2) == settled


def test_without_cards_nothing_is_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # and without nvidia-smi
    assert with_batch_size(run(DIT), workers=1).encoders.batch_size == "auto"
