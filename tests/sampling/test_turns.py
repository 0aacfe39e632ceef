"""Encoders, model and codec take turns on the device, and generate the same as side by side."""

import weakref
from dataclasses import replace

import pytest
import torch

from bigdit import checkpoint, models, objectives
from bigdit.catalog.families import objective_of
from bigdit.config.load import parse_run
from bigdit.encoders.load import load_image_codec, load_text_encoder
from bigdit.encoders.protocol import to_bytes
from bigdit.loader.buffers import padded
from bigdit.sampling import Sampler, SamplingOptions, conditions
from bigdit.sampling.conditions import Given
from bigdit.strategy import ModelSpec

CPU = torch.device("cpu")
CAPTIONS = ["a handwritten one", "a handwritten two", "a handwritten three of more bytes"]
OPTIONS = SamplingOptions(8, 8, steps=2, guidance=2.0, seed=3)


def computed_in(precision, trained):
    """The checkpoint as if its run had used this precision: all have fp32 masters."""
    found, _ = checkpoint.latest(trained)
    return replace(found, state=found.state | {"strategy": found.state["strategy"] | {"precision": precision}})


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_what_encoded_is_gone_before_the_model_comes_and_the_model_before_anything_is_decoded(
    precision, dtype, trained, monkeypatch
):
    sampler, held = Sampler(computed_in(precision, trained), CPU), {}

    def load(config, device, **more):
        encoder = load_text_encoder(config, device, **more)
        held["encoder"] = weakref.ref(*encoder.modules())
        return encoder

    def model():
        assert held["encoder"]() is None
        found = Sampler.model(sampler)
        held["model"] = weakref.ref(found)
        assert {each.dtype for each in found.parameters()} == {dtype}
        return found

    monkeypatch.setattr(conditions, "load_text_encoder", load)
    monkeypatch.setattr(sampler, "model", model)
    latents = sampler.generate(CAPTIONS, OPTIONS)
    first = next(latents)
    assert held["model"]() is not None
    images = sampler.decode([first, *latents], OPTIONS)
    next(images)
    assert held["model"]() is None
    assert len(list(images)) == len(CAPTIONS) - 1


@torch.no_grad()
def test_images_in_fp32_are_those_of_a_loop_with_all_of_it_side_by_side(trained):
    found = computed_in("fp32", trained)
    run, spec = parse_run(found.state["run"], ""), ModelSpec.model_validate(found.state["model"])
    encoder, codec = load_text_encoder(run.encoders.text), load_image_codec(run.encoders.image)
    family, objective = models.family(spec.class_name), objective_of(spec, run.objective)
    model = models.load(spec, trained / "exports/step-00000008/transformer", dtype=torch.float32).eval()
    texts = [text.to(CPU, torch.float32) for text in [*encoder.encode(CAPTIONS), *[encoder.null()] * len(CAPTIONS)]]
    given = Given(*padded(texts, {"text": encoder.max_tokens}))

    def predict(latents, t):
        own, away = family.predict(model, torch.cat([latents, latents]), t.repeat(2), given).chunk(2)
        return away + OPTIONS.guidance * (own - away)

    noise = objectives.draw_noise(torch.empty(len(CAPTIONS), *codec.latent_shape((8, 8))), [3, 4, 5])
    tokens = family.tokens(model, noise.shape)
    wanted = to_bytes(codec.decode(objectives.sample(objective, "euler", predict, noise, OPTIONS.steps, tokens)))
    drawn = torch.stack(list(Sampler(found, CPU).sample(CAPTIONS, OPTIONS)))
    assert torch.equal(drawn, wanted)
    in_bf16 = torch.stack(list(Sampler(computed_in("bf16", trained), CPU).sample(CAPTIONS, OPTIONS)))
    assert not torch.equal(in_bf16, wanted)


def test_images_come_while_others_are_still_to_be_drawn(trained, capsys):
    sampler = Sampler(computed_in("fp32", trained), CPU)
    whole = list(sampler.sample(CAPTIONS, OPTIONS))
    drawn = []

    def shown(what, found, total):
        assert (what, total) == ("generate", len(CAPTIONS))
        for each in found:
            drawn.append(each)
            yield each

    images = sampler.sample(CAPTIONS, replace(OPTIONS, micro_batch_size=1), shown=shown)
    for number, image in enumerate(images, 1):
        assert len(drawn) == number
        assert (image.int() - whole[number - 1].int()).abs().max() <= 1  # another batch size takes other kernels
    assert (len(drawn), capsys.readouterr().err) == (len(CAPTIONS), "")


def test_without_room_to_decode_next_to_the_model_they_come_when_all_are_drawn(trained, monkeypatch, capsys):
    sampler, printed = Sampler(computed_in("fp32", trained), CPU), []
    whole = list(sampler.sample(CAPTIONS, OPTIONS))
    model, decode = weakref.ref(kept := sampler.model()), sampler._codec.decode

    def short(latents):
        printed.append(model() is not None)
        if model() is not None and len(printed) > 1:  # the first one has room
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return decode(latents)

    models = [kept]
    del kept
    monkeypatch.setattr(sampler, "model", models.pop)
    monkeypatch.setattr(sampler._codec, "decode", short)
    waited = list(sampler.sample(CAPTIONS, OPTIONS))
    assert printed == [True, True, False, False]
    assert all(map(torch.equal, waited, whole))
    note = "note: --size 8x8: no room to decode next to the model; images come when all are generated"
    assert capsys.readouterr().err.splitlines() == [note]
