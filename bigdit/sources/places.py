"""What a path of the config means: the files of a pattern, the kind of a folder, the splits of a data set."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bigdit.config.data import SourceConfig, SourceKind
from bigdit.documents import read_json
from bigdit.errors import UserError, nearest
from bigdit.sources.picture import SUFFIXES

FILES_MOST = 1_000_000  # that a pattern may name

KINDS: dict[str, SourceKind] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".tar": "webdataset",
    ".gz": "webdataset",  # which refuses it, and says why
    ".tgz": "webdataset",
}
STATE, SPLITS = "state.json", "dataset_dict.json"  # of a folder that `datasets` saved
# Names as `push_to_hub` writes them: train-00000-of-00002.parquet, with a hash behind the count in older ones.
_HUB_NAME = re.compile(r"(?P<split>.+?)-\d{5}-of-\d{5}(-\w+)?\.parquet")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def kind_of(config: SourceConfig, key: str) -> SourceKind:
    """The kind that is asked for, or that the path shows. Raises UserError where it shows several."""
    if config.kind is not None:
        return config.kind
    suffix = config.path.suffix.lower()
    if suffix in KINDS and not config.path.is_dir():
        return KINDS[suffix]
    if config.path.is_file():
        what = f"a {suffix} file" if suffix else "a file without a suffix"
        raise UserError(
            f"{key}: {config.path} is {what}; give a folder of images or videos, a .csv, .tsv or .parquet table, "
            ".tar files (WebDataset), or a folder that `datasets` saved"
        )
    found = _kinds_within(config.path)
    if len(found) > 1:
        raise UserError(f"{key}.kind: {config.path} holds files of {' and '.join(sorted(found))}; say which is meant")
    return found.pop() if found else "folder"


def is_pattern(path: Path) -> bool:
    """Whether a path names files by a pattern, and is none itself."""
    return glob.has_magic(str(path)) or _BRACES.search(str(path)) is not None


def files_of(config: SourceConfig, suffix: str, key: str) -> list[Path]:
    """Files that `config.path` names: itself, those of a pattern, or those of its suffix below a folder; of the
    asked split. Raises UserError where there are none, or splits to choose from."""
    path = config.path
    if path.is_dir():
        below = path.glob(f"**/*{suffix}") if suffix == ".parquet" else path.glob(f"*{suffix}")
        files = sorted(file for file in below if not file.name.startswith("."))
        if not files:
            raise UserError(f"{key}: the folder {path} holds no {suffix} files")
        return _of_split(files, config.split, key) if suffix == ".parquet" else files
    files = []
    for expanded in _expanded(str(path), key):
        matches = sorted(map(Path, glob.glob(expanded, recursive=True))) if glob.has_magic(expanded) else []
        if not matches and not os.path.exists(expanded):
            raise UserError(f"{key}: {expanded} does not exist{'' if expanded == str(path) else f', of {path}'}")
        files += matches or [Path(expanded)]
    return files


def saved_files(config: SourceConfig, key: str) -> list[Path]:
    """The Arrow files of a folder that `datasets` saved, of the asked split. Raises UserError where there are
    splits to choose from, or the folder is not whole."""
    folder = config.path
    if (folder / SPLITS).is_file():
        listed = _json(folder / SPLITS, key).get("splits")
        splits = [str(split) for split in listed] if isinstance(listed, list) else []
        folder = folder / _choose(splits, config.split, key)
    elif config.split is not None:
        raise UserError(f"{key}.split: {folder} holds one split; leave split out")
    listed = _json(folder / STATE, key).get("_data_files")
    files = listed if isinstance(listed, list) else []
    names: list[Any] = [file.get("filename") if isinstance(file, dict) else file for file in files]
    wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if wrong or not names:
        raise UserError(f"{key}: {folder / STATE} names no data files of its folder: {names[:3]}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{key}: {folder} lacks {len(missing)} of {len(names)} files, the first {missing[0]}")
    return [folder / name for name in names]


def _kinds_within(folder: Path) -> set[SourceKind]:
    """What the top of a folder shows; nothing for a folder of folders."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return set()  # opening it as a folder will tell
    if names & {STATE, SPLITS}:
        return {"datasets"}
    suffixes = {os.path.splitext(name)[1].lower() for name in names}
    found: set[SourceKind] = {KINDS[suffix] for suffix in suffixes & {".tar", ".parquet"}}
    if suffixes & set(SUFFIXES):
        found.add("folder")
    return found or ({"parquet"} if any((folder / "data").glob("*.parquet")) else set())


def _expanded(pattern: str, key: str) -> Iterator[str]:
    """The pattern for each alternative of its braces: `{000..099}`, `{a,b}`."""
    pieces = _BRACES.split(pattern)  # texts and, between them, the contents of braces
    choices: list[Sequence[str]] = []
    count = 1
    for number, piece in enumerate(pieces):
        numbers = _RANGE.fullmatch(piece) if number % 2 else None
        if numbers:
            first, last = int(numbers[1]), int(numbers[2])
            count *= max(last - first + 1, 0)
        elif number % 2:
            count *= piece.count(",") + 1
        if not 0 < count <= FILES_MOST:
            raise UserError(f"{key}: {pattern} names {count} files; 1 to {FILES_MOST} can be read")
        if numbers:
            choices.append([str(at).zfill(len(numbers[1])) for at in range(first, last + 1)])
        else:
            choices.append(piece.split(",") if number % 2 else [piece])
    return map("".join, itertools.product(*choices))


def _of_split(files: list[Path], split: str | None, key: str) -> list[Path]:
    """The files of one split, by the names that the hub gives them; all, where names show none."""
    named = {file: match["split"] for file in files if (match := _HUB_NAME.fullmatch(file.name))}
    splits = sorted(set(named.values()))
    if not splits and split is None:
        return files
    chosen = _choose(splits, split, key)
    return [file for file in files if named.get(file) == chosen]


def _choose(splits: Sequence[str], split: str | None, key: str) -> str:
    if split is None:
        if len(splits) != 1:
            raise UserError(f"{key}.split: missing; there are {', '.join(splits) or 'none'}")
        return splits[0]
    if split not in splits:
        raise UserError(f"{key}.split: there is no {split}; {nearest(split, splits)}")
    return split


def _json(path: Path, key: str) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        raise UserError(f"{key}: {path} is missing or damaged; save the data set again") from None
    if not isinstance(value, dict):
        raise UserError(f"{key}: {path} is no JSON object; save the data set again")
    return value
