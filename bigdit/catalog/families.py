"""The diffusers classes that bigdit.models has an adapter for, and what each is fed: said here without torch."""

from __future__ import annotations

from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec, ObjectiveSpec
from bigdit.spec import ModelSpec, Strict


class Inputs(Strict):
    """What a family takes beside latents and t.

    `text_dim`: the constructor argument with the width of the text embeddings (a list says it first), None without
    text; `text_layers`: the one with the number of layers that are joined in them; `joined` layers of the text encoder
    make up one such width. `extras`: the further inputs, as its adapter names them. `classes`: the argument with the
    number of classes, of a family that is fed one of them. `packs`: latents go in as 2 × 2 patches in the channels.
    `video`: latents have frames. `square`: height and width are one number to it; `fixed`: that of `sample_size`.
    `depths`: the lists of like blocks, in the order of the forward pass, each with the constructor argument that
    says its length. `even`: the class takes an even number of blocks alone, whose halves are joined by skips.
    `routed`: tokens go to experts by their values, and with them memory.
    `objective`: what its models are trained by where nothing else is asked.
    """

    text_dim: str | None = None
    text_layers: str | None = None
    joined: int = 1
    extras: tuple[str, ...] = ()
    classes: str | None = None
    packs: bool = False
    video: bool = False
    square: bool = False
    fixed: bool = False
    depths: dict[str, str] = {"transformer_blocks": "num_layers"}
    even: bool = False
    routed: bool = False
    objective: FlowMatchingSpec | DdpmSpec = FlowMatchingSpec()


DDPM = DdpmSpec()
"""ε, betas from 0.0001 to 0.02 over 1000 timesteps, and the variance where a model has one. Source: Peebles & Xie,
arXiv:2212.09748, section 4; the code of PixArt-α and PixArt-Σ."""

_TWO_LISTS = {"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers"}

FAMILIES: dict[str, Inputs] = {
    "SanaTransformer2DModel": Inputs(text_dim="caption_channels"),
    "SanaVideoTransformer3DModel": Inputs(text_dim="caption_channels", video=True),
    "CogVideoXTransformer3DModel": Inputs(text_dim="text_embed_dim", video=True),
    "WanTransformer3DModel": Inputs(text_dim="text_dim", video=True, depths={"blocks": "num_layers"}),
    "HunyuanVideoTransformer3DModel": Inputs(
        text_dim="text_embed_dim", extras=("pooled_text",), video=True, depths=_TWO_LISTS
    ),
    "LTXVideoTransformer3DModel": Inputs(text_dim="caption_channels", video=True),
    "QwenImageTransformer2DModel": Inputs(text_dim="joint_attention_dim", packs=True),
    "ZImageTransformer2DModel": Inputs(text_dim="cap_feat_dim", depths={"layers": "n_layers"}),
    "Krea2Transformer2DModel": Inputs(text_dim="text_hidden_dim", text_layers="num_text_layers", packs=True),
    "PRXTransformer2DModel": Inputs(text_dim="context_in_dim", depths={"blocks": "depth"}),
    "CogView4Transformer2DModel": Inputs(text_dim="text_embed_dim"),
    "HunyuanImageTransformer2DModel": Inputs(
        text_dim="text_embed_dim", extras=("glyph_text", "glyph_mask"), depths=_TWO_LISTS
    ),
    "HiDreamImageTransformer2DModel": Inputs(
        text_dim="caption_channels",
        extras=("pooled_text", "llama_text"),
        depths={"double_stream_blocks": "num_layers", "single_stream_blocks": "num_single_layers"},
        routed=True,
    ),
    "DiTTransformer2DModel": Inputs(
        extras=("class_label",), classes="num_embeds_ada_norm", square=True, objective=DDPM
    ),
    "PaperDiT": Inputs(
        extras=("class_label",),
        classes="num_classes",
        square=True,
        fixed=True,
        depths={"blocks": "depth"},
        objective=DDPM,
    ),
    "PixArtTransformer2DModel": Inputs(text_dim="caption_channels", objective=DDPM),
    "SD3Transformer2DModel": Inputs(text_dim="joint_attention_dim", extras=("pooled_text",)),
    "FluxTransformer2DModel": Inputs(
        text_dim="joint_attention_dim", extras=("pooled_text",), packs=True, depths=_TWO_LISTS
    ),
    "ChromaTransformer2DModel": Inputs(text_dim="joint_attention_dim", packs=True, depths=_TWO_LISTS),
    "Flux2Transformer2DModel": Inputs(text_dim="joint_attention_dim", joined=3, packs=True, depths=_TWO_LISTS),
    "AuraFlowTransformer2DModel": Inputs(
        text_dim="joint_attention_dim",
        depths={"joint_transformer_blocks": "num_mmdit_layers", "single_transformer_blocks": "num_single_dit_layers"},
    ),
    "HunyuanDiT2DModel": Inputs(
        text_dim="cross_attention_dim_t5",
        extras=("clip_text_embeds", "clip_text_mask"),
        depths={"blocks": "num_layers"},
        even=True,
    ),
    "Lumina2Transformer2DModel": Inputs(text_dim="cap_feat_dim", depths={"layers": "num_layers"}),
    "LuminaNextDiT2DModel": Inputs(text_dim="cross_attention_dim", depths={"layers": "num_layers"}),
}

