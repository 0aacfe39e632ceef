"""Captions of a folder of images in one file, as of Hugging Face's imagefolder: metadata.jsonl or metadata.csv."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

from bigdit import log
from bigdit.config.data import SourceConfig
from bigdit.errors import UserError
from bigdit.files import leads_out
from bigdit.sources.protocol import Unusable
from bigdit.sources.tables import captions_of, choose
from bigdit.sources.text_rows import BLOCK, text_rows
from bigdit.units import how_many

NAMES = ("metadata.jsonl", "metadata.csv")
_NAMED = 3  # rows that a message names


def has_metadata(root: Path) -> bool:
    """Whether a folder or one below it has a file of these names."""
    return any(name in names for _, _, names in os.walk(root) for name in NAMES)


class Metadata:
    """The rows of the file `name` in the relative `folder` of a source, until each is taken by its image."""

    def __init__(self, folder: str, name: str, config: SourceConfig, key: str) -> None:
        """Read the file. Without columns of files and captions it has no rows, which is logged. Raises UserError if it
        cannot be read, or lacks the columns of `config`."""
        path = config.path / folder / name
        if not config.follow_links and leads_out(config.path, path):
            raise UserError(f"{key}: {path} is a link out of its folder; set follow_links of the source to read it")
        self._folder, self._key, self._where = folder, key, path
        self._rows: dict[str, str] = {}
        self._problems: list[str] = []
        rows = text_rows(path, key, "csv" if path.suffix == ".csv" else "json")
        named = config.image or ("file_name" if "file_name" in rows.columns else None)
        try:
            columns = choose(config.model_copy(update={"image": named}), rows.columns, rows.where, key)
        except UserError as error:
            if config.image or config.captions:
                raise
            self._problems = [f"{problem}; it is ignored" for problem in error.problems]
            return
        for start in range(0, len(rows), BLOCK):
            for number, row in enumerate(rows.read(start, start + BLOCK, columns.names), start):
                if isinstance(row, Unusable) or not (row[columns.image] and isinstance(row[columns.image], str)):
                    why = row if isinstance(row, Unusable) else f"column {columns.image} names no image"
                    self._problems.append(f"{key}: {rows.name(number)}: {why}")
                    continue
                try:
                    told = json.dumps([[each.text, each.weight] for each in captions_of(row, columns)])
                except Unusable as error:
                    told = json.dumps(f"{rows.name(number)}: {error}")
                self._rows[_plain(row[columns.image])] = told

    def row(self, image: str, captioned: bool) -> str | None:
        """The captions of the relative path `image` in JSON, [[text, weight], …]; or the problem of its row. None for
        an image that is `captioned` by a file beside it."""
        told = self._rows.pop(_plain(image.removeprefix(self._folder)), None)
        if captioned:
            return None
        return told or json.dumps(f"caption is missing: no file beside it, and no row of {self._where.name}")

    def log_unused(self) -> None:
        """Log rows that cannot be read, and those that no image took."""
        for problem in self._problems[:_NAMED]:
            log.notice(problem)
        if (more := len(self._problems) - _NAMED) > 0:
            log.notice(f"{self._key}: {self._where} has {how_many(more, 'more such row')}")
        if self._rows:
            unused = ", ".join(list(self._rows)[:_NAMED])
            log.notice(f"{self._key}: {how_many(len(self._rows), 'row')} of {self._where} name no image: {unused}")


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name.removeprefix("./"))
