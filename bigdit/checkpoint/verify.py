"""Every byte of a checkpoint, of a snapshot, or of an exported folder that is read was written as it is.

The checksums of an exported folder lie beside its files, where diffusers passes over them.
"""

from __future__ import annotations

from pathlib import Path

from bigdit.checkpoint.folder import SNAPSHOT, STATE, Checkpoint, Saved, advice, checksum
from bigdit.checkpoint.peers import Peers
from bigdit.documents import read_json
from bigdit.errors import UserError
from bigdit.files import write_json


def verify(found: Saved, peers: Peers | None = None) -> None:
    """Raise UserError where a file is missing, too many or changed.

    Where several processes call it, with their `peers`, each reads some of the files. All raise the problem of one.
    """
    peers = Peers() if peers is None else peers
    kind, said = _named(found)
    more = set(found.engine.glob("*.safetensors")) - set(found.files())
    problems = [f"{min(more)} is no part of its {kind}: {said} does not name it; take it away"] if more else []
    for file in found.files()[peers.world.rank :: peers.world.world_size]:
        problems += _problem(found, file)
    peers.agree(problems[0] if problems else None)


def _problem(found: Saved, file: Path) -> list[str]:
    kind, said = _named(found)
    name = str(file.relative_to(found.folder))
    if not file.is_file():
        return [f"the {kind} {found.folder} lacks {name}; {_advice(found)}"]
    try:
        if checksum(file) == found.state["checksums"][name]:
            return []
        why = f"its checksum is not the one in {said}"
    except OSError as error:
        why = str(error)
    return [f"{file} is damaged: {why}; {_advice(found)}"]


def _named(found: Saved) -> tuple[str, str]:
    """Its kind, and the name of its JSON."""
    return ("checkpoint", STATE) if isinstance(found, Checkpoint) else ("snapshot", SNAPSHOT)


def _advice(found: Saved) -> str:
    if isinstance(found, Checkpoint):
        return advice(found.folder.parent, found.folder.name)
    return "take the snapshot away, and averages are made without it"


CHECKSUMS = "checksums.json"
_AGAIN = "copy it again, or `bigdit export` it anew"


def write_checksums(folder: Path) -> None:
    """Write the xxh3-128 of each file in the folder. Raises UserError where it cannot be written."""
    write_json(folder / CHECKSUMS, {file.name: checksum(file) for file in sorted(folder.iterdir())})


def check_exported(folder: Path) -> None:
    """Raise UserError where a file of an exported folder is missing, too many or changed.

    A folder without checksums, as others write it, is not judged.
    """
    file = folder / CHECKSUMS
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
        raise UserError(f"{folder} lacks {lacking[0]}, which its {CHECKSUMS} names; {_AGAIN}")
    if changed:
        raise UserError(f"{folder / changed[0]} is damaged: its checksum is not the one in {CHECKSUMS}; {_AGAIN}")
    if more:
        raise UserError(f"{folder / min(more)} is no part of its export: {CHECKSUMS} does not name it; take it away")
