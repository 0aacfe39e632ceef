"""A run beside its plan: how its strategy differs, what the plan did not foresee, and what is refused."""

import pytest
from plan_files import SINGLE, STRATEGIES, plan_of, problems, run_yaml, write, zero2

from bigdit.config.plan_file import LargestMicroBatch, plan_notices, unplanned
from bigdit.config.stages import load_stages
from bigdit.config.strategy_text import parse_strategy
from bigdit.errors import UserError
from bigdit.strategy import EmaSpec, Strategy
from bigdit.train.prepare import prepare_stages


def stage_of(folder, plan, *overrides, **sections):
    write(plan, folder / "plan")
    (stage,) = load_stages(run_yaml(folder, plan, **sections), overrides)
    return stage


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.engine)
def test_the_section_of_a_run_is_the_strategy(strategy, tmp_path):
    plan = plan_of(strategy)
    stage = stage_of(tmp_path, plan)
    found = stage.run.strategy
    assert (found.optimizer.lr, found.optimizer.betas) == (2e-3, (0.9, 0.99))
    assert found.model_copy(update={"optimizer": strategy.optimizer}) == strategy
    assert stage.plan == plan
    assert unplanned(found, plan) == []
    assert prepare_stages([stage])[0].strategy == found


def test_constants_of_learning_are_no_other_strategy(tmp_path):
    plan = plan_of(SINGLE.model_copy(update={"ema": EmaSpec(widths=(0.05, 0.1), device="cpu")}))
    own = ("strategy.ema.widths=[0.03, 0.2]", "strategy.gradient_clipping=0.1", "strategy.optimizer.weight_decay=0.1")
    assert unplanned(stage_of(tmp_path, plan, *own).run.strategy, plan) == []


@pytest.mark.parametrize(
    ("overrides", "differs"),
    [
        (["strategy.micro_batch_size=4"], "strategy.micro_batch_size is 4 (planned: 8)"),
        (["strategy.checkpointed_blocks=all"], "strategy.checkpointed_blocks is all (planned: 1)"),
        (["strategy.gradient_clipping=null"], "strategy.gradient_clipping is null (planned: a limit)"),
        (["strategy.ema.power=0.1"], 'strategy.ema is {"device": "gpu", "count": 1} (planned: null)'),
        (["strategy.optimizer.name=came"], "strategy.optimizer.name is came (planned: adamw)"),
        (["strategy.read_ahead_steps=9"], "strategy.read_ahead_steps is 9 (planned: 2)"),
        (["strategy.engine=fsdp2", "strategy.cpu_offload=true"], "strategy.cpu_offload is true (planned: false)"),
    ],
)
def test_a_strategy_that_was_edited_is_not_compared(overrides, differs, tmp_path):
    plan = plan_of()
    stage = stage_of(tmp_path, plan, *overrides)
    assert differs in unplanned(stage.run.strategy, plan)
    (notice,) = stage.notices(plan.catalogue)
    assert notice.startswith("the plan is for another strategy, and is not compared with the run: strategy.")
    assert differs in notice


def test_other_processes_than_the_run_says_are_refused(tmp_path):
    plan = plan_of(zero2())
    write(plan, tmp_path / "plan")
    file = run_yaml(tmp_path, plan)
    assert load_stages(file, [], 2)[0].run.strategy.world_size == 2
    assert problems(load_stages, file, [], 3) == [
        f"{file}: strategy.world_size is 2, and 3 processes run (WORLD_SIZE); start that many, set it to 3, or "
        "leave it out"
    ]


def test_processes_that_the_run_does_not_say_are_those_that_run(tmp_path):
    plan = plan_of(Strategy(engine="fsdp2"))
    write(plan, tmp_path / "plan")
    file = run_yaml(tmp_path, plan, strategy={"engine": "fsdp2", "global_batch_size": 12}, plan=None)
    file.write_text(file.read_text().replace("  world_size: 1\n", "").replace("  grad_accum_steps: 1\n", ""))
    strategy = load_stages(file, [], 4)[0].run.strategy
    assert (strategy.world_size, strategy.grad_accum_steps) == (4, 3)


def test_what_cannot_be_trained_is_refused(tmp_path):
    stage = stage_of(tmp_path, plan_of(verdict="DOES NOT FIT"))
    assert problems(prepare_stages, [stage]) == [
        "the plan's verdict is DOES NOT FIT: 41.00 GiB needed of 44.00 GiB (expected); take one of the fixes in its "
        "report.html",
    ]
    stage = stage_of(tmp_path, plan_of(verdict="DOES NOT FIT"), "strategy.micro_batch_size=1")
    prepare_stages([stage])
    other = plan_of(kwargs=stage.run.model.kwargs | {"num_layers": 9})
    write(other, tmp_path / "plan")
    (stage,) = load_stages(tmp_path / "run.yaml")
    assert problems(prepare_stages, [stage]) == [
        "model has num_layers 4, and the plan's model.kwargs.num_layers is 9 (digits); set plan to null, or plan this "
        "model"
    ]


