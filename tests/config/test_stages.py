"""A run's stages: whole runs that differ in their own keys, and every problem with its key."""

import pytest
import yaml
from commands import DIGITS, in_process, with_set
from plan_files import SINGLE, plan_of, write

from bigdit.config.stages import load_run, load_stages
from bigdit.errors import UserError
from bigdit.train.prepare import prepare_stages, stage_at

LOW = {"data": {"features": "low"}, "train": {"steps": 5}}
HIGH = {
    "data": {"features": "high", "buckets": [[16, 16]]},
    "train": {"steps": 7},
    "strategy": {"optimizer": {"lr": 1e-4}},
}
ALONE = ("strategy.engine=single", "strategy.world_size=1", "strategy.ds_config=null", "train.warmup_steps=2")


def written(folder, *stages, **more):
    """The digits' run with stages."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(DIGITS.read_text()) | {"stages": list(stages)} | more))
    return path


def problems(path, *overrides):
    with pytest.raises(UserError) as caught:
        prepare_stages(load_stages(path, [*ALONE, *overrides]))
    return [problem.removeprefix(f"{path}: ") for problem in caught.value.problems]


def test_a_missing_store_is_reported_with_what_another_stage_contradicts(tmp_path):
    path = written(tmp_path, LOW | {"data": {"features": str(tmp_path)}}, HIGH)
    done = in_process("train", "--config", path, *with_set([*ALONE, "stages.1.train.warmup_steps=8"]))
    missing, late = done.stderr.splitlines()
    assert missing.startswith(f"error: stages.0: data.features: {tmp_path} holds no latents; `bigdit extract")
    assert late == "error: stages.1: train.warmup_steps is 8, beyond train.steps 7"
    assert done.returncode == 1


def test_each_is_the_run_with_what_it_has_otherwise(tmp_path):
    low, high = load_stages(written(tmp_path, LOW, HIGH), ALONE)
    assert (low.run.train.steps, high.run.train.steps) == (5, 7)
    assert (low.start, low.end, high.start, high.end) == (0, 5, 5, 12)
    assert low.run.data.buckets == load_run(DIGITS).data.buckets
    assert high.run.data.buckets == ((16, 16),)
    assert (low.run.strategy.optimizer.lr, high.run.strategy.optimizer.lr) == (2e-3, 1e-4)
    assert high.run.strategy.optimizer.betas == low.run.strategy.optimizer.betas
    assert (low.name, high.prefix) == ("stages.0", "stages.1.")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("stages.1.train.stepz=9", "stages.1.train.stepz: unknown key; did you mean steps, decay_steps?"),
        ("stages.0.train={stepz: 3}", "stages.0.train.stepz: unknown key; did you mean steps, decay_steps?"),
        ("train.stepz=9", "train.stepz: unknown key; did you mean steps, decay_steps?"),
        ("strategy.optimizer.lr=x", "stages.0.strategy.optimizer.lr is 'x', and a number was expected"),
        ("stages=[{train: {steps: x}}]", "train.steps is 'x', and a whole number was expected"),
        ("stages.1.plan=3", "stages.1.plan is 3, and a path was expected"),
    ],
)
def test_what_set_reported_of_a_stage_is_reported_of_it(tmp_path, override, problem):
    path = written(tmp_path, LOW, HIGH)
    with pytest.raises(UserError) as caught:
        load_stages(path, [*ALONE, override])
    assert caught.value.problems == (f"{path} with --set: {problem}",)


def test_what_a_stage_says_itself_is_not_reported_of_set(tmp_path):
    path = written(tmp_path, LOW, HIGH | {"strategy": {"optimizer": {"lr": "x"}}})
    with pytest.raises(UserError) as caught:
        load_stages(path, [*ALONE, "strategy.optimizer.lr=1e-3"])
    assert caught.value.problems == (f"{path}: stages.1.strategy.optimizer.lr is 'x', and a number was expected",)


def test_a_run_without_stages_is_one(tmp_path):
    (only,) = load_stages(DIGITS)
    assert (only.run, only.start, only.end, only.prefix) == (load_run(DIGITS), 0, 800, "")
    assert load_stages(written(tmp_path))[0].run == only.run


def test_a_step_belongs_to_the_stage_that_takes_it(tmp_path):
    """A checkpoint at a border belongs to the next stage, one at the end of all to the last."""
    stages = prepare_stages(load_stages(written(tmp_path, LOW, HIGH), ALONE))
    assert [stage_at(stages, step).number for step in (0, 4, 5, 11, 12)] == [0, 0, 1, 1, 1]


def test_overrides_reach_a_stage(tmp_path):
    path = written(tmp_path, LOW, HIGH)
    _, high = load_stages(path, ["stages.1.train.steps=9", "stages.1.train.min_lr=1e-5"])
    assert (high.run.train.steps, high.run.train.min_lr) == (9, 1e-5)
    assert problems(path, "stages.2.train.steps=9") == [
        "--set stages.2.train.steps=9: 2 is no number of a list of 2, from 0 on"
    ]
    assert load_stages(path, ["stages.0=null", "stages=[{train: {steps: 3}}]"])[0].end == 3


def test_a_stage_has_what_the_run_lacks(tmp_path):
    document = yaml.safe_load(DIGITS.read_text())
    del document["train"]["steps"]
    path = written(tmp_path, LOW, HIGH, train=document["train"])
    assert [stage.end for stage in load_stages(path)] == [5, 12]
    assert problems(written(tmp_path, LOW, {}, train=document["train"])) == [
        "stages.1.train: steps and epochs are both missing; set one of them"
    ]


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"data": {"buckets": 3}}, "stages.1.data.buckets: it is a list of sizes, such as [[3, 3]]; 3 was found"),
        ({"date": {}}, "stages.1.date: unknown key; did you mean data, strategy?"),
        ({"train": {"stepz": 3}}, "stages.1.train.stepz: unknown key; did you mean steps, decay_steps?"),
        ({"stages": []}, "stages.1.stages: unknown key"),
        ({"plan": 3}, "stages.1.plan is 3, and a path was expected"),
        (
            {"plan": "none"},
            "stages.1.plan: {folder}/none does not exist; set plan to null, or to one that `bigdit plan` wrote",
        ),
        ({"train": {"warmup_steps": 900}}, "stages.1: train.warmup_steps is 900, beyond train.steps 800"),
        (
            {"data": {"buckets": [[9, 8]]}},
            "stages.1: data.buckets: 9 × 8 does not divide by 2 (factor × patch_size); nearest: 8 × 8",
        ),
    ],
)
def test_what_is_wrong_of_a_stage_is_reported_by_its_key(tmp_path, stage, line):
    assert problems(written(tmp_path, LOW, stage)) == [line.replace("{folder}", str(tmp_path))]


def test_what_no_stage_would_hear_is_refused(tmp_path):
    path = written(tmp_path, LOW, HIGH)
    assert problems(path, "train.steps=9", "data.workers=1") == [
        "--set train.steps=9: all 2 stages have their own train.steps; set it for one, such as stages.0.train.steps=9"
    ]
    assert (
        load_stages(path, ["strategy.optimizer.lr=1e-3"])[0].run.strategy.optimizer.lr == 1e-3
    )  # the second has its own


def test_what_is_wrong_of_the_run_is_reported_once(tmp_path):
    path = written(tmp_path, LOW, HIGH)
    assert problems(path, "train.seed=-1") == [f"{path} with --set: train.seed is -1, and 0 or more was expected"]
    assert problems(path, "encoders.image.factor=1", "model.name=null") == [
        "encoders.image gives 1 channels (factor 1, gray), and the model's in_channels is 4; set encoders.image to the "
        "model's VAE (name: vae, class_name, path), or, for pixels, its factor to 2 and its color "
        "to gray"
    ]


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"train": {"seed": 3}}, "train.seed is 3, and stages.0 has 6"),
        ({"strategy": {"precision": "bf16"}}, "strategy.precision is bf16, and stages.0 has fp32"),
        ({"strategy": {"ema": {}}}, 'strategy.ema is {"decay": 0.9999, "device": "gpu"}, and stages.0 has null'),
        ({"model": {"kwargs": {"num_layers": 3}}}, "model.kwargs.num_layers is 3, and stages.0 has 4"),
        ({"strategy": {"optimizer": {"name": "came"}}}, "strategy.optimizer.name is came, and stages.0 has adamw"),
        ({"output": "else"}, "output is else, and stages.0 has demo/run"),
        ({"objective": {"name": "ddpm"}}, "objective.name is ddpm, and stages.0 has flow_matching"),
    ],
)
def test_what_all_stages_share_is_refused_in_one(tmp_path, stage, line):
    found = problems(written(tmp_path, LOW, stage))
    assert f"stages.1.{line}: all stages share it; set it once, outside stages" in found


def test_another_objective_is_one_line(tmp_path):
    (line,) = problems(written(tmp_path, LOW, HIGH), "stages.1.objective.name=ddpm")
    assert line.startswith("stages.1.objective.name is ddpm, and stages.0 has flow_matching: ")
    path = written(tmp_path, LOW, HIGH, objective={"name": "ddpm"})
    (line,) = problems(path, "stages.1.objective.prediction=v")
    assert line.startswith("stages.1.objective.prediction is v, and stages.0 has epsilon: ")


@pytest.mark.parametrize("stages", [3, ["a"], {"data": {}}])
def test_stages_are_a_list_of_mappings(tmp_path, stages):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(DIGITS.read_text()) | {"stages": stages}))
    assert problems(path) == [f"stages is {stages}, and a list of mappings of a run's keys was expected"]


def test_one_is_named_where_one_is_wanted(tmp_path):
    path = written(tmp_path, LOW, HIGH)
    assert load_run(path, ALONE, 1).train.steps == 7
    for asked, line in {
        (path, None): f"{path} has 2 stages; choose one: --stage 0 to 1",
        (path, 2): f"--stage is 2, and {path} has stages 0 to 1",
        (DIGITS, 1): f"--stage is 1, and {DIGITS} has no stages",
    }.items():
        with pytest.raises(UserError) as caught:
            load_run(asked[0], ALONE, asked[1])
        assert caught.value.problems == (line,)


def test_each_may_have_a_plan(tmp_path):
    plan = plan_of(SINGLE)
    write(plan, tmp_path / "plan")
    first, second = load_stages(written(tmp_path, {"plan": "plan", "train": {"steps": 5}}, {"train": {"steps": 7}}))
    assert (first.plan, second.plan) == (plan, None)
