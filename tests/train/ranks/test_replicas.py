"""A process whose weights or moments differ from its replicas' is found and named before a checkpoint is saved.

BIGDIT_ROUNDS=10 flips 1,000 bits, and takes 1,600 steps.
"""

import json
import os

import pytest
import torch
from commands import HELPERS, run_ranks

from bigdit.train.processes.alike import digest, sums

ROUNDS = int(os.environ.get("BIGDIT_ROUNDS", "1"))

_FLIPS = """
import json, random, sys
from pathlib import Path
import torch
from resuming import started, strategy
from bigdit.dist import world_from_env
from bigdit.engines.state import replicated
from bigdit.errors import UserError
from bigdit.strategy import LoraSpec
from bigdit.train.processes.alike import ReplicaCheck
from bigdit.train.processes.process import process_group

folder, steps, flips = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
world, chosen = world_from_env(), random.Random(0)
count = world.world_size
ENGINES = {
    "zero0": strategy("deepspeed", count, 0),
    "zero2": strategy("deepspeed", count, 2, lora=LoraSpec(rank=2, alpha=2)),
    "ddp": strategy("ddp", count, lora=LoraSpec(rank=2, base="nf4")),
    "hsdp": strategy("fsdp2", count, dp_replicate=count),
    "hsdp, rounded": strategy("fsdp2", count, dp_replicate=count, precision="bf16_sr"),
}

def flip(engine, ema, broken):
    names = list(replicated(engine, ema))
    name, tensor = chosen.choice(names)
    place, bit = chosen.randrange(tensor.nbytes), chosen.randrange(8)
    if world.rank == broken:
        tensor.view(-1).view(torch.uint8)[place] ^= 1 << bit
    return name

def found(engine, ema, peers):
    try:
        ReplicaCheck(engine, ema, peers, 1000).add(1, saved=True)
    except UserError as error:
        return str(error)

answer = {}
with process_group(world, needed=True):
    for name, wanted in ENGINES.items():
        engine, ema, step, peers = started(wanted, world)
        check = ReplicaCheck(engine, ema, peers, 1)
        for number in range(steps):
            step()
            check.add(number + 1, saved=number % 2 == 1)
        answer[name] = []
        for _ in range(flips):
            broken, state = chosen.randrange(count), chosen.getstate()
            where = flip(engine, ema, broken)
            answer[name].append((broken, where, found(engine, ema, peers)))
            after = chosen.getstate()
            chosen.setstate(state)
            flip(engine, ema, broken)
            chosen.setstate(after)
            assert found(engine, ema, peers) is None
        if hasattr(engine.model, "destroy"):
            from bigdit.engines.deepspeed import forget
            forget(engine)
if world.is_main:
    (folder / "answer.json").write_text(json.dumps(answer))
"""


@pytest.mark.slow
@pytest.mark.timeout(300 + 120 * ROUNDS)
def test_each_flipped_bit_is_found_and_no_step_is_suspected(tmp_path):
    script = tmp_path / "flips.py"
    script.write_text(_FLIPS)
    counts, environment = (4 * ROUNDS**2, 25 * ROUNDS), {"PYTHONPATH": HELPERS, "DS_ACCELERATOR": "cpu"}
    done = run_ranks(3, script, tmp_path, *counts, timeout=300 * ROUNDS, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert list(answer) == ["zero0", "zero2", "ddp", "hsdp", "hsdp, rounded"]
    for flips in answer.values():
        for broken, where, line in flips:
            assert line.startswith(f"rank {broken} (process ")
            assert f" on {os.uname().nodename}) differs from its replicas after step 1, first in {where}: " in line
    kinds = {name: {where.split(".")[0] for _, where, _ in flips} for name, flips in answer.items()}
    assert {"weight", "master", "state", "ema"} & kinds["zero0"] > {"state"}
    assert not kinds["zero2"] & {"master", "state"}  # each process has its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("hashed", [digest, sums])
def test_a_hash_changes_with_each_bit_and_with_the_order(dtype, hashed):
    values = torch.randint(0, 255, (10_001,), generator=torch.Generator().manual_seed(0)).to(dtype)
    before = int(hashed(values))
    assert int(hashed(values.clone())) == before
    for place in (0, 4_095, 4_096, 9_999, 10_000):
        flipped = values.clone()
        flipped[place : place + 1].view(torch.uint8)[0] ^= 1
        assert int(hashed(flipped)) != before
    assert int(hashed(values.roll(5_000))) != before
