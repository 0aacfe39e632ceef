"""Options of accelerate's launcher, as its own code passes them to processes: the run obeys, or refuses."""

import json
import os

import pytest
import yaml
from accelerate.commands import launch
from plan_files import SINGLE, plan_of, problems, run_yaml, write, zero2
from training import launched

from bigdit.config.check import check_accelerate
from bigdit.config.stages import load_stages
from bigdit.config.strategy_text import parse_strategy
from bigdit.dist import ACCELERATE, asked_of_accelerate

DEEPSPEED = "--use_deepspeed --num_processes 2"
FSDP = "--use_fsdp --num_processes 2"
OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
ZERO3 = parse_strategy([f"zero3,world_size=2,gradient_clipping=0.5,ds_config.zero_optimization={OFFLOADED}"])
FSDP2 = parse_strategy(["fsdp2,world_size=2,cpu_offload=true,reshard_after_forward=false,checkpointed_blocks=1"])
FP32 = parse_strategy(["fsdp2,world_size=2,dp_replicate=2,precision=fp32,compile_blocks=true"])


@pytest.fixture
def reported(monkeypatch):
    """Give this process the environment that `accelerate launch` makes of options."""

    def tell(options):
        for variable, _ in ACCELERATE.values():
            monkeypatch.delenv(variable, raising=False)
        words = [*options.split(), "--main_process_port", "0", "train.py"]
        asked, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
        asked.deepspeed_fields_from_accelerate_config = ""  # as launch_command has it
        if asked.cpu or not (asked.use_deepspeed or asked.use_fsdp or asked.multi_gpu or asked.use_megatron_lm):
            _, environment = launch.prepare_simple_launcher_cmd_env(asked)
        elif asked.use_deepspeed:
            _, environment = launch.prepare_deepspeed_cmd_env(asked)
        else:
            environment = launch.prepare_multi_gpu_env(asked)
        for name, value in environment.items() - os.environ.items():
            monkeypatch.setenv(name, value)

    return tell


@pytest.fixture
def checked(reported, tmp_path):
    """The answer of a run by a plan of this strategy to options of accelerate."""

    def check(strategy, options):
        plan = plan_of(strategy)
        folder = write(plan, tmp_path / "plan")
        if strategy.ds_config is not None:
            (folder / "ds_config.json").write_text(json.dumps(strategy.ds_document))
        (stage,) = load_stages(run_yaml(tmp_path, plan), [])
        reported(options.format(folder=folder, tmp=tmp_path))
        check_accelerate(stage.run.strategy)

    return check


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (zero2(), "--multi_gpu --num_processes 2"),  # it names no engine
        (zero2(), DEEPSPEED),
        (zero2(), f"{DEEPSPEED} --zero_stage 2 --mixed_precision bf16 --gradient_accumulation_steps 1"),
        (zero2(), f"{DEEPSPEED} --deepspeed_config_file {{folder}}/ds_config.json"),
        (ZERO3, f"{DEEPSPEED} --zero_stage 3 --offload_optimizer_device cpu --offload_param_device cpu"),
        (ZERO3, f"{DEEPSPEED} --gradient_clipping 0.5 --zero3_init_flag true"),
        (FSDP2, f"{FSDP} --fsdp_version 2"),
        (FSDP2, f"{FSDP} --fsdp_version 2 --fsdp_offload_params true --fsdp_reshard_after_forward false"),
        (FSDP2, f"{FSDP} --fsdp_version 2 --fsdp_activation_checkpointing true"),
        (FP32, f"{FSDP} --fsdp_version 2 --dynamo_backend inductor"),
        (SINGLE, "--cpu --num_processes 1 --mixed_precision bf16"),
    ],
)
def test_what_says_the_same_passes(checked, strategy, options):
    checked(strategy, options)


ZERO = "strategy.ds_config: zero_optimization"
CONTRADICTIONS = [
    (zero2(), f"{DEEPSPEED} --zero_stage 3", [("zero_stage", "3", f"{ZERO}.stage is 2", "2")]),
    (
        zero2(),
        f"{DEEPSPEED} --offload_optimizer_device cpu --offload_param_device cpu",
        [
            ("offload_optimizer_device", "cpu", f"{ZERO}.offload_optimizer.device is none", "none"),
            ("offload_param_device", "cpu", f"{ZERO}.offload_param.device is none", "none"),
        ],
    ),
    (
        ZERO3,
        f"{DEEPSPEED} --gradient_accumulation_steps 4 --gradient_clipping 1.0 --mixed_precision fp16",
        [
            ("mixed_precision", "fp16", "strategy.precision is bf16", "bf16"),
            ("gradient_accumulation_steps", "4", "strategy.grad_accum_steps is 1", "1"),
            ("gradient_clipping", "1.0", "strategy.gradient_clipping is 0.5", "0.5"),
        ],
    ),
    (FSDP2, FSDP, [("fsdp_version", "1", "strategy.engine is fsdp2", "2")]),
    (
        FP32,
        f"{FSDP} --fsdp_version 2 --fsdp_offload_params true --fsdp_reshard_after_forward false "
        "--fsdp_activation_checkpointing true --mixed_precision bf16",
        [
            ("mixed_precision", "bf16", "strategy.precision is fp32", "no"),
            ("fsdp_offload_params", "true", "strategy.cpu_offload is false", "false"),
            ("fsdp_reshard_after_forward", "false", "strategy.reshard_after_forward is true", "true"),
            ("fsdp_activation_checkpointing", "true", "strategy.checkpointed_blocks is 0", "false"),
        ],
    ),
    (
        FSDP2,
        f"{FSDP} --fsdp_version 2 --dynamo_backend inductor --use_parallelism_config "
        "--parallelism_config_tp_size 2 --parallelism_config_dp_replicate_size 2",
        [
            ("dynamo_backend", "INDUCTOR", "strategy.compile_blocks is false", "no"),
            ("parallelism_config_dp_replicate_size", "2", "strategy.dp_replicate is 1", "1"),
            ("parallelism_config_tp_size", "2", "strategy.cp splits samples", "1"),
        ],
    ),
]


