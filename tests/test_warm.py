"""A program that starts warm finds what fork and exec would give it, and so do its children."""

import json
import os
import signal
import subprocess
import sys

import pytest
import warm
from commands import environment_with, run_command
from gpus import answers

from bigdit import catalog, libraries

PROBE = """
import json, os, pathlib, signal, subprocess, sys, tempfile
def strings(name):
    return pathlib.Path("/proc/self", name).read_bytes().decode().split("\\0")
found = {
    "parent": os.getppid(), "pid": os.getpid(), "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path[:2], "name": __name__,
    "folders": [os.getcwd(), tempfile.gettempdir()],
    "cmdline": strings("cmdline"), "environ": sorted(strings("environ")), "variables": sorted(os.environ.items()),
    "handlers": [str(signal.getsignal(each)) for each in signal.valid_signals()],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "read": sys.stdin.read(),
    "handed": os.read(int(os.environ["HANDED"]), 9).decode(), "libraries": "deepspeed" in sys.modules,
}
if sys.argv[1:] == ["first"]:
    read, write = os.pipe()
    os.write(write, b"handed on")
    done = subprocess.Popen(
        [sys.executable, "-u", __file__, "second"], env=os.environ | {"HANDED": str(read)}, pass_fds=[read],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )
    found["child"] = json.loads(done.communicate()[0])
    assert found["child"].pop("parent") == os.getpid()
    assert found["child"].pop("pid") == done.pid
    assert done.returncode == 7
print(json.dumps(found))
print("said", file=sys.stderr)
sys.exit(7)
"""


def probed(popen, script):
    """What the script finds, and its stderr, if this class starts it."""
    read, write = os.pipe()
    os.write(write, b"handed")
    os.close(write)
    environment = environment_with({"HANDED": str(read), "PYTHONPATH": "/nowhere", "TMPDIR": str(script.parent)})
    command = [sys.executable, "-W", "ignore", str(script), "first"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with popen(command, env=environment, cwd=script.parent, process_group=0, pass_fds=[read], **pipes) as process:
        os.close(read)
        printed, errors = process.communicate("to be read", timeout=120)
    assert process.returncode == 7, errors
    found = json.loads(printed)
    assert (found.pop("parent"), found.pop("pid")) == (os.getpid(), process.pid)
    for each in (found, found["child"]):
        del each["variables"], each["environ"], each["libraries"]
    return json.loads(printed), found, errors


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "probe.py"
    file.write_text(PROBE)
    return file


@pytest.mark.slow
def test_it_is_as_if_it_had_been_executed(script):
    whole, warmly, errors = probed(warm.Popen, script)
    _, cold, expected = probed(warm.Executed, script)
    assert errors == expected
    assert warmly.pop("child") == cold.pop("child")
    assert warmly == cold
    assert whole["libraries"]
    assert whole["child"]["libraries"]
    for each in (whole, whole["child"]):
        own = dict(each["variables"])
        assert own.keys() >= {"HANDED", "PYTHONPATH", "PATH"}
        assert all(f"{name}={own[name]}" in each["environ"] for name in ("HANDED", "PYTHONPATH", "PATH"))


WORKER = """
import multiprocessing, sys
def known(name):
    return name in sys.modules
if __name__ == "__main__":
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        print(pool.apply(known, ["deepspeed"]))
"""


@pytest.mark.slow
def test_servers_of_workers_are_warm(tmp_path):
    file = tmp_path / "pools.py"
    file.write_text(WORKER)
    assert run_command(sys.executable, file).stdout == "True\n"


@pytest.mark.slow
def test_the_first_that_is_started_may_be_one_that_imports_nothing_from_its_folder(monkeypatch):
    """The seed starts with it, and imports what lies beside its own script."""
    monkeypatch.setattr(warm, "_seeds", {})
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    asks = "from sys import modules; print('deepspeed' in modules)"
    assert run_command(sys.executable, "-c", asks).stdout == "True\n"


@pytest.mark.slow
def test_a_process_that_tells_libraries_what_it_wants_starts_others_warm_before_and_after(monkeypatch):
    """As tests do that build models themselves. Later ones then imported all libraries again."""
    asks = "from sys import modules; print('deepspeed' in modules)"
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    before = run_command(sys.executable, "-c", asks)
    libraries.prepare()
    assert [each.stdout for each in (before, run_command(sys.executable, "-c", asks))] == ["True\n"] * 2


@pytest.mark.slow
def test_it_ends_by_signals_and_nothing_is_left_of_it(tmp_path):
    file = tmp_path / "waits.py"
    file.write_text("import subprocess, sys, time\nprint('ready', flush=True)\ntime.sleep(100)")
    for number, status in ((signal.SIGTERM, -15), (signal.SIGKILL, -9), (signal.SIGINT, -2)):
        process = warm.Popen([sys.executable, file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        process.communicate(timeout=20)  # its children that held the pipes have ended, too
        assert process.returncode == status


def test_a_program_that_is_not_there_or_no_python_is_started_as_ever(tmp_path):
    with pytest.raises(FileNotFoundError):
        warm.Popen([str(tmp_path / "none")])
    with pytest.raises(FileNotFoundError):
        warm.Popen([sys.executable, "-m", "json.tool"], cwd=tmp_path / "none")
    done = subprocess.run(["sh", "-c", "echo $0"], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "sh\n"


@pytest.mark.slow
def test_clones_see_gpus_of_their_own():
    """They share a seed, which has seen no GPU and has not read torch's allocator settings."""
    asks = "import json, sys, torch; p = torch.cuda.get_device_properties(0); free, total = torch.cuda.mem_get_info()"
    tells = "from sys import modules; count = torch.cuda.device_count(); libraries = 'deepspeed' in modules"
    tells += "; expandable = torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments']"
    tells += "; print(json.dumps([p.name, p.multi_processor_count, count, expandable, libraries]))"
    for gpu, name, gpus in (("a40", "NVIDIA A40", 2), ("h100-sxm", "NVIDIA H100 80GB HBM3", 1)):
        found = answers(gpu, f"{asks}\n{tells}", gpus, PYTORCH_ALLOC_CONF=f"expandable_segments:{gpus == 2}")
        assert found == [name, catalog.resolve_gpu(gpu).multiprocessors, gpus, gpus == 2, True]


ATTEMPTS = """
import subprocess, sys
from bigdit import catalog
from bigdit.profile.gpus import worker_environment
asks = "from sys import modules; print(str('deepspeed' in modules).lower())"
subprocess.run([sys.executable, "-c", asks], env=worker_environment(catalog.resolve_gpu("a40")), check=True)
"""


@pytest.mark.slow
def test_attempts_that_a_clone_with_gpus_makes_start_warm():
    """As `bigdit bench step` does on a GPU. It names another program to build the GPU's libraries."""
    assert answers("a40", ATTEMPTS) is True
