"""The command `bigdit whatif`: its address, and how it ends."""

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from commands import BIN, ROOT, bigdit, environment_with, run_command

# As tests/commands/test_plan.py asks, whose plan is kept.
QUESTION = ("--model", "dit-s-8", "--gpu", "rtx-3060", "--images", "10k", "--global-batch", "64")
WITHIN_S = 60


def children(pid):
    """The processes that a process has started."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def gone(pid):
    until = time.monotonic() + WITHIN_S
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.xdist_group("plan")
@pytest.mark.parametrize(("number", "status", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "")])
def test_it_serves_until_it_is_ended_and_its_processes_with_it(number, status, said):
    process = subprocess.Popen(
        [BIN / "bigdit", "whatif", *QUESTION, "--no-browser"],
        cwd=ROOT, env=environment_with({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", url), process.stderr.read()
        with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
            assert "dit-s-8 on" in answer.read().decode()
        own = children(process.pid)
        assert own  # what rehearses
        process.send_signal(number)
        _, errors = process.communicate(timeout=WITHIN_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    ended = [line for line in errors.splitlines() if not line.startswith("planning the training of dit-s-8")]
    assert ended == [line for line in ("each change of the page runs; Ctrl-C ends it", said) if line]
    assert all(map(gone, own))
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=WITHIN_S)


def test_a_port_that_is_taken_is_said_before_anything_is_planned():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = bigdit("whatif", "--model", "dit-s-8", "--gpu", "a40", "--port", port, "--no-browser")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: --port {port}: address already in use; leave it out for one that is free\n"


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_its_extra_it_says_what_brings_it(missing):
    code = f"import sys; sys.modules['{missing}'] = None; from bigdit.cli import main; main(['whatif', *{QUESTION}])"
    done = run_command(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: bigdit whatif: starlette or uvicorn is missing; pip install 'bigdit[whatif]'\n"


def test_what_cannot_be_asked_is_said_as_plan_says_it():
    questions = [(name, "--model", "sana-160m", "--gpu", "a4", "--gpus", "0") for name in ("plan", "whatif")]
    plan, whatif = (bigdit(*question) for question in questions)
    assert len(plan.stderr.splitlines()) == 3
    assert (whatif.returncode, whatif.stderr) == (plan.returncode, plan.stderr)
