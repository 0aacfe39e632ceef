"""`--fake-weights`: from_pretrained loads pipelines without a network, disk space or RAM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigdit.catalog.models import models
from bigdit.catalog.names import load_json
from bigdit.emulator.fake_models import write_weights
from bigdit.emulator.fake_tokenizers import document, write_tokenizer
from bigdit.emulator.fake_weights import known, lay_out, repository
from bigdit.errors import UserError

PIPELINES = {
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": "bfloat16",
    "THUDM/CogVideoX-2b": "float16",
}
THREE_TEXTS = "stabilityai/stable-diffusion-3.5-medium"
"""tests/test_recipes.py loads its encoders, and extracts with them."""
DISK_BYTES = 60_000_000  # most of it tokenizers
TINY_T5 = {"architectures": ["T5EncoderModel"], "model_type": "t5", "d_model": 8, "d_ff": 8, "num_layers": 1}
CAPTION = "An oil painting of two ships in a storm, waves high above the masts, dark clouds, a lighthouse far away"

LOAD = """
import json, resource, sys
import diffusers, torch, transformers
from bigdit.emulator.inside import sparse

sparse.install_loading(torch)  # as in every emulated process

def report(**found):
    print(json.dumps(found))

for name, dtype in json.loads(sys.argv[1]).items():
    pipeline = diffusers.DiffusionPipeline.from_pretrained(name, torch_dtype=getattr(torch, dtype))
    parts = {}
    for part, value in pipeline.components.items():
        found = {"class": type(value).__name__}
        if hasattr(value, "parameters"):
            found["params"] = sum(parameter.numel() for parameter in value.parameters())
            found["dtypes"] = sorted({str(parameter.dtype) for parameter in value.parameters()})
            found["zero"] = not any(parameter.flatten()[:8].any() for parameter in value.parameters())
        parts[part] = found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report(name=name, pipeline=type(pipeline).__name__, parts=parts, peak=peak)
    del pipeline, value

name = "someone/theirs"
model = diffusers.SanaTransformer2DModel.from_pretrained(name, subfolder="transformer", variant="fp16")
encoder = transformers.T5EncoderModel.from_pretrained(name, subfolder="text_encoder")
report(
    name=name,
    blocks=len(model.transformer_blocks),
    zero=not any(parameter.any() for parameter in model.parameters()),
    encoder=str(encoder.dtype),
    tokens=len(transformers.AutoTokenizer.from_pretrained(name, subfolder="tokenizer")),
)
vae = diffusers.AutoencoderKL.from_pretrained("me/my-vae")
report(name="me/my-vae", params=sum(parameter.numel() for parameter in vae.parameters()))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A user's own cache, with an empty folder of a repository that is laid out."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "datasets--some--images").mkdir()
    (folder / "models--THUDM--CogVideoX-2b").mkdir()
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory, own):
    """All that the tests load, laid out at once: the libraries that write weights take seconds to import."""
    folder, theirs = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("theirs")
    write_configs(theirs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(own))
        names = [*PIPELINES, THREE_TEXTS, f"someone/theirs={theirs}", "me/my-vae=stabilityai/sd-vae-ft-ema"]
        return folder, lay_out(names, folder)


