"""Encoders with weights: VAEs of diffusers, T5 of transformers, loaded from folders that they saved."""

import diffusers
import pytest
import torch
from transformers import T5Config, T5EncoderModel

from bigdit.config.run import TextEncoderConfig, VaeCodec
from bigdit.errors import UserError
from bigdit.features.codecs import load_image_codec
from bigdit.features.encoders.text import T5TextEncoder

TINY_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
CAPTIONS = ["a cat", "", "a much longer caption, of many more bytes", "ünïcödé", "a cat"]


def kl(**config):
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
        **config,
    )


def dc():
    return diffusers.AutoencoderDC(
        latent_channels=8,
        encoder_block_out_channels=(8, 16, 16),
        decoder_block_out_channels=(8, 16, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.41407,
    )


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
    assert {key for key in here if here[key] != other[key]} == {"weights"}


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
    kl(latents_mean=[0.0] * 4, latents_std=[1.0] * 4).save_pretrained(tmp_path / "normed")
    with pytest.raises(UserError, match="normalises by latents_mean, which bigdit does not apply"):
        load(tmp_path / "normed")


def test_missing_weights_are_not_drawn_at_random(tmp_path):
    from safetensors.torch import load_file, save_file

    kl().save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    del state["encoder.conv_in.bias"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"has 1 missing weights, the first encoder\.conv_in\.bias"):
        load_image_codec(VaeCodec(class_name="AutoencoderKL", path=tmp_path))


def test_padding_does_not_reach_the_encoding():
    encoder = T5TextEncoder(TextEncoderConfig(config=TINY_T5, max_tokens=24))
    together = encoder.encode(CAPTIONS)
    assert [text.states.shape for text in together] == [(6, 32), (1, 32), (24, 32), (12, 32), (6, 32)]  # bytes and </s>
    for caption, text in zip(CAPTIONS, together, strict=True):
        # Masked positions have weight zero; fp32 sums of another length may differ in the last bits.
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
    assert {key for key in first.identity if first.identity[key] != other.identity[key]} == {"weights"}


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
    with pytest.raises(UserError, match="holds a bert, and a t5 was expected"):
        T5TextEncoder(TextEncoderConfig(path=tmp_path))
    T5EncoderModel(T5Config(**TINY_T5, vocab_size=384)).config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"encoders\.text\.path: .* cannot be loaded"):
        T5TextEncoder(TextEncoderConfig(path=tmp_path))
