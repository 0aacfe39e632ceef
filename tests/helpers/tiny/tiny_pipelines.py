"""diffusers' pipelines with tiny text encoders: random weights, and tokenizers trained on a few sentences."""

import copy
import functools
import inspect
import json

import diffusers
import tiny_vaes
import torch
import transformers
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.t5gemma import T5GemmaModuleConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

CAPTIONS = [
    "a cat on a mat",
    "",
    "An oil painting of two ships in a storm, waves high above the masts, dark clouds, a lighthouse far away",
    "ünïcödé & symbols: <b>50%</b> #1",
    "a cat",
    "one " * 1200,  # longer than any pipeline accepts
    "Two dogs, a red house and a blue car under the evening sun",
]
_TEMPLATES = [
    DEFAULT_PROMPT_TEMPLATE["template"],
    *inspect.signature(diffusers.SanaPipeline.__call__).parameters["complex_human_instruction"].default,
    "<|im_start|>system Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|> <|im_start|>user assistant",
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts. <Prompt Start>",
]
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% if enable_thinking is false %} <think></think>{% endif %}"
    "{% endif %}"
)
PARTED_CHAT = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% for part in message.content %}{{ part.text }}{% endfor %}[/{{ message.role }}]{% endfor %}"
)
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@functools.cache
def _merges(end_of_word=""):
    """Train a byte-level BPE. Returns its vocabulary and merges."""
    suffix = {"end_of_word_suffix": end_of_word} if end_of_word else {}
    tokenizer = Tokenizer(models.BPE(**suffix))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|startoftext|>", "<|endoftext|>"] if end_of_word else ["<|endoftext|>"],
        show_progress=False,
        **suffix,
    )
    tokenizer.train_from_iterator([*_TEMPLATES, *CAPTIONS], trainer)
    return _model_of(tokenizer)


@functools.cache
def _sentencepiece_merges(*special, size=900):
    """Train a BPE over characters, with bytes for unknown ones. Returns its vocabulary and merges."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    words = (word for text in (*_TEMPLATES, *CAPTIONS) for word in text.split(" "))
    tokenizer.train_from_iterator([f"▁{word}" for word in words], trainer)
    return _model_of(tokenizer)


def _model_of(tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@functools.cache
def clip_tokenizer():
    vocab, merges = _merges("</w>")
    return transformers.CLIPTokenizer(vocab=dict(vocab), merges=merges, model_max_length=77)


@functools.cache
def bert_tokenizer():
    """A tokenizer of characters, at the start of words and within them."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({letter for caption in CAPTIONS for letter in caption.lower() if not letter.isspace()})
    vocab = [*special, *letters, *(f"##{letter}" for letter in letters)]
    return transformers.BertTokenizer(vocab={piece: at for at, piece in enumerate(vocab)}, model_max_length=77)


@functools.cache
def t5_tokenizer():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*_TEMPLATES, *CAPTIONS], trainer)
    vocab = [tuple(piece) for piece in json.loads(tokenizer.to_str())["model"]["vocab"]]
    return transformers.T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


