"""Python programs in processes that have the libraries already: importing them takes seconds, and tests start hundreds.

`Popen` is subprocess.Popen, but that python programs of this environment are clones of a process, the seed, which has
imported what others wrote, and of bigdit what most programs import. A clone is a child of the process that asked for
it, as after fork and exec, with its own arguments, environment, folder, files, signals and place in /proc. It has a
seed of its own, made before all else, so that what it starts, such as the ranks of a launcher, is warm too.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import linux

LIBRARIES = (
    *("diffusers.models.transformers.sana_transformer", "diffusers.schedulers", "transformers.models.t5"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.utils.flop_counter"),
    *("deepspeed", "torchao.optim", "accelerate", "matplotlib.figure", "pyarrow.parquet"),
    *("typer", "rich.progress", "rich.table", "xxhash", "elftools.elf.elffile"),
)
UNCOMPILED = ("deepspeed.runtime.zero.muon.muon_optimizer", "bitsandbytes.optim", "peft")
OF_BIGDIT = ("bigdit.app", "bigdit.train.main", "bigdit.train.loop", "bigdit.extract.worker", "bigdit.profile.steps")
"""What most programs import of it, a third of a tiny run's work: their own code begins when they are run."""
LOOK_AT_GPUS = ("bitsandbytes.optim", "peft")
"""Which of them ask for GPUs when they are imported: a clone is to see its own."""
READ_AT_IMPORT = ("HF_", "LD_", "OMP_", "MKL_", "BIGDIT_EMULATED_")
"""How variables begin that are read when libraries are imported, and not again."""
LIBRARIES_OF_GPUS = "BIGDIT_EMULATED_CACHE"
"""Of those, the folder of what is loaded, however it is called."""
READ_LATER = ("BIGDIT_EMULATED_GPU", "BIGDIT_EMULATED_PEERS", "BIGDIT_EMULATED_VALUES", "HF_HUB_OFFLINE")
"""Of those, what the emulated GPU's libraries read when they are first called, and what a clone reads again."""
SET_BY_BIGDIT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Of those, what bigdit/libraries.py sets where nobody has: a seed is told there, and its process may be told later."""


OF_IMPORTS = ("sys.modules", "sys.meta_path", "/proc/self/status")
"""What code asks that is to find out what an import takes along, or that changes what one does."""


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    read = SET_BY_BIGDIT | {
        name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT) and name not in READ_LATER
    }
    if LIBRARIES_OF_GPUS in read:
        read[LIBRARIES_OF_GPUS] = os.path.realpath(read[LIBRARIES_OF_GPUS])
    return read


def _has_a_torch(environment: Mapping[str, str]) -> bool:
    """Whether one would be found before the one that a clone has."""
    folders = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return any(Path(folder, name).exists() for folder in folders for name in ("torch", "torch.py"))


class Seed:
    """The process that is cloned, as the one that asks it holds it."""

    def __init__(self, asked: socket.socket, environment: Mapping[str, str], process: Any = None) -> None:
        self._asked = asked
        self._process = process
        self._owner = os.getpid()
        self._one = threading.Lock()
        self._environment = _read_at_import(environment)

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a clone is what a new process with these variables would be, and a child of this one."""
        alike = _read_at_import(environment) == self._environment and not _has_a_torch(environment)
        return self._owner == os.getpid() and alike

    def clone(self, asked: dict[str, Any], files: Sequence[int]) -> int:
        """The process id of a clone that has taken its place: its files are open, its group and signals are set."""
        text = json.dumps(asked).encode("utf-8", "surrogateescape")
        ready, theirs = os.pipe()
        with self._one, open(ready, "rb") as placed:
            try:
                socket.send_fds(self._asked, [len(text).to_bytes(8, "little")], [theirs, *files])
            finally:
                os.close(theirs)
            self._asked.sendall(text)
            pid = int.from_bytes(_exactly(self._asked, 8), "little")
            placed.read()
        return pid


FORK_SERVER = "from multiprocessing.forkserver import main"
Executed, _executed_spawn = subprocess.Popen, multiprocessing.util.spawnv_passfds  # their places are taken
_seeds: dict[Path, Seed] = {}
"""By the folder of their interpreter."""
_OWN = (Path(sys.prefix) / "bin").resolve()
_is_a_seed = __name__ == "__main__"


def _seed_for(folder: Path, environment: Mapping[str, str]) -> Seed | None:
    """The seed whose clone such a process would be. It starts when it is first asked, and ends with this process."""
    on_gpu = "BIGDIT_EMULATED_GPU" in environment
    home = _OWN.parents[1] / ".venv-cuda/bin" if on_gpu else _OWN
    observed = "BIGDIT_EMULATED_OUT" in environment
    if folder == home and folder not in _seeds and not observed and not _is_a_seed:
        own = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        own.pop("PYTHONSAFEPATH", None)  # it imports what lies beside it; its clones are told each
        if on_gpu:
            gpus = ("BIGDIT_EMULATED_", "DS_ACCELERATOR", "PYTHONPATH")
            own |= {name: value for name, value in environment.items() if name.startswith(gpus)}
            own["BIGDIT_EMULATED_VALUES"] = "1"  # a clone may leave them
        ours, theirs = socket.socketpair()
        process = Executed(
            [folder / "python", "-W", "ignore", __file__, str(theirs.fileno())],
            env=own,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # libraries' remarks on being imported
        )
        theirs.close()
        _seeds[folder] = Seed(ours, own, process)
    seed = _seeds.get(folder)
    return seed if seed is not None and seed.suits(environment) else None


