"""Every byte of a checkpoint, or of a snapshot, that is read was written as it is."""

from __future__ import annotations

from pathlib import Path

from bigdit.checkpoint.find import advice
from bigdit.checkpoint.folder import STATE, Checkpoint, Saved, checksum
from bigdit.checkpoint.peers import Peers
from bigdit.checkpoint.snapshot import FILE


def verify(found: Saved, peers: Peers | None = None) -> None:
    """Raise UserError where a file is missing, too many or not what was written.

    Where several processes call it, with their `peers`, each reads some of the files; what one finds, all raise.
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
    """What it is called, and its JSON."""
    return ("checkpoint", STATE) if isinstance(found, Checkpoint) else ("snapshot", FILE)


def _advice(found: Saved) -> str:
    if isinstance(found, Checkpoint):
        return advice(found.folder.parent, found.folder.name)
    return "take the snapshot away, and averages are made without it"
