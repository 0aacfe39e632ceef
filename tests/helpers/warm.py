"""Python programs in processes that have the libraries already: importing them takes 8 s, and tests start hundreds.

Run as a script, it imports what others wrote, nothing of bigdit, and forks at each line of JSON: each child has the
arguments, the environment, the folder and the files of a command that a shell starts, and runs the program itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIBRARIES = (
    *("diffusers.models.transformers.sana_transformer", "diffusers.schedulers", "transformers.models.t5"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.utils.flop_counter"),
    *("deepspeed", "bitsandbytes", "peft", "torchao.optim", "accelerate", "matplotlib.figure", "pyarrow.parquet"),
)


class Server:
    """The process that is forked: it starts when it is first asked, and ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, program: Sequence[str], environments: Sequence[dict[str, str]], folder: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a script with its arguments, or `-m MODULE` with its, in a process an environment, side by side.

        What they wrote, one after the other, and the first status that is not 0. Raises subprocess.TimeoutExpired
        after `timeout` s, and all are killed.
        """
        server = self._started()
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory() as kept:
            asked = {"program": list(program), "environments": list(environments), "folder": str(folder)}
            try:
                print(json.dumps(asked | {"files": kept, "timeout": timeout}), file=server.stdin, flush=True)
                statuses: list[int] | None = json.loads(server.stdout.readline())
            except BaseException:  # a test's own time was over: the answer would be taken for the next one's
                self._process = None
                server.terminate()
                raise
            out, err = (
                "".join(Path(kept, f"{name}{number}").read_text() for number in range(len(environments)))
                for name in ("out", "err")
            )
        if statuses is None:
            raise subprocess.TimeoutExpired(list(program), timeout, out, err)
        return subprocess.CompletedProcess(list(program), next(filter(None, statuses), 0), out, err)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__],
                env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # libraries' remarks on being imported
                text=True,
            )
            atexit.register(self._process.communicate)  # the end of its input is its end
        return self._process


def _serve() -> tuple[dict[str, Any], int] | None:
    """What a child is asked to be, and its number, in that child; None in the server, when there is no more to do."""
    for line in sys.stdin:
        asked = json.loads(line)
        children = []
        for number in range(len(asked["environments"])):
            children.append(os.fork())
            if children[-1] == 0:
                return asked, number
        print(json.dumps(_statuses(children, asked["timeout"])), flush=True)
    return None


def _statuses(children: list[int], timeout: float) -> list[int] | None:
    """How they ended; None where their time was over. Whatever lasts longer is killed, with what it has started."""
    deadline = time.monotonic() + timeout
    ended: dict[int, int] = {}
    try:
        while len(ended) < len(children) and time.monotonic() < deadline:
            for child in set(children) - ended.keys():
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    ended[child] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
    finally:
        for child in set(children) - ended.keys():
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return [ended[child] for child in children] if len(ended) == len(children) else None


def _become(asked: dict[str, Any], number: int) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    written = os.O_WRONLY | os.O_CREAT
    for descriptor, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{asked['files']}/out{number}", written),
        (2, f"{asked['files']}/err{number}", written),
    ):
        opened = os.open(name, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    environment, program = asked["environments"][number], asked["program"]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(asked["folder"])
    module = program[1] if program[0] == "-m" else None
    sys.argv = program[1:] if module else program
    sys.path[0] = asked["folder"] if module else str(Path(program[0]).parent)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def _end(asked: dict[str, Any], number: int) -> int:
    """Run the program; its exit status, when its threads have ended and its exit functions have run."""
    status: Any = 0
    try:
        _become(asked, number)
    except SystemExit as ending:
        status = ending.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no child is left
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.freeze()  # a child's collections do not touch, and so copy, what was imported
    found = _serve()
    if found is not None:
        os._exit(_end(*found))  # an interpreter that ends in order takes all libraries apart, for a second
