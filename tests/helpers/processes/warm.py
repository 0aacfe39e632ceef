"""Start Python programs as clones of a process that has imported the libraries. Imports take seconds, and tests start
hundreds of programs.

`Popen` is subprocess.Popen, except that Python programs of this environment are clones of a seed process. The seed
has imported the libraries, and the part of bigdit that most programs import. A clone is a child of the process that
started it, as after fork and exec. It has its own arguments, environment, folder, files, signals and entries in
/proc. It also has a seed of its own, made first, so that what it starts, such as a launcher's ranks, is warm too.
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
OF_BIGDIT = ("bigdit.app", "bigdit.train.loop", "bigdit.extract.worker", "bigdit.profile.steps")
"""Modules of bigdit that most programs import, a third of a tiny run's work. They only run code when called."""
LOOK_AT_GPUS = ("bitsandbytes.optim", "peft")
"""Libraries that look for GPUs when they are imported: a clone imports them itself, to see its own."""
READ_AT_IMPORT = ("HF_", "LD_", "OMP_", "MKL_", "BIGDIT_EMULATED_")
"""Prefixes of variables that libraries read once, when they are imported."""
LIBRARIES_OF_GPUS = "BIGDIT_EMULATED_CACHE"
"""Of those, the folder of the loaded libraries. Paths to the same folder are equal."""
READ_LATER = ("BIGDIT_EMULATED_GPU", "BIGDIT_EMULATED_PEERS", "BIGDIT_EMULATED_VALUES", "HF_HUB_OFFLINE")
READ_LATER += ("BIGDIT_EMULATED_BUILDER",)
"""Of those, variables that the emulated GPU's libraries read at their first call: a clone reads them again. Or that
build these libraries, which a clone has loaded."""
SET_BY_BIGDIT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Of those, variables that bigdit/libraries.py sets where nobody has. A seed has them; its process may get them
later."""


OF_IMPORTS = ("sys.modules", "sys.meta_path", "/proc/self/status")
"""Code with these words examines or changes imports, and so needs a new interpreter."""


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    read = SET_BY_BIGDIT | {
        name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT) and name not in READ_LATER
    }
    if LIBRARIES_OF_GPUS in read:
        read[LIBRARIES_OF_GPUS] = os.path.realpath(read[LIBRARIES_OF_GPUS])
    return read


def _has_a_torch(environment: Mapping[str, str]) -> bool:
    """Whether PYTHONPATH has a torch that would come before the clone's."""
    folders = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return any(Path(folder, name).exists() for folder in folders for name in ("torch", "torch.py"))