@functools.cache
def gemma_tokenizer():
    vocab, merges = _sentencepiece_merges("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    tokenizer = transformers.GemmaTokenizer(vocab=dict(vocab), merges=merges)
    return _beginning(tokenizer, "<bos>")


@functools.cache
def short_gemma_tokenizer():
    """Its short limit sets the length of PRX's captions."""
    tokenizer = copy.deepcopy(gemma_tokenizer())
    tokenizer.model_max_length = 256
    return tokenizer


@functools.cache
def llama_tokenizer():
    # Tiny vocabulary: the template has more tokens than the 95 that its pipeline cuts off.
    vocab, merges = _sentencepiece_merges("<unk>", "<s>", "</s>", "<pad>", size=600)
    tokenizer = transformers.LlamaTokenizer(vocab=dict(vocab), merges=merges, pad_token="<pad>", padding_side="right")
    return _beginning(tokenizer, "<s>")


@functools.cache
def qwen_tokenizer():
    vocab, merges = _merges()
    tokenizer = transformers.Qwen2Tokenizer(vocab=dict(vocab), merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = _CHAT
    return tokenizer


class PixtralProcessor(transformers.ProcessorMixin):
    """Its text half. transformers' class requires torchvision, and treats processors as one."""

    def __init__(self, tokenizer=None, chat_template=None):
        super().__init__(tokenizer, chat_template=chat_template)


class Qwen2VLProcessor(PixtralProcessor):
    """Its text half: the half for videos requires torchvision."""


@functools.cache
def qwen_processor():
    return Qwen2VLProcessor(qwen_tokenizer())


@functools.cache
def mistral_processor():
    tokenizer = copy.deepcopy(llama_tokenizer())
    tokenizer.padding_side = "left"
    return PixtralProcessor(tokenizer, chat_template="{{ bos_token }}" + PARTED_CHAT)


@functools.cache
def glm_tokenizer():
    """It pads on the left."""
    tokenizer = copy.deepcopy(llama_tokenizer())
    tokenizer.padding_side = "left"
    return tokenizer


@functools.cache
def krea_tokenizer():
    """Its template ends in five tokens, as many as its pipeline expects."""
    tokenizer = copy.deepcopy(qwen_tokenizer())
    tokenizer.add_tokens(["assistant"])
    return tokenizer


def _beginning(tokenizer, token):
    """The tokenizer with `token` before each text, as in the published ones."""
    from tokenizers.processors import TemplateProcessing

    number = tokenizer.convert_tokens_to_ids(token)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, number)]
    )
    return tokenizer


def t5(tokenizer):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, vocab_size=len(tokenizer)))


def umt5(tokenizer):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes, vocab_size=len(tokenizer)))


def clip(tokenizer, projected=False, width=8, positions=77):
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=6,
        max_position_embeddings=positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def bert(tokenizer):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=len(tokenizer)))


def gemma(tokenizer):
    return transformers.Gemma2Model(transformers.Gemma2Config(**_SIZES, vocab_size=len(tokenizer)))


def first_gemma(tokenizer):
    return transformers.GemmaModel(transformers.GemmaConfig(**_SIZES, vocab_size=len(tokenizer)))


def t5gemma(tokenizer):
    """The encoder alone, made from a part of the whole model's config."""
    sizes = T5GemmaModuleConfig(**_SIZES, vocab_size=len(tokenizer))
    return T5GemmaEncoder(transformers.T5GemmaConfig(encoder=sizes, decoder=sizes).encoder)


def llama(tokenizer):
    return transformers.LlamaModel(transformers.LlamaConfig(**_SIZES, vocab_size=len(tokenizer)))


def llama_with_words(tokenizer):
    """With its head, and eager: its pipeline reads attentions."""
    config = transformers.LlamaConfig(**_SIZES, vocab_size=len(tokenizer))
    return transformers.LlamaForCausalLM(config)


def byt5(tokenizer):
    sizes = {"d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, vocab_size=len(tokenizer)))


def qwen3(tokenizer, layers=4):
    sizes = _SIZES | {"num_hidden_layers": layers}
    return transformers.Qwen3Model(transformers.Qwen3Config(**sizes, vocab_size=len(tokenizer)))


def qwen_vl(tokenizer):
    text = {key: value for key, value in _SIZES.items() if key != "head_dim"} | {
        "vocab_size": len(tokenizer),
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def mistral(processor):
    """With its vision half and its head, and with as many layers as its pipeline reads."""
    text = _SIZES | {"num_hidden_layers": 31, "vocab_size": len(processor.tokenizer), "model_type": "mistral"}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8}
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(text_config=text, vision_config=vision)
    )


def glm(tokenizer):
    return transformers.GlmModel(transformers.GlmConfig(**_SIZES, vocab_size=len(tokenizer), pad_token_id=0))


def qwen3_vl(tokenizer):
    """With its vision half, without a head."""
    text = _SIZES | {
        "vocab_size": len(tokenizer),
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]})
    return transformers.Qwen3VLModel(config)


def qwen_vl_of(processor):
    return qwen_vl(processor.tokenizer)


def qwen_words(tokenizer):
    """Its text half."""
    return qwen_vl(tokenizer).model.language_model


