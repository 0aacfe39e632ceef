"""Hostile folders of models: nothing in them runs, is unpickled, or makes bigdit wait."""

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import tiny_pipelines
import tiny_vaes
import torch
from pipeline_folders import changed
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from bigdit.config.data import TextEncoderConfig, VaeCodec
from bigdit.encoders.load import load_text_encoder
from bigdit.encoders.vae import DiffusersVae
from bigdit.errors import UserError

LIMIT_S = 60
WEIGHTS = {"text_encoder": "model.safetensors", "vae": "diffusion_pytorch_model.safetensors"}


class Harm:
    """Its pickle creates the file `ran` when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("ran"),)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A pipeline, and a separate VAE and T5 with its tokenizer."""
    folder = tmp_path_factory.mktemp("sound")
    tiny_pipelines.save(folder, "WanPipeline")
    tiny_vaes.kl().save_pretrained(folder / "vae")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 384}
    T5EncoderModel(T5Config(**sizes)).save_pretrained(folder / "t5")
    ByT5Tokenizer().save_pretrained(folder / "t5")
    return folder


@pytest.fixture
def handed(sound, tmp_path, monkeypatch):
    """A copy to be changed. Code and pickles would run in the working folder. No wait is endless."""
    monkeypatch.chdir(tmp_path)
    signal.alarm(LIMIT_S)
    yield shutil.copytree(sound, tmp_path / "handed")
    signal.alarm(0)
    assert not Path("ran").exists()


def load(folder, part):
    """Load a part as a run does."""
    if part == "vae":
        return DiffusersVae(VaeCodec(class_name="AutoencoderKL", path=folder / "vae"), "cpu", 1)
    where = {"path": folder / "t5", "class_name": "T5EncoderModel"} if part == "t5" else {"pipeline": folder}
    encoder = load_text_encoder(TextEncoderConfig(**where))
    return encoder.null()


def refused(folder, part):
    with pytest.raises(UserError) as caught:
        load(folder, part)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shards(folder, name):
    """Replace a part's weights by an index that says they are all in one file."""
    weights = folder / WEIGHTS[folder.name]
    weights.rename(folder / "away")
    weights.with_name(f"{weights.name}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"shared.weight": name}})
    )


def outside(file):
    """Replace a file by a link that leads out of its folder."""
    elsewhere = Path("elsewhere") / file.name
    elsewhere.parent.mkdir()
    file.rename(elsewhere)
    file.symlink_to(elsewhere.absolute())


def with_code(file, key, **more):
    """Let a config name a Python class in a file beside it."""
    (file.parent / "evil.py").write_text("open('ran', 'w')\nclass Evil: pass\n")
    changed(file, auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]})
    changed(file, **more)


@pytest.mark.parametrize("part", ["text_encoder", "t5", "vae"])
def test_a_sound_folder_is_loaded(part, handed):
    load(handed, part)


def test_classes_that_load_any_class_are_not_loaded(handed):
    with_code(handed / "text_encoder/config.json", "AutoModel", model_type="evil")
    for class_name in ("AutoModel", "AutoModelForCausalLM", "pipeline", "Trainer", "RagTokenizer"):
        changed(handed / "model_index.json", text_encoder=["transformers", class_name])
        expected = f"/model_index.json has transformers.{class_name} as text_encoder, which is not supported; "
        assert expected in refused(handed, "text_encoder")


def test_the_code_of_a_folder_is_neither_run_nor_asked_about(handed):
    with_code(handed / "text_encoder/config.json", "AutoConfig")
    load(handed, "text_encoder")
    with_code(handed / "t5/config.json", "AutoConfig")
    with_code(handed / "t5/tokenizer_config.json", "AutoTokenizer", tokenizer_class="Evil")
    assert refused(handed, "t5").startswith(f"encoders.text.path: {handed}/t5 cannot be loaded: ")


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_pickles_are_not_opened(part, handed):
    file = handed / part / WEIGHTS[part]
    file.unlink()
    for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin"):
        torch.save({"shared.weight": Harm()}, file.with_name(name))
    problem = refused(handed, part)
    assert "cannot be loaded: it has no model.safetensors or diffusion_pytorch_model.safetensors; " in problem
    assert "; pytorch_model.bin is a pickle, which may run any code; take the .safetensors of it" in problem


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
@pytest.mark.parametrize("name", ["weights.bin", "../weights.bin", "../../x.safetensors", "/x.safetensors", 7])
def test_an_index_names_safetensors_next_to_it_alone(name, part, handed):
    shards(handed / part, name)
    torch.save({"shared.weight": Harm()}, handed / part / "weights.bin")
    torch.save({"shared.weight": Harm()}, handed / "weights.bin")
    assert f" names {str(name)!r}; only .safetensors files in its folder are read" in refused(handed, part)


