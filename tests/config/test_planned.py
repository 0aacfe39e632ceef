"""A run by a plan: what the YAML leaves out is the plan's, and what contradicts it is told by both keys."""

import json

import pytest
from commands import ROOT
from plan_files import SINGLE, STRATEGIES, plan_of, problems, run_yaml, write, zero2

from bigdit.config.deepspeed import complete_ds_config, ds_values
from bigdit.config.plan_file import LargestMicroBatch
from bigdit.config.planned import plan_notices, planned_strategy
from bigdit.config.stages import load_stages
from bigdit.config.strategy import parse_strategy
from bigdit.spec import EmaSpec, Strategy


def planned_run(*asked):
    (stage,) = load_stages(*asked)
    return stage.run


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.engine)
def test_what_the_yaml_leaves_out_is_the_plans(strategy, tmp_path):
    plan = plan_of(strategy)
    folder = write(plan, tmp_path / "plan")
    run = planned_run(run_yaml(tmp_path), [], plan, folder)
    found = planned_strategy(run, plan, strategy.world_size)
    assert found.optimizer.lr == 2e-3
    assert found.optimizer.betas == (0.9, 0.99)
    assert found.model_copy(update={"optimizer": strategy.optimizer}) == strategy
    assert run.model.kwargs == plan.model.kwargs
    assert run.engine.ds_config == (folder / "ds_config.json" if strategy.ds_config else None)


def test_what_the_yaml_says_too_may_be_the_same(tmp_path):
    strategy = zero2(grad_accum_steps=1)
    plan = plan_of(strategy)
    folder = write(plan, tmp_path / "plan")
    (tmp_path / "auto.json").write_text(
        json.dumps({"zero_optimization": strategy.ds_config["zero_optimization"], "bf16": "auto"})
    )
    run = planned_run(
        run_yaml(
            tmp_path,
            train={"steps": 8, "global_batch_size": 16, "micro_batch_size": 8, "precision": "bf16"},
            engine={"name": "deepspeed", "processes": 2, "ds_config": str(tmp_path / "auto.json")},
        ),
        [],
        plan,
        folder,
    )
    assert planned_strategy(run, plan, 2).ds_config == strategy.ds_config


def test_constants_of_learning_stay_the_yamls(tmp_path):
    """The decay of the average and the limit of the norm take no memory; DeepSpeed is told of the limit too."""
    plan = plan_of(parse_strategy(["zero2,world_size=2,ema.device=cpu,gradient_clipping=1.0"]))
    folder = write(plan, tmp_path / "plan")
    train = {"steps": 8, "ema": {"decay": 0.99}, "gradient_clipping": 0.1}
    found = planned_strategy(planned_run(run_yaml(tmp_path, train=train), [], plan, folder), plan, 2)
    assert (found.ema.decay, found.ema.device) == (0.99, "cpu")
    assert found.gradient_clipping == found.ds_config["gradient_clipping"] == 0.1
    assert complete_ds_config(found.ds_config, ds_values(found)) == (found.ds_config, [])


@pytest.mark.parametrize(
    ("said", "wanted"), [({}, (0.05, 0.1)), ({"ema": {"widths": [0.03, 0.2]}}, (0.03, 0.2))], ids=["plan's", "its own"]
)
def test_a_plan_decides_how_many_averages_there_are_and_the_run_which(said, wanted, tmp_path):
    plan = plan_of(SINGLE.model_copy(update={"ema": EmaSpec(widths=(0.05, 0.1), device="cpu")}))
    run = planned_run(run_yaml(tmp_path, train={"steps": 8, **said}), [], plan, write(plan, tmp_path / "plan"))
    assert planned_strategy(run, plan, 1).ema == EmaSpec(widths=wanted, device="cpu")


AGAIN = "leave it out, or ask `bigdit plan` for it"


