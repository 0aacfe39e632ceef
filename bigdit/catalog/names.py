"""Resolves names as people write them to those of the catalogue, and reads its JSON files."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from bigdit.errors import UserError
from bigdit.strategy import Strict

SUGGESTED = 4
"""The most suggested names."""

Aliases = Mapping[str, Sequence[str]]


class Refused(Strict):
    """A name that is refused with a reason. `asked`: a regular expression for normalised names; its group `rest` is the
    remaining name. `nearest`: names to suggest."""

    asked: str
    reason: str
    nearest: tuple[str, ...] = ()
    source: str


def load_json(file: str) -> dict[str, Any]:
    """A JSON document of the package."""
    document: dict[str, Any] = json.loads((resources.files(__package__) / file).read_text(encoding="utf-8"))
    return document


@cache
def refusals(kind: str) -> tuple[Refused, ...]:
    """Refused names of a kind, "model" or "gpu", narrower entries first."""
    return tuple(Refused.model_validate(entry) for entry in load_json("refused.json")[kind])


def normalise(name: str) -> str:
    """Lower case, with `-` for spaces, underscores and slashes: `DiT-XL/2` is dit-xl-2."""
    return re.sub(r"[\s_/]+", "-", name.strip().casefold())


def matches(name: str, known: Collection[str], aliases: Aliases) -> tuple[str, ...]:
    """The catalogue's names that equal `name` or its alias but for hyphens: `wan-2.1-14b` is wan2.1-14b."""
    plain = _compact(name)
    for each in known:
        if _compact(each) == plain:
            return (each,)
    for alias, targets in aliases.items():
        if _compact(alias) == plain:
            return tuple(targets)
    return ()


def resolve(kind: str, asked: str, plain: str, known: Collection[str], aliases: Aliases) -> str:
    """The catalogue's name for `plain`: one of `known`, or an alias of one. Messages show the name as `asked`.

    Raises UserError for an alias of several names, for a refused name with the reason, and for an unknown name with the
    nearest ones.
    """
    targets = matches(plain, known, aliases)
    if len(targets) == 1:
        return targets[0]
    if targets:
        raise UserError(f"{kind} {asked!r} is ambiguous; name one of {', '.join(targets)}")
    raise UserError(f"{kind} {asked!r} is not in the catalogue{suggestion(kind, plain, known, aliases)}")


def suggestion(kind: str, plain: str, known: Collection[str], aliases: Aliases) -> str:
    """The end of an error for an unknown name: the reason, if one is known, and the nearest names."""
    for refused in refusals(kind):
        found = re.search(refused.asked, plain)
        if found:
            rest = found.groupdict().get("rest") or ""
            near = refused.nearest or matches(rest, known, aliases) or _similar(rest, known, aliases)
            return f": {refused.reason}" + (f"; nearest: {', '.join(near)}" if near else "")
    similar = (
        list(matches(re.sub(r"-\d+g$", "", _short_memory(plain)), known, aliases))  # `RTX 4070 12GB`, of one memory
        or _similar(plain, known, aliases)
        or _similar(_corrected(plain, known, aliases), known, aliases)
        or difflib.get_close_matches(plain, known, n=SUGGESTED)
    )
    return (
        f"; did you mean {', '.join(similar)}? (`bigdit {kind}s` lists all)"
        if similar
        else f"; `bigdit {kind}s` lists all"
    )


def refusal(kind: str, name: str) -> str:
    """Why a name is refused; empty if it is not."""
    return next((f": {each.reason}" for each in refusals(kind) if re.search(each.asked, normalise(name))), "")


def aliases_of(name: str, aliases: Aliases) -> tuple[str, ...]:
    """The aliases of `name` alone."""
    return tuple(alias for alias, targets in aliases.items() if list(targets) == [name])


def _similar(plain: str, known: Collection[str], aliases: Aliases) -> list[str]:
    """The names that share most words with `plain`, weighted by rarity; of equal ones those with similar letters."""
    names_of = {name: [name, *(alias for alias, targets in aliases.items() if name in targets)] for name in known}
    words_of = {name: frozenset().union(*map(_words, names)) for name, names in names_of.items()}
    shared = {
        word: [name for name, words in words_of.items() if any(_word_matches(each, word) for each in words)]
        for word in _words(plain)
    }
    weights = {word: math.log(1 + len(words_of) / len(names)) for word, names in shared.items() if names}
    scores = {name: sum(weight for word, weight in weights.items() if name in shared[word]) for name in known}
    best = max(scores.values(), default=0.0)
    if not best:
        return []

    def likeness(name: str) -> float:
        return max(difflib.SequenceMatcher(None, plain, each).ratio() for each in names_of[name])

    return sorted((name for name in known if scores[name] == best), key=likeness, reverse=True)[:SUGGESTED]


def _word_matches(word: str, asked: str) -> bool:
    """Whether a word of a name equals or begins with the one asked for; of numbers whole parts: 2.1 begins with 2."""
    return word == asked or word.startswith(f"{asked}." if asked.isdigit() else asked)


def _corrected(plain: str, known: Collection[str], aliases: Aliases) -> str:
    """`plain` with misspelt words replaced by similar words of names: `sanna` becomes sana."""
    words = {word for name in (*known, *aliases) for word in _words(name) if word.isalpha()}
    near = (difflib.get_close_matches(word, words, n=1, cutoff=0.75) for word in sorted(_words(plain)))
    return "-".join(word for found in near for word in found)


def _compact(name: str) -> str:
    """A name without punctuation, except for points within numbers: `FLUX.1-dev` is flux1dev."""
    return re.sub(r"(?<!\d)\.|\.(?!\d)|[^\w.]|_", "", _short_memory(name))


def _words(name: str) -> frozenset[str]:
    """The words of a name: `wan2.1-t2v-14b` has wan, 2.1, t2v and 14b."""
    parted = re.sub(r"(?<=[a-z]{2})(?=\d)|(?<=\d)(?=[a-z]{2})", " ", _short_memory(name))
    return frozenset(word for word in re.split(r"(?<!\d)\.|\.(?!\d)|[^\w.]|_", parted) if word)


def _short_memory(name: str) -> str:
    """The name with `80g` for 80gb and 80gib, as in the catalogue."""
    return re.sub(r"(?<=\d)-?gi?b\b", "g", normalise(name))


@cache
def revision() -> str:
    """Sixteen hex digits that change with any figure in the catalogue's JSON files."""
    digest = hashlib.sha256()
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
