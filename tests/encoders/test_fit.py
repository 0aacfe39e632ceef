"""A store, the run's encoders and its plan: a mismatch is one line before the first step."""

import json
import re

import tiny_pipelines
import tiny_vaes
import torch
from commands import DIGITS
from plan_files import DIGITS_MODEL, plan_of, run_yaml, write
from stores import DIM, TOKENS, make_store
from transformers import T5Config, T5EncoderModel

from bigdit.catalog import model
from bigdit.config.plan_file import LargestMicroBatch
from bigdit.config.stages import load_run
from bigdit.encoders.fit import plan_misfits, run_misfits, smaller_than_planned, text_misfits
from bigdit.encoders.folder import weights_sample
from bigdit.encoders.load import load_image_codec, load_text_encoder
from bigdit.errors import EXIT_USER, guard
from bigdit.store.schema import StoreSchema
from bigdit.store.tensors import config_digest
from bigdit.train.__main__ import main

TEXT = load_run(DIGITS).encoders.text.config


def schema(codec=None, text=None, buckets=((8, 8), (8, 12), (12, 8))):
    """The digits' store, with `codec` and `text` as its encoders."""
    own = {"class_name": "T5EncoderModel", "config": config_digest(TEXT), "weights": "0", "dtype": "fp32"}
    return StoreSchema(
        codec=codec or {"name": "identity", "factor": 2, "color": "gray"},
        text_encoder={"stored": "bf16", "max_tokens": 32, "dim": 64} | (text or own),
        buckets=list(buckets),
        sources=[{"count": 4}],
        part_size=4,
    )


def misfits(*overrides, **made):
    return run_misfits(load_run(DIGITS, overrides), schema(**made))


def test_the_encoders_that_a_run_names_are_those_of_its_store(tmp_path):
    assert misfits() == []
    assert misfits("encoders.image.factor=4", "encoders.image.color=rgb", "data.buckets=[[16, 16]]") == [
        "it was encoded with factor 2, and encoders.image has factor 4",
        "it was encoded with color gray, and encoders.image has color rgb",
        "it was encoded with the buckets 8 × 8, 8 × 12, 12 × 8, and data.buckets is 16 × 16; set data.buckets to "
        "[[8, 8], [8, 12], [12, 8]], or set another data.features and extract again",
    ]
    begins = ["it was encoded without first frames, and encoders.first_frame is set"]
    assert misfits("encoders.first_frame={}") == begins
    (tmp_path / "config.json").write_text('{"latent_channels": 16}')
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    vae = f"encoders.image={{name: vae, class_name: AutoencoderKL, path: {tmp_path}, latents: sampled, seed: 3}}"
    assert misfits(vae) == ["it was encoded with name identity, and encoders.image has name vae"]
    made = {"name": "vae", "class_name": "AutoencoderKL", "latents": "sampled", "dtype": "bf16", "seed": 0}
    other, own = (config_digest({"latent_channels": channels}) for channels in (4, 16))
    assert misfits(vae, codec=made | {"config": other}) == [
        "it was encoded with dtype bf16, and encoders.image has dtype fp32",
        "it was encoded with seed 0, and encoders.image has seed 3",
        f"it was encoded with config {other}, and encoders.image has config {own}",
    ]
    assert misfits("encoders.text.config.d_ff=256", "encoders.text.stored=fp8", "encoders.text.dtype=bf16")[:2] == [
        "it was encoded with dtype fp32, and encoders.text has dtype bf16",
        "it was encoded with stored bf16, and encoders.text has stored fp8",
    ]
    (line,) = misfits("encoders.text.config.d_ff=256")
    assert line.startswith(f"it was encoded with config {config_digest(TEXT)}, and encoders.text has config ")
    (line,) = misfits(f"encoders.text={{pipeline: {tmp_path}}}")
    assert line == "it was encoded with class_name T5EncoderModel, and encoders.text has class_name FluxPipeline"
    assert misfits(f"encoders.text={{path: {tmp_path}/nowhere}}") == []  # nothing more is known without encoders