PIPELINES = {
    "AuraFlowTransformer2DModel": "AuraFlowPipeline",
    "ChromaTransformer2DModel": "ChromaPipeline",
    "CogVideoXTransformer3DModel": "CogVideoXPipeline",
    "FluxTransformer2DModel": "FluxPipeline",
    "HunyuanVideoTransformer3DModel": "HunyuanVideoPipeline",
    "LTXVideoTransformer3DModel": "LTXPipeline",
    "Lumina2Transformer2DModel": "Lumina2Pipeline",
    "PixArtTransformer2DModel": "PixArtSigmaPipeline",
    "QwenImageTransformer2DModel": "QwenImagePipeline",
    "SD3Transformer2DModel": "StableDiffusion3Pipeline",
    "SanaTransformer2DModel": "SanaPipeline",
    "SanaVideoTransformer3DModel": "SanaVideoPipeline",
    "WanTransformer3DModel": "WanPipeline",
    "ZImageTransformer2DModel": "ZImagePipeline",
}
"""The diffusers pipeline in whose folder lie the VAE and the text encoders that a class is trained with here."""
_BY_WIDTH = {
    ("Flux2Transformer2DModel", 7680): "Flux2KleinPipeline",
    ("Flux2Transformer2DModel", 12288): "Flux2KleinPipeline",
}
"""Of classes whose models are fed by several text encoders, those that are encoded here, by the width of their text."""


def pipeline_of(class_name: str, text_dim: int | None) -> str | None:
    """The diffusers pipeline by which the text of a model is encoded here; None where its text comes from elsewhere."""
    return PIPELINES.get(class_name) or _BY_WIDTH.get((class_name, text_dim or 0))


def objective_of(model: ModelSpec, asked: ObjectiveSpec | None) -> ObjectiveSpec:
    """What a model is trained by: as asked, else as its family was."""
    return asked or FAMILIES.get(model.class_name, Inputs()).objective


MOST_BLOCKS = 1000
"""In a list of like blocks; the deepest of the catalogue has 60."""
LARGEST_ARGUMENT = 2**24
"""Of a width, a count or a length: the largest of the catalogue is a width of 14336."""


def argument_problems(spec: ModelSpec) -> list[str]:
    """What no class takes: lengths and counts of a model that nobody could build or wait for."""
    inputs = FAMILIES.get(spec.class_name, Inputs())
    most = dict.fromkeys(inputs.depths.values(), MOST_BLOCKS)
    return [
        f"model.kwargs.{key} is {value}, and 0 to {most.get(key, LARGEST_ARGUMENT)} was expected"
        for key, value in spec.kwargs.items()
        if isinstance(value, int) and not 0 <= value <= most.get(key, LARGEST_ARGUMENT)
    ]


_STORED = ("pooled_text", "class_label")
"""Of the extras of families, those that the feature store keeps."""


def training_obstacle(spec: ModelSpec) -> str | None:
    """Why a model cannot be trained from a feature store, of latents and of one text sequence with its pooled vector or
    of a class of each picture; None where it can."""
    class_name = spec.class_name
    inputs = FAMILIES.get(class_name)
    if inputs is None:
        return f"no family adapter yet: {class_name}"
    missing = [extra for extra in inputs.extras if extra not in _STORED]
    if missing:
        return f"the feature store keeps no {' and no '.join(missing)}, which {class_name} is fed"
    if inputs.video and _begins_with_an_image(spec):
        return f"the feature store keeps no image that a video begins with, which {spec.name} is fed"
    return None


def _begins_with_an_image(spec: ModelSpec) -> bool:
    """Whether a model of videos is fed its first frame: beside the latents in further channels, or to its blocks."""
    channels, out = (spec.kwargs.get(key) for key in ("in_channels", "out_channels"))
    wider = isinstance(channels, int) and isinstance(out, int) and channels > out
    return wider or any(spec.kwargs.get(key) is not None for key in ("image_dim", "image_condition_type"))
