"""Before the first step: all processes have the same versions and run, and GPUs are free and as fast as the others."""

import os
import sys
from dataclasses import replace

import pytest
import torch
from commands import DIGITS, ROOT, TINY

from bigdit.train.processes.alike import Found, notes, product_seconds, unlike
from bigdit.train.processes.launch import Ranks
from bigdit.units import GIB

_STARTS = """
import sys
from pathlib import Path
from bigdit.config.stages import load_stages
from bigdit.dist import world_from_env
from bigdit.errors import guard
from bigdit.train.processes.alike import check_alike
from bigdit.train.processes.process import process_group
from bigdit.train.processes.stop import Stop, ending_together

def main():
    world = world_from_env()
    own = sys.argv[2 + world.rank].split(",")
    stages = load_stages(Path(sys.argv[1]), [*sys.argv[4:], "data.features=/on/" + str(world.rank), *own])
    with process_group(world, needed=True) as device, ending_together(world, Stop(10.0, world), 60.0):
        check_alike(stages, world, device)
    return 0

sys.exit(guard(main))
"""


@pytest.mark.parametrize(("second", "line"), [("train.seed=1", ""), ("train.seed=2", "train.seed 2, and rank 0 on")])
def test_another_run_on_another_machine_is_named(capfd, monkeypatch, second, line):
    """Each process may have its own copy of the features."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", _STARTS, str(DIGITS), "train.seed=1", second, *TINY, "strategy.world_size=2"]
    status = Ranks(command, 10.0).run(2)
    printed = capfd.readouterr().err
    if not line:
        assert (status, printed) == (0, "")
        return
    assert status == 1
    host = os.uname().nodename
    assert printed == (
        f"error: rank 1 on {host} has {line} {host} has 1; start all with the same YAML, plan and --set\n"
    )


ALIKE = [Found(f"node{rank // 2}", {"torch": "2.13.0"}, {"train": {"seed": 1}}, GIB, 0.001) for rank in range(4)]


def test_other_versions_are_named_once_a_machine():
    assert unlike(ALIKE) == notes(ALIKE) == []
    older = [replace(each, versions={"torch": "2.11.0"}) if each.host == "node1" else each for each in ALIKE]
    assert unlike(older) == [
        "rank 2 on node1 has torch 2.11.0, and rank 0 on node0 has 2.13.0; install the same on all machines"
    ]


def test_gpus_in_use_and_slow_ones_are_named():
    assert notes([*ALIKE[:3], replace(ALIKE[3], used_bytes=20 * GIB)]) == [
        "rank 3 on node1: 20.00 GiB of its GPU are in use before the run begins"
    ]
    assert notes([ALIKE[0], replace(ALIKE[1], product_s=0.002), *ALIKE[2:]]) == [
        "rank 1 on node0: a matrix product takes its GPU 2 ms, and the median GPU 1 ms; check its clocks, power "
        "limit and temperature"
    ]


def test_slow_links_are_named_beside_their_peers():
    """Of eight processes on two machines, whose network is always slower."""
    links = (0.001, 0.001, 0.0021, 0.02, 0.001, 0.0019, 0.001, None)
    found = [replace(ALIKE[0], host=f"node{rank // 4}", link_s=seconds) for rank, seconds in enumerate(links)]
    assert notes(found) == [
        "rank 2 on node0: an all-reduce with rank 3 on node0 takes 2.1 ms, and the median one between GPUs of a "
        "machine 1 ms; check how they are connected (nvidia-smi topo -m, NCCL_DEBUG=INFO)"
    ]
    found = [replace(each, host=f"node{rank // 2}") for rank, each in enumerate(found)]
    assert [line.split(" takes ")[0] for line in notes(found)] == [
        "rank 2 on node1: an all-reduce with rank 3 on node1",
        "rank 3 on node1: an all-reduce with rank 4 on node2",
    ]


_LINKS = """
import sys, torch
import torch.distributed as dist
from bigdit.dist import world_from_env
from bigdit.train.processes.alike import link_seconds
from bigdit.train.processes.process import process_group

world = world_from_env()
with process_group(world, needed=True) as device:
    groups = set(dist.distributed_c10d._world.pg_map)
    found = [None] * 3
    dist.all_gather_object(found, link_seconds(world, device))
    assert set(dist.distributed_c10d._world.pg_map) == groups
    assert all(0 < seconds < 10 for seconds in found[:2]) and found[2] is None, found
"""


def test_each_link_is_timed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert Ranks([sys.executable, "-c", _LINKS], 10.0).run(3) == 0


def test_a_matrix_product_is_timed():
    assert 0 < product_seconds(torch.device("cpu")) < 10
