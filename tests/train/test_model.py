"""A model that the config cannot train is refused before anything is read or made, and by --dry-run."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import tiny_pipelines
import torch
import yaml
from commands import DIGITS, SINGLE, TINY, with_set

from bigdit import models
from bigdit.catalog.resolve import model_spec
from bigdit.cli import main
from bigdit.config.stages import load_run, load_stages
from bigdit.errors import UserError
from bigdit.recipes import recipe
from bigdit.train.state import shape_errors

ARGUMENTS = yaml.safe_load(DIGITS.read_text())["model"]["kwargs"]


def dry_run(capsys, *overrides, config=DIGITS):
    """Exit status, stdout and stderr of `bigdit train --dry-run`, by the command's own function. A sound run's
    verdict, the last line, is left out."""
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(config), *with_set([*SINGLE, *overrides]), "--dry-run"])
    printed, message = capsys.readouterr()
    if ended.value.code == 0:
        *lines, verdict = message.splitlines(keepends=True)
        assert verdict.startswith("ok: ")
        message = "".join(lines)
    return ended.value.code, printed, message


def test_a_sound_run_is_printed(capsys, tmp_path):
    status, printed, message = dry_run(capsys, "data.images=/nowhere", "data.features=/none")
    assert (status, message) == (
        0,
        "note: /none holds no latents, and no source was checked: data.images: /nowhere does not exist\n",
    )
    found = json.loads(printed)
    assert found["strategy"]["micro_batch_size"] == 16
    config = tmp_path / "run.yaml"
    config.write_text(printed)
    assert json.loads(dry_run(capsys, config=config)[1]) == found  # it is a run's YAML itself


def test_a_path_that_no_shell_expanded_is_named(capsys):
    message = dry_run(capsys, "data.images=~/pics", "data.features=/none")[2]
    assert message.startswith("note: /none holds no latents, and no source was checked: data.images: ~/pics does not ")
    assert "~ stands for no folder here; write /" in message


@pytest.mark.parametrize("images", ["/nowhere", ["/nowhere"], {"path": "/nowhere"}, [{"path": "/nowhere"}]])
def test_a_source_is_set_by_the_key_that_errors_name(capsys, tmp_path, images):
    config = tmp_path / "run.yaml"
    document = yaml.safe_load(DIGITS.read_text())
    document["data"] |= {"images": images, "features": "/none"}
    config.write_text(json.dumps(document))
    status, printed, _ = dry_run(capsys, "data.images[0].path=/elsewhere", "data.images[0].flip=true", config=config)
    (source,) = json.loads(printed)["data"]["images"]
    assert (status, source["path"], source["flip"]) == (0, "/elsewhere", True)


def test_encoders_that_are_missing_are_named(capsys):
    """There is no store yet, which they should fill."""
    status, _, message = dry_run(capsys, "data.features=/none", "encoders.text={path: /t5}")
    assert status == 0
    assert "note: missing, and `bigdit extract` needs it to fill /none: encoders.text.path /t5\n" in message


def test_a_pipeline_whose_captions_are_not_encoded_is_refused_before_extraction(capsys, tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "LongCatImageEditPipeline"}')
    text = json.dumps({"pipeline": str(tmp_path)})
    status, _, message = dry_run(capsys, "data.features=/none", f"encoders.text={text}")
    why = "holds a LongCatImageEditPipeline: its input also has images, which bigdit does not support"
    assert (status, f"error: encoders.text.pipeline: {tmp_path} {why}" in message) == (1, True)


def test_files_that_the_folders_of_encoders_lack_are_named(capsys, tmp_path):
    def missing(**files):
        text = {"pipeline": str(tmp_path), "files": files}
        status, _, message = dry_run(capsys, "data.features=/none", f"encoders.text={json.dumps(text)}")
        (line,) = (each for each in message.splitlines() if "encoders.text.pipeline" in each)
        assert (status, line.count(f"{tmp_path}/")) == (0, line.count("encoders.text.pipeline"))
        return re.findall(rf"{tmp_path}/([\w./]+)", line)

    index = {"_class_name": "WanPipeline"}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert missing() == ["text_encoder/config.json", "text_encoder/model.safetensors", "tokenizer"]
    tiny_pipelines.save(tmp_path, "WanPipeline")
    (tmp_path / "text_encoder/model.safetensors").unlink()
    assert missing() == ["text_encoder/model.safetensors"]
    shutil.rmtree(tmp_path / "tokenizer")
    assert missing(text_encoder=str(DIGITS)) == ["tokenizer"]


SWAPPING = (
    *("strategy.precision=bf16_sr", "strategy.optimizer_in_backward=true", "strategy.gradient_clipping=null"),
    *("strategy.global_batch_size=16", "strategy.checkpointed_blocks=all"),
)
"""Settings that block swap of trained blocks requires."""


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.kwargs.num_layers=two"], "model.kwargs.num_layers is 'two', and a whole number was expected"),
        (["model.kwargs.num_layers=true"], "model.kwargs.num_layers is True, and a whole number was expected"),
        (["model.kwargs.in_channels=null"], "model.kwargs.in_channels is null, and a whole number was expected"),
        (["model.kwargs.mlp_ratio=much"], "model.kwargs.mlp_ratio is 'much', and a number was expected"),
        (["model.kwargs.num_layers=1000000000"], "model.kwargs.num_layers is 1000000000, and 0 to 1000 was expected"),
        (
            ["model.kwargs.num_attention_heads=16777216", "model.kwargs.attention_head_dim=72"],
            "model.kwargs.num_attention_heads is 16777216 and attention_head_dim 72: a width of 1207959552, and "
            "1048576 is the most",
        ),
        (["model.kwargs.num_layers=-1"], "model.kwargs.num_layers is -1, and 0 to 1000 was expected"),
        (
            ["model.kwargs.num_layer=2"],
            "model.kwargs.num_layer: SanaTransformer2DModel does not take it; did you mean num_layers?",
        ),
        (
            ["model.kwargs.patch_size=[1, 2]"],
            "model.kwargs: SanaTransformer2DModel cannot be made of these arguments: unsupported operand type(s) for "
            "//: 'int' and 'list'",
        ),
        (
            ["model.kwargs.out_channels=3"],
            "model.kwargs.out_channels is 3, and in_channels is 4: the prediction has the channels of the latents; "
            "set out_channels to 4",
        ),
        (
            ["model.init_from=nowhere"],
            "model.init_from: nowhere does not hold diffusers weights of SanaTransformer2DModel: there is no such "
            "folder; fetch it by `hf download`, or name one of diffusers, or a checkpoint",
        ),
        (
            ["model.kwargs.attention_head_dim=33"],  # accepted: no sample goes through the model
            "model.kwargs: a step ends with a and b must have same reduction dim, but got [300, 132] X [128, 128]; the "
            "model's arguments, such as widths, may not fit each other; if they do, this is a bug in bigdit",
        ),
        (["model.kwargs.patch_size=0"], "model.kwargs.patch_size is 0, and 1 or more was expected"),
        (["model.kwargs.num_attention_heads=0"], "model.kwargs.num_attention_heads is 0, and 1 or more was expected"),
        (["model.kwargs.mlp_ratio=.inf"], "model.kwargs.mlp_ratio is inf, and a finite number was expected"),
        (
            ["model.kwargs.num_layers=0"],
            "model.kwargs.num_layers is 0, and a model without a block learns nothing; set it to 1 or more",
        ),
        (["output=/proc/x"], "output: cannot write /proc/x: No such file or directory; choose another"),
        (["data.features=/dev/null"], "data.features: cannot write /dev/null: Not a directory; choose another"),
        (["train.seed=-1"], f"{DIGITS} with --set: train.seed is -1, and 0 or more was expected"),
        *(
            (
                ["model.kwargs.num_layers=2", *SWAPPING, f"strategy.blocks_to_swap={number}"],
                f"strategy.blocks_to_swap is {number}, and the model has 2 blocks: the weights of two are always on "
                "the device, and none are left to swap; set it to 0",
            )
            for number in (3, 4)
        ),
        (
            [*SWAPPING, "strategy.blocks_to_swap=5"],
            "strategy.blocks_to_swap is 5, and the model has 4 blocks; set it to 3 to 4, or to 0",
        ),
        (["strategy.checkpointed_blocks=999"], "strategy.checkpointed_blocks is 999, and the model has 4 blocks"),
        (
            [
                "strategy.lora.targets=[to_x]",
                "strategy.precision=bf16",
                "model.init_from=/weights",
            ],  # the model comes first
            "strategy.lora.targets: no linear layer's name ends in 'to_x'; did you mean to_v, to_q, to_k?",
        ),
    ],
)
def test_what_its_class_refuses_is_one_line(capsys, overrides, line):
    status, _, message = dry_run(capsys, *overrides)
    assert (status, message) == (1, f"error: {line}\n")


@pytest.mark.parametrize(
    ("left_out", "overrides", "line"),
    [
        (
            "in_channels",
            ["encoders.image.color=rgb"],
            "encoders.image gives 12 channels (factor 2, rgb), and the model's in_channels is 32; set encoders.image "
            "to the model's VAE (name: vae, class_name, path)",
        ),
        ("caption_channels", [], "encoders.text.config.d_model is 64, and the model's caption_channels is 2304"),
    ],
)
def test_what_is_left_out_is_what_the_class_takes_for_it(capsys, tmp_path, left_out, overrides, line):
    document = yaml.safe_load(DIGITS.read_text())
    del document["model"]["kwargs"][left_out]
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(document))
    assert dry_run(capsys, *overrides, config=config) == (1, "", f"error: {line}\n")


def write_header(spec, folder):
    """Weights of a model in a sparse file: a safetensors header, and no values."""
    header, end = {}, 0
    for name, tensor in models.outline(spec).state_dict().items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(folder / "diffusion_pytorch_model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_a_rank_above_the_side_of_a_layer_is_a_line(capsys, tmp_path):
    spec = model_spec(load_run(DIGITS, []).model)
    write_header(spec, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": spec.class_name} | spec.kwargs))
    lora = (
        f"model.init_from={tmp_path}",
        "strategy.precision=bf16",
        "strategy.lora.targets=[to_q,linear_1]",
        "data.features=/none",
    )
    _, _, message = dry_run(capsys, *lora, "strategy.lora.rank=64")
    assert "strategy.lora" not in message
    status, _, message = dry_run(capsys, *lora, "strategy.lora.rank=200")
    above = (
        "strategy.lora: rank 200 is set, and above 64 it adds nothing to caption_projection.linear_1, the smallest of"
    )
    assert (status, f"note: {above} " in message) == (0, True)


def test_channels_of_a_pixel_are_held_against_those_of_a_patch(capsys, tmp_path):
    """Qwen-Image gets patches of 2 × 2 as channels, but its out_channels counts a pixel's."""
    document = yaml.safe_load(recipe("qwen-image-lora-rtx-4090").text)
    document["model"]["init_from"] = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(document))
    write_header(model_spec(load_run(config).model), tmp_path)
    status, _, message = dry_run(capsys, config=config)
    assert (status, message.count("no source was checked: data.images: "), message.count("\n")) == (
        0,
        1,
        2,
    )  # the encoders are missing, too
    vae = {"_class_name": "AutoencoderKLQwenImage"}  # 8 pixels a latent, by default
    (tmp_path / "config.json").write_text(json.dumps(vae))
    sizes = ["data.buckets=[[1024, 1000]]", f"encoders.image.path={tmp_path}"]
    assert "error: data.buckets: 1024 × 1000: the width is 1000, but " in dry_run(capsys, *sizes, config=config)[2]
    one_file = f"encoders.image.path={tmp_path}/diffusion_pytorch_model.safetensors"  # its config lies elsewhere
    assert dry_run(capsys, one_file, config=config)[0] == 0
    document["model"] = {"class_name": "QwenImageTransformer2DModel", "kwargs": {"num_layers": 1, "out_channels": 64}}
    del document["strategy"]["lora"], document["strategy"]["checkpointed_blocks"]
    config.write_text(yaml.safe_dump(document))
    assert dry_run(capsys, config=config) == (
        1,
        "",
        "error: model.kwargs.out_channels is 64, and in_channels is 64: the prediction has the channels of the "
        "latents; set out_channels to 16\n",
    )


