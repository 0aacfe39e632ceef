"""A run for four machines goes on with fewer by the same command: with the same samples and losses."""

import os
import random
import subprocess
import sys
from collections import Counter

import pytest
from commands import DIGITS, ROOT, TINY, environment_with, with_set
from running import until
from training import run as run_alone

from bigdit import checkpoint
from bigdit.train.monitor.metrics import read_metrics
from bigdit.train.processes.launch import free_port

pytestmark = pytest.mark.slow

MACHINES = 4
ROUNDS = int(os.environ.get("BIGDIT_ROUNDS", "1"))
"""How often a machine is lost before three reach the end."""
STEPS = 12 * ROUNDS
COMPARED = 12
"""Steps whose losses are compared. Another order of sums is 1e-7 off. AdamW turns that into 1e-3 from step 14 on,
also for two processes that share the batch evenly."""
BATCH = ("strategy.precision=fp32", "strategy.global_batch_size=8", f"train.steps={STEPS}", "train.checkpoint_every=2")
ENGINES = {
    "fsdp2": ("strategy.engine=fsdp2", "strategy.ds_config=null"),
    "zero2": ("strategy.engine=deepspeed", "strategy.ds_config=ds_configs/zero2_bf16.json"),
}
# Sums of gradients have another order: see test_nodes.py. These are eight steps more.
TOLERANCE = 1e-4


def losses(output):
    return {row["step"]: row["loss"] for row in read_metrics(output / "metrics.jsonl")}


@pytest.fixture(scope="module")
def undisturbed(features, tmp_path_factory):
    """The losses of one process."""
    output = tmp_path_factory.mktemp("alone")
    assert run_alone(features, output, *BATCH, "strategy.micro_batch_size=8") == 0
    return losses(output)


def started(machines, engine, features, output):
    """The run's process on each of so many machines, by the command for all of them."""
    settings = [*TINY, *ENGINES[engine], *BATCH, f"data.features={features}", f"output={output}"]
    settings += [f"strategy.world_size={MACHINES}", "strategy.micro_batch_size=2", "train.timeout=60"]
    own = {"WORLD_SIZE": str(machines), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "bigdit.train", "--config", str(DIGITS), *with_set(settings)]
    return [
        subprocess.Popen(
            command, cwd=ROOT, env=environment_with(own | {"RANK": str(rank)}), stderr=subprocess.PIPE, text=True
        )
        for rank in range(machines)
    ]


def ended(ranks):
    """What each printed, and its status."""
    try:
        return [(rank.communicate(timeout=300)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def saved(output):
    """The steps of the latest checkpoint."""
    found, _ = checkpoint.latest(output)
    return 0 if found is None else found.step


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_left_goes_on(features, tmp_path, undisturbed, engine):
    """Machines are lost at random; the first one only once there is a checkpoint."""
    output, chance = tmp_path / "run", random.Random(engine)
    for number in range(ROUNDS):
        before = saved(output)
        ranks = started(MACHINES if number == 0 else chance.randint(2, MACHINES), engine, features, output)
        wanted = min(before + chance.choice([2, 4]), STEPS)
        until(lambda wanted=wanted: saved(output) >= wanted, within=200)
        chance.choice(ranks).kill()
        seen = saved(output)
        ended(ranks)
        assert saved(output) >= seen >= wanted
    resumed = saved(output)
    ranks = ended(started(3, engine, features, output))
    assert [status for _, status in ranks] == [0] * 3, ranks
    assert "3 of 4 GPUs: the global batch stays 8, with micro_batch_size 2, grad_accum_steps 2\n" in ranks[0][0]
    assert "over 3 GPUs takes 12 places: 4 samples are repeated with weight 0 (33 % of the time)\n" in ranks[0][0]
    assert saved(output) == STEPS
    counts = Counter(row["step"] for row in read_metrics(output / "metrics.jsonl"))
    assert counts == dict.fromkeys(range(1, STEPS + 1), 1)
    assert resumed < STEPS
    first = {step: loss for step, loss in losses(output).items() if step <= COMPARED}
    assert first == pytest.approx({step: undisturbed[step] for step in first}, rel=TOLERANCE)