def test_links_within_a_hub_s_cache_are_followed_and_others_out_of_the_folder_are_not(handed, tmp_path):
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    shutil.copytree(handed, snapshot)
    (tmp_path / "models--a--b/blobs").mkdir()
    files = [file for file in snapshot.rglob("*") if file.is_file()]
    for number, file in enumerate(files):
        blob = tmp_path / f"models--a--b/blobs/{number}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    for part in ("text_encoder", "t5", "vae"):
        load(snapshot, part)

    for part, file in (("text_encoder", "tokenizer/tokenizer.json"), ("vae", f"vae/{WEIGHTS['vae']}")):
        shutil.rmtree("elsewhere", ignore_errors=True)
        outside(handed / file)
        assert f"{handed / file} is a link out of its folder; copy the file there" in refused(handed, part)


@pytest.mark.parametrize(
    ("part", "file"),
    [
        *(("text_encoder", f"text_encoder/{name}") for name in ("config.json", "model.safetensors", "more.bin")),
        *(("text_encoder", file) for file in ("model_index.json", "tokenizer/tokenizer.json")),
        *(("t5", file) for file in ("t5/config.json", "t5/model.safetensors", "t5/tokenizer_config.json")),
        *(("vae", file) for file in ("vae/config.json", f"vae/{WEIGHTS['vae']}")),
    ],
)  # fmt: skip
def test_a_pipe_in_a_file_s_place_is_not_waited_for(part, file, handed):
    (handed / file).unlink(missing_ok=True)
    os.mkfifo(handed / file)
    assert "it is a named pipe, and a regular file was expected" in refused(handed, part)


@pytest.mark.parametrize(
    ("part", "values", "expected"),
    [
        ("text_encoder", {"dtype": "evil"}, "cannot be loaded: "),
        ("text_encoder", {"dtype": None, "torch_dtype": "evil"}, "cannot be loaded: "),
        ("t5", {"dtype": ["evil"]}, "cannot be loaded: "),
        ("text_encoder", {"num_layers": 10**9}, "num_layers is 1000000000, and 0 to 1000 was expected"),
        ("text_encoder", {"vocab_size": 10**9}, "vocab_size is 1000000000, and 0 to 16777216 was expected"),
        ("t5", {"num_layers": 10**9}, "num_layers is 1000000000, and 0 to 1000 was expected"),
        ("vae", {"layers_per_block": 10**9}, "layers_per_block is 1000000000, and 0 to 1000 was expected"),
        ("vae", {"block_out_channels": [1] * 10**6}, "block_out_channels has 1000000 values, and 1000 are the most"),
        ("vae", {"block_out_channels": [10**9]}, "block_out_channels[0] is 1000000000, and 0 to 16777216 was expected"),
        ("vae", {"down_block_types": ["Evil"]}, "cannot be loaded: "),
    ],
)
def test_a_config_that_nothing_can_be_built_of_is_a_line(part, values, expected, handed):
    changed(handed / part / "config.json", **values)
    assert expected in refused(handed, part)


def test_an_encoder_of_absurd_depth_is_not_drawn():
    config = TextEncoderConfig(class_name="T5EncoderModel", seed=0, config={"num_layers": 10**9})
    with pytest.raises(
        UserError, match=r"^encoders\.text\.config\.num_layers is 1000000000, and 0 to 1000 was expected$"
    ):
        load_text_encoder(config)


@pytest.mark.parametrize("of", ["CogView4Pipeline", "LuminaPipeline", "t5"])
def test_a_tokenizer_that_gives_the_empty_caption_no_token_is_a_line(of, handed):
    folder = handed / "t5" if of == "t5" else handed / of
    if of != "t5":
        folder.mkdir()
    tiny_pipelines.save(handed / of, of if of != "t5" else "PixArtSigmaPipeline")
    tokenizer = handed / of / "tokenizer"
    changed(tokenizer / "tokenizer.json", post_processor=None)
    changed(tokenizer / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if of == "t5":
        for file in tokenizer.iterdir():
            shutil.copy(file, folder)
        assert "gives the caption '' no token, not even an end of text" in refused(handed, "t5")
    else:
        assert "cannot encode the empty caption: " in refused(folder, "text_encoder")


def test_an_index_of_any_shape_is_answered(handed):
    index = json.loads((handed / "model_index.json").read_text())
    for key in ("_class_name", "text_encoder", "tokenizer", "text_encoder_2"):
        for value in (
            None,
            7,
            "x",
            [],
            [None],
            [None, None],
            ["a"],
            [[], {}],
            ["transformers", 7],
            {},
            ["a", "b", "c"],
        ):
            (handed / "model_index.json").write_text(json.dumps(index | {key: value}))
            with contextlib.suppress(UserError):
                load(handed, "text_encoder")


def test_adapters_of_other_weights_are_not_followed(handed):
    (handed / "text_encoder/adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(handed / "t5")})
    )
    assert "/adapter_config.json belongs to adapters; " in refused(handed, "text_encoder")