@pytest.mark.parametrize(
    ("strategy", "sections", "message"),
    [
        (
            SINGLE,
            {"train": {"precision": "fp32"}},
            "train.precision is fp32, and the plan's strategy.precision is bf16",
        ),
        (
            SINGLE,
            {"train": {"micro_batch_size": 4}},
            "train.micro_batch_size is 4, and the plan's strategy.micro_batch_size is 8",
        ),
        (
            SINGLE,
            {"train": {"global_batch_size": 64}},
            "train.global_batch_size is 64, and the plan's strategy.global_batch_size is 16",
        ),
        (
            SINGLE,
            {"train": {"grad_accum_steps": 1}},
            "train.grad_accum_steps is 1, and the plan's strategy.grad_accum_steps is 2",
        ),
        (
            SINGLE,
            {"train": {"checkpointed_blocks": "all"}},
            "train.checkpointed_blocks is all, and the plan's strategy.checkpointed_blocks is 1",
        ),
        (
            SINGLE,
            {"train": {"gradient_clipping": None}},
            "train.gradient_clipping is null, and the plan's strategy.gradient_clipping is 1.0",
        ),
        (
            SINGLE,
            {"train": {"ema": {"decay": 0.5}}},
            'train.ema is {"decay": 0.5, "device": "gpu"}, and the plan\'s strategy.ema is null',
        ),
        (
            SINGLE.model_copy(update={"ema": EmaSpec()}),
            {"train": {"ema": {"widths": [0.05, 0.1]}}},
            "train.ema is 2 averages (ema.widths [0.05, 0.1]), and the plan's strategy.ema is 1 average (ema.decay)",
        ),
        (
            SINGLE.model_copy(update={"ema": EmaSpec(widths=(0.05, 0.1))}),
            {"train": {"ema": {"power": 0.1}}},
            "train.ema is 1 average (ema.power 0.1), and the plan's strategy.ema is 2 averages "
            "(ema.widths [0.05, 0.1])",
        ),
        (
            SINGLE,
            {"optimizer": {"name": "came"}},
            "optimizer.name is came, and the plan's strategy.optimizer.name is adamw",
        ),
        (
            SINGLE,
            {"optimizer": {"implementation": "foreach"}},
            "optimizer.implementation is foreach, and the plan's strategy.optimizer.implementation is fused",
        ),
        (
            SINGLE,
            {"data": {"read_ahead_steps": 9}},
            "data.read_ahead_steps is 9, and the plan's strategy.read_ahead_steps is 2",
        ),
        (SINGLE, {"engine": {"name": "fsdp2"}}, "engine.name is fsdp2, and the plan's strategy.engine is single"),
        (
            zero2(),
            {"engine": {"processes": 8}},
            "engine.processes is 8, and the plan's strategy.world_size is 2",
        ),
        (
            Strategy(engine="fsdp2", world_size=16, gradient_clipping=1.0),
            {"engine": {"processes": 16}},
            "engine.processes is 16, and the plan's strategy.world_size is 16 (8 on a machine)",
        ),
    ],
)
def test_contradictions_name_both_keys(strategy, sections, message, tmp_path):
    plan = plan_of(strategy)
    folder, file = write(plan, tmp_path / "plan"), run_yaml(tmp_path, **sections)
    assert problems(planned_run, file, [], plan, folder) == [f"{file}: {message}; {AGAIN}"]


def test_overrides_contradict_as_the_yaml_does_and_all_are_told_at_once(tmp_path):
    plan = plan_of()
    file = run_yaml(tmp_path, train={"precision": "fp32"})
    found = problems(planned_run, file, ["train.micro_batch_size=4"], plan, write(plan, tmp_path / "plan"))
    assert [line.split(" is ")[0] for line in found] == [
        f"{file} with --set: train.micro_batch_size",
        f"{file}: train.precision",
    ]


def test_another_ds_config_is_a_contradiction(tmp_path):
    plan = plan_of(zero2())
    folder = write(plan, tmp_path / "plan")
    theirs = ROOT / "ds_configs/zero3_bf16.json"
    file = run_yaml(tmp_path, engine={"ds_config": str(theirs)})
    found = problems(planned_run, file, [], plan, folder)
    assert (
        f"{file}: engine.ds_config: in {theirs}, zero_optimization.stage is 3, and the plan's "
        f"strategy.ds_config.zero_optimization.stage is 2; {AGAIN}"
    ) in found
    edited = json.loads((folder / "ds_config.json").read_text()) | {"gradient_clipping": 0.5}
    (folder / "ds_config.json").write_text(json.dumps(edited))
    (line,) = problems(planned_run, run_yaml(tmp_path), [], plan, folder)
    assert line.endswith(
        f"engine.ds_config {folder}/ds_config.json: ds_config.gradient_clipping is 0.5, and the plan's "
        'strategy.gradient_clipping makes it 1.0; use "auto"'
    )
    (folder / "ds_config.json").unlink()
    assert problems(planned_run, run_yaml(tmp_path), [], plan, folder) == [
        f"engine.ds_config: {folder}/ds_config.json does not exist"
    ]
    plan = plan_of()
    file = run_yaml(tmp_path, engine={"ds_config": str(theirs)})
    assert problems(planned_run, file, [], plan, folder) == [
        f"{file}: engine.ds_config is {theirs}, and the plan's strategy has engine single; leave it out"
    ]