def _one(tokenizer, model):
    """One encoder with its tokenizer."""
    made = tokenizer()
    return {"tokenizer": made, "text_encoder": model(made)}


def _two_clips(positions=77):
    tokenizer = clip_tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": clip(tokenizer, projected=True, positions=positions),
        "tokenizer_2": tokenizer,
        "text_encoder_2": clip(tokenizer, projected=True, positions=positions),
    }


def _of_hidream():
    """Two long CLIPs, T5 and Llama."""
    clips = _two_clips(positions=248)
    tokenizer = llama_tokenizer()
    return clips | _third_t5() | {"tokenizer_4": tokenizer, "text_encoder_4": llama_with_words(tokenizer)}


def _third_t5():
    tokenizer = t5_tokenizer()
    return {"tokenizer_3": tokenizer, "text_encoder_3": t5(tokenizer)}


def _seeing():
    """CLIP's image half, which makes 257 states of an image as the published one does, and its processor."""
    config = transformers.CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=2
    )
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    return {
        "image_encoder": transformers.CLIPVisionModel(config),
        "image_processor": transformers.CLIPImageProcessor(**sizes),
    }


def _siglip():
    """SigLIP's image half, which makes 729 states of an image as the published one does, and its processor."""
    config = transformers.SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=54, patch_size=2
    )
    return {
        "image_encoder": transformers.SiglipVisionModel(config),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 54, "width": 54}),
    }


def _second(parts):
    """The parts under the names of a second encoder."""
    return {f"{name}_2": part for name, part in parts.items()}


PARTS = {
    "AuraFlowPipeline": lambda: _one(t5_tokenizer, umt5),
    "BriaPipeline": lambda: _one(t5_tokenizer, t5),
    "ChromaPipeline": lambda: _one(t5_tokenizer, t5),
    **dict.fromkeys(("CogVideoXImageToVideoPipeline", "CogVideoXPipeline"), lambda: _one(t5_tokenizer, t5)),
    "CogView3PlusPipeline": lambda: _one(t5_tokenizer, t5),
    "CogView4Pipeline": lambda: _one(glm_tokenizer, glm),
    "Flux2KleinPipeline": lambda: _one(qwen_tokenizer, lambda made: qwen3(made, layers=28)),
    "Flux2Pipeline": lambda: _one(mistral_processor, mistral),
    **dict.fromkeys(
        ("FluxControlPipeline", "FluxFillPipeline", "FluxKontextPipeline", "FluxPipeline"),
        lambda: _one(clip_tokenizer, clip) | _second(_one(t5_tokenizer, t5)),
    ),
    "HiDreamImagePipeline": _of_hidream,
    "HunyuanImagePipeline": lambda: _one(qwen_tokenizer, qwen_vl) | _second(_one(transformers.ByT5Tokenizer, byt5)),
    "HunyuanDiTPipeline": lambda: _one(bert_tokenizer, bert) | _second(_one(t5_tokenizer, t5)),
    "HunyuanVideo15ImageToVideoPipeline": lambda: PARTS["HunyuanVideo15Pipeline"]() | _siglip(),
    "HunyuanVideo15Pipeline": lambda: (
        _one(qwen_tokenizer, qwen_words) | _second(_one(transformers.ByT5Tokenizer, byt5))
    ),
    "HunyuanVideoPipeline": lambda: _one(llama_tokenizer, llama) | _second(_one(clip_tokenizer, clip)),
    "Kandinsky5T2VPipeline": lambda: _one(qwen_processor, qwen_vl_of) | _second(_one(clip_tokenizer, clip)),
    "Krea2Pipeline": lambda: _one(krea_tokenizer, qwen3_vl),
    **dict.fromkeys(("LTXConditionPipeline", "LTXImageToVideoPipeline", "LTXPipeline"), lambda: _one(t5_tokenizer, t5)),
    "LongCatImagePipeline": lambda: _one(qwen_tokenizer, qwen_vl),
    "Lumina2Pipeline": lambda: _one(gemma_tokenizer, gemma),
    "LuminaPipeline": lambda: _one(gemma_tokenizer, first_gemma),
    "OvisImagePipeline": lambda: _one(qwen_tokenizer, qwen3),
    "MochiPipeline": lambda: _one(t5_tokenizer, t5),
    "PRXPipeline": lambda: _one(short_gemma_tokenizer, t5gemma),
    "PixArtAlphaPipeline": lambda: _one(t5_tokenizer, t5),
    "PixArtSigmaPipeline": lambda: _one(t5_tokenizer, t5),
    "QwenImagePipeline": lambda: _one(qwen_tokenizer, qwen_vl),
    "SanaPipeline": lambda: _one(gemma_tokenizer, gemma),
    "SanaSprintPipeline": lambda: _one(gemma_tokenizer, gemma),
    "SanaVideoPipeline": lambda: _one(gemma_tokenizer, gemma),
    "StableDiffusion3Pipeline": lambda: _two_clips() | _third_t5(),
    "StableDiffusionXLPipeline": lambda: _two_clips() | {"text_encoder": clip(clip_tokenizer())},
    "WanImageToVideoPipeline": lambda: _one(t5_tokenizer, umt5) | _seeing(),
    "WanPipeline": lambda: _one(t5_tokenizer, umt5),
    "ZImagePipeline": lambda: _one(qwen_tokenizer, qwen3),
}
"""Parts that encode text, by pipeline class."""


