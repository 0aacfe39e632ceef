"""Disturb commands of bigdit, damage files, and read what runs leave."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import warm
from commands import BIN, ROOT, environment_with
from safetensors.numpy import load_file

from bigdit.checkpoint.folder import checksum, open_checkpoint
from bigdit.train.monitor.metrics import read_metrics

TAG = f"BIGDIT_DISTURBED={os.getpid()}"
"""Set for all that commands start, so that their processes are found whatever their parents are."""
LIMIT_S = 120.0
BUGS = ("Traceback", "this is a bug", "Fatal Python error")


class Command:
    """A running `bigdit ARGUMENTS`. With `cold` it starts in a new interpreter, as from a shell."""

    def __init__(self, arguments, log, watched, *, cold=False):
        words, self.log, self._watched = [str(BIN / "bigdit"), *map(str, arguments)], log, watched
        print(*words[1:2], *words[-2:])  # pytest shows it where a round fails
        own = environment_with(dict([TAG.split("="), ("BIGDIT_RECEIPTS", str(log.parent / "receipts"))]))
        with open(log, "w") as printed:
            files = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": printed}
            start = warm.Executed if cold else warm.Popen
            self.process = start(words, env=own, cwd=ROOT, **files, start_new_session=True)

    def text(self):
        return self.log.read_text(errors="replace")

    def until(self, changes, seconds, clock=None):
        """Wait for this many changes in the folder, then for `seconds`. Returns whether the command still runs.
        `clock` draws new file times meanwhile."""
        before, deadline = _listing(self._watched), time.monotonic() + LIMIT_S
        while changes > 0 and self.process.poll() is None:
            assert time.monotonic() < deadline, f"nothing happened: {self.text()[-2000:]}"
            now = _listing(self._watched)
            changes -= len(now ^ before)
            before = now
            if clock is not None:
                set_times(self._watched, clock)
            time.sleep(0.0005)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is None

    def hit(self, signum, whom, draw):
        """Send a signal to `the command`, to `a process` that it started, or to `all`. Returns who got it."""
        own, others = self.process.pid, [pid for pid in living() if pid != self.process.pid]
        chosen = {"the command": [own], "a process": [draw.choice(others or [own])], "all": [own, *others]}[whom]
        print(signum.name, whom)
        return send(signum, chosen)

    def ends(self, *statuses, refused=lambda status: status == 1, most=1, alone=True):
        """Wait for the end, and check it. Returns the exit status, which must be one of `statuses` if any are given.
        If it was `refused`, at most `most` lines must say why; otherwise none. If `alone`, no process may be left."""
        try:
            status = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {LIMIT_S:g} s: {self.text()[-3000:]}") from None
        _ = alone and none_left()
        printed = f"status {status}: {self.text()[-3000:]}"
        lines = sum(line.startswith("error: ") for line in self.text().splitlines())
        assert not any(bug in printed for bug in BUGS), printed
        assert status in (statuses or [status]), printed
        assert bool(refused(status)) <= lines <= (most if refused(status) else 0), printed
        return status


def _listing(folder):
    return {(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files)}


def living():
    """Ids of the processes that commands started and that still run."""
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError):
            found += [pid] * (TAG.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return found


def send(signum, pids):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
    return pids


def none_left(within=30.0, *, kill=False):
    """Wait until no process of a command is left."""
    deadline = time.monotonic() + within
    while left := living():
        assert time.monotonic() < deadline, f"processes were left behind: {left}"
        send(signal.SIGKILL, left if kill else [])
        time.sleep(0.005)


def set_times(folder, draw):
    moment = draw.choice([315532800, 4102444800])  # 1980 or 2100
    for root, folders, files in os.walk(folder):  # skips folders that a command has just renamed
        for name in (*folders, *files):
            with suppress(OSError):
                os.utime(Path(root, name), (moment, moment), follow_symlinks=False)


def folder_of(output, step):
    return output / f"checkpoints/step-{step:08d}"


def steps_of(output):
    return sorted(int(folder.name[5:]) for folder in (output / "checkpoints").glob("step-*"))


def rows_of(output):
    """Step, loss, norm of the gradients and learning rate of each row of metrics.jsonl."""
    rows = read_metrics(output / "metrics.jsonl")
    return [tuple(row.get(key) for key in ("step", "loss", "grad_norm", "lr")) for row in rows]


def exports_of(output):
    """Checksums of all exported files by path, without model cards, which hold measured figures."""
    files = [file for file in sorted((output / "exports").rglob("*")) if file.is_file() and ".tmp-" not in str(file)]
    return {str(file.relative_to(output / "exports")): checksum(file) for file in files if file.name != "README.md"}


def held_in(output, step):
    """By file of a whole checkpoint: its header, whose order varies, and the bytes of its tensors."""
    held, found = {}, open_checkpoint(folder_of(output, step))
    wrong = [name for name, right in found.state["checksums"].items() if checksum(found.folder / name) != right]
    assert not wrong, f"{found.folder}: {wrong} are damaged"
    for content, name in ((file.read_bytes(), file.name) for file in found.files()):
        data = 8 + int.from_bytes(content[:8], "little")
        held[name] = json.loads(content[8:data]), content[data:]
    return held


def weights_of(output):
    """All exported tensors, by path and name."""
    files = (output / "exports").rglob("*.safetensors")
    return {f"{file.relative_to(output)} {name}": each for file in files for name, each in load_file(file).items()}


DAMAGES = {"a bit flipped": 8, "cut": 3, "made longer": 2, "emptied": 2, "512 bytes zeroed": 2, "removed": 2}
DAMAGES |= {"another in its place": 3, "a folder in its place": 1, "a link to itself": 1, "not to be read": 1}
"""Ways to damage a file, with how often of all."""


def damage(draw, root, but):
    """Damage a file in `root`; each kind of name is equally likely. Returns the file, its former content, and the
    damage."""
    files = [file for file in sorted(root.rglob("*")) if file.is_file() and file.stat().st_size]
    kinds = {}
    for each in files:
        kinds.setdefault(re.match(r"\w+", str(each.relative_to(root)))[0], []).append(each)
    file = draw.choice(kinds[draw.choice(sorted({*kinds} - {but}))])
    whole = file.read_bytes()
    at, bit, page = draw.randrange(len(whole)), 1 << draw.randrange(8), draw.randrange(len(whole)) // 512 * 512
    alike = [each for each in files if each != file and each.suffix == file.suffix]
    others = [each for each in alike if each.name == file.name or each.parent == file.parent]
    ways = {
        "a bit flipped": whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :],
        "cut": whole[:at],
        "made longer": whole + draw.randbytes(draw.randrange(1, 100)),
        "emptied": b"",
        # a page that was not on disk when the power failed
        "512 bytes zeroed": whole[:page] + bytes(len(whole[page : page + 512])) + whole[page + 512 :],
        "another in its place": draw.choice(others or [file]).read_bytes(),
    }
    how = draw.choices(list(DAMAGES), list(DAMAGES.values()))[0]
    file.write_bytes(ways.get(how, whole))
    if how in ("removed", "a folder in its place", "a link to itself"):
        file.unlink()
        {"a folder in its place": file.mkdir, "a link to itself": lambda: file.symlink_to(file)}.get(how, int)()
    elif how == "not to be read":  # root can still read it
        file.chmod(0)
    print(how, file)
    return file, whole, how


def bring_back(file, content):
    """Restore a file as it was before it was damaged."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
