"""Processes that cannot meet end with a line, in seconds, on each machine."""

import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import BIN, DIGITS, ROOT, TINY, environment_with, run_ranks, with_set

from bigdit.train.processes.launch import free_port

FSDP2 = ("strategy.engine=fsdp2", "strategy.ds_config=null", "strategy.world_size=2")


def alone(rank, address, port, features, output, timeout=2, *, by=None):
    """The only process that starts, of two machines with one each; `by` bigdit train, or another launcher."""
    more = (f"train.timeout={timeout}", f"data.features={features}", f"output={output}")
    settings = with_set([*TINY, *FSDP2, *more])
    own = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    if by is None:
        own |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        done = run_ranks(1, "-m", "bigdit.train", "--config", DIGITS, *settings, **own)
    else:
        place = ("--nodes", "2", "--node-rank", str(rank), "--head", f"{address}:{port}")
        done = run_ranks(1, BIN / "bigdit", "train", "--config", DIGITS, *settings, *place)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "frame #" not in done.stderr  # of torch's stack
    limit = f"within {timeout} s (train.timeout)\n"
    waits = f"waiting until all 2 processes of the run connect to {address}:{port}, {limit}"
    assert (waits in done.stderr) == (timeout > 10)
    return errors[0]


@pytest.mark.slow
def test_processes_that_cannot_meet_end_with_a_line(features, tmp_path):
    """All wait at the same time, each alone. Another program uses the port of the first process, of another, which
    it does not answer, and of `bigdit train`; nobody joins the first process, or another; one has a problem of its
    own."""
    began = time.monotonic()
    with ThreadPoolExecutor() as aside, socket.create_server(("127.0.0.1", 0)) as server:

        def started(name, rank, port, store=features, timeout=2, *, address="127.0.0.1", by=None):
            return aside.submit(alone, rank, address, port, store, tmp_path / name, timeout, by=by)

        port = server.getsockname()[1]
        used = {"127.0.0.1": [started("first", 0, port), started("other", 1, port)]}
        used["[::1]"] = [started("by", 0, port, address="[::1]", by="bigdit train")]
        waiting = [started("waits", 0, free_port(), timeout=13), started("joins", 1, free_port(), timeout=14)]
        own = started("own", 1, free_port(), tmp_path / "none")
        lines = [(address, each.result()) for address, several in used.items() for each in several]
    in_use = "error: another program, or another rank 0, uses the port of"
    assert all(line.startswith(f"{in_use} {address}:{port} (--head, or MASTER_ADDR") for address, line in lines), lines
    assert all("not all processes of the run connected to 127.0.0.1" in each.result() for each in waiting)
    assert "holds no latents" in own.result()
    assert time.monotonic() - began < 120


def ended(features, output, *machines):
    """The lines about errors of each of several machines, which all end with 1."""
    settings = with_set([*TINY, *FSDP2, "strategy.world_size=4", f"data.features={features}", f"output={output}"])
    command = [BIN / "bigdit", "train", "--config", DIGITS, *settings]
    begun = [
        subprocess.Popen(
            [*command, *where.split()], cwd=ROOT, env=environment_with({}), stderr=subprocess.PIPE, text=True
        )
        for where in machines
    ]
    printed = [machine.communicate(timeout=200)[1] for machine in begun]
    assert [machine.returncode for machine in begun] == [1] * len(begun), printed
    return [[line for line in each.splitlines() if "error" in line.lower()] for each in printed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "node_ranks", "found", "fix"),
    [
        (
            (4, 4, 4),
            (0, 1, 1),
            "and rank 1 (process ",
            "have the same number; give each machine its own --node-rank (RANK)",
        ),
        ((4, 2), (0, 1), " of 4 processes on 4 machines", "give all the same --nodes (WORLD_SIZE)"),
    ],
)
def test_machines_that_do_not_belong_together_say_so_at_once(features, tmp_path, nodes, node_ranks, found, fix):
    """They do not wait for train.timeout, 240 s."""
    head = f"--head 127.0.0.1:{free_port()}"
    machines = [f"--nodes {count} --node-rank {rank} {head}" for count, rank in zip(nodes, node_ranks, strict=True)]
    (line,), *others = ended(features, tmp_path, *machines)
    assert all(each == [line] for each in others)
    assert line.startswith("error: rank ")
    assert found in line
    assert line.endswith(fix)


@pytest.mark.slow
def test_an_address_that_is_not_the_first_machine_s_is_a_line(features, tmp_path):
    head = "240.0.0.1:40000"  # nobody has this address
    ((line,),) = ended(features, tmp_path, f"--nodes 2 --node-rank 0 --head {head} --set train.timeout=2")
    assert line.startswith(f"error: rank 0 does not reach its own machine at {head} (--head, or MASTER_ADDR")
