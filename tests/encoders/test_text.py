"""Captions through pipelines' text encoders equal diffusers' encoding."""

import inspect
import json
import shutil

import pytest
import tiny_pipelines
import torch
from tiny_pipelines import CAPTIONS, PARTS, pipeline_of

from bigdit.catalog.families import PIPELINES
from bigdit.catalog.models import models
from bigdit.config.data import EncodersConfig, TextEncoderConfig
from bigdit.encoders.components import ProcessorTokenizer, lacking
from bigdit.encoders.load import load_text_encoder
from bigdit.encoders.recipes import RECIPES
from bigdit.errors import UserError

FLUX_PIPELINES = ("FluxControlPipeline", "FluxFillPipeline", "FluxKontextPipeline", "FluxPipeline")
# The arguments of encode_prompt in each pipeline's own call, as in diffusers 0.42.1.
CALLS = {
    "AuraFlowPipeline": {"max_sequence_length": 256},
    "BriaPipeline": {"max_sequence_length": 128},
    "ChromaPipeline": {"max_sequence_length": 512},
    "CogVideoXImageToVideoPipeline": {"max_sequence_length": 226},
    "CogVideoXPipeline": {"max_sequence_length": 226},
    "CogView3PlusPipeline": {"max_sequence_length": 224},
    "CogView4Pipeline": {"max_sequence_length": 1024},
    "Flux2KleinPipeline": {"max_sequence_length": 512},
    "Flux2Pipeline": {"max_sequence_length": 512},
    **{name: {"max_sequence_length": 512, "prompt_2": None} for name in FLUX_PIPELINES},
    "HiDreamImagePipeline": {"max_sequence_length": 128},
    "HunyuanDiTPipeline": {"text_encoder_index": 1},
    "HunyuanImagePipeline": {},
    "HunyuanVideo15ImageToVideoPipeline": {},
    "HunyuanVideo15Pipeline": {},
    "HunyuanVideoPipeline": {"max_sequence_length": 256},
    "Kandinsky5T2VPipeline": {"max_sequence_length": 512},
    "Krea2Pipeline": {"max_sequence_length": 512},
    **{
        name: {"max_sequence_length": 128 if name != "LTXConditionPipeline" else 256}
        for name in ("LTXConditionPipeline", "LTXImageToVideoPipeline", "LTXPipeline")
    },
    "LongCatImagePipeline": {},
    "Lumina2Pipeline": {"max_sequence_length": 256},
    "LuminaPipeline": {"clean_caption": True},
    "OvisImagePipeline": {"max_sequence_length": 256},
    "MochiPipeline": {"max_sequence_length": 256},
    "PRXPipeline": {"tokenizer_max_length": None},
    "PixArtAlphaPipeline": {"max_sequence_length": 120, "clean_caption": True},
    "PixArtSigmaPipeline": {"max_sequence_length": 300, "clean_caption": True},
    "QwenImagePipeline": {"max_sequence_length": 512},
    "SanaPipeline": {"max_sequence_length": 300},
    "SanaSprintPipeline": {"max_sequence_length": 300},
    "SanaVideoPipeline": {"max_sequence_length": 300},
    "StableDiffusion3Pipeline": {"max_sequence_length": 256, "prompt_2": None, "prompt_3": None},
    "StableDiffusionXLPipeline": {},
    "WanImageToVideoPipeline": {"max_sequence_length": 512},
    "WanPipeline": {"max_sequence_length": 512},
    "ZImagePipeline": {"max_sequence_length": 512},
}
WITH_INSTRUCTION = ("SanaPipeline", "SanaSprintPipeline", "SanaVideoPipeline")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A pipeline's text half, made once: its folder and its parts."""
    made = {}

    def of(class_name):
        if class_name not in made:
            folder = tmp_path_factory.mktemp(class_name)
            made[class_name] = folder, tiny_pipelines.save(folder, class_name)
        return made[class_name]

    return of


