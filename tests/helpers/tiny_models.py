"""Small transformers for tests, and the shapes of their samples."""

from bigdit.strategy import BatchShape, ModelSpec

SANA = ModelSpec(
    name="tiny-sana",
    class_name="SanaTransformer2DModel",
    kwargs={
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 12,
        "sample_size": 8,
        "patch_size": 1,
    },
)
# Three blocks. Some weights have more than 4,096 elements, so that bitsandbytes keeps them in 8 bits.
THREE_BLOCKS = ModelSpec(
    name="tiny-sana",
    class_name="SanaTransformer2DModel",
    kwargs={
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_layers": 3,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 32,
        "caption_channels": 12,
        "mlp_ratio": 2.5,
        "sample_size": 8,
        "patch_size": 1,
    },
)
# Two large blocks and three small ones.
DEEP_FLUX = ModelSpec(
    name="tiny-flux",
    class_name="FluxTransformer2DModel",
    kwargs={
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 3,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "joint_attention_dim": 12,
        "pooled_projection_dim": 10,
        "axes_dims_rope": [2, 2, 4],
    },
)
# Its first block's embedder is also called from outside the block: an FSDP2 unit that the backward pass gathers.
DIT = ModelSpec(
    name="tiny-dit",
    class_name="DiTTransformer2DModel",
    kwargs={
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 3,
        "num_embeds_ada_norm": 10,
        "sample_size": 8,
        "patch_size": 2,
    },
)
# Four heads and 24 tokens of a video, which two or four processes can share.
WAN = ModelSpec(
    name="tiny-wan",
    class_name="WanTransformer3DModel",
    kwargs={
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 12,
        "freq_dim": 16,
        "ffn_dim": 64,
        "num_layers": 3,
        "patch_size": [1, 2, 2],
    },
)
WAN_SHAPE = BatchShape(latents=(4, 3, 4, 8), text=(6, 12))
SHAPE = BatchShape(latents=(4, 8, 8), text=(6, 12))
