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


@pytest.mark.parametrize(("rank", "by"), [(0, None), (1, None), (0, "bigdit train")])
def test_a_port_in_use_is_a_line(features, tmp_path, rank, by):
    """For the first process, and for others, which another program does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = alone(rank, "127.0.0.1", port, features, tmp_path, by=by)
    assert line.startswith(f"error: another program uses the port of 127.0.0.1:{port} (--head, or MASTER_ADDR")


@pytest.mark.slow
def test_a_rendezvous_that_nobody_joins_is_a_line(features, tmp_path):
    """Each waits alone: the first process, the second, and one with a problem of its own."""
    began, stores = time.monotonic(), {0: features, 1: features, 2: tmp_path / "none"}
    with ThreadPoolExecutor(len(stores)) as aside:  # they wait at the same time
        *waiting, ended = [
            aside.submit(alone, min(number, 1), "127.0.0.1", free_port(), store, tmp_path / str(number), timeout)
            for (number, store), timeout in zip(stores.items(), (13, 14, 2), strict=True)
        ]
    assert all("not all processes of the run connected to 127.0.0.1" in each.result() for each in waiting)
    assert "holds no latents" in ended.result()
    assert time.monotonic() - began < 120
