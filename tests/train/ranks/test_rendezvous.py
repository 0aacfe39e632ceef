"""Processes that cannot meet end with a line, in seconds, on each machine."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import BIN, DIGITS, TINY, run_ranks, with_set

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

        def started(name, rank, port, store=features, timeout=2, *, by=None):
            return aside.submit(alone, rank, "127.0.0.1", port, store, tmp_path / name, timeout, by=by)

        port = server.getsockname()[1]
        used = [started("first", 0, port), started("other", 1, port), started("by", 0, port, by="bigdit train")]
        waiting = [started("waits", 0, free_port(), timeout=13), started("joins", 1, free_port(), timeout=14)]
        own = started("own", 1, free_port(), tmp_path / "none")
        lines = [each.result() for each in used]
    in_use = f"error: another program uses the port of 127.0.0.1:{port} (--head, or MASTER_ADDR"
    assert all(line.startswith(in_use) for line in lines), lines
    assert all("not all processes of the run connected to 127.0.0.1" in each.result() for each in waiting)
    assert "holds no latents" in own.result()
    assert time.monotonic() - began < 120
