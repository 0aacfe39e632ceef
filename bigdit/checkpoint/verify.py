"""Every byte of a checkpoint that is read was written as it is."""

from __future__ import annotations

from pathlib import Path

from bigdit.checkpoint.find import advice
from bigdit.checkpoint.folder import STATE, Checkpoint, checksum
from bigdit.checkpoint.peers import Peers


def verify(found: Checkpoint, peers: Peers | None = None) -> None:
    """Raise UserError where a file is missing, too many or not what was written.

    Where several processes call it, with their `peers`, each reads some of the files; what one finds, all raise.
    """
    peers = Peers() if peers is None else peers
    more = set(found.engine.glob("*.safetensors")) - set(found.files())
    problems = [f"{min(more)} is no part of its checkpoint: {STATE} does not name it; take it away"] if more else []
    for file in found.files()[peers.world.rank :: peers.world.world_size]:
        problems += _problem(found, file)
    peers.agree(problems[0] if problems else None)


def _problem(found: Checkpoint, file: Path) -> list[str]:
    name = str(file.relative_to(found.folder))
    if not file.is_file():
        return [f"the checkpoint {found.folder} lacks {name}; {advice(found.folder.parent, found.folder.name)}"]
    try:
        if checksum(file) == found.state["checksums"][name]:
            return []
        why = f"its checksum is not the one in {STATE}"
    except OSError as error:
        why = str(error)
    return [f"{file} is damaged: {why}; {advice(found.folder.parent, found.folder.name)}"]
