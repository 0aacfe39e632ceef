"""Repositories of the hub whose weights are for those alone who accepted a licence there."""

from __future__ import annotations

import datetime
from functools import cache

from bigdit.catalog.names import load_json
from bigdit.spec import Strict


class Gate(Strict):
    """Where it is said that a repository is gated, and the day on which that was so."""

    source: str
    seen: datetime.date


@cache
def gates() -> dict[str, Gate]:
    """By repository, as `owner/name`."""
    return {repository: Gate.model_validate(entry) for repository, entry in load_json("gated.json")["gated"].items()}


def before_download(repository: str) -> str | None:
    """What comes before `hf download`; None of a repository that is not known to be gated."""
    if repository not in gates():
        return None
    return f"accept the licence at https://huggingface.co/{repository}, and log in by `hf auth login`"