def test_a_plan_that_is_missing_is_named(tmp_path):
    file = run_yaml(tmp_path)
    assert problems(load_stages, file) == [
        f"{file}: plan: {tmp_path}/plan does not exist; set plan to null, or to one that `bigdit plan` wrote"
    ]


def test_what_the_plan_did_not_foresee_is_reported(tmp_path):
    plan = plan_of()
    run = stage_of(tmp_path, plan).run
    assert plan_notices(run, plan, plan.catalogue) == []
    build = plan.model_copy(update={"versions": plan.versions | {"torch": f"{plan.versions['torch']}+another"}})
    assert plan_notices(run, build, plan.catalogue) == []
    old = plan.model_copy(update={"versions": plan.versions | {"torch": "2.12.0", "python": "3.9"}})
    text = {"text": {"config": {}, "max_tokens": 64}}
    larger = stage_of(tmp_path, plan, data={"buckets": [[8, 12], [16, 16]]}, encoders=text).run
    fits = LargestMicroBatch(height=16, width=16, none=9, recommended=plan.strategy.micro_batch_size, full=9)
    fitting = plan.model_copy(update={"micro_batch_sizes": (fits,)})
    assert not any("data.buckets" in line for line in plan_notices(larger, fitting, plan.catalogue))
    assert plan_notices(larger, old, "fedcba9876543210") == [
        f"the plan was made with torch 2.12.0 ({plan.versions['torch']} is installed), which may change its memory; "
        f"plan again to be sure",
        "the plan was made with catalogue 0123456789abcdef, and this is fedcba9876543210; plan again to be sure",
        "data.buckets has 16 × 16, and the plan is for 8 × 12 (request.resolution) and sizes that fit as well "
        "(micro_batch_sizes): larger samples need more memory than planned",
        "encoders.text.max_tokens is 64, and the plan is for 32 (batch.text): longer text needs more memory than "
        "planned",
    ]


HSDP = "fsdp2,world_size=64,dp_replicate=8,micro_batch_size=4"


def of_machines(tmp_path, plan_strategy, gpus, monkeypatch, *overrides, here=8):
    """The stage of a run with a plan's strategy, on so many GPUs, `here` per machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    file = run_yaml(tmp_path, plan_of(parse_strategy([plan_strategy])), plan=None)
    return load_stages(file, overrides, gpus)[0]


def test_a_run_goes_on_without_a_machine(tmp_path, monkeypatch):
    stage = of_machines(tmp_path, HSDP, 56, monkeypatch)
    strategy = stage.run.strategy
    assert (strategy.global_batch_size, strategy.places, strategy.grad_accum_steps) == (256, 336, 2)
    assert (strategy.dp_replicate, strategy.dp_shard) == (7, 8)
    assert stage.notices("") == [
        "56 of 64 GPUs: the global batch stays 256, with micro_batch_size 3, grad_accum_steps 2 and 7 copies of the "
        "model",
        "a global batch of 256 over 56 GPUs takes 336 places: 80 samples are repeated with weight 0 (24 % of the time)",
    ]
    accumulated = of_machines(tmp_path, "zero2,world_size=64,micro_batch_size=2,grad_accum_steps=2", 56, monkeypatch)
    assert (accumulated.run.strategy.grad_accum_steps, accumulated.run.strategy.repeated_samples) == (3, 80)
    asked = of_machines(
        tmp_path, "zero2,world_size=64,micro_batch_size=1,global_batch_size=256", 56, monkeypatch,
        "strategy.micro_batch_size=5", "strategy.grad_accum_steps=null", "strategy.global_batch_size=256",
    )  # fmt: skip
    assert asked.notices("")[1].startswith(
        "a global batch of 256 over 56 GPUs takes 280 places: 24 samples are repeated with weight 0 (9 % of the time)"
    )


@pytest.mark.parametrize(
    ("strategy", "gpus", "here", "problem"),
    [
        (HSDP, 60, 8, "strategy.world_size is 64, and 60 processes run (WORLD_SIZE)"),
        (HSDP, 72, 8, "strategy.world_size is 64, and 72 processes run (WORLD_SIZE)"),
        (HSDP, 60, 4, "strategy.dp_replicate is 8, so 8 GPUs hold a copy of the model, and 60 of 64 are there; "),
        (f"{HSDP},cp=8", 60, 1, "strategy.dp_replicate is 8, so 8 GPUs"),
        ("fsdp2,world_size=64,cp=8", 60, 4, "strategy: cp is 8, which does not divide world_size 60"),
    ],
)
def test_other_processes_than_those_of_whole_machines(tmp_path, monkeypatch, strategy, gpus, here, problem):
    with pytest.raises(UserError) as found:
        of_machines(tmp_path, strategy, gpus, monkeypatch, here=here)
    assert problem in str(found.value)


def test_a_plan_of_one_machine_has_none_to_lose(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    plan = plan_of(zero2())
    write(plan, tmp_path / "plan")
    with pytest.raises(UserError, match="world_size is 2, and 1 process runs"):
        load_stages(run_yaml(tmp_path, plan), [], 1)
