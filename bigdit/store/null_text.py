"""The encoding of the empty caption, for classifier-free guidance (Ho & Salimans, arXiv:2207.12598)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from bigdit.store.digest import bytes_of, chained_digest
from bigdit.store.header import damaged, read_header
from bigdit.store.local import read_column
from bigdit.store.tensors import commit_tensors
from bigdit.store.text import Text

FILE = "null_text.safetensors"


def write_null_text(root: Path, encode: Callable[[], Text], identity: str, scratch: Path | None = None) -> None:
    """Commit the text of the empty caption, in bf16, to the store of this `schema.store_identity`; where it is there
    already nothing is encoded."""
    if not (root / FILE).exists():
        stored = encode().to("cpu", torch.bfloat16)
        pooled = {} if stored.pooled is None else {"pooled": stored.pooled}
        tensors = {"text": stored.states, "digest": torch.tensor([_digest(stored)]), **pooled}
        commit_tensors(root / FILE, tensors, {"store": identity}, scratch)


def read_null_text(root: Path, identity: str) -> Text:
    """The text, in bf16. Raises UserError where the file is damaged or of another store."""
    header = read_header(root / FILE)
    pooled = read_column(header, "pooled") if "pooled" in header.columns else None
    text = Text(read_column(header, "text"), pooled)
    if int(read_column(header, "digest")) != _digest(text):
        raise damaged(header.path, "is damaged: its digest differs")
    if header.metadata.get("store") != identity:
        raise damaged(header.path, "is of another store: it is of other encoders or buckets")
    return text


def _digest(text: Text) -> int:
    return chained_digest(bytes_of(each.contiguous()) for each in (text.states, text.pooled) if each is not None)
