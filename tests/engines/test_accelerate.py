"""A plan with DeepSpeed trains under `accelerate launch --use_deepspeed` as under torchrun, to the bit."""

import json

import pytest
import safetensors
import yaml
from commands import BIN, ROOT, run_command
from plan_files import TINY_KWARGS, plan_of, run_yaml, write

from bigdit.config.strategy_text import parse_strategy
from bigdit.train.processes.launch import free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plan(features, tmp_path_factory):
    """A plan's folder with its completed run."""
    folder = tmp_path_factory.mktemp("accelerate") / "plan"
    planned = plan_of(parse_strategy(["zero2,world_size=2,micro_batch_size=4"]), kwargs=TINY_KWARGS)
    write(planned, folder)
    (folder / "ds_config.json").write_text(json.dumps(planned.strategy.ds_document))
    train = {"steps": 3, "warmup_steps": 1}
    run_yaml(folder, planned, data={"features": str(features)}, train=train, plan="plan.yaml")
    return folder


def checkpoint(plan, name, *launcher):
    """The final weights, masters and optimizer state of the plan's run, by file and name."""
    words = ("launch/train.py", "--config", plan / "run.yaml")
    output = plan / name
    done = run_command(*launcher, *words, "--set", f"output={output}", DS_ACCELERATOR="cpu", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    files = (output / "checkpoints/step-00000003/engine").iterdir()
    return {file.name: dict(safetensors.deserialize(file.read_bytes())) for file in files}


@pytest.fixture(scope="module")
def by_torchrun(plan):
    found = checkpoint(plan, "torchrun", BIN / "torchrun", "--standalone", "--nproc-per-node", 2)
    assert [*sorted(found)] == [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    return found


ACCELERATE = (BIN / "accelerate", "launch")


def test_by_its_options(plan, by_torchrun):
    asked = ("--use_deepspeed", "--num_processes", 2, "--mixed_precision", "bf16", "--zero_stage", 2)
    assert checkpoint(plan, "options", *ACCELERATE, *asked, "--main_process_port", free_port()) == by_torchrun


def test_by_its_config_with_a_file_of_deepspeeds(plan, by_torchrun, tmp_path):
    deepspeed = {"deepspeed_config_file": str(plan / "ds_config.json"), "zero3_init_flag": False}
    document = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}
    config = tmp_path / "accelerate.yaml"
    config.write_text(yaml.safe_dump(document | {"num_machines": 1, "num_processes": 2, "use_cpu": False}))
    launcher = (*ACCELERATE, "--config_file", config, "--main_process_port", free_port())
    assert checkpoint(plan, "config", *launcher) == by_torchrun
