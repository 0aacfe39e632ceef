"""Seconds by rank, and the rank that the others wait for."""

import pytest
from two_processes import answer_of_two

from bigdit.train.monitor.seconds import RankSeconds, SlowRanks

_STEPS = """
import json, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from bigdit.checkpoint import Peers
from bigdit.dist import world_from_env
from bigdit.train.monitor.metrics import Metrics, read_metrics
from bigdit.train.monitor.seconds import Collectives
from bigdit.train.processes.process import process_group
from bigdit.train.step import StepResult

world, answer = world_from_env(), Path(sys.argv[1])
with process_group(world, needed=True) as device, Collectives() as collectives:
    known = {"start": 0, "stop": 60, "images": 1, "name_samples": str, "memory": dict, "collectives": collectives}
    with Metrics(answer.parent, Peers(world), device, **known) as metrics:
        for step in range(1, 61):
            with metrics.waiting_for_data():
                time.sleep(0.06 * world.rank)
            time.sleep(0.02)
            dist.all_reduce(torch.ones(10))
            if step == 30:
                with metrics.aside():
                    dist.barrier()
            metrics.add(step, 1e-3, StepResult(torch.tensor(1.0), None, taken=True))
if world.is_main:
    answer.write_text(json.dumps(read_metrics(metrics.path)))
assert dist.all_reduce.__module__ == "torch.distributed.distributed_c10d"
"""


def test_the_rank_that_others_wait_for_is_named(tmp_path):
    rows = [row for row in answer_of_two(_STEPS, tmp_path) if "step_seconds" in row]
    assert [row["step"] for row in rows] == [10, 20, 30, 40, 50, 60]
    for row in rows[1:]:
        assert row["data_seconds"][0] < 0.06 <= row["data_seconds"][1]
        assert row["collective_seconds"][0] > row["collective_seconds"][1]
        assert row["collective_seconds"][0] < row["step_seconds"][0]
    assert [row.get("slow_ranks") for row in rows] == [None] * 4 + [[1]] * 2


def window(*own):
    """Ranks with these times of their own. Each step took as long as the slowest."""
    return [RankSeconds(f"node{rank}", max(own), 0.25, 1.0 + max(own) - each) for rank, each in enumerate(own)]


@pytest.mark.parametrize(("seconds", "named"), [(1.2, True), (1.05, False)])
def test_a_rank_is_named_once_it_was_slow_in_all_of_fifty_steps(seconds, named):
    slow = SlowRanks()
    lines = [slow.add(10, window(1.0, 1.01, seconds, 1.0)) for _ in range(8)]
    assert [len(each) for each in lines] == [0, 0, 0, 0, int(named), 0, 0, 0]
    assert slow.now == ({2} if named else set())
    if named:
        assert lines[4] == [
            "rank 2 on node2 is slow: its own time of a step is 1.2 s, 0.25 s of it waiting for data, and the others' "
            "median 1 s, more than 10% less in all of the last 50 steps"
        ]
        assert slow.add(10, window(1.0, 1.0, 1.0, 1.0)) == []
        assert slow.now == set()
