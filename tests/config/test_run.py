"""Configs: strict, overridable, and every problem told at once by the key that mends it."""

import json

import pytest
from commands import DIGITS, ROOT

from bigdit.catalog.resolve import model_spec
from bigdit.config import check, load_run, strategy_of
from bigdit.errors import UserError


def problems(overrides, config=DIGITS):
    def load_and_check():
        run = load_run(config, [f"engine.ds_config={ROOT}/ds_configs/zero2_bf16.json", *overrides])
        check(run, model_spec(run.model))
        strategy_of(run, run.engine.processes)

    with pytest.raises(UserError) as caught:
        load_and_check()
    return [problem.removeprefix(f"{config}: ") for problem in caught.value.problems]


def test_the_recipe_is_a_strategy_on_two_processes(monkeypatch):
    monkeypatch.chdir(ROOT)
    run = load_run(DIGITS)
    check(run, model_spec(run.model))
    strategy = strategy_of(run, 2)
    assert (strategy.zero_stage, strategy.global_batch_size, strategy.grad_accum_steps) == (2, 128, 1)
    assert strategy.ds_config["train_micro_batch_size_per_gpu"] == 64
    assert strategy.ds_config["bf16"] == {"enabled": True}
    assert strategy_of(run, 1).grad_accum_steps == 2


def test_overrides_reach_nested_keys():
    run = load_run(DIGITS, ["train.steps=7", "data.buckets=[[16, 16]]", "model.kwargs.num_layers=2"])
    assert (run.train.steps, run.data.buckets, run.model.kwargs["num_layers"]) == (7, ((16, 16),), 2)


def test_an_unknown_key_names_the_nearest():
    assert problems(["train.stepz=3"]) == ["train.stepz: unknown key; did you mean steps?"]
    assert problems(["encoders.image.facto=2"]) == ["encoders.image.identity.facto: unknown key; did you mean factor?"]
    assert problems(["mode.name=x"]) == ["mode: unknown key; did you mean model, encoders?"]


def test_a_misplaced_key_names_its_section():
    assert problems(["train.lr=1"]) == ["train.lr: unknown key; did you mean optimizer.lr?"]


def test_all_problems_of_values_are_told_at_once():
    found = problems(["train.steps=-1", "optimizer.name=adam", "output=null"])
    assert "train.steps: Input should be greater than 0; -1 was found" in found
    (name,) = (line for line in found if line.startswith("optimizer.name: "))
    assert name.startswith("optimizer.name: Input should be 'adamw', 'adamw_8bit', ")
    assert name.endswith("'came' or 'came_8bit'; 'adam' was found")
    assert len(found) == 3


def test_all_contradictions_are_told_at_once():
    found = problems(["encoders.image.color=rgb", "data.buckets=[[8, 9]]", "encoders.text.config.d_model=32"])
    assert found == [
        "encoders.image gives 12 channels (factor 2, rgb), and the model's in_channels is 4",
        "data.buckets: 8 × 9 does not divide by 2 (factor × patch_size)",
        "encoders.text.config.d_model is 32, and the model's caption_channels is 64",
    ]


def test_an_impossible_batch_names_the_nearest_possible():
    assert problems(["train.global_batch_size=100"]) == [
        "train.global_batch_size is 100, and 2 processes × train.micro_batch_size 64 come to multiples of 128; "
        "nearest: 128 or 256"
    ]


def test_fsdp2_refuses_bitsandbytes():
    found = problems(["engine.name=fsdp2", "engine.ds_config=null", "optimizer.name=adamw_8bit"])
    assert found == [
        "optimizer.name adamw_8bit (bitsandbytes) cannot step FSDP2's sharded DTensors; "
        "use optimizer.name adamw_8bit_ao, or engine deepspeed"
    ]


def test_ds_config_and_run_config_must_agree(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 8,
                "optimizer": {"type": "Adam"},
                "zero_optimization": {"stage": 4},
            }
        )
    )
    found = problems([f"engine.ds_config={path}"])
    assert found == [
        "ds_config.optimizer: bigdit sets this with optimizer in the run's config; remove it from the JSON",
        'ds_config.train_micro_batch_size_per_gpu is 8, and train.micro_batch_size makes it 64; use "auto"',
        "ds_config.zero_optimization.stage is 4; it is 0, 1, 2 or 3",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "should hold sections such as model, data and train"),
        ("a: [", "is not YAML"),
        (None, "does not exist"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_run(path)


def test_set_needs_a_key_and_a_value():
    assert problems(["train.steps"]) == [
        "--set expects key.path=value, such as train.steps=100, and 'train.steps' was found"
    ]


def test_one_way_to_name_the_model():
    assert problems(["model.name=sana-600m"]) == [
        "one of model.name, model.path and model.class_name says what is trained; "
        "model.name and model.class_name was found"
    ]
