"""`bigdit emulate` runs unmodified scripts on emulated GPUs, through the command line."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import BIN, ROOT
from gpus import Done, emulate, script

GIB = 2**30

TRAINS = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    x = torch.randn(2000, 1024, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
"""

RUNS_OUT = """
import torch

class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2
    @staticmethod
    def backward(context, gradient):
        return gradient + torch.empty(100 * 2**30, dtype=torch.uint8, device="cuda")[0]

def train(x):
    kept = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    Greedy.apply(x).sum().backward()

train(torch.nn.Linear(1000, 1000).cuda().weight)
"""

CATCHES = """
import torch
model = torch.nn.Linear(4096, 4096, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
rows = 2**23
while True:
    try:
        model(torch.empty(rows, 4096, device="cuda")).sum().backward()
        break
    except torch.OutOfMemoryError:
        rows //= 2
optimizer.step()
print("rows", rows)
"""

BEGINS_ANEW = """
import os, sys
import torch
rows = int(sys.argv[1])
with torch.no_grad():
    model = torch.nn.Linear(4096, 4096, device="cuda")
    try:
        model(torch.empty(rows, 4096, device="cuda"))
    except torch.OutOfMemoryError:
        if rows == 2**23:
            os.execl(sys.executable, sys.executable, __file__, str(rows // 2))
        model(torch.empty(rows // 4, 4096, device="cuda"))
"""

NOTICES = """
import torch

class Stateless(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self):
        pass

torch.cuda.memory._record_memory_history(max_entries=1000)
model = torch.nn.Linear(10, 10).cuda()
model(torch.ones(1, 10, device="cuda")).sum().backward()
Stateless(model.parameters()).step()
print(len(torch.cuda.memory._snapshot()["device_traces"][0]))
"""

