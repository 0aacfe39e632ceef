"""Encoders with weights, loaded from folders that they saved: VAEs of diffusers, T5 of transformers."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from tiny_vaes import STATISTICS, VAES, dc, flux2, kl, ltx
from transformers import T5Config, T5EncoderModel

from bigdit.config.data import TextEncoderConfig, VaeCodec
from bigdit.encoders.folder import weights_sample
from bigdit.encoders.latents import VIDEO_VAES
from bigdit.encoders.load import load_image_codec
from bigdit.encoders.t5 import T5TextEncoder
from bigdit.errors import UserError

TINY_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
CAPTIONS = ["a cat", "", "a much longer caption, of many more bytes", "ünïcödé", "a cat"]


def channels(values, z):
    return torch.as_tensor(values).view(1, -1, *[1] * (z.dim() - 2))


def normalised(vae, z, kind):
    """As the pipelines that encode images compute it."""
    if kind == "scale":
        return z * vae.config.scaling_factor
    if kind == "buffers":  # LTXPipeline._normalize_latents
        return (z - channels(vae.latents_mean, z)) * vae.config.scaling_factor / channels(vae.latents_std, z)
    if kind == "batch norm":  # Flux2Pipeline: patches as channels
        patches = torch.nn.functional.pixel_unshuffle(z, 2)
        deviation = torch.sqrt(channels(vae.bn.running_var, z) + vae.config.batch_norm_eps)
        return torch.nn.functional.pixel_shuffle((patches - channels(vae.bn.running_mean, z)) / deviation, 2)
    mean, deviation = channels(STATISTICS["latents_mean"], z), channels(STATISTICS["latents_std"], z)
    return (z - mean) * vae.config.get("scaling_factor", 1.0) / deviation


@pytest.fixture
def pixels():
    return torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_a_kl_vae_gives_the_scaled_and_shifted_mode(tmp_path, pixels):
    vae = kl(scaling_factor=0.3611, shift_factor=0.1159).eval()
    vae.save_pretrained(tmp_path)
    codec = load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path))
    with torch.no_grad():
        mode = vae.encode(pixels).latent_dist.mode()
        decoded = vae.decode(mode).sample
    latents = codec.encode(pixels)
    assert (codec.channels, codec.downsample, codec.color) == (4, 2, "rgb")
    assert latents.shape == (2, 4, 8, 12)
    assert torch.equal(latents, (mode - 0.1159) * 0.3611)
    # Undoing scale and shift rounds once more in fp32.
    assert torch.allclose(codec.decode(latents), decoded, atol=1e-5)
    assert (codec.identity["scaling_factor"], codec.identity["shift_factor"]) == (0.3611, 0.1159)


_LDM = {
    r"\.mid_block\.resnets\.0": ".mid.block_1",
    r"\.mid_block\.resnets\.1": ".mid.block_2",
    r"\.mid_block\.attentions\.0\.group_norm": ".mid.attn_1.norm",
    r"\.mid_block\.attentions\.0\.to_([qkv])": r".mid.attn_1.\1",
    r"\.mid_block\.attentions\.0\.to_out\.0": ".mid.attn_1.proj_out",
    r"down_blocks\.(\d)": r"down.\1",
    r"up_blocks\.0": "up.1*",  # they are numbered in reverse
    r"up_blocks\.1": "up.0",
    r"\*": "",
    r"\.resnets\.": ".block.",
    "conv_shortcut": "nin_shortcut",
    r"(down|up)samplers\.0": r"\1sample",
    "conv_norm_out": "norm_out",
}
"""From diffusers' names for AutoencoderKL to the original project's."""


def in_original_names(vae, prefix):
    found = {}
    for name, tensor in vae.state_dict().items():
        linear = ".attentions." in name and tensor.ndim == 2  # convolutions there
        for ours, theirs in _LDM.items():
            name = re.sub(ours, theirs, name)
        found[prefix + name] = tensor[..., None, None].clone() if linear else tensor
    return found


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
def test_a_vae_is_read_from_one_file_and_the_config_of_a_folder(tmp_path, pixels, prefix):
    vae = kl(scaling_factor=0.3611, shift_factor=0.1159).eval()
    vae.save_pretrained(tmp_path / "vae")
    file = tmp_path / "ae.safetensors"
    save_file(in_original_names(vae, prefix) | {"model.diffusion_model.x": torch.zeros(1)}, file)
    folder = load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path / "vae"))
    (tmp_path / "vae/diffusion_pytorch_model.safetensors").unlink()
    config = VaeCodec(class_name="AutoencoderKL", path=file, config=tmp_path / "vae")
    codec = load_image_codec(config)
    assert torch.equal(codec.encode(pixels), folder.encode(pixels))
    assert codec.identity["weights"] == folder.identity["weights"]
    assert codec.identity["weights_sample"] == weights_sample(file, "fp32")
    with pytest.raises(UserError, match=r"is one file; set encoders\.image\.config to the folder of the VAE's conf"):
        load_image_codec(VaeCodec(class_name="AutoencoderKL", path=file))
    save_file({"decoder.conv_in.weight": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=rf"encoders\.image\.path: {file} .*"):
        load_image_codec(config)
    file.write_bytes(b"no weights")
    with pytest.raises(UserError, match=rf"encoders\.image\.path: {file}: ae.safetensors is no safetensors file, or"):
        load_image_codec(config)


def test_a_deep_compression_vae_goes_through_the_same_path(tmp_path, pixels):
    vae = dc().eval()
    vae.save_pretrained(tmp_path)
    codec = load_image_codec(VaeCodec(class_name="AutoencoderDC", path=tmp_path))
    latents = codec.encode(pixels)
    assert (codec.channels, codec.downsample) == (8, 4)
    assert latents.shape == (2, 8, 4, 6)
    with torch.no_grad():
        assert torch.equal(latents, vae.encode(pixels).latent * 0.41407)
    assert codec.decode(latents).shape == pixels.shape


@pytest.mark.parametrize("class_name", sorted(VAES))
def test_every_vae_gives_the_latents_that_its_transformers_are_fed(class_name, tmp_path, pixels):
    make, shape, kind = VAES[class_name]
    torch.manual_seed(0)
    vae = make().eval()
    vae.save_pretrained(tmp_path)
    codec = load_image_codec(VaeCodec(class_name=class_name, path=tmp_path))
    latents = codec.encode(pixels)
    assert codec.latent_shape((16, 24)) == shape
    assert (codec.channels, codec.downsample) == (4, 16 // shape[-2])
    assert latents.shape == (2, *shape)
    video = pixels.unsqueeze(2) if class_name in VIDEO_VAES else pixels
    with torch.no_grad():
        z = vae.encode(video).latent_dist.mode()
        decoded = vae.decode(z).sample
    assert torch.allclose(latents, normalised(vae, z, kind).reshape(latents.shape), atol=1e-6)
    assert torch.allclose(codec.decode(latents), decoded.reshape(pixels.shape), atol=1e-4)
    assert codec.identity == json.loads(json.dumps(codec.identity))


@pytest.mark.parametrize("class_name", sorted(VAES))
def test_moments_are_normalised_with_their_latents(class_name, tmp_path, pixels):
    make, shape, kind = VAES[class_name]
    torch.manual_seed(0)
    vae = make().eval()
    vae.save_pretrained(tmp_path)
    moments = load_image_codec(VaeCodec(class_name=class_name, path=tmp_path, latents="moments")).encode(pixels)
    assert moments.shape == (2, 2, *shape)
    video = pixels.unsqueeze(2) if class_name in VIDEO_VAES else pixels
    with torch.no_grad():
        distribution = vae.encode(video).latent_dist
    draw = distribution.mean + 0.7 * distribution.std
    mean, deviation = moments.unbind(1)
    assert torch.allclose(mean + 0.7 * deviation, normalised(vae, draw, kind).reshape(mean.shape), atol=1e-5)
    assert (deviation > 0).all()


def test_samples_are_drawn_by_the_images_place_and_in_no_other_order(tmp_path, pixels):
    kl(scaling_factor=0.5).save_pretrained(tmp_path)

    def load(latents, seed=0):
        return load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path, latents=latents, seed=seed))

    drawn = load("sampled").encode(pixels, [7, 3])
    mean, deviation = load("moments").encode(pixels).unbind(1)
    noise = (drawn - mean) / deviation
    assert abs(noise.mean()) < 0.1
    assert abs(noise.std() - 1) < 0.1
    assert not torch.allclose(noise[0], noise[1], atol=0.1)
    # The place decides, not the batch: convolutions of other batches differ in the last bits.
    assert torch.allclose(load("sampled").encode(pixels.flip(0), [3, 7]).flip(0), drawn, atol=1e-6)
    assert torch.equal(load("sampled").encode(pixels, [7, 3]), drawn)
    assert not torch.allclose(load("sampled", seed=1).encode(pixels, [7, 3]), drawn, atol=0.1)
    with pytest.raises(ValueError, match="sampling latents of 2 images needs as many indices; got 0"):
        load("sampled").encode(pixels)
    assert load("sampled").identity["seed"] == 0
    assert load("sampled").identity != load("moments").identity != load("mode").identity


def test_images_that_memory_does_not_do_for_at_once_are_encoded_in_smaller_batches(tmp_path, monkeypatch):
    kl().save_pretrained(tmp_path)
    config = VaeCodec(class_name="AutoencoderKL", path=tmp_path, latents="sampled")
    pixels = torch.rand(9, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    whole = load_image_codec(config, batch_size=9).encode(pixels, range(9))
    codec = load_image_codec(config, batch_size=9)
    batches, encode = [], codec._vae.encode

    def in_little_memory(some):
        batches.append(len(some))
        if len(some) > 2:
            torch.empty(2**60, dtype=torch.uint8)  # a real failure of torch's allocator
        return encode(some)

    monkeypatch.setattr(codec._vae, "encode", in_little_memory)
    assert torch.allclose(codec.encode(pixels, range(9)), whole, atol=1e-6)
    assert batches == [9, 4, 2, 2, 2, 2, 1]


def test_an_ltx_decoder_that_asks_for_noise_is_reported_that_there_is_none(tmp_path, pixels):
    ltx(timestep_conditioning=True).save_pretrained(tmp_path)
    codec = load_image_codec(VaeCodec(class_name="AutoencoderKLLTXVideo", path=tmp_path))
    assert codec.decode(codec.encode(pixels)).shape == pixels.shape


def test_vaes_compute_in_the_dtype_that_is_asked_for(tmp_path, pixels):
    kl().save_pretrained(tmp_path)
    exact, rounded = (
        load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path, dtype=dtype)).encode(pixels)
        for dtype in ("fp32", "bf16")
    )
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert 1e-4 < (rounded - exact).abs().mean() / exact.abs().mean() < 0.1


def test_what_a_vae_cannot_give_is_refused(tmp_path):
    dc().save_pretrained(tmp_path / "dc")
    with pytest.raises(UserError, match=r"latents is moments, and AutoencoderDC gives no distribution"):
        load_image_codec(VaeCodec(class_name="AutoencoderDC", path=tmp_path / "dc", latents="moments"))
    flux2().save_pretrained(tmp_path / "flux2")
    codec = load_image_codec(VaeCodec(class_name="AutoencoderKLFlux2", path=tmp_path / "flux2"))
    with pytest.raises(UserError, match=r"data\.buckets: 16 × 22 does not divide by 4"):
        codec.latent_shape((16, 22))


def test_the_identity_of_a_vae_is_its_weights_not_its_place(tmp_path):
    vae = kl()
    for name in ("here", "there"):
        vae.save_pretrained(tmp_path / name)
    kl().save_pretrained(tmp_path / "other")
    here, there, other = (
        load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path / name)).identity
        for name in ("here", "there", "other")
    )
    assert here == there
    assert {key for key in here if here[key] != other[key]} == {"weights", "weights_sample"}


def test_vaes_that_cannot_be_used_are_named(tmp_path):
    def load(folder, class_name="AutoencoderKL"):
        load_image_codec(VaeCodec(class_name=class_name, path=folder))

    with pytest.raises(UserError, match=r"encoders\.image\.path: .*nowhere/config\.json cannot be read"):
        load(tmp_path / "nowhere")
    kl().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"holds a AutoencoderKL, and encoders\.image\.class_name is AutoencoderDC"):
        load(tmp_path, "AutoencoderDC")
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"encoders\.image\.path: .* cannot be loaded"):
        load(tmp_path)


def test_missing_weights_are_not_drawn_at_random(tmp_path):
    from safetensors.torch import load_file, save_file

    kl().save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    del state["encoder.conv_in.bias"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"has 1 missing weight, the first encoder\.conv_in\.bias"):
        load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path))


def test_padding_does_not_reach_the_encoding():
    encoder = T5TextEncoder(TextEncoderConfig(config=TINY_T5, max_tokens=24))
    together = encoder.encode(CAPTIONS)
    assert [text.states.shape for text in together] == [(6, 32), (1, 32), (24, 32), (12, 32), (6, 32)]  # bytes and </s>
    for caption, text in zip(CAPTIONS, together, strict=True):
        # Masked positions have weight zero. fp32 sums of another length may differ in the last bits.
        assert torch.allclose(encoder.encode([caption])[0].states, text.states, atol=1e-5)
    assert not torch.allclose(together[0].states[:1], together[3].states[:1], atol=1e-2)


def test_a_seed_gives_the_same_encoder_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (T5TextEncoder(TextEncoderConfig(config=TINY_T5, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.encode(["a"])[0].states, again.encode(["a"])[0].states)
    assert first.identity == again.identity
    assert {key for key in first.identity if first.identity[key] != other.identity[key]} == {"weights", "seed"}


def test_a_text_encoder_from_a_folder_is_the_one_that_was_saved(tmp_path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    model = T5EncoderModel(T5Config(**TINY_T5, vocab_size=384)).eval()
    model.save_pretrained(tmp_path)
    encoder = T5TextEncoder(TextEncoderConfig(path=tmp_path, max_tokens=16))
    tokens = ByT5Tokenizer()("a cat", return_tensors="pt")
    with torch.no_grad():
        expected = model(**tokens).last_hidden_state[0]
    assert torch.allclose(encoder.encode(["a cat"])[0].states, expected, atol=1e-6)
    assert (encoder.dim, encoder.identity["class_name"]) == (32, "T5EncoderModel")


def test_text_encoders_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(UserError, match=r"encoders\.text\.config\.d_modle: .*did you mean d_model"):
        T5TextEncoder(TextEncoderConfig(config={"d_modle": 32}))
    with pytest.raises(UserError, match=r"encoders\.text\.config\.vocab_size: T5Config's encoder has no such key"):
        T5TextEncoder(TextEncoderConfig(config={"vocab_size": 32}))
    with pytest.raises(UserError, match=r"encoders\.text\.path: .*config\.json cannot be read \(No such file"):
        T5TextEncoder(TextEncoderConfig(path=tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="holds a bert, expected a t5"):
        T5TextEncoder(TextEncoderConfig(path=tmp_path))
    T5EncoderModel(T5Config(**TINY_T5, vocab_size=384)).config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"encoders\.text\.path: .*: tokenizer\.json is missing; fetch the model by"):
        T5TextEncoder(TextEncoderConfig(path=tmp_path))
