"""One file of a run, of a store or of what a user wrote is damaged: the next start says so, or it does not matter."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from bigdit.checkpoint.folder import NAME
from bigdit.config.plan_file import write_plan_file
from chaotic.checks import STEPS, Course, check_safe, check_said, check_whole, end_of, end_well, rows_of, steps_of
from chaotic.damage import damaged
from chaotic.plans import plan_of_course
from chaotic.processes import ChaosError, Door
from chaotic.seen import Seen
from chaotic.world import COURSES, ROOT, World, copied

MOST_LINES = 20
"""Of a config all problems are given at once, a line each."""

_ADVICE = re.compile(r"write (step-\d+) into (\S+)")
KINDS: dict[str, Callable[[str], bool]] = {
    "the weights and states of a checkpoint": lambda path: path.startswith("checkpoints/") and "/engine/" in path,
    "a checkpoint's state.json": lambda path: path.endswith("/state.json"),
    "`latest`": lambda path: path == "checkpoints/latest",
    "metrics.jsonl": lambda path: path == "metrics.jsonl",
    "an export": lambda path: path.startswith("exports/"),
    "the lock, the receipt, the page and its record": lambda path: (
        path in ("lock", "receipt.json", "run.json", "report.html")
    ),
}
_OF_A_STORE: dict[str, Callable[[str], bool]] = {
    "a part of the store": lambda path: path.startswith("part-"),
    "the store's schema.json": lambda path: path == "schema.json",
    "the store's index": lambda path: path == "index.safetensors",
    "the store's empty caption": lambda path: path == "null_text.safetensors",
    "the store's report and speeds": lambda path: path == "report.json" or path.startswith("speed/"),
}


def run_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """A file of the output of a run that was killed in its middle."""
    course = world.course(draw.choices(["single", "fsdp2"], [9, 1])[0])
    output = copied(course.half, folder / "run")
    shutil.copy(course.whole / "receipt.json", output)
    files = _files(output)
    kind, path = _drawn(files, KINDS, draw)
    file = output / path
    whole = file.read_bytes()
    siblings = [
        output / each for each in files if Path(each).name == file.name or Path(each).parent == Path(path).parent
    ]
    what = damaged(file, draw, siblings)
    seen = Seen(f"{kind} damaged")
    seen.landed[what] += 1
    door = _training(world, course, output)
    status = _done_or_refused(door)
    hurt = int(Path(path).parts[1][5:]) if NAME.fullmatch(Path(path).parts[min(1, len(Path(path).parts) - 1)]) else 0
    if status == 1:
        _others_are_whole(course, output, hurt, path)
        advice = _ADVICE.search(door.text())
        if advice and draw.random() < 0.7:
            Path(advice[2]).write_text(f"{advice[1]}\n")
            how = "refused in a line; as it advised"
        else:
            _bring_back(file, whole)
            how = "refused in a line; with the file brought back"
        last = _training(world, course, output)
        end_well(last, how)
    else:
        last, how = door, _went_on(door, path)
    if kind == "an export" or hurt == 4:
        _bring_back(file, whole)  # nobody has read it
    _check_rows(course, output, door, path, whole)
    check_whole(course, output, last, rows=False)
    seen.ended[f"{how}, equal to the bit"] += 1
    return seen


def store_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """A file of the store, before a run begins or goes on."""
    course = world.course("single")
    store = copied(world.store.root, folder / "features")
    files = _files(store)
    kind, path = _drawn(files, _OF_A_STORE, draw)
    file = store / path
    whole = file.read_bytes()
    what = damaged(file, draw, [store / each for each in files if each.split("-")[0] == path.split("-")[0]])
    output = copied(course.half, folder / "run") if draw.random() < 0.4 else folder / "run"
    seen = Seen(f"{kind} damaged")
    seen.landed[what] += 1
    door = _training(world, course, output, store)
    status = _done_or_refused(door)
    if status == 1:
        check_safe(course, output)
        if path.startswith("part-") and not file.is_dir() and draw.random() < 0.5:
            words, command = world.extracting(store), "bigdit extract"
            if what != "gone":
                words, command = (
                    ["features", "verify", store, "--repair", *words[1:]],
                    "bigdit features verify --repair",
                )
            how = f"refused in a line; `{command}`"
            mended = Door(words, folder / "mended.log")
            end_well(mended, command, within=15)
            if not file.is_file() or file.read_bytes() != whole:
                raise ChaosError(f"`{command}` did not mend {path}: {mended.text()[-2000:]}")
        else:
            _bring_back(file, whole)
            how = "refused in a line; with the file brought back"
        last = _training(world, course, output, store)
        end_well(last, how)
    else:
        last, how = door, _went_on(door, path)
    check_whole(course, output, last)
    seen.ended[f"{how}, equal to the bit"] += 1
    return seen


def written_round(world: World, draw: random.Random, folder: Path) -> Seen:
    """The run's YAML, a plan, DeepSpeed's JSON: what a user or `bigdit plan` wrote."""
    kind = draw.choice(["the run's YAML", "plan.yaml", "ds_config.json"])
    shutil.copy(world.config("zero2" if kind == "ds_config.json" else "single"), folder / "run.yaml")
    shutil.copy(COURSES["zero2"]["ds_config"], folder / "ds_config.json")
    write_plan_file(folder / "plan.yaml", plan_of_course(folder / "run.yaml"))
    output = folder / "run"
    file = {"the run's YAML": folder / "run.yaml"}.get(kind, folder / kind)
    words = ["train", "--config", folder / "run.yaml", "--set", f"output={output}"]
    words += ["--set", f"data.features={world.store.root}"]
    words += {"plan.yaml": ["--set", "plan=plan.yaml"], "ds_config.json": ["--ds-config", file]}.get(kind, [])
    right = _resolved(words, folder / "right.log")
    if right is None:
        raise ChaosError(f"what is right is refused: {(folder / 'right.log').read_text()}")
    others = [ROOT / "launch/recipes/digits.yaml", folder / "plan.yaml", folder / "run.yaml"]
    what = damaged(file, draw, [*ROOT.glob("ds_configs/*.json")] if kind == "ds_config.json" else others)
    seen = Seen(f"{kind} damaged")
    seen.landed[what] += 1
    found = _resolved(words, folder / "damaged.log")
    if found is None:
        seen.ended["refused in a line"] += 1
    elif found == right:
        seen.ended["read as before"] += 1
    elif kind == "plan.yaml":
        raise ChaosError(f"a changed plan was taken: {found}")
    else:
        door = Door([*words, "--set", "train.steps=2"], folder / "train.log")
        status = end_of(door)
        check_said(door, refused=status != 0, most=MOST_LINES)
        seen.ended["says something else, which was trained" if status == 0 else "says something else: a line"] += 1
    return seen


def _resolved(words: list[object], log: Path) -> object:
    """What a run would be, or None where it is refused in a line."""
    door = Door([*words, "--dry-run"], log)
    status = end_of(door, within=15)
    check_said(door, refused=status != 0, most=MOST_LINES)
    if status not in (0, 1):
        raise ChaosError(f"--dry-run ended with {status}: {door.text()[-2000:]}")
    text = door.text()
    return json.JSONDecoder().raw_decode(text[text.index("{") :])[0] if status == 0 else None  # the verdict follows


def _training(world: World, course: Course, output: Path, store: Path | None = None) -> Door:
    number = len(list(output.parent.glob("*.log")))
    return Door(world.training(course.name, output, store=store), output.parent / f"{number}.log")


def _done_or_refused(door: Door) -> int:
    status = end_of(door)
    if status not in (0, 1):
        raise ChaosError(f"ended with {status}: {door.text()[-3000:]}")
    check_said(door, refused=status == 1)
    return status


def _others_are_whole(course: Course, output: Path, hurt: int, path: str) -> None:
    """After a refusal all checkpoints but the damaged one are there, as they were, or were pruned for newer ones."""
    here = set(steps_of(output))
    wanted = {4, 6} if max(here) < STEPS else {4}
    if not wanted - {hurt} <= here:
        raise ChaosError(f"{path} was damaged, and of the checkpoints 4 and 6 are left {sorted(here)}")
    if not path.startswith("exports/"):
        check_safe(course, output, but=[hurt])


def _check_rows(course: Course, output: Path, door: Door, path: str, whole: bytes) -> None:
    """Every row is there once, and right; or its loss was said."""
    rows = rows_of(output)
    if rows == course.rows:
        return
    if path != "metrics.jsonl" or "metrics.jsonl" not in door.text().replace("\n", ""):
        raise ChaosError(f"the rows are {rows}, and nothing was said of it:\n{door.text()[-1500:]}")
    wrong = [row for row in rows if row not in course.rows]
    if (wrong and "was changed: its rows" not in door.text()) or len({row[0] for row in rows}) != len(rows):
        raise ChaosError(f"rows are wrong or twice there: {rows}")


def _went_on(door: Door, path: str) -> str:
    """How, by whether a line names the damaged file."""
    noted = path in door.text().replace("\n", "")
    return "went on with a line" if noted else "went on without a line: it was not to be read, or right"


def _bring_back(file: Path, whole: bytes) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(whole)


def _files(root: Path) -> list[str]:
    return sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file() and file.stat().st_size)


def _drawn(files: list[str], kinds: dict[str, Callable[[str], bool]], draw: random.Random) -> tuple[str, str]:
    """A kind of file and one of them."""
    kind = draw.choice(list(kinds))
    return kind, draw.choice([path for path in files if kinds[kind](path)])
