"""Extraction and training under kills, signals, damage, full disks and concurrent commands: nothing is lost, no loss is
silent, and the results equal undisturbed ones to the bit.

    BIGDIT_ROUNDS=1000 BIGDIT_SEED=0 pytest tests/test_disturbed.py

A round has a store, a run, and a few disturbances, the last of which is a signal. Then the same commands run to their
ends. The same seed draws the same rounds, but the moment at which a signal arrives is up to the machine.
"""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace

import disturbing as on
import hypothesis
import numpy as np
import pytest
from commands import DIGITS, ROOT, SINGLE, TINY, bigdit, with_set
from disks import mounted, remount
from disturbing import folder_of, rows_of, steps_of
from hypothesis import stateful
from hypothesis import strategies as st
from hypothesis.stateful import rule

from bigdit.checkpoint.saver import kept_steps
from bigdit.store.lease import FOLDER as WORKERS
from bigdit.store.lease import WorkerName, all_leases, remove_left

ROUNDS, SEED = (int(os.environ.get(f"BIGDIT_{name}", usual)) for name, usual in (("ROUNDS", 2), ("SEED", 0)))
PARTS, ROOM = 2, "size=1g"
IMAGES, STEPS, CHANGES, SECONDS = 40, 10, {"extract": 50, "train": 240}, 4.0
"""What an undisturbed command takes: about so many changes of names in its folder, and so many seconds."""
SAVING = (f"train.steps={STEPS}", "train.checkpoint_every=2", "train.export_every=4", "strategy.ema={decay: 0.9}")
SMALL = (*TINY, *SAVING, "data.part_size=4", "strategy.micro_batch_size=4", "strategy.global_batch_size=8")
COURSES = {
    "single": (*SMALL, *SINGLE),
    "fp32": (*SMALL, *SINGLE, "strategy.precision=fp32"),
    "fsdp2": (*SMALL, "strategy.engine=fsdp2", "strategy.ds_config=null", "strategy.precision=fp32"),
    "zero2": (*SMALL, f"strategy.ds_config={ROOT}/ds_configs/zero2_bf16.json"),
}
KILL, INT = signal.SIGKILL, signal.SIGINT
SIGNALS = [KILL, KILL, KILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, INT]
NAMES = st.sampled_from(["extract", "train", "train"])


class World:
    """Digits, and what undisturbed extraction and training make of them."""

    def __init__(self, once, images):
        def make(folder):
            shutil.copytree(images, folder, ignore=lambda _, names: sorted(names)[2 * IMAGES :])
            (folder / "0007.png").write_bytes(b"no image")

        self.once, self.images, self.course = once, once("disturbed", make), cache(self._course)
        self.features = once("disturbed-features", lambda folder: self.does("extract", "single", folder))
        self.caption = (self.features / "null_text.safetensors").read_bytes()
        self.parts = {file.name: file.read_bytes() for file in self.features.glob("part-*")}

    def words(self, command, course, features, *overrides):
        own = [*COURSES[course], f"data.images={self.images}", f"data.features={features}", *overrides]
        return command, "--config", DIGITS, *with_set(own)

    def does(self, *asked):
        done = bigdit(*self.words(*asked), BIGDIT_RECEIPTS=str(self.images.parent / "receipts"))
        assert done.returncode == 0, done.stderr

    def _course(self, name):
        """A run's course: each checkpoint's content, its rows, its exports and its output."""
        asked = ("train", name, self.features, "train.keep_checkpoints=99", "train.checkpoint_every=1")
        output = self.once(f"disturbed-{name}", lambda folder: self.does(*asked, f"output={folder}"))
        held = {step: on.held_in(output, step) for step in steps_of(output)}
        assert sorted(held) == list(range(1, STEPS + 1))
        return SimpleNamespace(name=name, output=output, held=held, rows=rows_of(output), exports=on.exports_of(output))