class Seed:
    """A handle on the process that is cloned."""

    def __init__(self, asked: socket.socket, environment: Mapping[str, str], process: Any = None) -> None:
        self._asked = asked
        self._process = process
        self._owner = os.getpid()
        self._one = threading.Lock()
        self._environment = _read_at_import(environment)

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a clone would equal a new process with these variables, and would be a child of this process."""
        alike = _read_at_import(environment) == self._environment and not _has_a_torch(environment)
        return self._owner == os.getpid() and alike

    def clone(self, asked: dict[str, Any], files: Sequence[int]) -> int:
        """Make a clone. Returns its process id once its files, group and signals are set."""
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
Executed, _executed_spawn = subprocess.Popen, multiprocessing.util.spawnv_passfds  # replaced below
_seeds: dict[Path, Seed] = {}
"""By the folder of their interpreter."""
_OWN = (Path(sys.prefix) / "bin").resolve()
_is_tests_own = __name__ != "__main__"
"""Whether this is no seed and no clone. A clone starts its few processes of emulated GPUs as usual: a seed imports more
than they do."""


def _seed_for(folder: Path, environment: Mapping[str, str]) -> Seed | None:
    """The seed to clone for this process, if there is one. Tests start theirs at first use, and it ends with them."""
    on_gpu = "BIGDIT_EMULATED_GPU" in environment
    home = _OWN.parents[1] / ".venv-cuda/bin" if on_gpu else _OWN
    observed = "BIGDIT_EMULATED_OUT" in environment
    if folder == home and folder not in _seeds and not observed and _is_tests_own:
        own = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        own["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # read at import: else clones start a compiler that imports torch
        own.pop("PYTHONSAFEPATH", None)  # the seed imports from its own folder; each clone has its own setting
        if on_gpu:
            gpus = ("BIGDIT_EMULATED_", "DS_ACCELERATOR", "PYTHONPATH")
            own |= {name: value for name, value in environment.items() if name.startswith(gpus)}
            own["BIGDIT_EMULATED_VALUES"] = "1"  # a clone may remove them
        ours, theirs = socket.socketpair()
        process = Executed(
            [folder / "python", "-W", "ignore", __file__, str(theirs.fileno())],
            env=own,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what libraries print when imported
        )
        theirs.close()
        _seeds[folder] = Seed(ours, own, process)
    seed = _seeds.get(folder)
    return seed if seed is not None and seed.suits(environment) else None


class Popen(Executed):
    """subprocess.Popen that clones a seed for Python programs. It starts others, and unusual ones, by exec."""

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
        except BaseException:  # the test ran out of time: a late answer would be taken for the next one's
            del _seeds[program.folder]
            raise
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None


class _Program(NamedTuple):
    folder: Path  # of its interpreter
    words: list[str]  # `-m MODULE`, `-c CODE` or a script, with its arguments
    unbuffered: bool = False
    safe_path: bool = False  # sys.path lacks the folder that it starts in


def _program(words: Sequence[str], environment: Mapping[str, str]) -> _Program | None:
    """The program to run, or None if it is not Python or examines imports."""
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
    if not Path(words[0]).is_absolute():  # the interpreter must find its own sys.executable
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
    """Make all that this process starts warm, where possible."""
    subprocess.Popen = Popen  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]


def spawn(path: str | bytes, words: Sequence[str | bytes], files: Sequence[int]) -> int:
    """multiprocessing.util.spawnv_passfds, with a warm server of workers. Returns its process id."""
    if not any(os.fsdecode(word).startswith(FORK_SERVER) for word in words):
        return _executed_spawn(path, words, files)
    process = Popen(words, pass_fds=files)
    process.returncode = 0  # multiprocessing waits for it
    return process.pid


def run(
    program: Sequence[str], environments: Sequence[dict[str, str]], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command once for each environment, side by side, each in its own process group.

    Returns their outputs, joined, and the first exit status that is not 0. Kills all that they started, and raises
    subprocess.TimeoutExpired, after `timeout` s.
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
    """Serve as a seed until the asking process ends. Returns in each clone, with what it must run."""
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
    _seeds[Path(sys.executable).parent.resolve()] = Seed(ours, os.environ)
    try:
        os.write(ready, b"placed")
    except BrokenPipeError:  # the asking process has ended
        os._exit(1)
    os.close(ready)
    return own


def _take_place(asked: dict[str, Any], files: Sequence[int]) -> None:
    """Take over the asked group, files, signals, environment and folder."""
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
    tempfile.tempdir = None  # an import may have asked for TMPDIR
    if os.environ.get("BIGDIT_EMULATED_VALUES") == "0":
        importlib.import_module("bigdit_emulated.values").leave()
    os.chdir(asked["folder"])
    linux.show(asked["words"], asked["environment"])


def _apart(file: int) -> int:
    """Duplicate a file to a number that no process expects."""
    apart = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512)
    os.close(file)
    return apart


def _open_nothing(numbers: Sequence[int]) -> None:
    """Open none of these files: a reader of a process's output waits for the last process that holds it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(nothing, number)
    os.close(nothing)


def _become(asked: dict[str, Any]) -> None:
    """Run the program as the interpreter would."""
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
    """Run the program, wait for its threads, and run its exit functions. Returns its exit status."""
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
    """Import the libraries as bigdit's processes do. Returns the variables that they set."""
    from bigdit import libraries

    before, on_gpu = dict(os.environ), "BIGDIT_EMULATED_GPU" in os.environ
    libraries.prepare()
    import torch

    asks = torch.cuda.is_available
    if on_gpu:  # torch would remember this process's answer, and refuse to ask again after a fork
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
    """Do not take torch's operators out of its dispatcher at exit: that takes as long as some steps of a tiny model."""
    from torch.library import _del_library

    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        called = each.peek()
        if called is not None and called[1] is _del_library:
            each.atexit = False


if __name__ == "__main__":
    given = socket.socket(fileno=int(sys.argv[1]))
    take_place()  # before libraries keep references
    set_by_imports = _import_libraries()
    from huggingface_hub import constants

    gc.freeze()  # a clone's collections then neither touch nor copy what was imported
    os._exit(_end(_grow(given)))  # taking all libraries apart at exit takes a second
