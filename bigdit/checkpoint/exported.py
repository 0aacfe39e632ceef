"""The checksums of an exported folder: beside its files, where diffusers passes over them."""

from __future__ import annotations

from pathlib import Path

from bigdit.checkpoint.folder import checksum
from bigdit.documents import read_json
from bigdit.errors import UserError
from bigdit.files import write_json

FILE = "checksums.json"
_AGAIN = "copy it again, or `bigdit export` it anew"


def write_checksums(folder: Path) -> None:
    """Write down the xxh3-128 of each file that is in the folder. Raises UserError where it cannot be written."""
    write_json(folder / FILE, {file.name: checksum(file) for file in sorted(folder.iterdir())})


def check_exported(folder: Path) -> None:
    """Raise UserError where a file of an exported folder is missing, too many or not what was written.

    A folder without checksums, as others write it, is not judged.
    """
    file = folder / FILE
    try:
        sums: dict[str, str] = read_json(file)
        more = {each.name for each in folder.glob("*.safetensors")} - sums.keys()
        lacking = [name for name in sums if not (folder / name).is_file()]
        changed = [name for name, known in sums.items() if name not in lacking and checksum(folder / name) != known]
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged or cannot be read ({error}); {_AGAIN}") from None
    if lacking:
        raise UserError(f"{folder} lacks {lacking[0]}, which its {FILE} names; {_AGAIN}")
    if changed:
        raise UserError(f"{folder / changed[0]} is damaged: its checksum is not the one in {FILE}; {_AGAIN}")
    if more:
        raise UserError(f"{folder / min(more)} is no part of its export: {FILE} does not name it; take it away")
