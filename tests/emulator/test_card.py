"""The card that is not there, as the CUDA build of torch sees it: figures, bytes, refusals, and what is left of it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from cards import answers, on_card
from traces import timeline

from bigdit import catalog
from bigdit.catalog.capability import capability
from bigdit.emulator import build, emulated_environment, shared_state
from bigdit.errors import UserError
from bigdit.memory.allocator import replay
from bigdit.memory.footprint import UNLIMITED
from bigdit.memory.process import cuda_context
from bigdit.rehearse.card.client import cuda_python
from bigdit.units import GIB, MIB

FIGURES = """
import json, torch
p = torch.cuda.get_device_properties(0)
shared = [p.shared_memory_per_multiprocessor, p.shared_memory_per_block_optin]
threads = p.max_threads_per_multi_processor
n = torch.cuda.device_count()
print(json.dumps([p.name, [p.major, p.minor], p.multi_processor_count, p.total_memory, threads, *shared, n]))
"""


@pytest.mark.parametrize("name", ["a40", "rtx-5090", "h100-sxm", "a100-80g:3g.40gb"])
def test_a_card_is_the_catalogues(name):
    gpu = catalog.resolve_gpu(name)
    has = capability(gpu.compute_capability)
    assert answers(name, FIGURES, cards=3) == [
        gpu.title,
        list(gpu.compute_capability),
        gpu.multiprocessors,
        gpu.usable_bytes,
        has.threads,
        has.shared_bytes,
        has.shared_optin_bytes,
        3,
    ]


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
        cards=3,
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
def test_memory_ends_where_the_cards_bytes_end(setting):
    gpu = catalog.resolve_gpu("rtx-3060-12g")
    free, total, held, reserved, message = answers(gpu.name, FILL, PYTORCH_CUDA_ALLOC_CONF=setting)
    context = cuda_context(gpu.compute_capability, gpu.multiprocessors).high_bytes
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


def test_a_limited_card_is_one_of_so_many_bytes():
    """Two pages of 20 MiB are there, a block of 50 wants one more, and there is no fourth."""
    found = answers("h100-sxm", LIMITED.format(limit="limit(60 << 20)"), **EXPANDABLE)
    assert found == [20 * MIB, 0, 60 * MIB]


def test_torchs_own_limit_has_room_looked_for_where_a_card_has_it():
    """Why attempts do not go by it: the block of 50 MiB counts whole beside the two pages that it lies on."""
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


@pytest.mark.parametrize("limit", [11, 40])
def test_addresses_follow_from_the_card_and_not_from_its_limit(limit):
    """Where a block fits depends on how many addresses there are behind another."""
    gpu = catalog.resolve_gpu("rtx-3060-12g")
    events = [8 * GIB, GIB, GIB, -1, -3, GIB // 2, 8 * GIB]
    found = answers(gpu.name, ADDRESSES.format(limit=limit, events=events), **EXPANDABLE)
    trace = timeline(*events)
    replayed = replay(trace, limit * GIB, expandable_segments=True, card_bytes=gpu.usable_bytes)
    assert found == replayed.peak_reserved_bytes
    assert found < replay(trace, UNLIMITED, expandable_segments=True).peak_reserved_bytes


def test_processes_of_an_emulation_fill_the_same_card(tmp_path):
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
    assert f"Process {first.pid} has" in full.stdout  # torch asks NVML who else is there
    free = [int(done.stdout.split(",")[0].strip("[")) for done in (full, again)]
    assert free[1] - free[0] > 5 * GIB  # what a killed process held is free again


def test_graphs_and_compiled_kernels_are_taken_and_counted():
    found = answers(
        "a40",
        """
        import json, torch
        from bigdit_emulated import counts
        x = torch.zeros(1 << 20, device="cuda")
        before = counts.read()["launches"]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2 + 1
        captured = counts.read()["launches"] - before
        graph.replay()
        replayed = counts.read()["launches"] - before - captured
        torch.special.airy_ai(x)  # a kernel that nvrtc compiles
        torch.cuda.synchronize()
        print(json.dumps([captured, replayed, counts.read()["host_syncs"] > 0]))
        """,
    )
    assert found == [2, 2, True]


def test_calls_of_libraries_fills_and_copies_by_direction_are_counted():
    """Products are cuBLAS's, convolutions cuDNN's; a copy of rows that do not adjoin is one."""
    found = answers(
        "a40",
        """
        import ctypes, json, torch
        from bigdit_emulated import counts, libraries
        a, b = (torch.zeros(512, 512, device=f"cuda:{card}") for card in range(2))
        picture, kernel = torch.zeros(1, 3, 32, 32, device="cuda"), torch.zeros(4, 3, 3, 3, device="cuda")
        high, rows = torch.zeros(1 << 18, 16, device="cuda"), torch.zeros(8, 16, dtype=torch.uint8)
        at = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, rows)]
        sizes = [ctypes.c_size_t(size) for size in (16, 16, 12, 8)]

        def counted(run):
            before = counts.read()
            run()
            return {name: count - before[name] for name, count in counts.read().items() if count != before[name]}

        def in_rows():
            runtime = libraries.library("libcudart")
            runtime.cudaMemcpy2DAsync(at[0], sizes[0], at[1], sizes[1], sizes[2], sizes[3], 1, None)

        a @ a, torch.conv2d(picture, kernel)  # what only the first ones do
        print(json.dumps([
            counted(lambda: a @ a),
            counted(lambda: torch.conv2d(picture, kernel))["library_calls"],
            counted(lambda: high.sum(0)),  # blocks of threads meet at counters that are zero before
            counted(lambda: b.copy_(a))["bytes_between"],
            counted(lambda: a.cpu()),
            counted(in_rows),
        ]))
        """,
        cards=2,
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
    done = on_card("a40", "import torch; torch.linalg.eigh(torch.ones(500, 500, device='cuda') * 2, UPLO='L')")
    small = on_card("a40", "import torch; print(torch.linalg.inv(torch.eye(2, device='cuda') * 4).tolist())")
    assert small.stdout == "[[0.25, 0.0], [0.0, 0.25]]\n"
    assert done.returncode == 0 or "has no answer without a GPU" in done.stderr


def test_host_tensors_share_pages_and_weights_are_not_drawn():
    found = answers(
        "a40",
        """
        import json, resource, time, torch
        began = time.perf_counter()
        layers = [torch.nn.Linear(16384, 16384) for _ in range(24)]
        pinned = torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)
        layers[0].cuda()
        took = time.perf_counter() - began
        small = torch.nn.Linear(8, 8)
        with open("/proc/self/status") as file:
            anonymous = next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
        print(json.dumps([anonymous, took, float(small.weight.std()), pinned.is_pinned()]))
        """,
    )
    anonymous_kib, took, deviation, pinned = found
    assert anonymous_kib < 2 * MIB  # KiB: 24 GiB of weights lie in 2 at most, libraries included
    assert took < 60
    assert deviation > 0.05
    assert pinned


def test_what_is_copied_to_shared_pages_is_zeros_and_takes_no_time():
    """What was copied there would be lost; all other copies are what they were."""
    found = answers(
        "a40",
        """
        import json, time, torch
        ones = torch.ones(1 << 25)
        huge, pinned = torch.empty(1 << 31), torch.empty(1 << 25, pin_memory=True)
        began = time.process_time()
        moved = [huge.to(torch.bfloat16), huge.to("cpu", copy=True), torch.empty(1 << 31).copy_(huge)]
        moved.append(pinned.copy_(ones))
        took, first = time.process_time() - began, [float(each[0]) for each in moved]
        small = torch.ones(1 << 15)
        few = [small.to(torch.bfloat16), small.to("cpu", copy=True), torch.empty(1 << 15).copy_(small)]
        followed = torch.empty(1 << 25, requires_grad=True).to(torch.bfloat16)
        broad = torch.empty(2, 1 << 25).copy_(torch.ones(()))
        print(json.dumps({
            "took": took,
            "dtypes": [str(each.dtype) for each in moved],
            "first": first,
            "few": [float(each.mean()) for each in few],
            "same": huge.to(torch.float32) is huge,
            "followed": followed.grad_fn is not None,
            "broad": float(broad[0, 0]),
        }))
        """,
    )
    assert found.pop("took") < 2  # 28 GiB
    assert found == {
        "dtypes": ["torch.bfloat16", *["torch.float32"] * 3],
        "first": [0.0] * 4,
        "few": [1.0] * 3,
        "same": True,
        "followed": True,
        "broad": 1.0,
    }


def test_what_nobody_wrote_is_copied_as_zeros_and_what_somebody_wrote_as_it_is(tmp_path):
    """Tensors of less than 32 MiB share no pages: they hold all that is written to them."""
    found = answers(
        "a40",
        f"""
        import json, time, torch
        from safetensors.torch import load_file, save_file
        torch.set_num_threads(1)
        file, dense, names = "{tmp_path}/model.safetensors", "{tmp_path}/dense", list(map(str, range(64)))
        save_file({{name: torch.zeros(7 << 20) for name in names}}, file)  # but for their first MiB holes, of 28 MiB
        torch.ones(7 << 20).numpy().tofile(dense)
        began = time.process_time()
        loaded = load_file(file)
        rounded = [loaded[name].to(torch.bfloat16) for name in names]
        copied = [torch.empty(7 << 20).copy_(loaded[name]) for name in names]
        bounds = [float(bound) for each in copied for piece in each.split(1 << 20) for bound in piece.aminmax()]
        took = time.process_time() - began
        loaded["5"][-3:], copied[6][1] = 5, float("nan")
        mapped = torch.from_file(dense, shared=False, size=7 << 20)
        brought = torch.empty(7 << 20, device="cuda").cpu()
        read = [float(each[123456]) for each in (*rounded, *copied, brought)]
        brought[1 << 20] = -2
        written = loaded["5"].to(torch.bfloat16), torch.empty(7 << 20).copy_(loaded["5"])
        print(json.dumps({{
            "took": took,
            "bounds": set(bounds) == {{0.0}},
            "read": set(read) == {{0.0}},
            "written": [float(each.sum()) for each in written],
            "in it": [*loaded["5"].aminmax()] == [0, 5] and [*brought.aminmax()] == [-2, 0],
            "not a number": [bool(bound.isnan()) for bound in copied[6].aminmax()],
            "moved": float(copied[6].to(torch.float16)[1]) != 0,
            "of a file": [float(mapped.to(torch.bfloat16).mean()), *map(float, mapped.aminmax())],
            "by dimension": brought.view(2, -1).aminmax(dim=1).min.tolist(),
        }}))
        """,
    )
    assert found.pop("took") < 0.8  # 5 GiB
    assert found == {
        "bounds": True,
        "read": True,
        "written": [15.0, 15.0],
        "in it": True,
        "not a number": [True, True],
        "moved": True,
        "of a file": [1.0, 1.0, 1.0],
        "by dimension": [-2.0, 0.0],
    }


def test_tables_of_positions_that_would_be_lost_are_not_computed():
    found = answers(
        "a40",
        """
        import json, time, torch
        from diffusers.models.embeddings import PatchEmbed, get_2d_sincos_pos_embed
        make = lambda size: PatchEmbed(embed_dim=1536, pos_embed_max_size=size, layer_norm=False)
        began = time.process_time()
        large = make(384).pos_embed
        took = time.process_time() - began
        small, there = make(16).pos_embed, get_2d_sincos_pos_embed(64, 4, device="cuda")
        with torch.device("meta"):
            outline = make(384).pos_embed
        deviation, devices = float(small.std()), [str(each.device) for each in (there, outline)]
        print(json.dumps([took, large.shape, str(large.dtype), deviation, devices]))
        """,
    )
    assert found.pop(0) < 0.5
    assert 0.5 < found.pop(2) < 1  # of sines and cosines
    assert found == [[1, 384 * 384, 1536], "torch.float32", ["cuda:0", "meta"]]


def test_libraries_stand_before_those_of_installed_packages(tmp_path):
    """torch's DT_RPATH leads to NVIDIA's packages beside it, before LD_LIBRARY_PATH is asked."""
    site = tmp_path / "site"
    torch = Path(
        subprocess.run(
            [cuda_python(), "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    ).parent
    (site / "torch" / "lib").mkdir(parents=True)
    for file in torch.iterdir():
        if file.name != "lib":
            (site / "torch" / file.name).symlink_to(file)
    for file in (torch / "lib").iterdir():
        (site / "torch" / "lib" / file.name).symlink_to(file)
    nvidia = site / "nvidia" / "cu13" / "lib"
    nvidia.mkdir(parents=True)
    source = tmp_path / "real.c"
    source.write_text("#include <unistd.h>\n__attribute__((constructor)) void loaded(void) { _exit(77); }\n")
    name = "libcudart.so.13"
    subprocess.run(
        [build.compiler(), "-shared", "-fPIC", f"-Wl,-soname,{name}", source, "-o", nvidia / name], check=True
    )
    environment = os.environ | emulated_environment(catalog.resolve_gpu("a40"))
    script = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import torch; print(torch.__file__, torch.cuda.is_available())"
    )
    command = [str(cuda_python()), "-c", script]
    with warm.Executed(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        found, errors = process.communicate()
    assert found == f"{site}/torch/__init__.py True\n", errors
    built = next(folder for folder in build.cache_folder().iterdir() if (folder / name).exists())
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"LD_LIBRARY_PATH": str(built)}
    assert subprocess.run(command, env=plain, capture_output=True).returncode == 77  # without the hook NVIDIA's wins


def test_a_torch_without_cuda_says_how_to_get_one():
    environment = os.environ | emulated_environment(catalog.resolve_gpu("a40"))
    done = subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "has no CUDA" in done.stderr
    assert "pip install 'torch===" in done.stderr


def test_a_missing_compiler_is_a_line(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    build.recipe.cache_clear()
    with pytest.raises(UserError, match="no C compiler: no-such-compiler is not found"):
        emulated_environment(catalog.resolve_gpu("a40"))
    build.recipe.cache_clear()


@pytest.mark.parametrize("cards", [0, 17])
def test_as_many_cards_as_a_machine_has(cards):
    with pytest.raises(UserError, match=f"{cards} cards are asked for; one machine is emulated with 1 to 16"):
        emulated_environment(catalog.resolve_gpu("a40"), cards)


def test_libraries_are_built_once_and_by_one(tmp_path):
    environment = (
        os.environ | emulated_environment(catalog.resolve_gpu("a40")) | {"BIGDIT_EMULATED_CACHE": str(tmp_path)}
    )
    command = [str(cuda_python()), "-c", "import torch; print(torch.cuda.device_count())"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["1\n", "1\n"]
    (folder,) = tmp_path.iterdir()  # nothing half-built lies beside it
    built = (folder / "libcuda.so.1").stat().st_mtime_ns
    subprocess.run(command, env=environment, check=True)
    assert (folder / "libcuda.so.1").stat().st_mtime_ns == built


def test_damaged_libraries_are_built_anew(tmp_path):
    environment = os.environ | emulated_environment(catalog.resolve_gpu("a40"))
    environment["BIGDIT_EMULATED_CACHE"] = str(tmp_path)
    command = [str(cuda_python()), "-W", "ignore", "-c", "import torch; print(torch.cuda.device_count())"]
    subprocess.run(command, env=environment, check=True)
    (folder,) = tmp_path.iterdir()
    whole = (folder / "libcudart.so.13").read_bytes()
    for damage in (whole[:5000], whole[:9000] + b"x" + whole[9001:], None):
        if damage is None:
            (folder / "libcudart.so.13").unlink()
        else:
            (folder / "libcudart.so.13").write_bytes(damage)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.stdout, done.returncode) == ("1\n", 0)
        assert "is damaged, and is built anew" in done.stderr
        assert (folder / "libcudart.so.13").read_bytes() == whole


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


def test_building_needs_only_a_compiler(tmp_path):
    """No header and no library of NVIDIA's: the C stands for itself, and without a warning."""
    for source in sorted(build.C.glob("*.c")):
        command = [build.compiler(), "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-nostdinc", "-c", source]
        standard = [f"-isystem{path}" for path in _include_paths()]
        subprocess.run([*command, *standard, "-o", tmp_path / "out.o"], check=True)
    assert shutil.which(build.compiler())


def _include_paths() -> list[str]:
    done = subprocess.run([build.compiler(), "-E", "-v", "-x", "c", "/dev/null"], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("#include <"))
    last = next(i for i, line in enumerate(lines) if line.startswith("End of search list"))
    return [line.strip() for line in lines[first + 1 : last]]
