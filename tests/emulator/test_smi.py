"""`nvidia-smi` of the emulated GPU, as scripts and launchers call it, beside what CUDA reports."""

import json

import pytest
from gpus import emulate, script

from bigdit import catalog
from bigdit.units import GIB, MIB

ASKS = """
import json, os, subprocess, sys, torch
from accelerate.utils.environment import get_driver_version, get_gpu_info
from torch.utils import collect_env

def smi(*arguments):
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True)
    return [done.returncode, done.stdout, done.stderr]

held = torch.empty(3 << 30, dtype=torch.uint8, device="cuda:1")
free, total = torch.cuda.mem_get_info(1)
fields = "index,memory.total,memory.used,memory.free,power.draw,utilization.gpu"
found = {
    "pid": os.getpid(),
    "executable": os.path.realpath(sys.executable),
    "free": free,
    "uuid": str(torch.cuda.get_device_properties(1).uuid),
    "launcher": [get_gpu_info(), get_driver_version()],
    "collect_env": [collect_env.get_nvidia_driver_version(collect_env.run), collect_env.get_gpu_info(collect_env.run)],
    "table": smi(),
    "list": smi("-L"),
    "csv": smi(f"--query-gpu={fields}", "--format=csv"),
    "bare": smi("--query-gpu", "memory.free,compute_cap,pci.bus_id", "--format=csv,noheader,nounits", "-i", "1"),
    "apps": smi("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"),
    "wrong": smi("--query-gpu=name,colour", "--format=csv"),
    "unformatted": smi("--query-gpu=name"),
    "absent": smi("-i", "2"),
    "unknown": smi("topo", "-m"),
}
with open(os.environ["FOUND"], "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("smi")
    asked = ("--gpu", "a40", "--processes", 2, "--", "python", "-W", "ignore", script(folder, ASKS))
    done = emulate(*asked, FOUND=str(folder / "found.json"))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


def test_launchers_find_the_gpu(found):
    names = ["NVIDIA A40", "NVIDIA A40"]
    assert found["launcher"] == [[names, 2], "580.00"]
    driver, listed = found["collect_env"]
    assert driver == "580.00"
    assert listed.splitlines() == [f"GPU {index}: NVIDIA A40" for index in range(2)]


def test_the_table_says_that_it_is_emulated(found):
    status, table, printed = found["table"]
    assert status == 0
    assert "580.00 (emulated)" in table
    assert printed == "nvidia-smi: no GPU is here; bigdit answers for an emulated one\n"
    assert {len(line) for line in table.splitlines()} == {0, 91}
    assert f"{found['pid']:>10}" in table
    assert found["list"][1].splitlines()[1] == f"GPU 1: NVIDIA A40 (UUID: GPU-{found['uuid']})"


def test_bytes_are_those_that_cuda_says(found):
    gpu = catalog.resolve_gpu("a40")
    used = gpu.usable_bytes - found["free"]
    assert used > 3 * GIB
    total = gpu.total_bytes // MIB
    assert found["csv"][1].splitlines() == [
        "index, memory.total [MiB], memory.used [MiB], memory.free [MiB], power.draw [W], utilization.gpu [%]",
        f"0, {total} MiB, 0 MiB, {gpu.usable_bytes // MIB} MiB, [N/A], 0 %",
        f"1, {total} MiB, {used // MIB} MiB, {found['free'] // MIB} MiB, [N/A], 0 %",
    ]
    assert found["bare"][1] == f"{found['free'] // MIB}, 8.6, 00000000:02:00.0\n"
    assert found["apps"][1] == f"{found['pid']}, {found['executable']}, {used // MIB} MiB\n"


def test_what_is_not_known_is_refused_as_the_real_one_does(found):
    assert found["wrong"][:2] == [2, 'Field "colour" is not a valid field to query.\n']
    status, out, printed = found["unformatted"]
    assert (status, out) == (2, "")
    assert "--format is None; a query takes csv[,noheader][,nounits]" in printed
    assert found["absent"][:2] == [6, "No devices were found\n"]
    status, out, printed = found["unknown"]
    assert (status, out) == (2, "")
    assert printed.startswith("nvidia-smi: unrecognized arguments: topo -m; an emulated GPU supports the table, -L,")