def call(class_name, pipeline, caption, **arguments):
    """The pipeline's own encode_prompt of one caption, padded as in its call. Returns its results by name."""
    asked = CALLS[class_name] | arguments
    if class_name in WITH_INSTRUCTION:
        parameters = inspect.signature(type(pipeline).__call__).parameters
        asked["complex_human_instruction"] = parameters["complex_human_instruction"].default
    if class_name != "LongCatImagePipeline":  # it encodes where its text encoder is
        asked["device"] = torch.device("cpu")
    with torch.no_grad():
        returned = pipeline.encode_prompt(prompt=[caption], **asked)
    given = dict(zip(RECIPES[class_name].gives, returned, strict=True))
    # Krea 2's transformer gets a token's layers, which are its features here.
    return given | ({"states": given["states"].flatten(2)} if class_name == "Krea2Pipeline" else {})


def fed(class_name, given, prefix=""):
    """What the pipeline's transformer gets of one caption: states without masked ones, and the pooled vector."""
    states, pooled = given[f"{prefix}states"][0], given.get(f"{prefix}pooled")
    mask = None if RECIPES[class_name].padding == "kept" else given.get(f"{prefix}mask")
    return states if mask is None else states[mask[0].bool()], None if pooled is None else pooled[0]


def same(text, states, pooled):
    # The loader pads with what comes after the text.
    assert torch.allclose(text.states, states[: len(text.states)], atol=2e-5)
    assert not states[len(text.states) :].any()
    assert (text.pooled is None) == (pooled is None)
    assert pooled is None or torch.allclose(text.pooled, pooled, atol=2e-5)


@pytest.mark.parametrize("class_name", sorted(PARTS))
def test_captions_are_encoded_as_the_pipeline_does(class_name, saved):
    folder, parts = saved(class_name)
    encoder = load_text_encoder(TextEncoderConfig(pipeline=folder), batch_size=3)
    pipeline = pipeline_of(class_name, parts)
    texts = encoder.encode(CAPTIONS)
    for caption, text in zip(CAPTIONS, texts, strict=True):
        states, pooled = fed(class_name, call(class_name, pipeline, caption))
        same(text, states, pooled)
        assert (text.states.shape[1], text.states.dtype) == (encoder.dim, torch.float32)
        assert (None if text.pooled is None else len(text.pooled)) == encoder.pooled_dim
    lengths = [len(text.states) for text in texts]
    if RECIPES[class_name].padding == "kept":
        assert set(lengths) == {encoder.max_tokens}
    else:
        assert max(lengths) == encoder.max_tokens  # the caption that is too long fills it
        # HunyuanVideo-1.5 reads a space for an empty caption, with as many tokens as a cat; CogView4 reads sixteen.
        assert lengths[1] <= lengths[4] <= lengths[0] < lengths[2]
        hunyuan = class_name.startswith("HunyuanVideo15")
        assert hunyuan or class_name == "CogView4Pipeline" or lengths[1] < lengths[4]
    tail = 12 if class_name.startswith("HunyuanVideo15") else 3  # after a caption, the template begins the answer
    own = [text.states[: text.shown][-tail:] for text in (texts[0], texts[6])]
    assert not torch.allclose(*own, atol=1e-3)


def words(count):
    return " ".join(["one"] * count)