CHUNKS = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    model(torch.randn(10, 1024, device="cuda")).square().mean().backward()
    gradients = [(p, p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    for p, p.grad in gradients:
        optimizer.step()
        p.grad = None
"""

SHARDS = """
import os, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
shards, copy = (torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda() for _ in range(2))
models = [fully_shard(shards), DistributedDataParallel(copy)]
optimizer = torch.optim.AdamW([{"params": [*model.parameters()]} for model in models])
for step in range(100):
    x = torch.randn(100, 1024, device="cuda")
    sum(model(x).square().mean() for model in models).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.memory_snapshot()
"""

HALF = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(100):
    with accelerator.accumulate(model):
        loss = model(torch.randn(100, 1024, device="cuda")).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def peaks(account: dict[str, Any]) -> dict[str, int]:
    return {phase["phase"]: phase["peak_allocated_bytes"] for phase in account["gpus"][0]["phases"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path, Path]:
    """Three steps of a plain script, with its report in a folder."""
    folder = tmp_path_factory.mktemp("trains")
    file, out = script(folder, TRAINS), folder / "out"
    return emulate("--gpu", "a40", "--steps", 3, "--out", out, "--json", "--", "python", file), file, out


def test_peaks_are_those_that_torch_tells_the_script(trained: tuple[Done, Path, Path]) -> None:
    done, _, _ = trained
    assert done.returncode == 0, done.stderr
    reported = re.findall(r"^peak (\d+) (\d+)$", done.stderr, re.MULTILINE)  # the JSON replaces the printed text
    assert len(reported) == 3
    gpu = done.account["gpus"][0]
    assert [gpu["peak_allocated_bytes"], gpu["peak_reserved_bytes"]] == [int(nbytes) for nbytes in reported[-1]]
    assert gpu["phases_off_bytes"] == 0
    assert max(point[1] for point in gpu["curve"]) == gpu["peak_allocated_bytes"]
    assert max(point[2] for point in gpu["curve"]) == gpu["peak_reserved_bytes"]
    assert done.report["fits"]
    assert done.report["notices"] == []
    assert done.account["ended"] == "steps"
    assert done.account["steps"] == 3


def test_phases_are_reported_apart(trained: tuple[Done, Path, Path]) -> None:
    """Eight layers of 1024 × 1025 parameters in fp32, and 2000 rows of 1024 saved for each."""
    done, _, _ = trained
    found = peaks(done.account)
    parameters, rows = 8 * (1024 + 1) * 1024 * 4, 2000 * 1024 * 4
    assert parameters + rows <= found["start"] < parameters + 2 * rows
    assert found["forward"] > 3 * parameters + 9 * rows  # in the second step: parameters, two states, what is saved
    assert found["backward"] > found["forward"]
    assert 4 * parameters < found["step"] < found["backward"]
    spans = [span["phase"] for span in done.account["gpus"][0]["spans"]]
    assert spans[:5] == ["forward", "backward", "forward", "step", "forward"]


def test_live_tensors_are_named_by_the_scripts_lines(trained: tuple[Done, Path, Path]) -> None:
    done, file, _ = trained
    gpu = done.account["gpus"][0]
    assert sum(group["nbytes"] for group in gpu["tensors"]) == gpu["peak_allocated_bytes"]
    code = "loss = model(x).square().mean()"
    saved = next(group for group in gpu["tensors"] if group["script"]["code"] == code)  # the largest comes first
    assert saved["script"]["file"] == str(file)
    assert saved["script"]["line"] == 7
    assert saved["library"]["file"].endswith("torch/nn/modules/linear.py")
    assert saved["phase"] == "forward"
    states = [group for group in gpu["tensors"] if group["phase"] == "step"]
    assert {group["script"]["code"] for group in states} == {"optimizer.step()"}
    assert sum(group["nbytes"] for group in states) >= 2 * 8 * (1024 + 1) * 1024 * 4


def test_the_folder_has_a_page_that_stands_alone_and_a_snapshot(trained: tuple[Done, Path, Path]) -> None:
    done, _, out = trained
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "fits" in page
    assert "loss = model(x).square().mean()" in page
    assert not re.search(r"(src|href)=\"(?!#)|@import|<script", page)
    assert json.loads((out / "report.json").read_text()) == done.report
    (snapshot,) = out.glob("snapshot-*.pickle")
    assert len(pickle.loads(snapshot.read_bytes())["device_traces"][0]) == done.account["gpus"][0]["events"]


def test_work_is_counted_a_step(trained: tuple[Done, Path, Path]) -> None:
    done, _, _ = trained
    work = done.account["work_a_step"]
    assert work["launches"] >= 8  # a sum for each bias's gradient
    assert work["library_calls"] >= 8  # a product for each weight's gradient
    copies = {"copies_to_device", "copies_to_host", "copies_on_device"}
    assert set(work) == {"launches", "library_calls", "host_syncs"} | copies


def test_out_of_memory_in_a_thread_of_autograd(tmp_path: Path) -> None:
    done = emulate("--gpu", "a40", "--", "python", script(tmp_path, RUNS_OUT))
    assert done.returncode == 2
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 100.00 GiB" in done.stderr
    text = " ".join(done.stdout.split())
    assert "ran out of memory in backward, after 0 steps, on GPU 0: 100.00 GiB requested" in text
    assert "train.py:10 in backward: return gradient + torch.empty(100 * 2**30" in text
    assert "3.00 GiB 1 start" in text
    assert "does not fit" in text
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_a_script_that_catches_it_and_trains_on_fits(tmp_path: Path) -> None:
    done = emulate("--gpu", "a40", "--json", "--", "python", script(tmp_path, CATCHES))
    assert done.returncode == 0, done.stderr
    assert "rows 524288" in done.stderr
    assert done.account["out_of_memory_count"] == 4
    assert done.account["fits"]
    (notice,) = done.report["notices"]  # none for SGD, which has no state
    assert notice.startswith("memory ran out 4 times, and the script caught it")
    live = done.account["out_of_memory"][0]["tensors"]
    assert sum(group["nbytes"] for group in live) == done.account["out_of_memory"][0]["allocated_bytes"]


def test_a_program_that_begins_again_and_takes_less_ended_well(tmp_path: Path) -> None:
    """It trains nothing: at first it becomes another program, which then takes a quarter."""
    command = ("python", script(tmp_path, BEGINS_ANEW), 2**23)
    done = emulate("--gpu", "a40", "--out", tmp_path / "out", "--json", "--", *command)
    assert done.returncode == 0, done.stderr
    first, second = done.report["runs"][0]["accounts"]
    assert first["pid"] == second["pid"]
    assert [each["out_of_memory_count"] for each in (first, second)] == [1, 1]
    assert [(each["ended"], each["computed_after_oom"]) for each in (first, second)] == [
        ("exec", False),
        ("exit", True),
    ]
    assert done.report["fits"]
    assert len([*(tmp_path / "out").glob("snapshot-*.pickle")]) == 2
    began_anew, went_on = done.report["notices"]
    assert "the script caught it and restarted" in began_anew
    assert "the script caught it and continued" in went_on


def test_what_would_make_figures_wrong_is_reported(tmp_path: Path) -> None:
    done = emulate("--gpu", "a40", "--json", "--", "python", script(tmp_path, NOTICES))
    assert done.returncode == 0, done.stderr
    printed = "\n".join(done.report["notices"])
    assert "Stateless has no state after its step" in printed
    assert "first at train.py:13" in printed
    assert "the script records the allocator's history itself" in printed
    assert int(done.stderr.strip().splitlines()[-1]) > 0  # unchanged


def test_an_optimizer_that_steps_chunk_by_chunk_takes_one_step(tmp_path: Path) -> None:
    """As bigdit's optimizer does in a single process: the run had ended within the first step, without most of the
    state."""
    done = emulate("--gpu", "a40", "--steps", 3, "--json", "--", "python", script(tmp_path, CHUNKS))
    assert done.returncode == 0, done.stderr
    assert (done.account["steps"], done.account["backwards"]) == (3, 3)
    weights_and_states = 3 * 8 * (1024 + 1) * 1024 * 4
    assert peaks(done.account)["forward"] > weights_and_states


PARAMETERS = 4 * (1024 + 1) * 1024 * 4


def state_of(account: dict[str, Any]) -> int:
    return sum(group["nbytes"] for group in account["gpus"][0]["tensors"] if group["phase"] == "step")


def test_two_machines_with_two_gpus_each(tmp_path: Path) -> None:
    """A copy of one model, and shards of another. Launchers find each other by variables. torchrun starts a process for
    each GPU if it is not asked for another number. Each machine's GPUs have their own memory."""
    command = ("torchrun", script(tmp_path, SHARDS))
    asked = ("--gpu", "a40", "--nodes", 2, "--processes", 2, "--steps", 2)
    done = emulate(*asked, "--json", "--", *command)
    assert done.returncode == 0, done.stderr
    accounts = done.report["runs"][0]["accounts"]
    found = [(each["node"], each["rank"], each["world_size"], each["gpus"][0]["index"]) for each in accounts]
    assert found == [(0, 0, 4, 0), (0, 1, 4, 1), (1, 2, 4, 0), (1, 3, 4, 1)]
    assert [each["steps"] for each in accounts] == [2] * 4
    assert 2.5 * PARAMETERS <= state_of(accounts[0]) < 3 * PARAMETERS  # two states, and a quarter of two
    assert (done.report["nodes"], done.report["fits"]) == (2, True)
    assert not any("shared its memory" in notice for notice in done.report["notices"])  # a snapshot has all GPUs
    process = accounts[0]["gpus"][0]["process"]
    assert process["high_bytes"] - process["low_bytes"] > GIB // 2  # NCCL's buffers, whose size is unknown


NETWORKED = """
import os, socket
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, name = dist.get_rank(), socket.gethostname()
served = socket.create_server(("", 8080))
found = [None, None]
dist.all_gather_object(found, (name, socket.gethostbyname(name), os.getcwd()))
if rank == 0:
    print("found", found, os.environ["MASTER_PORT"], flush=True)
    socket.create_connection(("node2", 8080)).close()
dist.barrier()
torch.ones(1, device="cuda")
"""


def test_machines_with_networks_of_their_own(tmp_path: Path) -> None:
    """Each has a name, an address and all ports. They meet at an address that this machine lacks."""
    file = script(tmp_path, NETWORKED)
    meets = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-id", 7, "--rdzv-endpoint", "node1:29500")
    command = ("torchrun", *meets, "--nproc-per-node", 1, file)
    before = socket.if_nameindex()
    done = emulate("--gpu", "a40", "--nodes", 2, "--own-networks", "--", *command)
    if "--own-networks needs" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    here = str(ROOT)
    assert f"found {[(f'node{at}', f'10.0.0.{at}', here) for at in (1, 2)]} " in done.stdout
    assert socket.if_nameindex() == before


def test_networks_that_cannot_be_had_are_refused() -> None:
    done = emulate("--gpu", "a40", "--own-networks", "--", "true")
    assert done.returncode == 1
    assert done.stderr == "error: --own-networks is for several machines that bigdit starts: --nodes 2 -- torchrun …\n"
    without = ("setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin") if os.geteuid() == 0 else ()
    if not without:
        pytest.skip("only root can do without a capability")
    asked = (BIN / "bigdit", "emulate", "--gpu", "a40", "--nodes", 2, "--own-networks", "--", "true")
    refused = subprocess.run(
        [str(each) for each in (*without, *asked)], capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "error: --own-networks needs network namespaces, which this machine refuses: RTNETLINK answers: "
    )
    assert len(refused.stderr.splitlines()) == 1


def test_a_machine_that_fails_ends_the_others(tmp_path: Path) -> None:
    """Their launchers would wait for it. Where their processes were is logged."""
    file = script(tmp_path, "import time\ndef meet():\n    time.sleep(300)\nmeet()\n")
    waits = f"test $NODE_RANK = 1 && exit 3; RANK=0 python {file}"
    done = emulate("--gpu", "a40", "--nodes", 2, "--", "sh", "-c", waits)
    assert done.returncode == 3
    assert re.search(rf"rank 0, process \d+ of machine 1 is in meet \({file.name}:3\)", done.stderr)
    assert "no answer: the command ended with status 3" in done.stdout


def test_fp16_has_two_answers(tmp_path: Path) -> None:
    done = emulate("--gpu", "a40", "--steps", 1, "--json", "--", "python", script(tmp_path, HALF))
    assert done.returncode == 0, done.stderr
    taken, skipped = done.report["runs"]
    assert (taken["first_step_skipped"], skipped["first_step_skipped"]) == (False, True)
    assert [run["accounts"][0]["skipped_steps"] for run in (taken, skipped)] == [0, 1]
    states = 2 * 4 * (1024 + 1) * 1024 * 4
    assert peaks(taken["accounts"][0])["step"] > peaks(skipped["accounts"][0])["backward"] + states // 2
    assert "step" not in peaks(skipped["accounts"][0])


def test_more_processes_than_gpus(tmp_path: Path) -> None:
    command = ("torchrun", "--standalone", "--nproc-per-node", 2, script(tmp_path, SHARDS))
    done = emulate("--gpu", "a40", "--json", "--", *command)
    assert done.returncode == 1
    assert any("--processes 2 gives each its own" in notice for notice in done.report["notices"])
