"""The encoding of the empty caption, for classifier-free guidance (Ho & Salimans, arXiv:2207.12598)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from bigdit.store.captions import column_name
from bigdit.store.digest import bytes_of, chained_digest
from bigdit.store.header import Header, damaged, read_header
from bigdit.store.local import read_column
from bigdit.store.tensors import commit_tensors
from bigdit.store.text import TEXT, Text

FILE = "null_text.safetensors"


def write_null_text(root: Path, encode: Callable[[], Text], identity: str, scratch: Path | None = None) -> None:
    """Commit the text of the empty caption, in bf16, to the store of this `schema.store_identity`; where it is there
    already nothing is encoded."""
    if not (root / FILE).exists():
        stored = encode().to("cpu", torch.bfloat16)
        tensors = {"text": stored.states, "digest": torch.tensor([_digest(stored)])}
        if stored.pooled is not None:
            tensors["pooled"] = stored.pooled
        for name, each in stored.sequences.items():
            if name != TEXT:
                tensors[column_name("text", name)] = each.states
            if each.seen is not None:
                tensors[column_name("seen", name)] = torch.tensor([each.seen])
        commit_tensors(root / FILE, tensors, {"store": identity}, scratch)


def read_null_text(root: Path, identity: str) -> Text:
    """The text, in bf16. Raises UserError where the file is damaged or of another store."""
    header = read_header(root / FILE)
    streams = [name.partition("/")[2] for name in header.columns if name.startswith("text/")]
    pooled = read_column(header, "pooled") if "pooled" in header.columns else None
    text = replace(_sequence(header, TEXT), pooled=pooled, streams={name: _sequence(header, name) for name in streams})
    if int(read_column(header, "digest")) != _digest(text):
        raise damaged(header.path, "is damaged: its digest differs")
    if header.metadata.get("store") != identity:
        raise damaged(header.path, "is of another store: it is of other encoders or buckets")
    return text


def _sequence(header: Header, name: str) -> Text:
    seen = column_name("seen", name)
    shown = int(read_column(header, seen)) if seen in header.columns else None
    return Text(read_column(header, column_name("text", name)), seen=shown)


def _digest(text: Text) -> int:
    """Of all values, the streams' names, and how many states the mask shows."""
    parts: list[memoryview | bytes] = [
        bytes_of(each.contiguous()) for each in (text.states, text.pooled) if each is not None
    ]
    for name, each in text.sequences.items():
        if name != TEXT:
            parts += [f"{name} {tuple(each.states.shape)}".encode(), bytes_of(each.states.contiguous())]
        if each.seen is not None:
            parts.append(str(each.seen).encode())
    return chained_digest(parts)