@pytest.mark.parametrize("class_name", sorted(PARTS))
def test_captions_that_a_tokenizer_cuts_are_reported_from_those_that_just_fit(class_name, saved):
    """Words at the end of a cut caption change nothing. A template's end is cut before the caption is. Each caption
    is encoded alone, since batches of other sizes round sums differently."""
    encoder = load_text_encoder(TextEncoderConfig(pipeline=saved(class_name)[0]), batch_size=1)
    *texts, cat = encoder.encode([words(1200), words(1201), "a cat"])
    long, longer = ({cut.tokenizer: cut for cut in text.cuts} for text in texts)
    assert cat.cuts == ()
    assert long.keys() == longer.keys()
    assert {name for name, cut in long.items() if cut.key == "encoders.text.max_tokens"} == max_tokens_raise(class_name)
    name, loosest = max(long.items(), key=lambda each: each[1].limit)
    word = longer[name].longest - loosest.longest
    most = 1200 - -((loosest.limit - loosest.longest) // word)  # words that it knows whole
    less, whole, more, cut, same = encoder.encode([words(most + each) for each in (-1, 0, 1, 20, 21)])
    assert [name in {cut.tokenizer for cut in text.cuts} for text in (less, whole, more, cut)] == [False] * 2 + [
        True
    ] * 2
    assert all(torch.equal(*each) for each in zip(tensors_of(cut), tensors_of(same), strict=True))
    assert not all(map(torch.equal, tensors_of(less), tensors_of(whole)))


def max_tokens_raise(class_name):
    """Tokenizers whose length encoders.text.max_tokens sets. The others have their own length."""
    several = {
        **{name: {"tokenizer_2"} for name in FLUX_PIPELINES},
        "HiDreamImagePipeline": {"tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4"},
        "HunyuanDiTPipeline": set(),
        "StableDiffusion3Pipeline": {"tokenizer_3"},
        "StableDiffusionXLPipeline": set(),
    }
    return several.get(class_name, {"tokenizer"})


def tensors_of(text):
    return [
        each
        for each in (text.states, text.pooled, *(stream.states for stream in text.streams.values()))
        if each is not None
    ]


def test_words_within_quotes_that_a_second_encoder_reads_are_cut_in_any_batch(saved):
    """HunyuanImage's ByT5 reads only them, and LongCat reads them letter by letter. The batch also has captions
    without quotes."""
    quoted = f'a sign "{words(100)}" in the rain'
    for class_name, tokenizer in (("HunyuanImagePipeline", "tokenizer_2"), ("LongCatImagePipeline", "tokenizer")):
        encoder = load_text_encoder(TextEncoderConfig(pipeline=saved(class_name)[0], max_tokens=300), batch_size=4)
        texts = encoder.encode([quoted, "a cat", 'a "sign"', "a dog"])
        assert [[cut.tokenizer for cut in text.cuts] for text in texts] == [[tokenizer], [], [], []]
        assert texts[0].cuts[0].longest > 399  # a byte or a letter each


def test_all_states_of_a_model_that_pools_them_are_kept_and_a_second_text_next_to_them(saved):
    """HunyuanDiT: all of mT5's states, whose mask covers the first ones, and CLIP's without padding; to the bit."""
    folder, parts = saved("HunyuanDiTPipeline")
    encoder, pipeline = load_text_encoder(TextEncoderConfig(pipeline=folder)), pipeline_of("HunyuanDiTPipeline", parts)
    assert (encoder.dim, encoder.max_tokens, encoder.streams) == (16, 256, {"clip_text": (77, 8)})
    assert encoder.identity["streams"] == {"clip_text": {"max_tokens": 77, "dim": 8}}
    for prefix, caption in (("", "a cat on a mat"), ("null_", "a cat")):
        text = encoder.null() if prefix else encoder.encode([caption])[0]
        own, clip = (
            call(
                "HunyuanDiTPipeline", pipeline, caption, do_classifier_free_guidance=bool(prefix), text_encoder_index=i
            )
            for i in (1, 0)
        )
        states, mask = own[f"{prefix}states"][0], own[f"{prefix}mask"][0]
        assert torch.equal(text.states, states)
        assert mask.tolist() == [1] * text.unmasked + [0] * (256 - text.unmasked)
        assert states[text.unmasked :].any(dim=1).all()  # padding has states of its own
        second = text.streams["clip_text"]
        assert torch.equal(second.states, clip[f"{prefix}states"][0][clip[f"{prefix}mask"][0].bool()])
        assert (second.unmasked, len(second.states) < 77) == (None, True)


def test_all_layers_of_llama_are_kept_next_to_t5(saved):
    """HiDream: one after another, as its encode_prompt stacks them, with padding, to which its blocks attend."""
    folder, parts = saved("HiDreamImagePipeline")
    encoder = load_text_encoder(TextEncoderConfig(pipeline=folder), batch_size=1)
    assert (encoder.dim, encoder.max_tokens, encoder.pooled_dim) == (16, 128, 12)
    assert encoder.streams == {"llama_text": (4 * 128, 16)}
    pipeline = pipeline_of("HiDreamImagePipeline", parts)
    for prefix, text in (("", encoder.encode(["a cat on a mat"])[0]), ("null_", encoder.null())):
        given = call("HiDreamImagePipeline", pipeline, "a cat on a mat", do_classifier_free_guidance=bool(prefix))
        layers = text.streams["llama_text"].states.unflatten(0, (4, 128))
        assert torch.equal(layers, given[f"{prefix}llama_text"][:, 0])
        assert torch.equal(text.states, given[f"{prefix}states"][0])
        assert torch.equal(text.pooled, given[f"{prefix}pooled"][0])
        assert (text.unmasked, text.streams["llama_text"].unmasked) == (None, None)
    short = load_text_encoder(TextEncoderConfig(pipeline=folder, max_tokens=9))
    assert (short.max_tokens, short.streams) == (9, {"llama_text": (4 * 9, 16)})


def test_what_stands_in_quotes_is_a_text_of_its_own(saved):
    """HunyuanImage: ByT5's text has no tokens if the caption quotes none."""
    folder, parts = saved("HunyuanImagePipeline")
    encoder = load_text_encoder(TextEncoderConfig(pipeline=folder))
    assert (encoder.dim, encoder.max_tokens, encoder.streams) == (16, 1000, {"glyph_text": (128, 12)})
    pipeline, caption = pipeline_of("HunyuanImagePipeline", parts), 'a sign with "OPEN" on it'
    written, plain = encoder.encode([caption, "a sign"])
    given = call("HunyuanImagePipeline", pipeline, caption)
    glyphs = given["glyph_text"][0][given["glyph_text_mask"][0].bool()]
    assert torch.equal(written.streams["glyph_text"].states, glyphs)
    assert len(glyphs) == len('Text "OPEN". ') + 1  # ByT5's tokens are bytes and an end
    for text in (plain, encoder.null()):
        assert text.streams["glyph_text"].states.shape == (0, 12)
    short = load_text_encoder(TextEncoderConfig(pipeline=folder, max_tokens=9))
    assert short.max_tokens == len(short.encode(CAPTIONS[-1:])[0].states) == 9


def test_a_pipeline_of_several_texts_needs_all_of_its_encoders(saved, tmp_path):
    folder, _ = saved("HunyuanDiTPipeline")
    index = json.loads((folder / "model_index.json").read_text())
    del index["text_encoder_2"]
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"tokenizer_2": [None, None]}))
    for part in ("text_encoder", "tokenizer"):
        (tmp_path / part).symlink_to(folder / part)
    expected = (
        r"model_index\.json names no text_encoder_2 and no tokenizer_2, which HunyuanDiTPipeline needs for captions"
    )
    with pytest.raises(UserError, match=expected):
        load_text_encoder(TextEncoderConfig(pipeline=tmp_path))


