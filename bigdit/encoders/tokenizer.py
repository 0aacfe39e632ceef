"""What tells one tokenizer from another."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from bigdit.store.digest import lines_digest


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """The class, the numbered vocabulary and the template of chats."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    lines = [f"{number} {token!r}".encode() for token, number in vocabulary]
    if template := getattr(tokenizer, "chat_template", None):
        lines.append(repr(template).encode())
    return lines_digest([type(tokenizer).__name__.encode(), *lines])
