"""Which checkpoint a run goes on from."""

from __future__ import annotations

from pathlib import Path

from bigdit.checkpoint.folder import LATEST, NAME, STATE, Checkpoint, open_checkpoint
from bigdit.config.output import CHECKPOINTS
from bigdit.errors import UserError
from bigdit.files import read_bytes


def latest(output: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that a run goes on from, or None before the first; and what a person should know of the choice.

    It is the one that `latest` names, or, where that is missing or not readable, the whole one that was saved last.
    Raises UserError where `latest` names one that is not whole.
    """
    root = output / CHECKPOINTS
    name, why = _named(root / LATEST)
    if name is not None:
        try:
            return open_checkpoint(root / name), []
        except UserError as error:
            raise UserError(f"{error}; {advice(root, name)}") from None
    others = whole(root)
    if not others:
        return None, [f"{why}, and no checkpoint in {root} is whole"] if any(root.glob("step-*")) else []
    found = newest(others)
    return found, [f"{why}; {found.folder.name} was saved last"]


def find_checkpoint(path: Path) -> tuple[Checkpoint, list[str]]:
    """A checkpoint's folder, or the latest of a run's output, with notices. Raises UserError where there is none."""
    if (path / STATE).is_file():
        return open_checkpoint(path), []
    found, notices = latest(path)
    if found is None:
        raise UserError(*notices, f"--checkpoint {path}: neither a checkpoint nor the output of a run that saved one")
    return found, notices


def whole(root: Path) -> list[Checkpoint]:
    """The checkpoints in `root` whose state.json is as it was written and whose files are there."""
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if not NAME.fullmatch(folder.name):
            continue
        try:
            each = open_checkpoint(folder)
        except UserError:
            continue
        if all(file.is_file() for file in each.files()):
            found.append(each)
    return found


def newest(found: list[Checkpoint]) -> Checkpoint:
    """The one that was saved last."""
    return max(found, key=lambda each: (each.state["saved"], each.step))


def advice(root: Path, damaged: str) -> str:
    """What a person can do where the checkpoint of the name `damaged` is not whole."""
    others = [found for found in whole(root) if found.folder.name != damaged]
    if not others:
        return "there is no other; choose another output to start anew"
    return f"to go on from the one before, write {newest(others).folder.name} into {root / LATEST}"


def _named(pointer: Path) -> tuple[str | None, str]:
    """What `latest` names, or None and why."""
    try:
        text = read_bytes(pointer).decode().strip()
    except FileNotFoundError:
        return None, f"{pointer} is missing"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{pointer} cannot be read ({error})"
    if NAME.fullmatch(text):
        return text, ""
    return None, f"{pointer} holds {text[:40]!r}, which is no checkpoint's name"