def test_other_weights_of_the_same_encoders_are_reported_apart_without_loading_them(tmp_path):
    for name in ("own", "other"):
        tiny_vaes.kl().save_pretrained(tmp_path / f"{name}/vae")
        tiny_pipelines.save(tmp_path / f"{name}/pipeline", "FluxPipeline", seed=len(name))

    def named(name, dtype="fp32"):
        vae = f"encoders.image={{name: vae, class_name: AutoencoderKL, path: {tmp_path}/{name}/vae}}"
        return vae, f"encoders.text={{pipeline: {tmp_path}/{name}/pipeline, dtype: {dtype}}}"

    encoders = load_run(DIGITS, named("own")).encoders
    made = {"codec": load_image_codec(encoders.image).identity, "text": load_text_encoder(encoders.text).identity}
    assert misfits(*named("own"), **made) == []
    image, first, second = misfits(*named("other"), **made)
    assert re.fullmatch(
        "it was encoded with weights_sample [0-9a-f]{32}, and encoders.image has weights_sample [0-9a-f]{32}", image
    )
    for part, line in (("text_encoder", first), ("text_encoder_2", second)):
        assert re.search(f", and encoders.text.pipeline, in {part}, has weights_sample [0-9a-f]{{32}}$", line)
    assert misfits(*named("nowhere"), **made) == []  # the machine that trains needs no encoders
    model = T5EncoderModel(T5Config(**TEXT, vocab_size=384))
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="100KB")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    one, several = (weights_sample(tmp_path / name, "fp32") for name in ("one", "several"))
    assert one == several != weights_sample(tmp_path / "rounded", "fp32")
    assert weights_sample(tmp_path / "one", "bf16") == weights_sample(tmp_path / "rounded", "bf16")
    (tmp_path / "one/model.safetensors").write_bytes(b"half")
    assert weights_sample(tmp_path / "one", "fp32") is None


def test_another_seed_of_a_drawn_encoder_is_another_encoder():
    encoder = load_text_encoder(load_run(DIGITS).encoders.text)
    assert misfits(text=encoder.identity) == []
    assert misfits("encoders.text.seed=7", text=encoder.identity) == [
        "it was encoded with seed 0, and encoders.text has seed 7"
    ]


def limit(height, width, recommended):
    return LargestMicroBatch(height=height, width=width, none=1, recommended=recommended, full=64)


def test_samples_larger_than_a_plans_are_refused_and_smaller_ones_reported_of():
    plan = plan_of()  # 4x4x6 of 8 × 12 pixels, 32 tokens, a micro-batch of 8
    assert plan_misfits(plan, [(4, 4, 4), (4, 4, 6), (4, 6, 4)], 32) == []
    assert plan_misfits(plan, [(4, 4, 6), (4, 16, 16)], 64) == [
        "its bucket 4x16x16 is 10.7 times the plan's largest (batch.latents 4x4x6, for 8 × 12); plan again "
        "for the size of this bucket",
        "its text has up to 64 tokens, and the plan is for 32 (batch.text)",
    ]
    assert plan_misfits(plan, [(4, 3, 4, 6)], 32)[0].startswith("its bucket 4x3x4x6 is 3.0 times the plan's largest")
    found = plan.model_copy(update={"micro_batch_sizes": (limit(16, 16, 8), limit(32, 32, 7))})
    assert plan_misfits(found, [(4, 8, 8)], 32) == []  # the plan found this size to fit its micro-batch
    assert len(plan_misfits(found, [(4, 16, 16)], 32)) == 1
    assert smaller_than_planned(plan, [(4, 4, 4), (4, 4, 6)]) == []
    assert smaller_than_planned(plan, [(4, 2, 2), (4, 2, 3)]) == [
        "the largest bucket of data.features is 4x2x3, and the plan is for 4x4x6 (batch.latents): steps take less "
        "memory and time than planned, and a larger micro-batch may fit"
    ]