def test_a_store_that_is_there_is_held_against_the_run(capsys, features):
    status, _, message = dry_run(capsys, f"data.features={features}", "data.buckets=[[8, 8], [16, 16]]")
    assert status == 1
    assert f"error: data.features: {features} does not fit: it was encoded with the buckets 8 × 8, 8 × 12, " in message


def test_nothing_would_be_left_to_train_on(capsys, features):
    status, _, message = dry_run(capsys, f"data.features={features}", "validation.samples=9999")
    assert status == 1
    assert (
        f"error: validation.samples is 9999, and {features} has 240 samples: none would be left to train on; "
        in message
    )


def test_the_folder_of_a_pipeline_is_no_transformers(capsys, tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").touch()
    status, _, message = dry_run(capsys, f"model.init_from={tmp_path}")
    assert (status, message.rpartition(": ")[2]) == (1, f"it has no config.json; {tmp_path}/transformer has\n")


@pytest.mark.parametrize("named", [".", "checkpoints", "checkpoints/step-9"])
def test_of_a_run_the_newest_export_is_named(capsys, tmp_path, named):
    (tmp_path / "checkpoints/step-9").mkdir(parents=True)
    for step in (9, 12):
        (tmp_path / f"exports/step-{step}/transformer").mkdir(parents=True)
        (tmp_path / f"exports/step-{step}/transformer/config.json").touch()
    status, _, message = dry_run(capsys, f"model.init_from={tmp_path / named}")
    has = f"it has no config.json; {tmp_path}/exports/step-12/transformer has\n"
    assert (status, message.rpartition(": ")[2]) == (1, has)


def test_weights_of_another_shape_than_the_class_takes_are_refused(capsys, tmp_path):
    """They would load, but the run could neither resume nor be sampled."""
    (tmp_path / "config.json").write_text(json.dumps(ARGUMENTS | {"_class_name": "SanaTransformer2DModel"}))
    spec = model_spec(load_run(DIGITS).model)
    write_header(spec, tmp_path)
    left_out = {key: value for key, value in ARGUMENTS.items() if key not in ("num_layers", "sample_size")}
    starts = ("data.images=/nowhere", "data.features=/none", f"model.init_from={tmp_path}")
    status, _, message = dry_run(capsys, *starts, f"model.kwargs={json.dumps(left_out)}")
    assert (status, message) == (
        1,
        f"error: model.init_from: {tmp_path} has num_layers 4, and model.kwargs leaves it to SanaTransformer2DModel, "
        f"which has 20, and 1 more of its arguments differ; set model.path to {tmp_path} instead of "
        "model.class_name and model.kwargs\n",
    )
    by_path = ("model.class_name=null", "model.kwargs={}", f"model.path={tmp_path}")
    for sound in ((f"model.kwargs={json.dumps(ARGUMENTS)}",), by_path):
        assert dry_run(capsys, *starts, *sound)[0] == 0
    write_header(spec.model_copy(update={"kwargs": {**spec.kwargs, "num_layers": 5}}), tmp_path)
    more = f"{tmp_path} holds weights of another SanaTransformer2DModel: 0 tensors missing and "
    assert f"error: model.init_from: {more}" in dry_run(capsys, *starts, *sound)[2]
    write_header(spec.model_copy(update={"kwargs": {**spec.kwargs, "caption_channels": 7}}), tmp_path)
    assert "size mismatch for caption_projection." in dry_run(capsys, *starts, *sound)[2]


@pytest.mark.parametrize(
    ("steps", "output", "end"),
    [(8, None, ""), (8, "trained", "; nothing is left to train"), (12, "trained", "; resumes after step 8")],
)
def test_a_verdict_is_the_last_line(capfd, features, trained, tmp_path, steps, output, end):
    chosen = (*TINY, *SINGLE, f"data.features={features}", f"output={trained if output else tmp_path}")
    with pytest.raises(SystemExit):
        main(["train", "--config", str(DIGITS), *with_set([*chosen, f"train.steps={steps}"]), "--dry-run"])
    known = f"ok: 240 images, 3 buckets, {steps} steps of 16, memory not planned (`bigdit plan --config`)"
    assert capfd.readouterr().err.splitlines()[-1] == known + end


def test_a_checkpoint_that_the_run_cannot_go_on_from_is_refused(capsys, features, trained):
    """With training's message, before training starts."""
    chosen = (*TINY, f"data.features={features}", f"output={trained}")
    found = trained / "checkpoints/step-00000008"
    for nothing_goes_on in ((), ("data.caption_dropout=0.3", "train.steps=7", "train.warmup_steps=0")):
        status, _, message = dry_run(capsys, *chosen, *nothing_goes_on)
        assert (status, message) == (0, f"{found} has its 8 steps already; raise train.steps to continue\n")
    status, _, message = dry_run(capsys, *chosen, "train.steps=9", "data.caption_dropout=0.3")
    assert (status, message) == (
        0,
        f"note: {found} was trained with data.caption_dropout 0.1, and resumes with 0.3\n"
        f"note: {found} was trained with train.steps 8, and resumes with 9\n",
    )
    for override, problem in {
        "objective.name=ddpm": f"{found} was trained with objective.name flow_matching, and the run asks for ddpm; ",
        "model.kwargs.num_layers=3": f"{found} holds num_layers 2, and the run's model has 3; ",
        "train.seed=7": f"train.seed is 7, and {found} was trained with 6: ",
    }.items():
        status, printed, message = dry_run(capsys, *chosen, "train.steps=9", override)
        assert (status, printed) == (1, "")
        assert message.startswith(f"error: {problem}")


def test_images_that_extraction_refuses_are_refused(capsys, tmp_path, features, images):
    columns = ["data.images={}", f"data.images.path={images}", "data.images.captions=[text]"]
    status, _, message = dry_run(capsys, *columns, f"data.features={tmp_path / 'none'}")
    assert (status, message) == (
        1,
        f"error: data.images: {images} is a folder without metadata.jsonl, .csv or .parquet, so it has no columns; "
        "leave out image and captions\n",
    )
    status, _, message = dry_run(capsys, f"data.images={tmp_path}", f"data.features={tmp_path / 'none'}")
    assert (status, message.partition(" (")[0]) == (1, f"error: data.images: {tmp_path} holds no images")
    assert dry_run(capsys, "data.images=/nowhere", f"data.features={features}")[::2] == (0, "")


def test_what_only_a_step_shows_of_arguments_that_do_not_go_together_is_a_line_there():
    """Some classes read values of masks before they reach what does not fit."""
    run = load_stages(DIGITS, [])[0].run
    with (
        pytest.raises(UserError, match=r"model\.kwargs: a step ends with mat1 and mat2 shapes cannot be multiplied"),
        shape_errors(run),
    ):
        torch.ones(2, 3) @ torch.ones(4, 2)
    with pytest.raises(RuntimeError, match="of something else"), shape_errors(run):
        raise RuntimeError("of something else")