class Popen(Executed):
    """As subprocess.Popen; what is no python program, or not as it would be there, is started by exec."""

    def _execute_child(  # type: ignore[override]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ):  # fmt: skip
        given = os.environ if env is None else env
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
        standard = [number if own == -1 else own for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        usual = not (shell or executable or preexec_fn or gid or gids or uid or umask != -1 or isinstance(args, str))
        usual = usual and close_fds and (cwd is None or os.path.isdir(cwd)) and not any(map(os.isatty, standard))
        program = _program([os.fsdecode(word) for word in args], environment) if usual else None
        seed = _seed_for(program.folder, environment) if program is not None else None
        if program is None or seed is None:
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
        asked = {
            "program": program.words,
            "words": [os.fsdecode(word) for word in args],
            "unbuffered": program.unbuffered,
            "safe_path": program.safe_path,
            "environment": environment,
            "folder": str(Path(os.fsdecode(cwd) if cwd else ".").absolute()),
            "numbers": [0, 1, 2, *pass_fds],
            "session": start_new_session,
            "group": process_group,
            "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN],
            "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        try:
            self.pid = seed.clone(asked, [*standard, *pass_fds])
        except BaseException:  # a test's own time was over: the answer would be taken for the next one's
            del _seeds[program.folder]
            raise
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None


class _Program(NamedTuple):
    folder: Path  # of its interpreter
    words: list[str]  # `-m MODULE`, `-c CODE` or a script, with its arguments
    unbuffered: bool = False
    safe_path: bool = False  # without the folder that it is started in


def _program(words: Sequence[str], environment: Mapping[str, str]) -> _Program | None:
    """None for what is none of python, and for code that is of imports."""
    found = shutil.which(words[0], path=environment.get("PATH"))
    if found is None:
        return None
    folder, rest = Path(found).parent.resolve(), list(words[1:])
    if not Path(found).name.startswith("python"):
        with open(found, "rb") as script:
            interpreter = Path(os.fsdecode(script.readline().strip()).removeprefix("#!"))
        return _Program(interpreter.parent.resolve(), [found, *rest]) if interpreter.is_absolute() else None
    if not (folder / "python").exists():
        return None
    if not Path(words[0]).is_absolute():  # whose sys.executable is for the interpreter to find
        return None
    options = set()
    while rest and (rest[0] in ("-u", "-B", "-P") or rest[0].startswith("-W")):
        options.add(rest[0])
        del rest[: 1 + (rest[0] == "-W")]
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-m", "-c")):
        return None
    if rest[0] == "-c" and any(asked in rest[1] for asked in OF_IMPORTS):
        return None
    unbuffered = "-u" in options or bool(environment.get("PYTHONUNBUFFERED"))
    return _Program(folder, rest, unbuffered, "-P" in options or bool(environment.get("PYTHONSAFEPATH")))


def take_place() -> None:
    """Have all that this process starts be warm, where it can."""
    subprocess.Popen = Popen  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]


def spawn(path: str | bytes, words: Sequence[str | bytes], files: Sequence[int]) -> int:
    """As multiprocessing.util.spawnv_passfds, by which it starts a server of workers: the id of the process."""
    if not any(os.fsdecode(word).startswith(FORK_SERVER) for word in words):
        return _executed_spawn(path, words, files)
    process = Popen(words, pass_fds=files)
    process.returncode = 0  # it is for multiprocessing to wait for
    return process.pid


def run(
    program: Sequence[str], environments: Sequence[dict[str, str]], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process an environment, side by side, each in a group of its own.

    What they wrote, one after the other, and the first status that is not 0. Raises subprocess.TimeoutExpired
    after `timeout` s, and all are killed, with what they have started.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as ending:
        running, written = [], []
        for environment in environments:
            files = [ending.enter_context(tempfile.TemporaryFile("w+")) for _ in ("out", "err")]
            process = Popen(program, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                            stdout=files[0], stderr=files[1], process_group=0)  # fmt: skip
            ending.callback(_kill, process)
            running.append(process)
            written.append(files)
        try:
            statuses = [process.wait(max(0, deadline - time.monotonic())) for process in running]
        finally:
            out, err = ("".join(_read(files[number]) for files in written) for number in (0, 1))
    return subprocess.CompletedProcess(list(program), next(filter(None, statuses), 0), out, err)


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(file: Any) -> str:
    file.seek(0)
    return file.read()


def _exactly(asked: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = asked.recv(count - len(found))
        if not part:
            raise EOFError("the process that has the libraries has ended")
        found += part
    return found


def _grow(asked_by: socket.socket) -> dict[str, Any]:
    """Be a seed until the process that asks ends; returns in each clone, as what it was asked to be, in its place."""
    while True:
        header, files, *_ = socket.recv_fds(asked_by, 8, 256)
        if not header:
            os._exit(0)
        asked = _exactly(asked_by, int.from_bytes(header, "little"))
        pid = linux.clone_beside()
        if pid == 0:
            break
        asked_by.sendall(pid.to_bytes(8, "little"))
        for each in files:
            os.close(each)
    asked_by.close()
    own: dict[str, Any] = json.loads(asked.decode("utf-8", "surrogateescape"))
    ready, *files = map(_apart, files)
    _take_place(own, files)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        linux.end_with_parent()
        linux.show(["seed"], {})
        os.close(ready)
        ours.close()
        _open_nothing(own["numbers"])
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        return _grow(theirs)
    theirs.close()
    global _is_a_seed
    _is_a_seed = False
    _seeds[Path(sys.executable).parent.resolve()] = Seed(ours, os.environ)
    try:
        os.write(ready, b"placed")
    except BrokenPipeError:  # who asked has been ended meanwhile
        os._exit(1)
    os.close(ready)
    return own


def _take_place(asked: dict[str, Any], files: Sequence[int]) -> None:
    """Group, files, signals, environment and folder of a process that was asked for."""
    if asked["session"]:
        os.setsid()
    elif asked["group"] != -1:
        os.setpgid(0, asked["group"])
    for each, number in zip(files, asked["numbers"], strict=True):
        os.dup2(each, number)
        os.close(each)
    for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        usual = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
        signal.signal(each, signal.SIG_IGN if each in asked["ignored"] else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    os.environ.clear()
    os.environ.update(set_by_imports | asked["environment"])
    constants.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    tempfile.tempdir = None  # asked for TMPDIR once, when an import wants it
    if os.environ.get("BIGDIT_EMULATED_VALUES") == "0":
        importlib.import_module("bigdit_emulated.values").leave()
    os.chdir(asked["folder"])
    linux.show(asked["words"], asked["environment"])


def _apart(file: int) -> int:
    """The same file by a number that none is to have."""
    apart = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512)
    os.close(file)
    return apart


def _open_nothing(numbers: Sequence[int]) -> None:
    """Hold none of these files: who reads what a process wrote waits for the last one that holds it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(nothing, number)
    os.close(nothing)


def _become(asked: dict[str, Any]) -> None:
    """Run the program as the interpreter does."""
    environment, program = asked["environment"], asked["program"]
    if asked["unbuffered"]:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    if Path(asked["words"][0]).name.startswith("python"):
        sys.executable = asked["words"][0]
    first, *rest = program
    given = first in ("-m", "-c")
    sys.argv, sys.orig_argv = [first, *rest[1:]] if given else program, asked["words"]
    before = [] if asked["safe_path"] else [{"-m": asked["folder"], "-c": ""}.get(first, str(Path(first).parent))]
    sys.path[:1] = [*before, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], sys.modules["__main__"].__dict__)
    else:
        runpy.run_path(first, run_name="__main__")


def _end(asked: dict[str, Any]) -> int:
    """Run the program; its exit status, when its threads have ended and its exit functions have run."""
    status: Any = 0
    try:
        _become(asked)
    except SystemExit as ending:
        status = ending.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _import_libraries() -> dict[str, str]:
    """As bigdit's own processes do; the variables that they set."""
    from bigdit import libraries

    before, on_gpu = dict(os.environ), "BIGDIT_EMULATED_GPU" in os.environ
    libraries.prepare()
    import torch

    asks = torch.cuda.is_available
    if on_gpu:  # which torch would remember of this process's, and refuse to look again after a fork
        torch.cuda.is_available = lambda: True
    for name in LIBRARIES:
        importlib.import_module(name)
    with libraries.uncompiled():
        for name in UNCOMPILED:
            if not (on_gpu and name in LOOK_AT_GPUS):
                importlib.import_module(name)
    torch.cuda.is_available = asks
    _let_operators_stay()
    for name in OF_BIGDIT:
        importlib.import_module(name)
    return {name: value for name, value in os.environ.items() if name not in before}


def _let_operators_stay() -> None:
    """At exit torch would take operators out of its dispatcher, one by one, which is left to the end of the process: it
    takes as long as a few steps of a tiny model."""
    from torch.library import _del_library

    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        called = each.peek()
        if called is not None and called[1] is _del_library:
            each.atexit = False


if __name__ == "__main__":
    given = socket.socket(fileno=int(sys.argv[1]))
    take_place()  # before libraries keep them
    set_by_imports = _import_libraries()
    from huggingface_hub import constants

    gc.freeze()  # a clone's collections do not touch, and so copy, what was imported
    os._exit(_end(_grow(given)))  # an interpreter that ends in order takes all libraries apart, for a second