class Qwen2_5_VLProcessor(transformers.Qwen2_5_VLProcessor):
    """transformers' class without its video half, which requires torchvision."""

    def __init__(self, image_processor, tokenizer):
        self.image_processor, self.tokenizer, self.chat_template = image_processor, tokenizer, None
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = self.video_processor = None


def _seeing_qwen():
    """Like the published one: its processor makes a token of 28 × 28 pixels."""
    tokenizer = copy.deepcopy(qwen_tokenizer())
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]},
        replace_extra_special_tokens=False,
    )
    model = qwen_vl(tokenizer)
    model.config.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 56**2, "longest_edge": 12845056})
    return {"tokenizer": tokenizer, "text_encoder": model, "processor": Qwen2_5_VLProcessor(images, tokenizer)}


SEEING = dict.fromkeys(("QwenImageEditPipeline", "QwenImageEditPlusPipeline"), _seeing_qwen)
"""The same for pipelines whose text encoders read images."""
SETTINGS = {"Krea2Pipeline": {"text_encoder_select_layers": [1, 2, 4]}}
"""Other values in the folder's index."""


def save(folder, class_name, seed=0):
    """Write a pipeline's text half in diffusers' layout. Returns its parts."""
    torch.manual_seed(seed)
    parts = (PARTS | SEEING)[class_name]()
    index = {"_class_name": class_name, "vae": ["diffusers", "AutoencoderKL"], **SETTINGS.get(class_name, {})}
    for name, part in parts.items():
        part.eval() if isinstance(part, torch.nn.Module) else None
        (part.image_processor if name == "processor" else part).save_pretrained(folder / name)
        library = "prx" if isinstance(part, T5GemmaEncoder) else "transformers"  # as in PRX's repositories
        index[name] = [library, type(part).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return parts


def pipeline_of(class_name, parts):
    """The diffusers pipeline of these parts alone."""
    pipeline = getattr(diffusers, class_name)
    parameters = inspect.signature(pipeline.__init__).parameters.values()
    absent = {each.name: None for each in parameters if each.default is each.empty and each.name != "self"}
    absent |= {each.name: False for each in parameters if each.name == "requires_safety_checker"}
    if class_name == "BriaPipeline":  # it requires both, even to encode captions alone
        absent |= {"vae": diffusers.AutoencoderKL(), "transformer": diffusers.BriaTransformer2DModel(**BRIA)}
    if class_name.startswith("HunyuanVideo15"):  # it reads the VAE's latent channels, if there is one
        absent["vae"] = tiny_vaes.hunyuan_15()
    return pipeline(**(absent | SETTINGS.get(class_name, {}) | parts))


SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "joint_attention_dim": 16,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 12,
    "pos_embed_max_size": 16,
}
"""A transformer that accepts what the encoders of StableDiffusion3Pipeline make."""
WAN = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
}
"""The transformer of WanPipeline."""
_PACKED = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "joint_attention_dim": 16,
}
BRIA = _PACKED | {"axes_dims_rope": [0, 4, 4]}
"""The transformer of BriaPipeline."""
LONGCAT_IMAGE = _PACKED | {"pooled_projection_dim": 16, "axes_dims_rope": [2, 2, 4]}
"""The transformer of LongCatImagePipeline."""
FLUX = _PACKED | {"patch_size": 1, "axes_dims_rope": [2, 2, 4], "pooled_projection_dim": 8}
"""The transformer of FluxPipeline and FluxKontextPipeline."""
FLUX_CONTROL = FLUX | {"in_channels": 32, "out_channels": 16}
"""The transformer of FluxControlPipeline."""
FLUX_FILL = FLUX | {"in_channels": 48, "out_channels": 16}
"""The transformer of FluxFillPipeline, whose VAE makes a latent of 2 × 2 pixels."""
FLUX2 = _PACKED | {"joint_attention_dim": 48, "timestep_guidance_channels": 16, "axes_dims_rope": [2, 2, 2, 2]}
"""The transformer of Flux2Pipeline, which reads three layers."""
QWEN_IMAGE = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": [4, 6, 6],
}
"""The transformer of QwenImagePipeline and its edits."""
OVIS_IMAGE = _PACKED | {"out_channels": 16, "axes_dims_rope": [2, 2, 4]}
"""The transformer of OvisImagePipeline."""
COGVIEW3 = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "text_embed_dim": 16,
    "time_embed_dim": 8,
    "condition_dim": 4,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}
