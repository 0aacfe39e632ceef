"""diffusers' VAEs with a few narrow blocks and random weights."""

import diffusers
import torch


def kl(**config):
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
        **config,
    )


def pyramid(blocks, **config):
    """The arguments of a small VAE of two levels. `blocks` names its blocks, with {} for Down and Up."""
    return {
        "block_out_channels": (8, 16),
        "down_block_types": (blocks.format("Down"),) * 2,
        "up_block_types": (blocks.format("Up"),) * 2,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        **config,
    }


STATISTICS = {"latents_mean": [0.1, -0.2, 0.3, -0.4], "latents_std": [1.5, 2.0, 2.5, 3.0]}


def flux2():
    vae = diffusers.AutoencoderKLFlux2(**pyramid("DownEncoderBlock2D", up_block_types=("UpDecoderBlock2D",) * 2))
    vae.bn.running_mean.uniform_(-1, 1)
    vae.bn.running_var.uniform_(0.5, 2)
    return vae


def wan(halved=False):
    """With `halved` it halves the frames, too."""
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[halved],
        scale_factor_spatial=2,
        **STATISTICS,
    )


def wan_22():
    """Like the VAE of Wan 2.2 5B: it takes patches, and its blocks have residuals."""
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[True],
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_temporal=2,
        scale_factor_spatial=4,
        **STATISTICS,
    )


def qwen_image():
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False], **STATISTICS
    )


def qwen_image_of_8():
    """A latent stands for 8 × 8 pixels, as in the published one."""
    halved = [False, True, True]
    return diffusers.AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=halved, **STATISTICS
    )


def ltx(levels=2, patch=2, **config):
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8,) * levels,
        decoder_block_out_channels=(8,) * levels,
        down_block_types=("LTXVideoDownBlock3D",) * levels,
        layers_per_block=(1,) * (levels + 1),
        decoder_layers_per_block=(1,) * (levels + 1),
        spatio_temporal_scaling=(True,) * (levels - 1) + (False,),
        decoder_spatio_temporal_scaling=(True,) * (levels - 1) + (False,),
        decoder_inject_noise=(False,) * (levels + 1),
        downsample_type=("conv",) * levels,
        upsample_residual=(False,) * levels,
        upsample_factor=(1,) * levels,
        patch_size=patch,
        **config,
    )
    vae.latents_mean.uniform_(-1, 1)
    vae.latents_std.uniform_(0.5, 2)
    return vae


def hunyuan(levels=2):
    """Halves the frames twice, for which it needs three levels."""
    config = pyramid(
        "HunyuanVideo{}Block3D",
        block_out_channels=(8,) * (levels - 1) + (16,),
        down_block_types=("HunyuanVideoDownBlock3D",) * levels,
        up_block_types=("HunyuanVideoUpBlock3D",) * levels,
    )
    return diffusers.AutoencoderKLHunyuanVideo(**config, spatial_compression_ratio=2 ** (levels - 1))


def hunyuan_15():
    """Halves the frames twice. Its attention takes one sample at a time."""
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    vae.enable_slicing()
    return vae


def hunyuan_image():
    """Its norms have 32 groups."""
    return diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=16,
        scaling_factor=0.75289,
    )


def cogvideox(frames=1, **config):
    return diffusers.AutoencoderKLCogVideoX(
        **pyramid("CogVideoX{}Block3D"), temporal_compression_ratio=frames, **config
    )


def mochi():
    """Its norms have 32 groups. It halves the frames once."""
    return diffusers.AutoencoderKLMochi(
        latent_channels=4,
        encoder_block_out_channels=(32, 32),
        decoder_block_out_channels=(32, 32),
        layers_per_block=(1, 1, 1),
        temporal_expansions=(2,),
        spatial_expansions=(2,),
        add_attention_block=(False, True, False),
        **STATISTICS,
    )


# By class: a small VAE, the latents of 16 × 24 pixels as its transformers get them, and its pipeline's arithmetic.
VAES = {
    "AutoencoderKL": (lambda: kl(**STATISTICS, scaling_factor=0.5), (4, 8, 12), "statistics"),
    "AutoencoderKLFlux2": (flux2, (4, 8, 12), "batch norm"),
    "AutoencoderKLQwenImage": (qwen_image, (4, 8, 12), "statistics"),
    "AutoencoderKLWan": (wan, (4, 1, 8, 12), "statistics"),
    "AutoencoderKLLTXVideo": (ltx, (4, 1, 4, 6), "buffers"),
    "AutoencoderKLHunyuanImage": (hunyuan_image, (4, 8, 12), "scale"),
    "AutoencoderKLHunyuanVideo": (hunyuan, (4, 1, 8, 12), "scale"),
    "AutoencoderKLHunyuanVideo15": (hunyuan_15, (4, 1, 4, 6), "scale"),
    "AutoencoderKLCogVideoX": (cogvideox, (4, 1, 8, 12), "scale"),
    "AutoencoderKLMochi": (mochi, (4, 1, 8, 12), "statistics"),
}


def _channels(values, z):
    return torch.as_tensor(values).view(1, -1, *[1] * (z.dim() - 2))


def _by_statistics(vae, z):
    """The inverse of WanPipeline's decoding."""
    return (z - _channels(STATISTICS["latents_mean"], z)) / _channels(STATISTICS["latents_std"], z)


def _by_buffers(vae, z):
    """LTXPipeline._normalize_latents."""
    return (z - _channels(vae.latents_mean, z)) * vae.config.scaling_factor / _channels(vae.latents_std, z)


def _by_scale(vae, z):
    """The inverse of CogVideoXPipeline's and HunyuanVideoPipeline's decoding."""
    return z * vae.config.scaling_factor


# By class: a VAE whose first latent frame holds one frame and later ones two or four; its latents of 5 × 16 × 24
# pixels; its pipeline's arithmetic.
VIDEO_VAES = {
    "AutoencoderKLWan": (lambda: wan(halved=True), (4, 3, 8, 12), _by_statistics),
    "AutoencoderKLLTXVideo": (ltx, (4, 3, 4, 6), _by_buffers),
    "AutoencoderKLHunyuanVideo": (lambda: hunyuan(levels=3), (4, 2, 4, 6), _by_scale),
    "AutoencoderKLHunyuanVideo15": (hunyuan_15, (4, 2, 4, 6), _by_scale),
    "AutoencoderKLCogVideoX": (lambda: cogvideox(frames=2), (4, 3, 8, 12), _by_scale),
    "AutoencoderKLMochi": (mochi, (4, 3, 8, 12), _by_statistics),
}


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