def test_padding_on_the_left_is_not_taken_for_padding_on_the_right(saved, monkeypatch):
    encoder = load_text_encoder(TextEncoderConfig(pipeline=saved("HunyuanDiTPipeline")[0]))
    monkeypatch.setattr(encoder._pipeline.tokenizer_2, "padding_side", "left")
    with pytest.raises(UserError, match=r"a tokenizer there pads on the left; it must pad on the right"):
        encoder.encode(["a cat"])


@pytest.mark.parametrize("class_name", sorted(name for name in PARTS if "null_states" in RECIPES[name].gives))
def test_no_caption_is_the_pipelines_negative_prompt(class_name, saved):
    folder, parts = saved(class_name)
    null = load_text_encoder(TextEncoderConfig(pipeline=folder)).null()
    given = call(class_name, pipeline_of(class_name, parts), "a cat", do_classifier_free_guidance=True)
    same(null, *fed(class_name, given, "null_"))


def test_no_caption_is_the_empty_one_where_a_pipeline_has_no_negative_prompt(saved):
    encoder = load_text_encoder(TextEncoderConfig(pipeline=saved("HunyuanVideoPipeline")[0]))
    null, empty = encoder.null(), encoder.encode([""])[0]
    assert torch.equal(null.states, empty.states)
    assert torch.equal(null.pooled, empty.pooled)