def test_training_by_a_plan_refuses_a_store_of_larger_samples(tmp_path, capfd):
    make_store(tmp_path / "store")
    kwargs = DIGITS_MODEL["kwargs"] | {"caption_channels": DIM}
    plan = plan_of(kwargs=kwargs)
    write(plan, tmp_path / "plan")
    config = run_yaml(
        tmp_path,
        plan,
        data={"features": str(tmp_path / "store"), "buckets": [[8, 8]]},
        encoders={"text": {"config": {"d_model": DIM}, "max_tokens": TOKENS}},
    )
    arguments = ["--config", str(config), "--set", f"output={tmp_path}/run"]
    assert guard(lambda: main(arguments)) == EXIT_USER
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert printed == [
        f"error: data.features: {tmp_path}/store does not fit: its bucket {name} is {times} times the plan's "
        "largest (batch.latents 4x4x6, for 8 × 12); plan again for the size of this bucket"
        for name, times in (("4x4x8", "1.3"), ("4x6x6", "1.5"))
    ]
    make_store(tmp_path / "other", buckets=((8, 8), (8, 16)))
    arguments += ["--set", f"data.features={tmp_path}/other"]
    assert guard(lambda: main([*arguments, "--set", "plan=null"])) == EXIT_USER
    printed = capfd.readouterr().err
    assert "it was encoded with the buckets 8 × 8, 8 × 16, and data.buckets is 8 × 8; set data.buckets to " in printed


def _model(kwargs):
    document = json.dumps({"class_name": DIGITS_MODEL["class_name"], "kwargs": kwargs})
    return ["--set", f"model={document}", "--set", "optimizer={lr: 0.001}"]


_IMAGE = "HunyuanImageTransformer2DModel"


def test_further_texts_are_those_that_the_model_is_fed():
    spec = model("hunyuandit-v1.2").spec
    text, clip = (256, 2048), (77, 1024)
    assert text_misfits(spec, {"text": text, "clip_text": clip}, None) == []
    assert text_misfits(spec, {"text": (300, 4096)}, None) == [
        "4096 features, and the model's cross_attention_dim_t5 is 2048",
        "300 states, and the model's text_len_t5 is 256",
        "no clip_text, which HunyuanDiT2DModel needs",
    ]
    assert text_misfits(spec, {"text": text, "clip_text": (77, 768), "more": clip}, None) == [
        "more, which HunyuanDiT2DModel does not take",
        "clip_text of 77 × 768, and HunyuanDiT2DModel takes 77 × 1024",
    ]
    assert text_misfits(model("sana-1600m-1024").spec, {"text": (300, 2304), "clip_text": clip}, None) == [
        "clip_text, which SanaTransformer2DModel does not take"
    ]
    hidream, layers = model("hidream-i1").spec, (32 * 128, 4096)
    assert text_misfits(hidream, {"text": (128, 4096), "llama_text": layers}, 2048) == []
    assert text_misfits(hidream, {"text": (128, 768), "llama_text": (16 * 128, 4096)}, 768) == [
        "768 features, and the model's caption_channels is 4096",
        "768 pooled features, and the model's text_emb_dim is 2048",
        "llama_text of 2048 × 4096, and HiDreamImageTransformer2DModel takes 4096 × 4096",
    ]
    for unusual in (None, 7, [], ["a"]):  # the class says what is wrong
        odd = hidream.model_copy(update={"kwargs": hidream.kwargs | {"llama_layers": unusual}})
        assert text_misfits(odd, {"text": (128, 4096), "llama_text": (9, 9)}, 2048) == []
    glyphs, without = {"text": (1000, 3584), "glyph_text": (128, 1472)}, {"text_embed_dim": 3584}
    assert text_misfits(model("hunyuanimage-2.1").spec, glyphs, None) == []
    assert text_misfits(spec.model_copy(update={"class_name": _IMAGE, "kwargs": without}), glyphs, None) == [
        f"glyph_text, which {_IMAGE} does not take"
    ]
    unsaid = spec.model_copy(update={"kwargs": {}})  # the class's defaults are not checked
    assert text_misfits(unsaid, {"text": (3, 4), "clip_text": (5, 6)}, None) == []
