"""Text encoders in one file each, with the names and dtypes of ComfyUI's files."""

import re
import shutil

import pytest
import tiny_pipelines
import tiny_sources
import tiny_vaes
import torch
import yaml
from commands import in_process
from safetensors.torch import load_file, save_file

from bigdit.config.data import TextEncoderConfig
from bigdit.encoders.host_bytes import text_bytes
from bigdit.encoders.load import load_text_encoder
from bigdit.errors import UserError

NAMES = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl_fp8_e4m3fn_scaled"}
CAPTIONS = ["a cat", "", "two dogs and a red house"]


def scaled(tensors):
    """Matrices in fp8 with a scale for each, as ComfyUI stores them."""
    found = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn), "spiece_model": torch.zeros(9, dtype=torch.uint8)}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and re.search(r"(SelfAttention|attn|mlp)\.", name) and name.endswith(".weight"):
            scale = tensor.abs().max() / 448
            found[name] = (tensor / scale).to(torch.float8_e4m3fn)
            found[name.removesuffix("weight") + "scale_weight"] = scale
        else:
            found[name] = tensor.half()
    return found


@pytest.fixture
def pipeline(tmp_path):
    """A folder with all weights, rounded as the files round them; one without; and the files."""
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    whole.mkdir()
    tiny_pipelines.save(whole, "StableDiffusion3Pipeline")
    small = tiny_pipelines.clip(tiny_pipelines.clip_tokenizer(), projected=True, width=4)
    small.save_pretrained(whole / "text_encoder")  # as the published ones differ
    files = {}
    for part, name in NAMES.items():
        weights = whole / part / "model.safetensors"
        tensors = load_file(weights)
        stored = scaled(tensors) if "scaled" in name else {key: each.half() for key, each in tensors.items()}
        files[part] = tmp_path / f"{name}.safetensors"
        save_file(stored, files[part])
        rounded = {}
        for key in tensors:
            scale = stored.get(key.removesuffix("weight") + "scale_weight", torch.ones(()))
            rounded[key] = stored[key].float() * scale
        save_file(rounded, weights, {"format": "pt"})
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    return whole, bare, files


def test_captions_are_encoded_by_the_weights_of_the_files(pipeline):
    whole, bare, files = pipeline
    config = TextEncoderConfig(pipeline=bare, files=files)
    expected, found = (load_text_encoder(each) for each in (TextEncoderConfig(pipeline=whole), config))
    for one, other in zip(expected.encode(CAPTIONS), found.encode(CAPTIONS), strict=True):
        assert torch.equal(one.states, other.states)
        assert torch.equal(one.pooled, other.pooled)
    digests = [
        {name: (each.get("weights"), each.get("vocabulary")) for name, each in encoder.identity["components"].items()}
        for encoder in (expected, found)
    ]
    assert digests[0] == digests[1]
    assert text_bytes(config) >= text_bytes(TextEncoderConfig(pipeline=whole))


OPEN_CLIP = {
    r"^text_model\.": "",
    r"encoder\.layers": "transformer.resblocks",
    r"(\d\.)layer_norm": r"\1ln_",
    r"self_attn\.q_proj\.": "attn.in_proj_",
    r"self_attn": "attn",
    r"mlp\.fc1": "mlp.c_fc",
    r"mlp\.fc2": "mlp.c_proj",
    r"final_layer_norm": "ln_final",
    r"embeddings\.position_embedding\.weight": "positional_embedding",
    r"embeddings\.": "",
    r"text_projection\.weight": "text_projection",
}