def test_sana_reads_captions_after_its_instruction_and_no_caption_without(saved):
    encoder = load_text_encoder(TextEncoderConfig(pipeline=saved("SanaPipeline")[0]))
    assert "Enhanced prompt" in encoder.identity["complex_human_instruction"]
    assert not torch.allclose(encoder.null().states[-1], encoder.encode([""])[0].states[-1], atol=1e-2)


def test_batches_of_like_lengths_are_padded_to_their_longest_alone(saved, monkeypatch):
    encoder = load_text_encoder(TextEncoderConfig(pipeline=saved("PixArtSigmaPipeline")[0]), batch_size=2)
    model, shapes = encoder._pipeline.text_encoder, []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **rest: shapes.append(tuple(ids.shape)) or forward(ids, **rest))
    captions = ["a cat", "a red house and a blue car under the evening sun", "two", "a red house and a blue car"]
    texts = encoder.encode(captions)
    lengths = sorted((len(text.states) for text in texts), reverse=True)
    batches = shapes[-2:]
    assert [count for count, _ in batches] == [2, 2]
    for (_, padded), longest in zip(batches, lengths[::2], strict=True):
        assert longest < padded <= longest + 2


def test_an_encoder_is_read_by_its_own_config_or_by_that_of_the_whole_model(saved, tmp_path):
    """Both of T5Gemma's are read from PRX's folder."""
    folder, _ = saved("PRXPipeline")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "text_encoder/config.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": "t5gemma", "encoder": own, "decoder": own}))
    found, whole = (
        load_text_encoder(TextEncoderConfig(pipeline=each)).encode(CAPTIONS[:1])[0] for each in (folder, tmp_path)
    )
    assert torch.equal(found.states, whole.states)


def test_layers_are_those_that_the_folder_s_index_names(saved, tmp_path):
    """Krea 2's. The identity of its texts includes them."""
    folder, _ = saved("Krea2Pipeline")
    found = load_text_encoder(TextEncoderConfig(pipeline=folder))
    assert (found.dim, found.identity["text_encoder_select_layers"]) == (3 * 16, [1, 2, 4])
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"text_encoder_select_layers": [1, 4]}))
    fewer = load_text_encoder(TextEncoderConfig(pipeline=tmp_path))
    first, last = (slice(16), slice(-16, None))
    own, other = (each.encode(["a cat"])[0].states for each in (found, fewer))
    assert torch.equal(other, torch.cat([own[:, first], own[:, last]], dim=1))


@pytest.mark.parametrize("begins", ["{{ bos_token }}", ""])
def test_a_processor_s_tokenizer_makes_of_words_what_the_processor_does(begins, tmp_path):
    processor = tiny_pipelines.mistral_processor()
    chats = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in CAPTIONS]
    template = begins + tiny_pipelines.PARTED_CHAT
    made = tiny_pipelines.PixtralProcessor(processor.tokenizer, chat_template=template)
    made.save_pretrained(tmp_path)
    asked = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    asked |= {"padding": "max_length", "truncation": True, "max_length": 64}
    expected = made.apply_chat_template(chats, **asked)
    found = ProcessorTokenizer.from_pretrained(tmp_path, local_files_only=True).apply_chat_template(chats, **asked)
    assert found["input_ids"].shape == (len(CAPTIONS), 64)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(found["attention_mask"], expected["attention_mask"])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=f"^encoders.text.pipeline: {tmp_path} has no chat_template.jinja, which its"):
        ProcessorTokenizer.from_pretrained(tmp_path, local_files_only=True).apply_chat_template(chats, **asked)


