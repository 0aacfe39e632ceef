"""A user's config.json as a model to plan for: what is read from it, what its sibling adds, what is refused."""

import json
from collections import Counter

import pytest

from bigdit.catalog import batch_shape, find_model, model, user_model
from bigdit.catalog.models import models
from bigdit.errors import UserError
from bigdit.strategy import BatchShape


def written(folder, class_name, kwargs):
    """A config.json as diffusers writes it."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({"_class_name": class_name, "_diffusers_version": "0.42.1", **kwargs}))
    return file


def arguments(m):
    return m.spec.class_name, json.dumps(m.spec.kwargs, sort_keys=True)


TWICE = [spec for spec, count in Counter(arguments(m) for m in models()).items() if count > 1]


def test_the_catalogues_own_arguments_give_the_catalogues_shapes(tmp_path):
    for name in (m.name for m in models() if arguments(m) not in TWICE and m.editor is None):
        m = model(name)
        user = user_model(written(tmp_path / "mine", m.spec.class_name, m.spec.kwargs))
        assert (user.name, user.spec.kwargs, user.params) == ("mine", m.spec.kwargs, None), name
        for field in ("text", "vae", "patch_size", "resolution", "video", "clip"):
            assert getattr(user, field) == getattr(m, field), (name, field)
        assert batch_shape(user) == batch_shape(m).model_copy(update={"first_frame": False}), name  # a run states it
        assert name in user.unverified, name


def test_what_differs_from_the_sibling_is_read_from_the_config(tmp_path):
    kwargs = model("sana-1600m-1024").spec.kwargs | {"in_channels": 16, "sample_size": 24, "caption_channels": 640}
    user = find_model(str(written(tmp_path / "small-sana", "SanaTransformer2DModel", kwargs)))
    assert batch_shape(user) == BatchShape(latents=(16, 24, 24), text=(300, 640))
    assert (user.resolution, user.vae.name, user.vae.downsample) == (768, "a VAE of 16 channels", 32)
    flux = model("flux.1-dev").spec.kwargs | {"in_channels": 128, "joint_attention_dim": 2048}
    user = find_model(str(written(tmp_path / "wide-flux", "FluxTransformer2DModel", flux).parent))
    assert batch_shape(user, 512) == BatchShape(latents=(32, 64, 64), text=(512, 2048))


def test_as_many_text_tokens_as_the_config_says(tmp_path):
    hunyuan = model("hunyuandit-v1.2").spec.kwargs | {"text_len_t5": 100}
    user = find_model(str(written(tmp_path / "short-text", "HunyuanDiT2DModel", hunyuan)))
    assert batch_shape(user).text == (100, 2048)
    assert "tokens" not in user.unverified


def test_what_is_no_transformer_is_called_what_it_is(tmp_path):
    vae = written(tmp_path / "vae", "AutoencoderKL", {})
    with pytest.raises(UserError, match=r"no family adapter drives 'AutoencoderKL': it is a VAE: name the transformer"):
        find_model(str(vae))
    with pytest.raises(UserError, match=r"^x{300}\.json cannot be read: File name too long"):
        find_model(f"{'x' * 300}.json")


def test_a_name_is_still_a_name():
    assert find_model("DiT-XL/2").name == "dit-xl-2"
    with pytest.raises(UserError, match=r"model 'sana-160m' is not in the catalogue"):
        find_model("sana-160m")
    with pytest.raises(UserError, match=r"^\./absent does not exist|^absent does not exist"):
        find_model("./absent")
    with pytest.raises(UserError, match=r"'mine/absent' is not in the .*; nor is there such a folder here$"):
        find_model("mine/absent")


def test_a_path_that_is_not_there_is_answered_with_the_file_that_is(tmp_path):
    kwargs = dict(model("pixart-sigma-xl-2-512").spec.kwargs)
    file = written(tmp_path / "mine", "PixArtTransformer2DModel", kwargs)
    for name in ("config.jso", "confg.json"):
        with pytest.raises(UserError, match=rf"^{file.with_name(name)} does not exist; did you mean {file}\?$"):
            find_model(str(file.with_name(name)))
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/model_index.json").write_text('{"transformer": ["diffusers", "PixArtTransformer2DModel"]}')
    with pytest.raises(UserError, match=r"pipeline/transformer/config\.json does not exist; a diffusers config"):
        find_model(str(tmp_path / "pipeline"))
    file.write_text(json.dumps(kwargs | {"_class_name": ["a"]}))
    with pytest.raises(UserError, match=r'config\.json has _class_name \["a"\]; set it to a class, such as "_class'):
        find_model(str(file))


def test_what_a_config_must_say(tmp_path):
    kwargs = dict(model("pixart-sigma-xl-2-512").spec.kwargs)
    for key in ("in_channels", "caption_channels"):
        del kwargs[key]
    with pytest.raises(UserError) as error:
        user_model(written(tmp_path / "bare", "PixArtTransformer2DModel", kwargs))
    file = tmp_path / "bare/config.json"
    assert [problem.split("; ")[0] for problem in error.value.problems] == [
        f"{file} has no in_channels, which the plan needs",
        f"{file} has no caption_channels, which the plan needs",
    ]
    (tmp_path / "nameless").mkdir()
    (tmp_path / "nameless/config.json").write_text(json.dumps(kwargs))
    with pytest.raises(UserError, match=r"nameless/config\.json has no _class_name; add .* or give a model's name$"):
        user_model(tmp_path / "nameless")
    with pytest.raises(UserError, match=r"no family adapter drives 'UNet2DConditionModel': it is a U-Net, and "):
        user_model(written(tmp_path / "unet", "UNet2DConditionModel", {}))
    with pytest.raises(
        UserError, match=r"odd/config.json: in_channels is 66, and FluxTransformer2DModel packs 2 × 2 .* such as 64"
    ):
        user_model(written(tmp_path / "odd", "FluxTransformer2DModel", {"in_channels": 66}))
    deep = dict(model("sana-600m-512").spec.kwargs) | {"num_layers": 1000000}
    with pytest.raises(UserError, match=r"^\S+/deep/config\.json: num_layers is 1000000, and 0 to 1000 was expected$"):
        user_model(written(tmp_path / "deep", "SanaTransformer2DModel", deep))
    wrong = dict(model("sana-600m-512").spec.kwargs) | {"sample_size": "large"}
    with pytest.raises(UserError, match=r"wrong/config.json: sample_size is 'large'; a positive integer was expected"):
        user_model(written(tmp_path / "wrong", "SanaTransformer2DModel", wrong))
    two = dict(model("sana-600m-512").spec.kwargs) | {"num_layers": "two"}
    file = written(tmp_path / "two", "SanaTransformer2DModel", two).rename(tmp_path / "c12.json")
    with pytest.raises(UserError, match=r"/c12\.json: num_layers is 'two'; a positive integer was expected"):
        user_model(file)


def test_a_model_is_called_by_its_file_or_by_the_folder_of_a_config_json(tmp_path):
    file = written(tmp_path / "mine", "SanaTransformer2DModel", model("sana-600m-512").spec.kwargs)
    assert user_model(file).name == "mine"
    assert user_model(file.rename(tmp_path / "mine/c12.json")).name == "c12"