def of_open_clip(tensors):
    """A CLIP by the names of OpenCLIP, where q, k and v are one tensor and the projection is turned."""
    found = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            tensor = torch.cat([tensors[name.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj")])
        if "text_projection" in name:
            tensor = tensor.T.contiguous()
        for here, there in OPEN_CLIP.items():
            name = re.sub(here, there, name)
        if ".k_proj" not in name and ".v_proj" not in name:
            found[name] = tensor
    return found


@pytest.mark.parametrize("prefix", ["", "conditioner.embedders.1.model."])
def test_a_clip_with_open_clips_names_is_read(pipeline, prefix):
    whole, bare, files = pipeline
    named = {prefix + name: each for name, each in of_open_clip(load_file(files["text_encoder_2"])).items()}
    save_file(named | {f"{prefix}logit_scale": torch.ones(()), "other.weight": torch.ones(3)}, files["text_encoder_2"])
    config = TextEncoderConfig(pipeline=bare, files=files)
    expected, found = (load_text_encoder(each).encode(CAPTIONS) for each in (TextEncoderConfig(pipeline=whole), config))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.states, other.states)
        assert torch.equal(one.pooled, other.pooled)


def test_encoders_within_a_checkpoint_of_stable_diffusion_3_are_read(pipeline, tmp_path):
    whole, bare, files = pipeline
    tensors = {"model.diffusion_model.x_embedder.proj.bias": torch.ones(3)}
    for part, name in NAMES.items():
        prefix = f"text_encoders.{name.split('_fp8')[0]}"
        tensors[f"{prefix}.logit_scale"] = torch.ones(())
        tensors |= {f"{prefix}.transformer.{key}": each for key, each in load_file(files[part]).items()}
    save_file(tensors, tmp_path / "sd3.safetensors")
    config = TextEncoderConfig(pipeline=bare, files=dict.fromkeys(NAMES, tmp_path / "sd3.safetensors"))
    expected, found = (load_text_encoder(each).encode(CAPTIONS) for each in (TextEncoderConfig(pipeline=whole), config))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.states, other.states)
        assert torch.equal(one.pooled, other.pooled)


def test_an_encoder_that_a_whole_checkpoint_lacks_is_named(pipeline, tmp_path):
    _, bare, files = pipeline
    small = load_file(files["text_encoder"])
    own = {f"conditioner.embedders.0.transformer.{name}": each for name, each in small.items()}
    save_file(own | {"first_stage_model.decoder.conv_in.bias": torch.ones(3)}, tmp_path / "xl.safetensors")
    config = TextEncoderConfig(pipeline=bare, files=files | {"text_encoder_3": tmp_path / "xl.safetensors"})
    with pytest.raises(UserError) as error:
        load_text_encoder(config)
    (problem,) = error.value.problems
    assert problem.startswith("encoders.text.files.text_encoder_3: ")
    assert "missing weights, the first " in problem
    assert "; it holds conditioner.embedders.0." in problem


@pytest.mark.parametrize("name", ["QwenImagePipeline", "WanPipeline"])
def test_comfyuis_scaled_language_models_are_read(tmp_path, name, capfd):
    tiny_pipelines.save(tmp_path, name)
    weights, file = tmp_path / "text_encoder/model.safetensors", tmp_path / "fp8_scaled.safetensors"
    stored = scaled(load_file(weights))
    save_file(stored, file)
    one = torch.ones(())
    rounded = {
        key: stored[key].float() * stored.get(key.removesuffix("weight") + "scale_weight", one)
        for key in load_file(weights)
    }
    save_file(rounded, weights, {"format": "pt"})
    whole = load_text_encoder(TextEncoderConfig(pipeline=tmp_path)).encode(CAPTIONS)
    found = load_text_encoder(TextEncoderConfig(pipeline=tmp_path, files={"text_encoder": file})).encode(CAPTIONS)
    assert all(torch.equal(each.states, other.states) for each, other in zip(whole, found, strict=True))
    assert "UNEXPECTED" not in "".join(capfd.readouterr())


def test_a_store_holds_which_files_encoded_it(pipeline, tmp_path):
    _, bare, files = pipeline
    tiny_vaes.kl(shift_factor=0.0609).save_pretrained(tmp_path / "vae")
    for number in range(2):
        tiny_sources.save(tmp_path / "images" / f"{number}.png", f"a cat {number}", tiny_sources.gradient(16, 16))
    text = {"pipeline": str(bare), "files": {part: str(file) for part, file in files.items()}}
    config = {
        "model": {"class_name": "SD3Transformer2DModel", "kwargs": tiny_pipelines.SD3},
        "data": {"images": str(tmp_path / "images"), "features": str(tmp_path / "features"), "buckets": [[16, 16]]},
        "encoders": {
            "image": {"name": "vae", "class_name": "AutoencoderKL", "path": str(tmp_path / "vae")},
            "text": text,
        },
        "train": {"steps": 1},
        "output": str(tmp_path / "run"),
    }
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(config))
    assert in_process("extract", "--config", run).returncode == 0
    assert in_process("train", "--config", run, "--dry-run").returncode == 0
    save_file({key: each + 1 for key, each in load_file(files["text_encoder"]).items()}, files["text_encoder"])
    found = in_process("train", "--config", run, "--dry-run")
    assert found.returncode == 1
    assert "encoders.text.pipeline, in text_encoder, has weights_sample" in found.stderr


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"text_encoder_4": "clip_l"}, "encoders.text.files has text_encoder_4, which .* has not; did you mean"),
        ({"tokenizer": "clip_l"}, "encoders.text.files has tokenizer, which .* has not"),
        ({"text_encoder": "none"}, "files.text_encoder: .*none.safetensors: it is missing"),
        (
            {"text_encoder": "t5xxl_fp8_e4m3fn_scaled"},
            "files.text_encoder: .*scaled.safetensors has 53 missing weights",
        ),
        ({"text_encoder": "open_clip"}, "files.text_encoder: .*open_clip.safetensors has 53 missing weights"),
        (
            {"text_encoder_3": "wan"},
            "wan.safetensors has .* missing weights, .*; it holds blocks.0.attn.q.weight instead",
        ),
        ({"text_encoder": "wide"}, "files.text_encoder: .*wide.safetensors .*mismatch"),
        ({"text_encoder": "pickle"}, "pickle.pt is a pickle, which may run any code; take the .safetensors of it"),
        ({}, "text_encoder: .*bare/text_encoder cannot be loaded"),
    ],
)
def test_a_file_that_is_no_such_encoder_is_named(pipeline, files, why):
    _, bare, known = pipeline
    here = bare.parent
    save_file({"transformer.resblocks.0.ln_1.bias": torch.zeros(4)}, here / "open_clip.safetensors")
    save_file({"blocks.0.attn.q.weight": torch.zeros(4, 4)}, here / "wan.safetensors")
    wide = load_file(known["text_encoder"])
    save_file(wide | {"text_projection.weight": torch.zeros(5, 7)}, here / "wide.safetensors")
    (here / "pickle.pt").write_bytes(b"\x80\x04")
    named = {part: here / f"{name}{'.pt' if name == 'pickle' else '.safetensors'}" for part, name in files.items()}
    with pytest.raises(UserError, match=why) as caught:
        load_text_encoder(TextEncoderConfig(pipeline=bare, files=(known | named if files else {})))
    assert "\n" not in str(caught.value)


def test_scales_in_a_folder_are_not_left_out_in_silence(pipeline):
    whole, _, files = pipeline
    shutil.copy(files["text_encoder_3"], whole / "text_encoder_3/model.safetensors")
    with pytest.raises(
        UserError, match=r"text_encoder_3 has fp8 weights with scales, .* name the file as encoders.text"
    ):
        load_text_encoder(TextEncoderConfig(pipeline=whole))