def test_captions_are_cut_where_the_run_says(saved):
    folder, parts = saved("WanPipeline")
    encoder = load_text_encoder(TextEncoderConfig(pipeline=folder, max_tokens=9))
    pipeline = pipeline_of("WanPipeline", parts)
    for caption, text in zip(CAPTIONS, encoder.encode(CAPTIONS), strict=True):
        same(text, *fed("WanPipeline", call("WanPipeline", pipeline, caption, max_sequence_length=9)))
    assert encoder.max_tokens == 9
    folder, _ = saved("StableDiffusionXLPipeline")
    assert load_text_encoder(TextEncoderConfig(pipeline=folder, max_tokens=77)).max_tokens == 77
    expected = r"encoders\.text\.max_tokens: StableDiffusionXLPipeline has the fixed length 77; leave it out"
    with pytest.raises(UserError, match=expected):
        load_text_encoder(TextEncoderConfig(pipeline=folder, max_tokens=9))


def test_a_length_is_a_multiple_of_what_the_pipeline_pads_to(saved):
    folder, _ = saved("LuminaPipeline")
    assert load_text_encoder(TextEncoderConfig(pipeline=folder, max_tokens=24)).max_tokens == 24
    expected = r"encoders\.text\.max_tokens is 9, and LuminaPipeline needs a multiple of 8; nearest: 16"
    with pytest.raises(UserError, match=expected):
        load_text_encoder(TextEncoderConfig(pipeline=folder, max_tokens=9))


def test_what_is_attended_to_is_that_of_a_caption_alone(saved):
    """CogView4 pads to a multiple of 16 before the words: to the bit, whatever else is in the batch."""
    folder, parts = saved("CogView4Pipeline")
    texts = load_text_encoder(TextEncoderConfig(pipeline=folder), batch_size=3).encode(CAPTIONS)
    assert {len(text.states) % 16 for text in texts} == {0}
    pipeline = pipeline_of("CogView4Pipeline", parts)
    for caption, text in zip(CAPTIONS, texts, strict=True):
        assert torch.equal(text.states, call("CogView4Pipeline", pipeline, caption)["states"][0])


def test_encoders_compute_in_the_dtype_that_is_asked_for(saved):
    folder, _ = saved("FluxPipeline")
    exact = load_text_encoder(TextEncoderConfig(pipeline=folder)).encode(CAPTIONS[:1])[0]
    rounded = load_text_encoder(TextEncoderConfig(pipeline=folder, dtype="bf16")).encode(CAPTIONS[:1])[0]
    assert (rounded.states.dtype, rounded.pooled.dtype) == (torch.bfloat16, torch.bfloat16)
    # Two layers that round states of about 1 to 8 significant bits.
    assert torch.allclose(rounded.states.float(), exact.states, atol=0.1)
    assert not torch.equal(rounded.states.float(), exact.states)


def test_the_identity_names_every_part(saved, tmp_path):
    folder, _ = saved("FluxPipeline")
    found = load_text_encoder(TextEncoderConfig(pipeline=folder)).identity
    assert found == json.loads(json.dumps(found))
    assert found["class_name"] == "FluxPipeline"
    assert (found["max_tokens"], found["dim"], found["pooled_dim"]) == (512, 16, 8)
    assert {name: part["class_name"] for name, part in found["components"].items()} == {
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer": "CLIPTokenizer",
        "tokenizer_2": "T5Tokenizer",
    }
    tiny_pipelines.save(tmp_path, "FluxPipeline", seed=1)
    other = load_text_encoder(TextEncoderConfig(pipeline=tmp_path)).identity
    differing = {name for name in found["components"] if found["components"][name] != other["components"][name]}
    assert differing == {"text_encoder", "text_encoder_2"}