class Disturbed(stateful.RuleBasedStateMachine):
    """A store and a run that are disturbed before they are done."""

    def __init__(self):
        super().__init__()
        self.draw = next(self.draws)  # hypothesis draws what happens: it likes to draw numbers again
        self.course = self.world.course(self.draw.choices(["single", "fsdp2", "zero2"], [8, 2, 1])[0])
        self.ending, self.may_mount, self.complete = ExitStack(), False, False
        self.folder = Path(self.ending.enter_context(tempfile.TemporaryDirectory(prefix="disturbed-")))
        self.disk = self.folder / "disk"
        try:
            self.may_mount = bool(self.ending.enter_context(mounted(self.disk, ROOM)))
        except pytest.skip.Exception as why:  # all disturbances but full disks have been tried
            warnings.warn(f"no full disks: {why}", stacklevel=1)
        self.ending.callback(on.none_left, kill=True)
        self.store, self.output, self.parts, self.vanished = self.disk / "features", self.disk / "run", set(), set()
        self.restart()

    def restart(self):
        shutil.rmtree(self.output, ignore_errors=True)
        self.newest, self.saved, self.keeping = 0, set(), {"keep_checkpoints": 2, "keep_every": 4}

    def runs(self, *words, cold=False):
        return on.Command(words, self.folder / f"{len(list(self.folder.glob('*.log')))}.log", self.disk, cold=cold)

    def start(self, name, output=None, course=None, *, cold=False):
        own = [f"train.{key}={json.dumps(value)}" for key, value in self.keeping.items()]
        words = self.world.words(name, course or self.course.name, self.store, *own, f"output={output or self.output}")
        return self.runs(*words, cold=cold)

    def moment(self, name):
        """A moment to disturb: after some changes in a command's folder, or sometimes after a time alone."""
        if self.draw.random() < 0.25:
            return 0, self.draw.uniform(0, SECONDS)
        left = max(STEPS - self.newest, 1) / STEPS if name == "train" else 1
        return self.draw.randint(1, int(CHANGES[name] * left)), self.draw.choice([0, 0.02, 0.2]) * self.draw.random()

    def underway(self, name, *, saved=False):
        """Leave something to do: for a training, which needs a store, or for an extraction. `saved`: with a
        checkpoint."""
        if name == "train":
            self.extracts()
            if self.newest == STEPS:
                self.trains()
            if saved and not self.newest:
                command, step = self.start("train"), folder_of(self.output, self.draw.choice([4, 6]))
                while not step.exists():
                    assert command.until(1, 0), command.text()
                command.hit(KILL, "all", self.draw)
                command.ends(refused=lambda _: False)
                self.nothing_is_lost()
            return
        self.complete = False
        if (self.store / "report.json").exists():
            (self.store / "report.json").unlink()
            for part in self.draw.sample(sorted(self.world.parts), 4):
                (self.store / part).unlink()
                self.parts.discard(part)

    @stateful.invariant()
    def nothing_is_lost(self, but=0):
        """Every visible part, checkpoint (`but` one) and export is whole and right, and none is missing."""
        on.none_left()
        parts = {file.name: file.read_bytes() for file in self.store.glob("part-*")}
        assert self.parts <= parts.keys(), "a part is lost"
        assert parts.items() <= self.world.parts.items(), "a part is wrong"
        steps, exports = [step for step in steps_of(self.output) if step != but], on.exports_of(self.output)
        assert max(steps, default=0) >= self.newest, "a checkpoint is lost"
        wrong = [step for step in steps if on.held_in(self.output, step) != self.course.held[step]]
        assert not wrong, f"steps {wrong} are not what an undisturbed run has"
        names = {name.split("/")[0] for name in exports}
        assert exports == {name: found for name, found in self.course.exports.items() if name.split("/")[0] in names}
        self.parts, self.newest, self.saved = set(parts), max(steps, default=0), self.saved | {*steps}

    def extracts(self):
        """The same extraction succeeds, every part is equal to the byte, and killed ones leave nothing behind."""
        if self.complete:
            return
        self.start("extract").ends(0)
        self.nothing_is_lost()
        report = json.loads((self.store / "report.json").read_text())
        assert (report["images"], report["encoded"], len(report["skipped"])) == (IMAGES, IMAGES - 1, 1)
        assert self.parts == self.world.parts.keys()
        assert (self.store / "null_text.safetensors").read_bytes() == self.world.caption
        held = {(each.folder.name, each.fate) for each in all_leases(self.store)}
        assert held == {(name, "unknown") for name in self.vanished}
        remove_left(self.store, other_machines=True)
        assert not [*(self.store / WORKERS).glob("*"), *self.store.rglob(".tmp-*")]
        self.vanished, self.complete = set(), True

    def trains(self, last=None, *, rows=True):
        """The same training succeeds, or `last` did. It equals an undisturbed one, and its attempts leave nothing
        behind. A new one may begin."""
        self.extracts()
        last = last or self.start("train")
        last.ends(0)
        self.nothing_is_lost()
        printed, latest, steps = (
            last.text().replace("\n", " "),
            self.output / "checkpoints/latest",
            steps_of(self.output),
        )
        done = "steps already" in printed  # nothing was left to train, measure, save or prune
        assert (done and "saved last" in printed and not latest.exists()) or latest.read_text() == f"step-{STEPS:08d}\n"
        assert on.exports_of(self.output) == self.course.exports
        assert not rows or rows_of(self.output) == self.course.rows
        assert (self.output / "receipt.json").exists() or (done and "receipt.json is missing" in printed), printed
        kept = kept_steps(sorted({*range(2, STEPS + 1, 2), *self.saved}), *self.keeping.values())
        assert kept == steps or (done and {*kept} <= {*steps}), (kept, steps)
        assert not list(self.output.rglob(".tmp-*"))
        self.restart()

    def teardown(self):
        with self.ending:
            if sys.exc_info()[0] is None:
                self.one_is_ended(self.draw.choice(["extract", "train"]), self.draw.choice(SIGNALS))
                self.extracts()
                if self.output.exists():
                    self.trains()
                self.seen["a round", "has come through"] += 1

    @rule(name=NAMES, signum=st.sampled_from(SIGNALS))
    def one_is_ended(self, name, signum):
        self.underway(name)
        whom, hit, before = self.draw.choice(["a process", "all", "the command"]), [], rows_of(self.output)
        if name == "extract" and signum != KILL:  # a terminal sends Ctrl-C, SLURM and people the others
            signum, whom = self.draw.choice([(INT, "all"), (signal.SIGTERM, "the command")])
        command = self.start(name, cold=signum in (KILL, signal.SIGTERM) and self.draw.random() < 0.03)
        if command.until(*self.moment(name), clock=self.draw if self.draw.random() < 0.2 else None):
            hit = command.hit(signum, whom, self.draw)
            if signum == INT and self.draw.random() < 0.5 and command.until(0, self.draw.uniform(0, 0.7)):
                hit, whom = command.hit(signum, "all", self.draw), f"{whom} and again to all"
        if name == "extract":
            how = f"status {command.ends(0, 1, -signum, 128 + signum)}"
        elif signum == KILL:
            how = f"status {command.ends(refused=lambda status: status != 0 and command.process.pid not in hit)}"
        else:
            how = self.after_a_signal(command, signum, before)
        self.seen[f"{name}: {signum.name} to {whom}", how] += 1

    def after_a_signal(self, command, signum, before):
        """A signalled training ends in one of the documented ways."""
        lost, early = (f"was ended by {signum.name}", "was lost after step"), "ended before a step was taken"
        status = command.ends(0, -signum, 128 + signum, refused=lambda _: any(each in command.text() for each in lost))
        text, saved = command.text(), f"{signum.name}: saved"
        ways = (saved, early, "ended at once, without a checkpoint", *lost, "interrupted\n", "")
        printed = next(way for way in ways if way in text)
        if printed == saved:
            step = int(text.rpartition("resumes from step ")[2].split()[0])
            assert (self.output / "checkpoints/latest").read_text() == f"step-{step:08d}\n", text
        elif status and printed in (*lost, "interrupted\n", ""):
            assert printed or status == -signum, f"nothing was said: {text}"
            assert rows_of(self.output) in (before, self.course.rows), f"ended in the middle of training: {text}"
        return f"status {status}, {printed.strip() or 'nothing printed'}"

    @rule(name=NAMES, hangs=st.booleans())
    def two_run_at_once(self, name, hangs):
        """Run two side by side, or stop one for longer than the other waits, and continue it when the other has
        ended."""
        self.underway(name)
        both = [self.start(name)]
        if both[0].until(*self.moment(name)) and hangs:
            on.send(signal.SIGSTOP, [*on.living(), *on.living()])
        both.append(self.start(name))
        if hangs:
            both[1].ends(alone=False)
            on.send(signal.SIGCONT, on.living())
        statuses = [each.ends(0, *([1] if name == "train" else []), alone=False) for each in both]
        refused = ["is in use by process" in each.text() for each in both]
        assert [status == 1 for status in statuses] == refused != [True, True], both[0].text() + both[1].text()
        self.seen[f"two of {name}, one hangs: {hangs}", f"{sum(refused)} refused"] += 1
        if name == "train":
            self.trains(both[refused.index(False)])

    @stateful.precondition(lambda self: self.may_mount)
    @rule(name=NAMES)
    def the_disk_is_full(self, name):
        self.underway(name)
        disk, wanted = os.statvfs(self.disk), sum(map(len, self.world.parts.values()))
        if name == "train":
            last = sum(file.stat().st_size for file in folder_of(self.course.output, STEPS).rglob("*"))
            wanted = last * max(4 - len(steps_of(self.output)), 1)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_bsize
        remount(self.disk, f"size={used + 4096 + self.draw.randrange(wanted)}")
        command = self.start(name)
        full = command.ends(0, 1) == 1
        assert not full or "No space left on device" in command.text(), command.text()
        remount(self.disk, ROOM)
        self.seen[f"full disk: {name}", "one line" if full else "room enough"] += 1

    @rule(what=st.sampled_from(["store", "output", "times", "latest", "keeping", "machine", "processes"]))
    def something_changes(self, what):
        """Folders move, clocks jump, `latest` is lost, fewer checkpoints are kept, or a machine is lost with
        half-written parts. The commands work around it, and keep what there is."""
        if what == "times":
            on.set_times(self.disk, self.draw)
        elif what == "latest":
            (self.output / "checkpoints/latest").unlink(missing_ok=True)
        elif what == "keeping":
            self.keeping = {"keep_checkpoints": 1, "keep_every": None}
        elif what == "processes":
            self.goes_on_elsewhere(*self.draw.sample(["fsdp2", "fp32"], 2))
        elif what == "machine":
            self.underway("extract")
            for name, whole in self.draw.sample(sorted(self.world.parts.items()), 2):
                folder = self.store / WORKERS / str(replace(WorkerName.here(), host="gone", boot="0123456789ab"))
                folder.mkdir(parents=True)
                (folder / name).write_bytes(whole[: self.draw.randrange(len(whole))])
                self.vanished.add(folder.name)
        else:
            before = getattr(self, what)
            if before.exists():
                setattr(self, what, before.rename(f"{before}-moved"))
        self.seen["changed", what] += 1

    def goes_on_elsewhere(self, first, second):
        """Resume on another number of processes than before the kill."""
        self.extracts()
        output, course = self.disk / "elsewhere", self.world.course(second)
        command = self.start("train", output, first)
        if command.until(*self.moment("train")):
            command.hit(KILL, "all", self.draw)
        command.ends(refused=lambda _: False)
        self.start("train", output, second).ends(0)
        rows, found, right = rows_of(output), on.weights_of(output), on.weights_of(course.output)
        assert [row[0] for row in rows] == list(range(1, STEPS + 1))
        assert np.allclose([row[1] for row in rows], [row[1] for row in course.rows], rtol=1e-4, atol=0)
        assert found.keys() == right.keys()
        far = {name: np.abs(found[name] - right[name]).max() for name in right}
        # The true gradient of keys' biases is 0: Adam makes steps of rounding errors.
        assert max(off for name, off in far.items() if not name.endswith("to_k.bias")) <= 1e-4, far
        assert not list(output.rglob(".tmp-*"))
        shutil.rmtree(output)

    @rule(of=st.sampled_from(["a run", "a run", "a store", "an unfinished store"]))
    def a_file_is_damaged(self, of):
        """Damage a file: of a run with a checkpoint, of a store that a training reads, or beside an unfinished
        store's parts."""
        name, root = "train" if of != "an unfinished store" else "extract", self.output if of == "a run" else self.store
        self.extracts()
        self.underway(name, saved=of == "a run")
        if of == "a run" and not (root / "receipt.json").exists():
            shutil.copy(self.course.output / "receipt.json", root)
        file, whole, how = on.damage(self.draw, root, but="part" if name == "extract" else None)
        path, ended = str(file.relative_to(root)), "went on"
        hurt = int((re.findall(r"checkpoints/step-(\d+)/", path) or [0])[0])
        folder = folder_of(root, hurt)
        its = hurt and folder.stat().st_ino
        first = last = self.start(name)
        if first.ends(0, 1):
            ended = self.mended(first, file, whole, how)
            self.newest = max({*steps_of(self.output)} - {hurt}, default=0) if hurt == self.newest else self.newest
            self.nothing_is_lost(hurt)
            last = self.start(name)
            last.ends(0)
        unread = hurt and (ended == "went on" or self.newest > hurt)
        unread = unread and folder.exists() and folder.stat().st_ino == its  # else it was written anew
        if of != "a run" or unread or ("exports/" in path and ".tmp-" not in path):
            on.bring_back(file, whole)  # no process has read it
        if path == "metrics.jsonl":  # every row is there once, and right; or its loss was logged
            rows, printed = rows_of(root), first.text().replace("\n", "")
            assert rows == self.course.rows or path in printed, f"nothing was said of {rows}: {printed}"
            assert {*rows} <= {*self.course.rows} or "was changed: its rows" in printed, rows
            assert len({row[0] for row in rows}) == len(rows), rows
        if name == "train":
            self.trains(last, rows=path != "metrics.jsonl")
        self.seen[f"{of}, {re.sub('[0-9]+', 'N', path)}: {how}", ended] += 1

    def mended(self, refused, file, whole, how):
        """Do what the message says about a checkpoint, or what the docs say about a part, or restore the file."""
        advice = re.search(r"write (step-\d+) into (\S+)", refused.text())
        if advice and self.draw.random() < 0.7:
            Path(advice[2]).write_text(f"{advice[1]}\n")
            return "refused, as it advised"
        if not file.name.startswith("part-") or how == "a folder in its place":
            on.bring_back(file, whole)
            return "refused, brought back"
        repair = ["features", "verify", self.store] if how != "removed" else []
        if repair:
            verified = self.runs(*repair)
            verified.ends(1, refused=lambda _: "error: " in verified.text())
            assert file.name in verified.text(), verified.text()
        extract, *config = self.world.words("extract", "single", self.store)
        self.runs(*([*repair, "--repair"] if repair else [extract]), *config).ends(0)
        assert file.read_bytes() == whole, "it was not mended"
        return "refused, mended"


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * ROUNDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_and_nothing_is_silent(part, once, images, record_property):
    draws = (Random(f"{SEED} {part} {number}") for number in count())
    machine = type("Machine", (Disturbed,), {"world": World(once, images), "seen": Counter(), "draws": draws})
    settings = hypothesis.settings(
        max_examples=max(ROUNDS // PARTS, 1), stateful_step_count=3, database=None,
        phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    stateful.run_state_machine_as_test(hypothesis.seed(SEED * PARTS + part)(machine), settings=settings)
    for (fault, how), times in sorted(machine.seen.items()):
        record_property("found", f"{fault}: {how}: {times}")
