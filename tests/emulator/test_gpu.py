"""The emulated GPU as the CUDA build of torch sees it: figures, bytes, refusals, and what is left behind."""

import os
import signal
import subprocess
import time

import pytest
from gpus import answers, on_gpu

from bigdit import catalog
from bigdit.catalog.gpus import capability
from bigdit.emulator import emulated_environment, shared_state
from bigdit.emulator.interpreter import cuda_python
from bigdit.errors import UserError
from bigdit.memory.process import cuda_context
from bigdit.units import GIB, MIB

FIGURES = """
import json, torch
p = torch.cuda.get_device_properties(0)
shared = [p.shared_memory_per_multiprocessor, p.shared_memory_per_block_optin]
threads = p.max_threads_per_multi_processor
n = torch.cuda.device_count()
print(json.dumps([p.name, [p.major, p.minor], p.multi_processor_count, p.total_memory, threads, *shared, n]))
"""


@pytest.mark.parametrize("name", ["a40", "rtx-5090", "h100-sxm", "a100-80g-sxm:3g.40gb"])
def test_a_gpu_is_the_catalogues(name):
    gpu = catalog.resolve_gpu(name)
    has = capability(gpu.compute_capability)
    assert answers(name, FIGURES, gpus=3) == [
        gpu.title,
        list(gpu.compute_capability),
        gpu.multiprocessors,
        gpu.usable_bytes,
        has.threads,
        has.shared_bytes,
        has.shared_optin_bytes,
        3,
    ]


SORTED = """
import json, torch
rows, values = torch.arange(3, device="cuda"), torch.ones(3, 5, device="cuda")
written = torch.zeros(4, 5, device="cuda").index_put_((rows,), values, accumulate=True)  # sorts the rows, by CUB
print(json.dumps([written.sum().item(), torch.sort(torch.rand(300_000, device="cuda")).indices.shape[0]]))
"""


@pytest.mark.parametrize(
    "name", ["v100-sxm2-32gb", "t4", "a100-80g-sxm", "a40", "l40s", "rtx-4090", "h100-sxm", "b200", "rtx-5090"]
)
def test_kernels_are_those_that_the_library_was_built_with(name):
    """CUB refuses a generation for which it has no code. 8.9 runs what was built for 8.6."""
    assert answers(name, SORTED) == [15.0, 300_000]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("1", 1), ("2,0", 2), ("", 0), ("-1", 0), ("0,7,1", 1), ("GPU-b1b1b1b1-b1b1-b1b1-b1b1-b1b1b1b1b102", 1)],
)
def test_visible_devices_are_those_that_cuda_would_show(visible, seen):
    found = answers(
        "a40",
        """
        import ctypes, json, torch
        n = torch._C._cuda_getDeviceCount()
        print(json.dumps([n, [torch.cuda.get_device_properties(i).uuid.bytes[-1] for i in range(n)]]))
        """,
        gpus=3,
        CUDA_VISIBLE_DEVICES=visible,
    )
    assert found[0] == seen
    which = {"1": [1], "2,0": [2, 0], "0,7,1": [0], "GPU-b1b1b1b1-b1b1-b1b1-b1b1-b1b1b1b1b102": [2]}
    assert found[1] == which.get(visible, [])


FILL = """
import json, torch
free, total = torch.cuda.mem_get_info()
held = []
try:
    while True:
        held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError as error:
    print(json.dumps([free, total, len(held), torch.cuda.memory_reserved(), str(error)]))
"""