@pytest.mark.parametrize(("strategy", "options", "printed"), CONTRADICTIONS, ids=[each[1] for each in CONTRADICTIONS])
def test_what_contradicts_the_run_is_refused_by_both_names(checked, strategy, options, printed):
    assert problems(checked, strategy, options) == [
        f"accelerate was asked for --{option} {asked} ({ACCELERATE[option][0]}), and {decided}; use --{option} {wanted}"
        for option, asked, decided, wanted in printed
    ]


@pytest.mark.parametrize(
    ("strategy", "options", "named", "fix"),
    [
        (zero2(), f"{FSDP} --fsdp_version 2", "use_fsdp", "use --use_deepspeed"),
        (FSDP2, f"{DEEPSPEED} --zero_stage 2", "use_deepspeed", "use --use_fsdp --fsdp_version 2, or --multi_gpu"),
        (SINGLE, "--use_deepspeed --num_processes 1", "use_deepspeed", "start it by `python launch/train.py`"),
        (zero2(), "--use_megatron_lm --num_processes 2", "use_megatron_lm", "use --use_deepspeed"),
    ],
)
def test_another_engine_is_refused_alone(checked, strategy, options, named, fix):
    assert problems(checked, strategy, options) == [
        f"accelerate was asked for --{named} ({ACCELERATE[named][0]}), and strategy.engine is {strategy.engine}; {fix}"
    ]


def test_another_file_of_deepspeeds_is_refused_by_what_differs(checked, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    zero = zero2().ds_config["zero_optimization"]
    option = f"--deepspeed_config_file {other}"
    wanted = {"allgather_bucket_size": zero["allgather_bucket_size"], "reduce_bucket_size": zero["reduce_bucket_size"]}
    assert problems(checked, zero2(), f"{DEEPSPEED} {option}") == [
        f"accelerate was asked for {option} (ACCELERATE_DEEPSPEED_CONFIG_FILE), and zero_optimization.{key} in it is "
        f"{found}, and in strategy.ds_config {value}; leave --deepspeed_config_file out"
        for key, found, value in [*((key, "null", value) for key, value in wanted.items()), ("stage", 3, 2)]
    ]
    other.write_text('{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}')
    assert problems(checked, zero2(), f"{DEEPSPEED} {option}") == [
        f'{option}: ds_config.gradient_accumulation_steps is 4, and grad_accum_steps makes it 1; use "auto"'
    ]
    other.unlink()
    assert problems(checked, zero2(), f"{DEEPSPEED} {option}") == [f"{option.replace(' ', ': ')} does not exist"]


def test_its_config_says_as_much_as_its_options(reported, tmp_path):
    """Every entry that `accelerate config` writes for DeepSpeed. An option overrides it."""
    deepspeed = {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero_stage": 2,
    }
    local = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "debug": False, "use_cpu": False}
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        yaml.safe_dump(
            local | {"deepspeed_config": deepspeed, "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2}
        )
    )
    reported(f"--config_file {config} --zero_stage 3")
    del deepspeed["zero3_init_flag"]
    assert asked_of_accelerate() == {
        **{name: str(value) for name, value in deepspeed.items()},
        **{"use_deepspeed": "true", "mixed_precision": "bf16", "zero_stage": "3"},
    }


def test_a_launched_process_refuses_before_it_looks_for_features(reported, tmp_path, monkeypatch, capsys):
    plan = plan_of(zero2())
    write(plan, tmp_path / "plan")
    config = run_yaml(tmp_path, plan)
    reported(f"{DEEPSPEED} --zero_stage 1")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert launched(config, []) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: accelerate was asked for --zero_stage 1 (ACCELERATE_DEEPSPEED_ZERO_STAGE), and strategy.ds_config: "
        "zero_optimization.stage is 2; use --zero_stage 2"
    ]