def disk_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def loaded(hub):
    """What one process loads of it, by name."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(PIPELINES)],
        env={**os.environ, **hub[1]},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", PIPELINES)
def test_diffusers_loads_the_pipeline(loaded, name):
    found = loaded[name]
    entry = document()["repositories"][name]
    model = next(model for model in models() if model.name == entry["model"])
    recipe = document()["pipelines"][model.spec.class_name]
    assert found["pipeline"] == recipe["pipeline"]
    parts = found["parts"]
    assert parts["transformer"]["params"] == model.params
    assert parts["vae"]["params"] == model.vae.params
    for suffix, (encoder, class_name, tokenizer) in zip(("", "_2", "_3"), recipe["text"], strict=False):
        assert parts[f"text_encoder{suffix}"]["class"] == class_name
        expected = load_json("models.json")["text_encoders"][encoder]
        if expected["class_name"] == class_name:
            assert parts[f"text_encoder{suffix}"]["params"] == expected["params"]
        assert parts[f"tokenizer{suffix}"]["class"] == document()["tokenizers"][tokenizer]["class"]
    models_loaded = [part for part in parts.values() if "params" in part]
    assert all(part["zero"] and f"torch.{PIPELINES[name]}" in part["dtypes"] for part in models_loaded)
    # CogVideoX alone has 13 GB of weights. transformers makes another third of T5's fp16 as fp32.
    assert found["peak"] < 8 * 2**30


def test_hardly_any_disk(hub):
    folder, _ = hub
    assert disk_bytes(folder) < DISK_BYTES
    assert sum(path.stat().st_size for path in folder.rglob("*")) > 100e9


@pytest.mark.parametrize(
    ("kind", "size", "fewest", "most"),
    [("clip", 49408, 24, 31), ("clip-g", 49408, 24, 31), ("t5", 32100, 23, 29), ("umt5", 256300, 23, 29),
     ("gemma", 256000, 23, 30), ("qwen", 151646, 22, 28)],
)  # fmt: skip
def test_tokenizers_load_by_every_way_and_have_pieces_like_the_published(hub, kind, size, fewest, most):
    """By its class, by the fast one and by AutoTokenizer; from a folder, and from a subfolder of the cache."""
    import sentencepiece
    import transformers

    recipe = document()["tokenizers"][kind]
    cached = Path(hub[1]["HF_HUB_CACHE"])
    (folder,) = (cached / "models--someone--theirs" / "snapshots").glob(f"*/tokenizer-{kind}")
    of_hub = {"subfolder": folder.name, "cache_dir": cached, "local_files_only": True}
    by_class, fast = (getattr(transformers, recipe["class"] + suffix) for suffix in ("", "Fast"))
    auto = transformers.AutoTokenizer
    cached_ways = ((by_class, {}), (fast, {}), (auto, {}), (auto, {"use_fast": False}))
    for found in (
        auto.from_pretrained(folder),
        *(tokenizer.from_pretrained("someone/theirs", **of_hub, **more) for tokenizer, more in cached_ways),
    ):
        assert len(found) == size
        assert found.model_max_length == recipe["longest"]
        for role, (token, number) in recipe["special"].items():
            assert getattr(found, role) == token
            assert found.convert_tokens_to_ids(token) == number
        assert fewest <= len(found(CAPTION).input_ids) <= most
        padded = found([CAPTION, ""], padding="max_length", max_length=77, truncation=True)
        assert [len(ids) for ids in padded.input_ids] == [77, 77]
    for model in folder.glob("*.model"):  # as slow tokenizers of transformers 4 read it
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
        assert pieces.get_piece_size() == recipe["size"]
        assert fewest <= len(pieces.encode(CAPTION)) <= most
        assert pieces.decode(pieces.encode(CAPTION)) == CAPTION


def write_configs(folder):
    for part, config in {
        "transformer": {"_class_name": "SanaTransformer2DModel", "num_layers": 1, "_diffusers_version": "0.42.1"},
        "text_encoder": {"architectures": ["T5EncoderModel"], "model_type": "t5", "num_layers": 1,
                         "torch_dtype": "bfloat16"},
    }.items():  # fmt: skip
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(config))
    (folder / "transformer" / "old.safetensors").write_bytes(b"weights")
    for kind in document()["tokenizers"]:
        write_tokenizer(kind, folder / f"tokenizer-{kind}")
    passed_by_the_script = {"tokenizer_4": [None, None], "tokenizer_5": None}
    index = {"_class_name": "SomePipeline", "tokenizer": ["transformers", "T5TokenizerFast"], **passed_by_the_script}
    (folder / "model_index.json").write_text(json.dumps(index))


def test_a_folder_of_configs(hub, loaded):
    found = loaded["someone/theirs"]
    assert (found["blocks"], found["zero"], found["encoder"], found["tokens"]) == (1, True, "torch.bfloat16", 32100)
    repository = Path(hub[1]["HF_HUB_CACHE"]) / "models--someone--theirs"
    snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text()
    assert not (snapshot / "transformer" / "old.safetensors").exists()
    assert json.loads((snapshot / "transformer" / "config.json").read_text())["_diffusers_version"] == "0.42.1"


def test_another_name_of_a_known_repository_and_one_component(loaded):
    assert loaded["me/my-vae"]["params"] == load_json("models.json")["vaes"]["sd-vae-ft"]["params"]


def test_what_the_users_own_cache_holds_stays_at_hand(own, hub):
    laid = Path(hub[1]["HF_HUB_CACHE"])
    assert (laid / "datasets--some--images").resolve() == own / "datasets--some--images"
    assert not (laid / "models--THUDM--CogVideoX-2b").is_symlink()
    assert not any((own / "models--THUDM--CogVideoX-2b").iterdir())


def test_names_that_cannot_be_laid_out(tmp_path):
    with pytest.raises(UserError, match=r"does not know this repository; did you mean black-forest-labs/FLUX.1-dev"):
        lay_out(["black-forest-labs/FLUX.1-dav"], tmp_path / "a")
    with pytest.raises(UserError, match=r"--fake-weights x/y=/nowhere: there is no such folder"):
        lay_out(["x/y=/nowhere"], tmp_path / "b")
    with pytest.raises(UserError, match="write --fake-weights NAME=/some/folder"):
        lay_out(["/some/folder"], tmp_path / "c")
    with pytest.raises(UserError, match="was given twice"):
        lay_out(["stabilityai/sd-vae-ft-ema", "stabilityai/sd-vae-ft-ema"], tmp_path / "d")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        lay_out([f"x/y={tmp_path / 'empty'}"], tmp_path / "e")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "config.json").write_text('{"_class_name": "NoSuchModel"}')
    with pytest.raises(UserError, match=r"no model can be built from .*config\.json: .*NoSuchModel"):
        lay_out([f"x/y={tmp_path / 'wrong'}"], tmp_path / "f")


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ('{"tokenizer": "T5Tokenizer"}', r"tokenizer in its model_index\.json is no \[library, class\]"),
        ('{"tokenizer": ["transformers"]}', r"tokenizer in its model_index\.json is no \[library, class\]"),
        ('{"tokenizer": [null, 3]}', r"tokenizer in its model_index\.json is no \[library, class\]"),
        ('{"tokenizer": ["x", "LlamaTokenizer"]}', r"lacks tokenizer/, and a LlamaTokenizer cannot be generated"),
        ('{"tokenizer": [', r"its model_index\.json is not JSON"),
        ("[]", r"its model_index\.json is a list, and an object of components was expected"),
    ],
)
def test_a_damaged_model_index_is_one_line(tmp_path, index, problem):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(UserError, match=f"^--fake-weights x/y=.*{problem}"):
        lay_out([f"x/y={tmp_path}"], tmp_path / "hub")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"_class_name": "AutoModel"}, "diffusers has no model AutoModel"),
        ({"_class_name": "FluxPipeline"}, "diffusers has no model FluxPipeline"),
        ({"architectures": ["AutoModel"]}, "transformers has no model AutoModel"),
        ({"architectures": ["pipeline"]}, "transformers has no model pipeline"),
        ({"architectures": {}}, 'its "architectures" name no class'),
        (TINY_T5 | {"num_layers": 10**9}, "num_layers is 1000000000, and 0 to 1000 was expected"),
        (TINY_T5 | {"dtype": "evil"}, "evil"),
        (TINY_T5 | {"torch_dtype": "evil"}, "evil"),
        ([1], "is a list, and a JSON object was expected"),
    ],
)
def test_a_config_of_no_model_is_a_line(config, why, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=rf"--fake-weights: no model can be built from {tmp_path}/config\.json: .*{why}"
    ):
        write_weights(tmp_path / "config.json", "float32")


def test_every_repository_names_what_the_catalogue_has():
    for name in known():
        found = repository(name)
        assert all("_class_name" in config or "architectures" in config for config in found.configs.values())


def test_a_text_encoder_that_sees_images_too_has_the_language_model_of_the_catalogue_in_it():
    import torch
    import transformers

    config = repository("Qwen/Qwen-Image").configs["text_encoder/config.json"]
    built = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = built(built.config_class(**config))
    language, vision = (
        sum(each.numel() for each in part.parameters()) for part in (model.model.language_model, model.model.visual)
    )
    assert language == load_json("models.json")["text_encoders"]["qwen2.5-vl-7b"]["params"]
    assert vision == pytest.approx(0.68e9, abs=5e6)  # as the catalogue's note says