@pytest.mark.parametrize("setting", ["", "expandable_segments:True"])
def test_memory_ends_where_the_gpus_bytes_end(setting):
    gpu = catalog.resolve_gpu("rtx-3060-12g")
    free, total, held, reserved, message = answers(gpu.name, FILL, PYTORCH_CUDA_ALLOC_CONF=setting)
    context = cuda_context(gpu).high_bytes
    assert total == gpu.usable_bytes
    assert free == gpu.usable_bytes - context
    assert held == free // GIB
    step = 20 * MIB if setting else GIB  # expandable segments grow by as much
    assert reserved == -(-held * GIB // step) * step
    assert "Tried to allocate 1024.00 MiB" in message or "Tried to allocate 1.00 GiB" in message
    assert f"total capacity of {gpu.usable_bytes / GIB:.2f} GiB" in message


LIMITED = """
import json, torch
from bigdit_emulated.libraries import limit
torch.cuda.init()
{limit}
held = torch.empty(21 << 20, dtype=torch.uint8, device="cuda")
del held
free = torch.cuda.mem_get_info()[0]
held = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
retries = torch.cuda.memory_stats()["num_alloc_retries"]
try:
    torch.empty(11 << 20, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    print(json.dumps([free, retries, torch.cuda.memory_reserved()]))
"""

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_a_limited_gpu_is_one_of_so_many_bytes():
    """Two pages of 20 MiB exist. A block of 50 needs one more, and there is no fourth."""
    found = answers("h100-sxm", LIMITED.format(limit="limit(60 << 20)"), **EXPANDABLE)
    assert found == [20 * MIB, 0, 60 * MIB]


FINAL = """
import json, torch
from bigdit_emulated.libraries import limit
torch.cuda.init()

def taken(mib):
    try:
        return torch.empty(mib << 20, dtype=torch.uint8, device="cuda").numel() >> 20
    except torch.cuda.OutOfMemoryError:
        return 0

found = []
for final in (False, True):
    limit(60 << 20, final=final)
    found.append([taken(40), taken(80), taken(40)])
    torch.cuda.empty_cache()
limit(60 << 20)
print(json.dumps([*found, taken(40)]))
"""


def test_a_final_limit_gives_nothing_more_once_it_has_refused_something():
    """Even if torch has freed what it kept. Another limit starts from zero."""
    assert answers("h100-sxm", FINAL, **EXPANDABLE) == [[40, 0, 40], [40, 0, 0], 40]


def test_torchs_own_limit_has_room_looked_for_where_a_gpu_has_it():
    """So attempts do not use it: the block of 50 MiB counts in full beside the two pages that it lies on."""
    own = "torch.cuda.set_per_process_memory_fraction(60.5 * 2**20 / torch.cuda.get_device_properties(0).total_memory)"
    found = answers("h100-sxm", LIMITED.format(limit=own), **EXPANDABLE)
    assert found[1:] == [1, 60 * MIB]


ADDRESSES = """
import json, torch
from bigdit_emulated.libraries import limit
torch.cuda.init()
limit({limit} << 30)
blocks, made = {{}}, 0
for event in {events}:
    if event < 0:
        del blocks[-event]
    else:
        made += 1
        blocks[made] = torch.empty(event, dtype=torch.uint8, device="cuda")
print(json.dumps(torch.cuda.memory_reserved()))
"""


def test_addresses_follow_from_the_gpu_and_not_from_its_limit():
    """Where a block fits depends on how many addresses follow another."""
    events = [8 * GIB, GIB, GIB, -1, -3, GIB // 2, 8 * GIB]
    of_gpu = [answers("rtx-3060-12g", ADDRESSES.format(limit=each, events=events), **EXPANDABLE) for each in (11, 40)]
    of_larger_gpu = answers("a40", ADDRESSES.format(limit=40, events=events), **EXPANDABLE)
    assert of_gpu[0] == of_gpu[1] < of_larger_gpu


def test_processes_of_an_emulation_fill_the_same_gpu(tmp_path):
    gpu = catalog.resolve_gpu("rtx-3060-12g")
    hold = """
import sys, torch
x = torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
    with shared_state() as state:
        environment = os.environ | emulated_environment(gpu, 1, state)
        command = [str(cuda_python()), "-c", hold]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        with subprocess.Popen(command, **pipes) as first:
            assert first.stdout.readline() == "held\n"
            full = subprocess.run([str(cuda_python()), "-c", FILL], env=environment, capture_output=True, text=True)
            first.send_signal(signal.SIGKILL)
            first.wait()
        again = subprocess.run([str(cuda_python()), "-c", FILL], env=environment, capture_output=True, text=True)
    assert '"CUDA out of memory' in full.stdout
    assert f"Process {first.pid} has" in full.stdout  # torch asks NVML for other processes
    free = [int(done.stdout.split(",")[0].strip("[")) for done in (full, again)]
    assert free[1] - free[0] > 5 * GIB  # the memory of a killed process is free again


def test_graphs_and_compiled_kernels_are_taken_and_counted():
    found = answers(
        "a40",
        """
        import json, torch
        from bigdit_emulated import libraries
        x = torch.zeros(1 << 20, device="cuda")
        before = libraries.read_counts()["launches"]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2 + 1
        captured = libraries.read_counts()["launches"] - before
        graph.replay()
        replayed = libraries.read_counts()["launches"] - before - captured
        torch.special.airy_ai(x)  # a kernel that nvrtc compiles
        torch.cuda.synchronize()
        print(json.dumps([captured, replayed, libraries.read_counts()["host_syncs"] > 0]))
        """,
    )
    assert found == [2, 2, True]


CONVOLUTIONS = """
import json, torch
from torch.nn.functional import conv2d, conv3d

kept = []

def like(*shape, dtype=torch.bfloat16):
    kept.append(torch.empty(shape, device="cuda", dtype=dtype))
    return kept[-1]

def taken(run):
    torch.cuda.reset_peak_memory_stats()
    result = eval(run)
    return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()

def gradient_of_weight():
    settings = [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
    return torch.ops.aten.convolution_backward(like(16, 1152, 64, 64), *half, None, *settings)

def without_tf32():
    torch.backends.cudnn.allow_tf32 = False
    return conv2d(*single, padding=1)

half = like(16, 4, 128, 128), like(1152, 4, 2, 2)
last = [tensor.contiguous(memory_format=torch.channels_last) for tensor in half]
single = [like(*shape, dtype=torch.float32) for shape in ((1, 128, 256, 256), (128, 128, 3, 3))]
if {room}:
    torch.cuda.set_per_process_memory_fraction({room} / torch.cuda.get_device_properties(0).total_memory)
print(json.dumps([taken(run) for run in {runs}]))
"""


def workspaces(gpu: str, runs: list[str], room: int = 0) -> list[int]:
    return answers(gpu, CONVOLUTIONS.format(runs=runs, room=room))


def test_convolutions_take_the_workspace_that_a_real_gpu_was_seen_to_take():
    """With channels first. benchmarks/on_gpu/convolutions.json has the bytes, here in blocks of 512."""
    seen = {
        "conv2d(like(1, 128, 256, 256), like(128, 128, 3, 3), padding=1)": 33_849_491,
        "conv2d(*half, stride=2)": 155_263_123,
        "conv2d(*last, stride=2)": 0,
        "conv3d(like(1, 16, 13, 60, 90), like(3072, 16, 1, 2, 2), stride=(1, 2, 2))": 110_466_963,
        "gradient_of_weight()": 155_262_992,
        "conv2d(like(1, 1120, 16, 16), like(5600, 1120, 1, 1))": 0,
        "conv2d(like(1, 5600, 16, 16), like(5600, 1, 3, 3), padding=1, groups=5600)": 0,
        "conv2d(like(1, 3, 256, 256), like(128, 3, 3, 3), padding=1)": 0,
        "conv2d(*single, padding=1)": 67_698_835,
        "without_tf32()": 0,
    }
    assert workspaces("h200-sxm", [*seen]) == [-(-each // 512) * 512 for each in seen.values()]


def test_a_convolution_without_room_for_its_workspace_takes_none():
    assert workspaces("h100-sxm", ["conv2d(*half, stride=2)"], room=250 * MIB) == [0]


def test_a_result_in_tf32_is_not_copied_on_ampere():
    """Input and weight are, as the published peak of a VAE on an A100 shows (benchmarks/peers.md)."""
    assert workspaces("a40", ["conv2d(*single, padding=1)"]) == [4 * 128 * (256 * 256 + 128 * 9) + 512]


def test_calls_of_libraries_fills_and_copies_by_direction_are_counted():
    """cuBLAS counts products, cuDNN convolutions. A copy of separate rows counts once."""
    found = answers(
        "a40",
        """
        import ctypes, json, torch
        from bigdit_emulated import libraries
        a, b = (torch.zeros(512, 512, device=f"cuda:{gpu}") for gpu in range(2))
        image, kernel = torch.zeros(1, 3, 32, 32, device="cuda"), torch.zeros(4, 3, 3, 3, device="cuda")
        high, rows = torch.zeros(1 << 18, 16, device="cuda"), torch.zeros(8, 16, dtype=torch.uint8)
        at = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, rows)]
        sizes = [ctypes.c_size_t(size) for size in (16, 16, 12, 8)]

        def counted(run):
            before = libraries.read_counts()
            run()
            now = libraries.read_counts()
            return {name: count - before[name] for name, count in now.items() if count != before[name]}

        def in_rows():
            runtime = libraries.library("libcudart")
            runtime.cudaMemcpy2DAsync(at[0], sizes[0], at[1], sizes[1], sizes[2], sizes[3], 1, None)

        a @ a, torch.conv2d(image, kernel)  # what only the first ones do
        print(json.dumps([
            counted(lambda: a @ a),
            counted(lambda: torch.conv2d(image, kernel))["library_calls"],
            counted(lambda: high.sum(0)),  # blocks of threads meet at counters that are zero before
            counted(lambda: b.copy_(a))["bytes_between"],
            counted(lambda: a.cpu()),
            counted(in_rows),
        ]))
        """,
        gpus=2,
    )
    assert found == [
        {"library_calls": 1},
        1,
        {"launches": 1, "fills": 1},
        1 * MIB,
        {"copies_to_host": 1, "bytes_to_host": 1 * MIB, "host_syncs": 1},
        {"copies_to_device": 1, "bytes_to_device": 96},
    ]


def test_what_has_no_answer_is_named():
    done = on_gpu("a40", "import torch; torch.linalg.eigh(torch.ones(500, 500, device='cuda') * 2, UPLO='L')")
    small = on_gpu("a40", "import torch; print(torch.linalg.inv(torch.eye(2, device='cuda') * 4).tolist())")
    assert small.stdout == "[[0.25, 0.0], [0.0, 0.25]]\n"
    assert done.returncode == 0 or "is not supported" in done.stderr


@pytest.mark.parametrize("gpus", [0, 17])
def test_as_many_gpus_as_a_machine_has(gpus):
    with pytest.raises(UserError, match=f"{gpus} GPUs were requested; an emulated machine has 1 to 16"):
        emulated_environment(catalog.resolve_gpu("a40"), gpus)


def test_a_killed_process_leaves_nothing(tmp_path):
    def left() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "bigdit" in name}

    before = left()
    environment = os.environ | emulated_environment(catalog.resolve_gpu("a40")) | {"TMPDIR": str(tmp_path)}
    script = "import time, torch; x = torch.empty(1 << 30, device='cuda'); print('on', flush=True); time.sleep(600)"
    with subprocess.Popen([str(cuda_python()), "-c", script], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"on\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    time.sleep(0.1)
    assert left() == before
    assert not list(tmp_path.iterdir())
