"""On emulated GPUs that are too small: a step that runs out of memory is repeated with less of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import contextmanager

import pytest
import torch
from commands import DIGITS, ROOT, SINGLE, TINY, bigdit, with_set
from gpus import TIME_LIMIT_S
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from running import until

from bigdit import catalog
from bigdit.emulator import emulated_environment, shared_state
from bigdit.emulator.interpreter import cuda_python
from bigdit.errors import UserError
from bigdit.memory.process import cuda_context, nccl_buffers
from bigdit.shortage import asked_bytes, memory_errors
from bigdit.strategy import SegmentSpec, StepSize, Strategy
from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.oom_fallback import FILE, OomFallback, read_oom_fallback, smaller_strategy, write_oom_fallback
from bigdit.train.processes.launch import free_port
from bigdit.units import MIB

BUCKETS = "data.buckets=[[8,8],[32,32]]"
FSDP2 = ("strategy.engine=fsdp2", "strategy.ds_config=null")
BIGDIT = ("-c", "from bigdit.cli import main; main()", "train")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "launch/train.py")
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--log_level", "warning", "--num_gpus", "2")
A40 = catalog.resolve_gpu("a40")
# MiB for its context and NCCL.
CONTEXT = -(-cuda_context(A40).high_bytes // MIB)
NCCL = -(-nccl_buffers(A40, 2).high_bytes // MIB)
HALVED = "strategy.micro_batch_size 8, grad_accum_steps 2, checkpointed_blocks 0"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, images):
    """A store of two buckets. The larger one has 16 times the tokens and is rare."""
    folder, features = tmp_path_factory.mktemp("mixed"), tmp_path_factory.mktemp("store") / "features"
    for file in images.glob("*.png"):
        image = Image.open(file)
        large = int(file.stem) % 4 == 3
        (image.resize((32, 32)) if large else image).save(folder / file.name)
        (folder / f"{file.stem}.txt").write_text(file.with_suffix(".txt").read_text())
    done = bigdit(
        "extract", "--config", DIGITS, *with_set([f"data.images={folder}", f"data.features={features}", BUCKETS])
    )
    assert done.returncode == 0, done.stderr
    return features


@contextmanager
def gpus(mib, count=1):
    """The environment of a process with emulated A40s that have this much memory."""
    with shared_state() as state:
        small = A40.model_copy(update={"usable_mib": mib})
        environment = os.environ | emulated_environment(small, count, state) | {"OMP_NUM_THREADS": "1"}
        yield environment


def line_of(features, output, command, *overrides):
    """The command of a run of twelve steps. Large samples come after one step with a global batch of 16, after five
    with 32."""
    chosen = [*TINY, BUCKETS, "train.steps=12", "train.checkpoint_every=100", "train.seed=0", *overrides]
    chosen += [f"data.features={features}", f"output={output}"]
    return [str(cuda_python()), "-W", "ignore", *command, "--config", str(DIGITS), *with_set(chosen)]


def trained(environment, features, output, command, *overrides):
    line = line_of(features, output, command, *overrides)
    return subprocess.run(
        line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )


def check(done, output, rank, step):
    """Check that after so many steps one ran out of memory, that all before were saved, that it was repeated, and
    that the receipt says so."""
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line for line in done.stderr.splitlines() if line.startswith("note: step ")]
    assert len(printed) == 1, done.stderr
    assert printed[0].startswith(f"note: step {step + 1} ran out of memory on rank {rank} (NVIDIA A40) in ")
    assert printed[0].endswith(
        "; all restart with strategy.micro_batch_size 8, grad_accum_steps 2, checkpointed_blocks 0"
    )
    assert f"resuming from {output}/checkpoints/step-{step:08}, step {step}" in done.stderr
    assert [row["step"] for row in read_metrics(output / "metrics.jsonl")] == list(range(1, 13))
    assert (output / "checkpoints/latest").read_text() == "step-00000012\n"
    receipt = json.loads((output / "receipt.json").read_text())
    (event,) = receipt["out_of_memory"]
    assert (event["step"], event["rank"], event["saved"]) == (step, rank, True)
    assert event["asked_bytes"] > event["free_bytes"]
    assert (event["before"]["micro_batch_size"], event["before"]["grad_accum_steps"]) == (16, 1)
    assert (receipt["strategy"]["micro_batch_size"], receipt["strategy"]["grad_accum_steps"]) == (8, 2)


@pytest.mark.slow
def test_one_process_continues_with_half_the_micro_batch_and_so_does_its_next_start(mixed, tmp_path):
    sizes = (*SINGLE, "strategy.micro_batch_size=16", "strategy.global_batch_size=16")
    with gpus(CONTEXT + 46) as environment:
        check(trained(environment, mixed, tmp_path, BIGDIT, *sizes), tmp_path, 0, 1)
        again = trained(environment, mixed, tmp_path, BIGDIT, *sizes, "train.steps=14")
    assert again.returncode == 0, again.stderr
    assert (
        "note: strategy.micro_batch_size 8, grad_accum_steps 2, checkpointed_blocks 0, since a step ran out"
        in again.stderr
    )
    assert "ran out of memory on rank" not in again.stderr
    assert len(json.loads((tmp_path / "receipt.json").read_text())["out_of_memory"]) == 1


HOG = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda:1")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "room"), [("fsdp2", 46), ("zero3", 134)])
def test_two_processes_start_again_together_where_one_gpu_is_partly_taken(mixed, tmp_path, engine, room):
    """The second process runs out of memory while the first waits for it in a collective."""
    sizes = ("strategy.micro_batch_size=16", "strategy.global_batch_size=32")
    config = ("launch/train.py", "--ds-config", f"ds_configs/{engine}_bf16.json")
    command = TORCHRUN if engine == "fsdp2" else (*DEEPSPEED, "--master_port", str(free_port()), *config)
    taken = 400 - room
    with gpus(2 * CONTEXT + NCCL + 400, 2) as environment:
        hog = subprocess.Popen(
            [str(cuda_python()), "-W", "ignore", "-c", HOG, str(taken << 20)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert hog.stdout.readline() == "held\n"
            overrides = (*sizes, *(FSDP2 if engine == "fsdp2" else ()))
            check(trained(environment, mixed, tmp_path, command, *overrides), tmp_path, 1, 5)
        finally:
            hog.communicate("")


@pytest.mark.slow
def test_where_nothing_is_left_to_take_it_is_one_line(mixed, tmp_path):
    sizes = ("strategy.micro_batch_size=1", "strategy.global_batch_size=1", "strategy.checkpointed_blocks=all")
    with gpus(CONTEXT + 20) as environment:
        done = trained(environment, mixed, tmp_path, BIGDIT, *SINGLE, *sizes)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "ran out of memory" in line
    assert "`bigdit plan` finds what fits: an optimizer with less state, strategy.lora, CPU offload" in line


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["single", "fsdp2"])
def test_what_cannot_be_kept_ends_the_run_in_a_line(mixed, tmp_path, engine):
    """All steps before are saved: a restart without that record would only run out of memory again."""
    (tmp_path / FILE).mkdir()
    sizes = (*SINGLE, "strategy.micro_batch_size=16", "strategy.global_batch_size=16")
    command, count, room, step = BIGDIT, 1, CONTEXT + 46, 1
    if engine == "fsdp2":
        sizes = (*FSDP2, "strategy.micro_batch_size=16", "strategy.global_batch_size=32")
        command, count, room, step = TORCHRUN, 2, CONTEXT + NCCL + 46, 5
    with gpus(room, count) as environment:
        done = trained(environment, mixed, tmp_path, command, *sizes)
    assert done.returncode == 1
    assert "Exception in thread" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"error: step {step + 1} ran out of memory on rank " in line
    assert f"and the smaller strategy cannot be kept: cannot write {tmp_path}/{FILE}: " in line
    assert (tmp_path / "checkpoints/latest").read_text() == f"step-{step:08}\n"


@pytest.mark.slow
def test_a_signal_while_they_start_again_ends_them_in_order(mixed, tmp_path):
    """It comes when all is saved and recorded. The same command resumes from there."""
    sizes = (*FSDP2, "strategy.world_size=2", "strategy.micro_batch_size=16", "strategy.global_batch_size=32")
    with gpus(CONTEXT + NCCL + 46, 2) as environment:
        line = line_of(mixed, tmp_path, BIGDIT, *sizes)
        run = subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        until(lambda: run.poll() is not None or (tmp_path / FILE).exists())
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
        assert run.returncode == 143
        assert (tmp_path / "checkpoints/latest").read_text() == "step-00000005\n"
        again = trained(environment, mixed, tmp_path, BIGDIT, *sizes)
    assert again.returncode == 0, again.stderr
    assert f"note: {HALVED}, since a step ran out of memory before" in again.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 13))


STRATEGY = Strategy(micro_batch_size=6, grad_accum_steps=2)


def test_the_plan_s_own_sizes_come_first():
    planned = [
        STRATEGY.step_size,
        StepSize(micro_batch_size=6, grad_accum_steps=2, checkpointed_blocks=4),
        StepSize(micro_batch_size=3, grad_accum_steps=4, checkpointed_blocks=9),
    ]
    first = smaller_strategy(STRATEGY, planned, 12)
    second = smaller_strategy(first, planned, 12)
    assert [first.step_size, second.step_size] == planned[1:]
    after = smaller_strategy(second, planned, 12)
    assert after.step_size == StepSize(micro_batch_size=1, grad_accum_steps=12, checkpointed_blocks=9)


@given(
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(0, 12),
    st.sampled_from(["full", "selective"]),
    st.sampled_from([None, SegmentSpec(blocks=1, every=2)]),
)
def test_the_samples_stay_and_it_comes_to_an_end(micro_batch_size, grad_accum_steps, blocks, checkpointing, segments):
    strategy = Strategy(
        micro_batch_size=micro_batch_size,
        grad_accum_steps=grad_accum_steps,
        checkpointed_blocks=blocks,
        checkpointing=checkpointing,
        checkpointed_segments=segments,
        gradient_clipping=1.0,
    )
    samples, seen = strategy.global_batch_size, []
    while strategy is not None:
        assert strategy.global_batch_size == samples
        assert strategy.step_size not in seen
        seen.append(strategy.step_size)
        strategy = smaller_strategy(strategy, (), 12)
    assert seen[-1].micro_batch_size == 1
    assert seen[-1].checkpointed_blocks in ("all", 12)
    assert seen[-1].checkpointed_segments is None
    assert len(seen) < 10


def test_deepspeed_s_document_follows():
    document = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    strategy = Strategy(engine="deepspeed", world_size=2, micro_batch_size=4, ds_config=document)
    smaller = smaller_strategy(strategy, (), 12)
    wanted = strategy.ds_document | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert smaller.ds_document == wanted


def test_what_steps_in_the_backward_pass_recomputes_blocks():
    strategy = Strategy(micro_batch_size=8, optimizer_in_backward=True, gradient_clipping=None)
    assert smaller_strategy(strategy, (), 12).step_size.checkpointed_blocks == "all"


def test_a_file_of_other_settings_or_a_damaged_one_is_a_note_and_left_out(tmp_path, capsys):
    now = smaller_strategy(STRATEGY, (), 12)
    write_oom_fallback(tmp_path, OomFallback(asked=STRATEGY, now=now))
    assert read_oom_fallback(tmp_path, STRATEGY).now == now
    assert "since a step ran out of memory before" in capsys.readouterr().err
    other = STRATEGY.model_copy(update={"world_size": 2, "engine": "fsdp2"})
    assert read_oom_fallback(tmp_path, other).now == other
    assert "is for other settings than this run's, and is not used" in capsys.readouterr().err
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace('"now"', '"how"'))
    assert read_oom_fallback(tmp_path, STRATEGY).now == STRATEGY
    assert "is not used (it is damaged)" in capsys.readouterr().err


def test_what_was_asked_for_is_read_from_torch_s_message():
    assert asked_bytes("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total") == 20 << 20
    assert asked_bytes("CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has") == 512
    assert asked_bytes("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate") is None


def test_what_a_host_ran_out_of_is_one_line():
    line = r"^training ran out of memory: 1073741824\.00 GiB were asked for, [\d.]+ GiB of [\d.]+ GiB were free; less$"
    with pytest.raises(UserError, match=line), memory_errors("training", torch.device("cpu"), "less"):
        torch.empty(2**60, dtype=torch.uint8)


def test_other_errors_of_a_step_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shape"), memory_errors("training", torch.device("cpu"), "less"):
        torch.empty(2).view(3)