def test_other_processes_and_what_cannot_be_trained(tmp_path):
    plan = plan_of(zero2())
    run = planned_run(run_yaml(tmp_path), [], plan, write(plan, tmp_path / "plan"))
    assert problems(planned_strategy, run, plan, 3) == [
        "the plan is for 2 processes (strategy.world_size), and 3 run (WORLD_SIZE, engine.processes); start 2, or ask "
        "`bigdit plan` with --gpus 3"
    ]
    unfit = plan_of(SINGLE.model_copy(update={"features": "online"}), verdict="DOES NOT FIT")
    assert problems(planned_strategy, run, unfit, 1) == [
        f"the plan's strategy.features is online, and data.features is {run.data.features}; set it to online, or ask "
        "`bigdit plan` with --features cached",
        "the plan's verdict is DOES NOT FIT: 41.00 GiB wanted of 44.00 GiB (expected); take one of the fixes in its "
        "report.html",
    ]


def test_features_online_are_of_the_plan_and_of_the_run(tmp_path):
    """Or of neither; the plan says how many samples are encoded at once."""
    online, chunk = {"data": {"features": "online", "buckets": [[8, 8]]}}, {"features": "online", "encode_chunk": 4}
    plan, file = plan_of(SINGLE.model_copy(update=chunk)), tmp_path / "plan"
    run = planned_run(run_yaml(tmp_path, **online), [], plan, write(plan, file))
    strategy = planned_strategy(run, plan, 1)
    assert (strategy.features, strategy.encode_chunk) == ("online", 4)
    plan = plan_of(SINGLE)
    run = planned_run(run_yaml(tmp_path, **online), [], plan, write(plan, file))
    assert problems(planned_strategy, run, plan, 1) == [
        "the plan's strategy.features is cached, and data.features is online; set it to a folder, or ask `bigdit plan` "
        "with --features online",
    ]


def test_what_the_plan_did_not_foresee_is_said(tmp_path):
    plan = plan_of()
    folder = write(plan, tmp_path / "plan")
    run = planned_run(run_yaml(tmp_path), [], plan, folder)
    assert plan_notices(run, plan, plan.catalogue) == []
    compiled = planned_run(run_yaml(tmp_path), ["train.compile_blocks=true"], plan, folder)
    assert planned_strategy(compiled, plan, 1).compile_blocks
    assert plan_notices(compiled, plan, plan.catalogue) == [
        "train.compile_blocks is true, and the plan is of blocks as they are written: compiled ones keep other "
        "tensors, as a rule less, and at times more"
    ]
    build = plan.model_copy(update={"versions": plan.versions | {"torch": f"{plan.versions['torch']}+another"}})
    assert plan_notices(run, build, plan.catalogue) == []
    old = plan.model_copy(update={"versions": plan.versions | {"torch": "2.12.0", "python": "3.9"}})
    larger = planned_run(
        run_yaml(tmp_path, data={"buckets": [[8, 12], [16, 16]]}, encoders={"text": {"config": {}, "max_tokens": 64}}),
        [],
        plan,
        folder,
    )
    fits = LargestMicroBatch(height=16, width=16, none=9, recommended=plan.strategy.micro_batch_size, full=9)
    fitting = plan.model_copy(update={"micro_batch_sizes": (fits,)})
    assert not any("data.buckets" in line for line in plan_notices(larger, fitting, plan.catalogue))
    assert plan_notices(larger, old, "fedcba9876543210") == [
        f"the plan was made with torch 2.12.0 ({plan.versions['torch']} is installed), which may take other memory; "
        "plan again to be sure",
        "the plan was made with catalogue 0123456789abcdef, and this is fedcba9876543210; plan again to be sure",
        "data.buckets holds 16 × 16, and the plan is for 8 × 12 (question.resolution) and what fits as it does "
        "(micro_batch_sizes): larger samples take more memory than it says",
        "encoders.text.max_tokens is 64, and the plan is for 32 (batch.text): longer text takes more memory than it "
        "says",
    ]