def test_pipelines_that_cannot_be_used_are_named(tmp_path):
    def load():
        load_text_encoder(TextEncoderConfig(pipeline=tmp_path))

    index = tmp_path / "model_index.json"
    with pytest.raises(UserError, match=r"encoders\.text\.pipeline: .*model_index\.json cannot be read \(No such"):
        load()
    index.write_text("[]")
    with pytest.raises(UserError, match=r"model_index\.json does not name a pipeline's class"):
        load()
    index.write_text('{"_class_name": "FluxPriorReduxPipeline"}')
    with pytest.raises(UserError, match=r"holds a FluxPriorReduxPipeline, which is not supported"):
        load()
    index.write_text('{"_class_name": "WanPipeline", "text_encoder": ["custom", "Encoder"]}')
    with pytest.raises(UserError, match=r"has custom\.Encoder as text_encoder, which is not supported; did you"):
        load()
    index.write_text('{"_class_name": "WanPipeline"}')
    with pytest.raises(
        UserError, match=r"has no text_encoder and no tokenizer, and WanPipeline cannot encode captions"
    ):
        load()
    tiny_pipelines.save(tmp_path, "WanPipeline")
    (tmp_path / "text_encoder/model.safetensors").unlink()
    with pytest.raises(UserError, match=r"encoders\.text\.pipeline: text_encoder: .* cannot be loaded: it has no m"):
        load()
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"tokenizer: .*/tokenizer: it is missing; fetch the model by `hf download`$"):
        load()


@pytest.mark.parametrize("name", ["WanPipeline", "SanaPipeline", "QwenImagePipeline", "FluxPipeline"])
def test_tokenizers_without_their_vocabulary_are_named_and_not_made_of_special_tokens(tmp_path, name):
    """transformers makes a tokenizer that knows no word."""
    tiny_pipelines.save(tmp_path, name)
    text = TextEncoderConfig(pipeline=tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        kept = (tmp_path / "tokenizer" / file).read_bytes()
        (tmp_path / "tokenizer" / file).unlink()
        line = rf"tokenizer: {tmp_path}/tokenizer: {file} is missing; fetch the model by `hf download`$"
        with pytest.raises(UserError, match=line):
            load_text_encoder(text)
        encoders = EncodersConfig.model_validate({"image": {"name": "identity"}, "text": {"pipeline": tmp_path}})
        assert lacking(encoders) == [f"encoders.text.pipeline {tmp_path}/tokenizer/{file}"]
        (tmp_path / "tokenizer" / file).write_bytes(kept)
    load_text_encoder(text)


def test_weights_are_not_unpickled_and_missing_ones_not_drawn(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_pipelines.save(tmp_path, "WanPipeline")
    file = tmp_path / "text_encoder/model.safetensors"
    state = load_file(file)
    torch.save(state, tmp_path / "text_encoder/pytorch_model.bin")
    dropped = next(name for name in state if "SelfAttention.q" in name)
    save_file({name: tensor for name, tensor in state.items() if name != dropped}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="has 1 missing weight, "):
        load_text_encoder(TextEncoderConfig(pipeline=tmp_path))
    file.unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        load_text_encoder(TextEncoderConfig(pipeline=tmp_path))


def test_a_tokenizer_of_sentencepiece_alone_is_read(tmp_path):
    """The published PixArt-Σ has spiece.model and no tokenizer.json."""
    import sentencepiece

    tiny_pipelines.save(tmp_path, "PixArtSigmaPipeline")
    folder = tmp_path / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([word for caption in CAPTIONS for word in caption.split()]),
        model_prefix=str(folder / "spiece"),
        vocab_size=60,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (folder / "tokenizer.json").unlink()
    encoder = load_text_encoder(TextEncoderConfig(pipeline=tmp_path))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    texts = encoder.encode(["a cat on a mat", "a cat"])
    assert [len(text.states) for text in texts] == [
        len(pieces.encode(caption)) + 1 for caption in ("a cat on a mat", "a cat")
    ]


def test_the_catalogue_names_pipelines_that_have_recipes():
    assert set(PIPELINES.values()) <= set(RECIPES)
    named = {model.text_pipeline for model in models()} - {None}
    assert named >= {"Flux2KleinPipeline", "SanaPipeline"}
    assert named <= set(RECIPES)
