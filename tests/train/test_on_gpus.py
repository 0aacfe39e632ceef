"""bigdit's trainer on emulated GPUs: CUDA's code paths in every engine and optimizer, with torch's own peaks."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from typing import get_args

import pytest
from commands import DIGITS, ONLINE, ROOT, SINGLE, TINY, with_set
from diffusers import AutoencoderKL
from gpus import A40, TIME_LIMIT_S, answers, benched, on_gpu
from plan_files import SINGLE as PLANNED
from plan_files import TINY_KWARGS, plan_of, run_yaml, write

from bigdit import catalog
from bigdit.catalog.encoders import OnlineEncoders, TextEncoderSpec, VaeSpec
from bigdit.catalog.resolve import model_spec
from bigdit.config.stages import load_run
from bigdit.emulator import emulated_environment, shared_state
from bigdit.emulator.interpreter import cuda_python
from bigdit.profile.attempt import StepRequest
from bigdit.profile.gpus import EmulatedGpus
from bigdit.strategy import BatchShape, OptimizerName
from bigdit.train.monitor.metrics import read_metrics
from bigdit.units import gib

STEPS = ("train.steps=3", "train.checkpoint_every=3")
FSDP2 = ("strategy.engine=fsdp2", "strategy.ds_config=null")
BIGDIT = ("-c", "from bigdit.cli import main; main()", "train")


def launched(features, output, *command, overrides=(), gpus=2, gpu="a40"):
    """Run a launcher's command on emulated GPUs."""
    chosen = with_set([*TINY, *STEPS, f"data.features={features}", f"output={output}", *overrides])
    with shared_state() as state:
        environment = os.environ | emulated_environment(catalog.resolve_gpu(gpu), gpus, state)
        environment["OMP_NUM_THREADS"] = "1"
        line = [str(cuda_python()), "-W", "ignore", *command, "--config", str(DIGITS), *chosen]
        return subprocess.run(
            line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )


def on_two_gpus(features, output, *command, overrides=()):
    """Run a launcher's command on two emulated A40s. Returns the run's receipt."""
    done = launched(features, output, *command, overrides=overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "overflow" not in (done.stdout + done.stderr).lower()
    assert "skipping step" not in (done.stdout + done.stderr).lower()
    return json.loads((output / "receipt.json").read_text())


def check(receipt, output, world_size):
    """Check the receipt of an emulated GPU: the allocator's own peaks, and a whole checkpoint."""
    assert receipt["emulated"]
    assert receipt["device"] == "NVIDIA A40"
    assert receipt["strategy"]["world_size"] == world_size
    assert receipt["measured_with"] == "torch.cuda.max_memory_allocated"
    assert receipt["measured_peak_allocated_bytes"] <= receipt["measured_peak_reserved_bytes"]
    losses = [row["loss"] for row in read_metrics(output / "metrics.jsonl")]
    assert len(set(losses)) == 3  # the digits' tensors are small, so that losses are computed, and change
    assert all(0.5 < loss < 5 for loss in losses), losses
    assert (output / "checkpoints/latest").read_text() == "step-00000003\n"


@pytest.mark.slow
def test_fp8_trains_where_the_gpus_have_it(features, tmp_path):
    for gpu, settings in (
        ("h100-sxm", (*FSDP2, "strategy.float8=tensorwise")),
        ("a40", (*SINGLE, "strategy.float8=rowwise")),
    ):
        done = launched(features, tmp_path / gpu, *BIGDIT, overrides=settings, gpu=gpu)
        if gpu == "a40":
            assert (done.returncode, done.stdout) == (1, "")
            assert (
                "NVIDIA A40 multiplies nothing in FP8 (compute capability 8.6), which needs 8.9 or more" in done.stderr
            )
            continue
        assert done.returncode == 0, done.stdout + done.stderr
        assert "16 of the 16 linear layers of the blocks multiply in FP8\n" in done.stderr
        assert (tmp_path / gpu / "checkpoints/latest").read_text() == "step-00000003\n"


@pytest.mark.slow
def test_a_run_by_a_plan_says_what_was_planned_and_what_was_measured(features, tmp_path):
    """With compiled blocks, whose kernels write nothing: no step is skipped for old content of its memory."""
    compiled, one_block = PLANNED.model_copy(update={"compile_blocks": True}), TINY_KWARGS | {"num_layers": 1}
    plan = plan_of(compiled, kwargs=one_block, expandable_segments=True)
    write(plan, tmp_path / "plan")
    config = run_yaml(tmp_path, plan, data={"features": str(features)})
    command = [str(cuda_python()), "-W", "ignore", *BIGDIT, "--config", str(config)]
    chosen = ["train.steps=3", "train.warmup_steps=1"]
    done = subprocess.run(
        [*command, *with_set([*chosen, f"output={tmp_path / 'run'}"])],
        env=os.environ | emulated_environment(catalog.resolve_gpu("a40")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    receipt, expected = json.loads((tmp_path / "run/receipt.json").read_text()), plan.expected
    measured = receipt["measured_peak_reserved_bytes"]
    off = f"{100 * (measured / expected.peak_reserved_bytes - 1):+.1f} %"
    printed = f"planned 40.00 GiB at 8 × 12, measured {gib(measured)} ({off}) reserved by torch"
    assert done.stderr.count(f"{printed}\n") == 1, done.stderr
    waits = r"note: strategy\.compile_blocks: the first step of each of \d buckets waits for torch's compiler"
    assert re.search(waits, done.stderr)
    compiled = [line for line in done.stderr.splitlines() if "compiled" in line]
    assert compiled, done.stderr
    assert all(re.fullmatch(r"note: step \d: compiled \d graphs? for \d new sizes?", line) for line in compiled)
    assert "skipped" not in done.stderr
    assert receipt["predicted_peak_reserved_bytes"] == expected.peak_reserved_bytes
    assert receipt["predicted_peak_allocated_bytes"] == expected.peak_allocated_bytes
    for row in read_metrics(tmp_path / "run/metrics.jsonl"):
        assert row["planned_memory_bytes"] == expected.peak_allocated_bytes
        assert 0 < row["memory_bytes"] < row["peak_memory_bytes"]
        assert row["peak_memory_bytes"] >= receipt["measured_peak_allocated_bytes"]  # it is of the first two steps
        assert "mfu" not in row  # an emulated GPU computes nothing
    check_phases(json.loads((tmp_path / "run/run.json").read_text()), plan, receipt)
    page = (tmp_path / "run/report.html").read_text()
    assert html.escape(printed) in page
    assert "NVIDIA A40, emulated" in page


def check_phases(record, plan, receipt):
    """The phases' peaks, whose highest are the run's, beside the planned ones."""
    phases = record["measured"]["phases"]
    assert [each["phase"] for each in phases] == ["init", "forward", "backward", "step"]
    assert max(each["allocated_bytes"] for each in phases) == receipt["measured_peak_allocated_bytes"]
    assert max(each["reserved_bytes"] for each in phases) == receipt["measured_peak_reserved_bytes"]
    assert len({each["allocated_bytes"] for each in phases}) == 4
    assert record["planned"]["phases"] == plan.phases


T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
KL = {"block_out_channels": [8, 16], "down_block_types": ["DownEncoderBlock2D"] * 2, "latent_channels": 4}
KL |= {"up_block_types": ["UpDecoderBlock2D"] * 2, "norm_num_groups": 4}
HELD = 1024
"""Bytes: a step's loss and norm, which the loop reads in the next step."""


@pytest.mark.slow
def test_encoders_online_take_of_a_gpu_what_an_attempt_takes(images, tmp_path):
    """A VAE and the digits' T5 in every phase, beside the step's memory. Encoding has its own phase."""
    AutoencoderKL(**KL).save_pretrained(tmp_path / "vae")
    codec = f"encoders.image={{name: vae, class_name: AutoencoderKL, path: {tmp_path / 'vae'}}}"
    places = [f"data.images={images}", *ONLINE, "data.buckets=[[16, 16]]", codec]
    settings = [*TINY, *STEPS, *SINGLE, *places, f"output={tmp_path / 'run'}"]
    command = [str(cuda_python()), "-W", "ignore", *BIGDIT, "--config", str(DIGITS), *with_set(settings)]
    done = subprocess.run(
        command,
        env=os.environ | emulated_environment(A40) | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads((tmp_path / "run/receipt.json").read_text()), tmp_path / "run", 1)
    measured = json.loads((tmp_path / "run/run.json").read_text())["measured"]["phases"]
    found = {each["phase"]: each["allocated_bytes"] for each in measured}
    run = load_run(DIGITS, settings)
    text = TextEncoderSpec(
        class_name="T5EncoderModel",
        config_class="T5Config",
        kwargs=T5 | {"vocab_size": 384},
        dtype="fp32",
        tokens=32,
    )
    vae = VaeSpec(class_name="AutoencoderKL", kwargs=KL, dtype="fp32")
    request = StepRequest(
        model=model_spec(run.model),
        batch=BatchShape(latents=(4, 8, 8), text=(32, 64), latents_dtype="bf16"),
        strategy=run.strategy,
        encoders=OnlineEncoders(pixels=(3, 16, 16), vae=vae, text=(text,)),
    )
    with EmulatedGpus(A40, 1) as gpus:
        attempted = {phase: each.peak_bytes for phase, each in gpus.attempt(request).phases.items()}
    assert list(found) == list(attempted) == ["init", "encode", "forward", "backward", "step"]
    assert {phase: found[phase] - attempted[phase] for phase in ("forward", "backward", "step")} == dict.fromkeys(
        ("forward", "backward", "step"), HELD
    )
    # An attempt's captions fill all tokens. Their ids are on the GPU for the whole micro-batch.
    assert 0 <= attempted["encode"] + HELD - found["encode"] < 2**20


DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--log_level", "warning", "--num_gpus", "2")
ACCELERATE = (
    *("-m", "accelerate.commands.accelerate_cli", "launch", "--use_deepspeed", "--num_processes", "2"),
    *("--zero_stage", "3", "--mixed_precision", "bf16"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "stage"), [((*DEEPSPEED, "--master_port"), 2), ((*ACCELERATE, "--main_process_port"), 3)]
)
def test_deepspeed_trains_on_two_gpus(features, tmp_path, launcher, stage):
    ds_config = f"ds_configs/zero{stage}_bf16.json"
    command = (*launcher, str(_port()), "launch/train.py", "--ds-config", ds_config)
    check(on_two_gpus(features, tmp_path, *command), tmp_path, 2)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "launch/train.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        (TORCHRUN, FSDP2),
        (BIGDIT, (*FSDP2, "strategy.dp_replicate=2")),
        (BIGDIT, ("strategy.engine=ddp", "strategy.ds_config=null")),
    ],
    ids=["torchrun, fsdp2", "bigdit train, hsdp", "bigdit train, ddp"],
)
def test_engines_of_torch_train_on_two_gpus(features, tmp_path, command, overrides):
    check(on_two_gpus(features, tmp_path, *command, overrides=overrides), tmp_path, 2)


@pytest.mark.slow
def test_more_processes_than_gpus_are_a_line(features, tmp_path):
    done = launched(features, tmp_path, *BIGDIT, gpus=1)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: 2 processes of the run are on this machine, a GPU each, and torch sees 1 there: start 1 "
        "(strategy.world_size, or the launcher's own number), or make more visible (CUDA_VISIBLE_DEVICES)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("expandable", [False, True], ids=["whole segments", "expandable segments"])
def test_a_gpu_measures_what_was_predicted_to_the_byte(features, expandable):
    segments = f"expandable_segments:{expandable}"
    chosen = with_set([*TINY, f"data.features={features}"])
    receipt, printed = benched("--config", DIGITS, *chosen, PYTORCH_ALLOC_CONF=segments)
    assert "one process on an emulated NVIDIA A40" in printed
    assert receipt["emulated"]
    assert receipt["expandable_segments"] is expandable
    assert receipt["predicted_peak_allocated_bytes"] == receipt["measured_peak_allocated_bytes"]
    assert receipt["predicted_peak_reserved_bytes"] == receipt["measured_peak_reserved_bytes"]


TRAINED = """
import json, os, sys
from bigdit.errors import guard
from bigdit.train.__main__ import main
sys.exit(guard(lambda: main(json.loads(os.environ["ARGUMENTS"]))))
"""


@pytest.mark.slow
def test_gpus_that_accelerate_was_to_leave_alone_are_refused(features, tmp_path):
    overrides = (*TINY, *STEPS, *SINGLE, f"data.features={features}", f"output={tmp_path}")
    arguments = ["--config", str(DIGITS), *with_set(overrides)]
    done = on_gpu("a40", TRAINED, ARGUMENTS=json.dumps(arguments), ACCELERATE_USE_CPU="True")  # accelerate's words
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == (
        "error: accelerate was asked for --cpu (ACCELERATE_USE_CPU), and runs take the GPUs that they see; leave it "
        "out, or hide the GPUs: CUDA_VISIBLE_DEVICES="
    )


OPTIMIZERS = get_args(OptimizerName)

EACH = """
import json, os, sys
from bigdit.train.__main__ import main
found = {}
for name in json.loads(os.environ["OPTIMIZERS"]):
    output = os.path.join(os.environ["OUTPUT"], name)
    arguments = json.loads(os.environ["ARGUMENTS"])
    status = main([*arguments, "--set", f"output={output}", "--set", f"strategy.optimizer.name={name}"])
    found[name] = [status, os.path.exists(os.path.join(output, "receipt.json"))]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_every_optimizer_steps_on_a_gpu(features, tmp_path):
    """In one process, one after another: each trains, and has its state after the step."""
    # CAME's confidence starts from zero, as published. Its first steps are some ten times those of the others: at the
    # recipe's rate it diverges, also on CPUs.
    rates = ("strategy.optimizer.lr=2.0e-4", "train.lr_schedule=constant")
    overrides = (*TINY, *STEPS, *SINGLE, *rates, f"data.features={features}")
    arguments = ["--config", str(DIGITS), *with_set(overrides)]
    found = answers(
        "a40",
        EACH,
        OPTIMIZERS=json.dumps(OPTIMIZERS),
        OUTPUT=str(tmp_path),
        ARGUMENTS=json.dumps(arguments),
        OMP_NUM_THREADS="1",
    )
    assert found == {name: [0, True] for name in OPTIMIZERS}
    for name in OPTIMIZERS:
        receipt = json.loads((tmp_path / name / "receipt.json").read_text())
        assert receipt["strategy"]["optimizer"]["name"] == name
        check(receipt, tmp_path / name, 1)


def _port():
    from bigdit.train.processes.launch import free_port

    return free_port()
