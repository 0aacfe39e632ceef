"""Encoders that stay on the GPU: their memory, and the catalogue's encoders at full size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpus import A40, answers
from tiny_models import SANA, SHAPE

from bigdit.catalog import batch_shape, model
from bigdit.catalog.encoders import OnlineEncoders, TextEncoderSpec, VaeSpec, online_encoders
from bigdit.encoders.frozen import FrozenEncoders
from bigdit.errors import UserError
from bigdit.profile.attempt import IMAGES as OF_IMAGES
from bigdit.profile.attempt import TEXTS, StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.profile.run_attempt import weights_of
from bigdit.profile.steps import raw_batch
from bigdit.speed.work import load_of
from bigdit.strategy import BatchShape, Strategy
from bigdit.train.step import encode

MICRO_BATCH_SIZE = 3
KL = VaeSpec(
    class_name="AutoencoderKL",
    kwargs={
        "block_out_channels": [8, 16],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    },
)
DC = VaeSpec(
    class_name="AutoencoderDC",
    kwargs={
        "latent_channels": 4,
        "encoder_block_out_channels": [8, 32],
        "decoder_block_out_channels": [8, 32],
        "encoder_layers_per_block": [1, 1],
        "decoder_layers_per_block": [1, 1],
        "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
        "decoder_block_types": ["ResBlock", "EfficientViTBlock"],
        "encoder_qkv_multiscales": [[], [5]],
        "decoder_qkv_multiscales": [[], [5]],
        "scaling_factor": 0.41407,
    },
    dtype="bf16",
)
T5 = TextEncoderSpec(
    class_name="T5EncoderModel",
    config_class="T5Config",
    kwargs={"vocab_size": 20, "d_model": 12, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 3},
    tokens=6,
)
GEMMA = TextEncoderSpec(
    class_name="Gemma2Model",
    config_class="Gemma2Config",
    kwargs={
        "vocab_size": 20,
        "hidden_size": 12,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    tokens=8,
    layers=(-2,),
    skip=2,
)
CLIP = TextEncoderSpec(
    class_name="CLIPTextModelWithProjection",
    config_class="CLIPTextConfig",
    kwargs={
        "vocab_size": 20,
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 5,
        "max_position_embeddings": 8,
    },
    tokens=2,
    gives="both",
    layers=(-2,),
)


def _encoders(vae: VaeSpec, text: TextEncoderSpec) -> OnlineEncoders:
    return OnlineEncoders(pixels=(3, 16, 16), vae=vae, text=(text,))


def _strategy(precision: str, chunk: int | None, **changes: object) -> Strategy:
    return Strategy(
        micro_batch_size=MICRO_BATCH_SIZE,
        grad_accum_steps=2,
        precision=precision,
        features="online",
        encode_chunk=chunk,
        **changes,
    )


@pytest.fixture(scope="module")
def gpus(own_cache: None) -> Iterator[EmulatedGpus]:
    with EmulatedGpus(A40, 1) as found:
        yield found


def _request(vae: VaeSpec, text: TextEncoderSpec, precision: str, chunk: int | None) -> StepRequest:
    strategy = _strategy(precision, chunk)
    return StepRequest(model=SANA, batch=SHAPE, strategy=strategy, encoders=_encoders(vae, text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vae", "text", "precision"), [(KL, T5, "bf16"), (DC, GEMMA, "fp32")], ids=["KL, T5", "DC, Gemma 2"]
)
def test_encoders_stay_on_the_gpu_and_chunks_lower_the_peak_of_encoding_alone(
    gpus: EmulatedGpus, vae: VaeSpec, text: TextEncoderSpec, precision: str
) -> None:
    whole, chunked = (
        {phase.phase: phase for phase in gpus.profile(_request(vae, text, precision, chunk)).ledger.phases}
        for chunk in (None, 1)
    )
    assert {*whole} == {"init", "encode", "forward", "backward", "step"}
    assert "saved activation" not in whole["encode"].at_peak
    assert chunked["encode"].peak_bytes < whole["encode"].peak_bytes
    assert chunked["step"] == whole["step"]
    weights = FrozenEncoders(_encoders(vae, text)).tensors()
    assert whole["step"].at_peak["encoder"] == sum(_block(tensor) for tensor in weights)


@pytest.mark.slow
def test_encoders_alone_take_turns_on_the_gpu(gpus: EmulatedGpus) -> None:
    """In each phase its own weights are there, and no others."""
    request = _request(KL, T5, "bf16", None).model_copy(update={"part": "encoders"})
    attempt, frozen = gpus.attempt(request), FrozenEncoders(_encoders(KL, T5))
    for phase, modules in ((OF_IMAGES, frozen.of_images()), (TEXTS, frozen.of_texts())):
        weights = sum(_block(tensor) for module in modules for tensor in module.parameters())
        assert attempt.phases[weights_of(phase)].end_bytes == weights
        assert attempt.phases[phase].peak_bytes > weights
        assert load_of(attempt.work, (phase,), phase).at("device").flops > 0


def _block(tensor: torch.Tensor) -> int:
    """The bytes that the allocator gives for it."""
    return -(-tensor.nbytes // 512) * 512


def test_chunks_change_no_feature() -> None:
    """Up to rounding, latents, text and mask do not depend on how many samples are encoded at once."""
    torch.manual_seed(0)
    encoders = OnlineEncoders(pixels=(3, 16, 16), vae=KL, text=(T5.model_copy(update={"dtype": "fp32"}),))
    frozen = FrozenEncoders(encoders)
    raw = raw_batch(encoders, SHAPE, _strategy("fp32", None))
    raw.pixels.random_(0, 256)
    raw.tokens[0][0].random_(0, 20)
    raw.tokens[0][1][:, -1] = 0
    whole, chunked = (encode(frozen, chunk, raw, torch.float32) for chunk in (None, 2))
    assert whole.latents.shape == (MICRO_BATCH_SIZE, *SHAPE.latents)
    assert whole.text_embeds is not None
    assert chunked.text_embeds is not None
    assert whole.text_embeds.shape == (MICRO_BATCH_SIZE, *SHAPE.text)
    assert torch.allclose(whole.latents, chunked.latents, atol=1e-5)
    assert torch.allclose(whole.text_embeds, chunked.text_embeds, atol=1e-5)
    assert torch.equal(whole.text_mask, chunked.text_mask)
    assert whole.text_mask.sum() == MICRO_BATCH_SIZE * (T5.tokens - 1)
    assert (whole.seeds, whole.latents.requires_grad) == (raw.seeds, False)


def test_latents_are_those_of_the_extracting_codec(tmp_path: Path) -> None:
    from bigdit.config.data import VaeCodec
    from bigdit.encoders.load import load_image_codec
    from bigdit.encoders.protocol import to_unit_range

    frozen = FrozenEncoders(OnlineEncoders(pixels=(3, 16, 16), vae=KL))
    frozen._vae.save_pretrained(tmp_path)
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    codec = load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path))
    assert torch.equal(frozen.encode(pixels, []).latents, codec.encode(to_unit_range(pixels)))


def test_several_text_encoders_make_one_sequence_and_one_pooled_vector() -> None:
    """As in Stable Diffusion 3: two CLIPs side by side, padded to T5's width, then T5. The pooled vectors are
    joined."""
    encoders = OnlineEncoders(pixels=(3, 16, 16), vae=KL, text=(CLIP, CLIP, T5))
    assert encoders.extras == ("pooled_text",)
    raw = raw_batch(encoders, SHAPE, _strategy("bf16", None))
    for _, mask in raw.tokens:
        mask[:, -1] = 0
    batch = encode(FrozenEncoders(encoders), None, raw, torch.bfloat16)
    assert batch.text_embeds is not None
    assert batch.text_mask is not None
    assert batch.text_embeds.shape == (MICRO_BATCH_SIZE, 2 + 6, 12)
    assert batch.text_embeds[:, :2, 8:].eq(0).all()
    assert batch.text_mask[0].tolist() == [1, 0, 1, 1, 1, 1, 1, 0]
    assert batch.extras["pooled_text"].shape == (MICRO_BATCH_SIZE, 10)


IMAGES = (
    "dit-xl-2",
    "pixart-sigma-xl-2-512",
    "sana-1600m-1024",
    "sd3-medium",
    "flux.1-dev",
    "chroma1-hd",
    "flux.2-dev",
    "flux.2-klein-4b",
    "lumina-image-2.0",
    "lumina-next-sft",
    "prx-1.2b",
    "krea2",
    "qwen-image",
    "z-image",
    "hunyuandit-v1.2",
    "hunyuanimage-2.1",
    "hidream-i1",
    "ovis-image-7b",
    "longcat-image",
    "cogview3-plus-3b",
    "bria-3.2",
)
VIDEOS = {
    "cogvideox-2b": (16, 5, 30, 45),
    "wan2.1-t2v-1.3b": (16, 5, 30, 52),
    "hunyuanvideo-t2v": (16, 5, 30, 40),
    "ltx-video-0.9": (128, 3, 16, 24),
    "sana-video-2b-480p": (16, 5, 30, 52),
    "hunyuanvideo-1.5-480p": (32, 2, 15, 20),
    "mochi-1-preview": (12, 3, 30, 26),
    "kandinsky-5-t2v-lite": (16, 3, 32, 48),
}
_ENCODE_ALL = """
import gc, json, sys, torch
from bigdit import libraries
libraries.prepare()
from bigdit.catalog.encoders import OnlineEncoders
from bigdit.encoders.frozen import FrozenEncoders
from bigdit.profile.steps import raw_batch
from bigdit.profile.unwritten import unwritten_weights
from bigdit.strategy import BatchShape, Strategy
from bigdit.speed.work import load_of
from bigdit.train.step import encode
answers, device = {{}}, torch.device("cuda")
for name, (encoders, shape) in json.load(open({asked!r})).items():
    encoders, shape = OnlineEncoders.model_validate(encoders), BatchShape.model_validate(shape)
    raw = raw_batch(encoders, shape, Strategy(features="online", micro_batch_size=2))
    with unwritten_weights():
        frozen = FrozenEncoders(encoders)
    nbytes = sum(tensor.nbytes for tensor in frozen.tensors())
    frozen.to(device)
    batch = encode(frozen, None, raw.to(device, torch.bfloat16), torch.bfloat16)
    text = batch.text_embeds
    answers[name] = {{
        "latents": list(batch.latents.shape),
        "text": None if text is None else list(text.shape),
        "mask": None if text is None else list(batch.text_mask.shape),
        "extras": {{key: list(value.shape) for key, value in batch.extras.items()}},
        "bytes": nbytes,
    }}
    del frozen, batch, text, raw
    gc.collect()
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_the_catalogue_s_encoders_make_what_its_models_are_fed(tmp_path: Path) -> None:
    """The real VAEs and text encoders at full size make the shapes of a cached batch."""
    text = {name: model(name).text for name in VIDEOS}
    shapes = {name: batch_shape(model(name), model(name).resolution) for name in IMAGES} | {
        name: BatchShape(latents=latents, text=text[name] and (text[name].tokens, text[name].dim))
        for name, latents in VIDEOS.items()
    }
    encoders = {name: online_encoders(model(name), shape) for name, shape in shapes.items()}
    asked = tmp_path / "asked.json"
    asked.write_text(
        json.dumps({name: (encoders[name].model_dump(), shape.model_dump()) for name, shape in shapes.items()})
    )
    answered = answers("b200", _ENCODE_ALL.format(asked=str(asked)))
    for name, shape in shapes.items():
        found = answered[name]
        assert found["latents"] == [2, *shape.latents], name
        assert found["text"] == (shape.text and [2, *shape.text]), name
        assert found["mask"] == (shape.text and [2, shape.text[0]]), name
    assert answered["sd3-medium"]["extras"] == {"pooled_text": [2, 2048]}
    assert answered["flux.1-dev"]["extras"] == {"pooled_text": [2, 768]}
    assert answered["hunyuanvideo-t2v"]["extras"] == {"pooled_text": [2, 768]}
    clip, glyphs, llama = [2, 77, 1024], [2, 128, 1472], [2, 32 * 128, 4096]
    assert answered["hunyuandit-v1.2"]["extras"] == {"clip_text": clip, "clip_text_mask": clip[:2]}
    assert answered["hunyuanimage-2.1"]["extras"] == {"glyph_text": glyphs, "glyph_text_mask": glyphs[:2]}
    two_clips = {"pooled_text": [2, 2048]}
    assert answered["hidream-i1"]["extras"] == {"llama_text": llama, "llama_text_mask": llama[:2], **two_clips}
    # Verified counts of parameters: Gemma 2 and T5-XXL in bf16, the VAEs in fp32 and bf16; Gemma has buffers of 514 B.
    assert answered["sana-1600m-1024"]["bytes"] == 2614341888 * 2 + 312250275 * 4 + 514
    assert answered["chroma1-hd"]["bytes"] == (4762310656 + 83819683) * 2


def test_what_has_no_recipe_is_named() -> None:
    flux2 = model("flux.2-klein-9b")
    with pytest.raises(UserError, match=r"^flux\.2-klein-9b cannot be planned with features online: .* no recipe"):
        online_encoders(flux2, batch_shape(flux2))
    wan = model("wan2.2-ti2v-5b")
    with pytest.raises(UserError, match=r"has no constructor arguments of its wan2\.2-vae; use features cached"):
        online_encoders(wan, BatchShape(latents=(48, 3, 8, 8), text=(512, 4096)))