"""The transformer of CogView3PlusPipeline."""
COGVIEW4 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 16,
    "time_embed_dim": 8,
    "condition_dim": 4,
    "rope_axes_dim": [8, 8],
}
"""The transformer of CogView4Pipeline."""
HUNYUAN_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 16,
    "num_layers": 4,
    "mlp_ratio": 2.0,
    "cross_attention_dim": 8,
    "cross_attention_dim_t5": 16,
    "pooled_projection_dim": 6,
    "use_style_cond_and_image_meta_size": False,
}
"""The transformer of HunyuanDiTPipeline, version 1.2."""
HI_DREAM = {
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_channels": [16, 16],
    "text_emb_dim": 12,
    "num_routed_experts": 2,
    "num_activated_experts": 2,
    "axes_dims_rope": [8, 4, 4],
    "max_resolution": [16, 16],
    "llama_layers": [0, 1, 2, 3],
}
"""The transformer of HiDreamImagePipeline, with both kinds of experts."""
HUNYUAN_IMAGE = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "patch_size": [1, 1],
    "text_embed_dim": 16,
    "text_embed_2_dim": 12,
    "rope_axes_dim": [8, 8],
}
"""The transformer of HunyuanImagePipeline, with a second text."""
LUMINA_NEXT = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 8,
    "cross_attention_dim": 16,
}
"""The transformer of LuminaPipeline."""
PRX = {
    "in_channels": 4,
    "patch_size": 2,
    "context_in_dim": 16,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "axes_dim": [8, 8],
}
"""The transformer of PRXPipeline."""
KANDINSKY5 = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 16,
    "in_text_dim2": 8,
    "time_dim": 16,
    "patch_size": [1, 2, 2],
    "model_dim": 32,
    "ff_dim": 64,
    "num_text_blocks": 1,
    "num_visual_blocks": 1,
    "axes_dims": [4, 6, 6],
    "visual_cond": True,
}
"""The transformer of Kandinsky5T2VPipeline."""
KREA2 = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "timestep_embed_dim": 16,
    "text_hidden_dim": 16,
    "num_text_layers": 3,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 16,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": [4, 6, 6],
}
"""The transformer of Krea2Pipeline, with the layers that SETTINGS names."""
MOCHI = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "pooled_projection_dim": 16,
    "in_channels": 4,
    "text_embed_dim": 16,
    "time_embed_dim": 8,
}
"""The transformer of MochiPipeline."""
HUNYUAN_VIDEO_15 = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "text_embed_2_dim": 12,
    "image_embed_dim": 8,
    "rope_axes_dim": [4, 6, 6],
}
"""The transformers of HunyuanVideo15Pipeline and of HunyuanVideo15ImageToVideoPipeline."""
