"""Tokenizers: what tells one from another, those within processors, and how many tokens captions have.

Pipelines put templates around captions and cut them in different places; the calls of their tokenizers show both. It
costs next to nothing: only a text that fills the whole length is tokenized again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bigdit.errors import UserError
from bigdit.store.digest import lines_digest

Lengths = tuple[list[int] | None, int | None]
"""The tokens of each caption, with the template around it, and the length at which the tokenizer cuts. None for the
tokens where the calls do not show which caption is which; None for a length where others cut."""


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """The class, the numbered vocabulary and the template of chats."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    lines = [f"{number} {token!r}".encode() for token, number in vocabulary]
    if template := getattr(tokenizer, "chat_template", None):
        lines.append(repr(template).encode())
    return lines_digest([type(tokenizer).__name__.encode(), *lines])


class Words:
    """The tokenizer of a processor of words, pictures and videos, called as the processor is with words alone.

    The processor itself asks for torchvision, which nothing is needed of here. Source: transformers 5.23,
    ProcessorMixin.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, place: Path, *, local_files_only: bool, trust_remote_code: bool = False) -> Words:
        """That of a processor's folder."""
        assert not trust_remote_code
        return cls(AutoTokenizer.from_pretrained(place, local_files_only=local_files_only, trust_remote_code=False))

    def __call__(self, text: list[str], images: None = None, videos: None = None, **asked: Any) -> Any:
        """The tokens of texts."""
        return self.tokenizer(text, **asked)

    def apply_chat_template(self, conversations: list[Any], *, tokenize: bool, return_dict: bool, **asked: Any) -> Any:
        """The tokens of chats: special ones are put around those alone that do not begin with one. Raises UserError
        where there is no template of them."""
        assert tokenize and return_dict  # noqa: PT018
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"encoders.text.pipeline: {self.tokenizer.name_or_path} has no chat_template.jinja, by which its "
                "processor writes down who says a caption; save it there"
            )
        begins = asked.pop("add_generation_prompt", False)
        texts = self.tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=begins)
        first = self.tokenizer.bos_token
        return self(texts, add_special_tokens=first is None or not texts[0].startswith(first), **asked)

    def decode(self, tokens: Any) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(tokens)


@dataclass(frozen=True)
class _Call:
    """The texts of one call, how many tokens each has before it is cut, and the length at which it is cut."""

    texts: Sequence[str]
    tokens: Sequence[int]
    limit: int | None


class TokenizerCalls:
    """The calls of tokenizers, by their names, since `clear`."""

    def __init__(self, tokenizers: Mapping[str, PreTrainedTokenizerBase]) -> None:
        self._calls: dict[str, list[_Call]] = {name: [] for name in tokenizers}
        for name, tokenizer in tokenizers.items():
            _observe(tokenizer, self._calls[name])

    def clear(self) -> None:
        """Forget the calls."""
        for calls in self._calls.values():
            calls.clear()

    def lengths(self, captions: Sequence[str]) -> dict[str, Lengths]:
        """What each tokenizer that was called made of these captions."""
        found: dict[str, Lengths] = {}
        for name, calls in self._calls.items():
            limit = max((call.limit for call in calls if call.limit is not None), default=None)
            if calls:
                tokens = _by_characters(calls, captions) if limit is None else _by_order(calls, len(captions))
                found[name] = tokens, limit
        return found


def full_length(tokenizer: Any, text: str, kind: Any = None, special: bool = True) -> int:
    """The tokens of a text that is not cut, as the class `kind` of the tokenizer makes them."""
    called = kind or type(tokenizer)
    return len(called.__call__(tokenizer, text, verbose=False, add_special_tokens=special)["input_ids"])


def _observe(tokenizer: PreTrainedTokenizerBase, calls: list[_Call]) -> None:
    """Have a tokenizer note its calls, by a class of its own: Python looks `__call__` up in classes alone."""
    kind: Any = type(tokenizer)

    def call(self: Any, text: Any = None, *args: Any, **asked: Any) -> Any:
        found = kind.__call__(self, text, *args, **asked)
        texts = [text] if isinstance(text, str) else text
        if isinstance(texts, list) and all(isinstance(each, str) for each in texts):
            limit = asked.get("max_length") if asked.get("truncation") else None
            special = asked.get("add_special_tokens", True)
            tokens = [
                full_length(self, each, kind, special) if count == limit else count
                for each, count in zip(texts, _counts(found), strict=True)
            ]
            calls.append(_Call(texts, tokens, limit))
        return found

    tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _counts(found: Mapping[str, Any]) -> list[int]:
    """The tokens of each text of a call, without padding."""
    shown = found["attention_mask"]
    if isinstance(shown, torch.Tensor):
        return [int(count) for count in shown.sum(dim=-1)]
    return [sum(row) for row in (shown if not shown or isinstance(shown[0], list) else [shown])]


def _by_order(calls: Sequence[_Call], count: int) -> list[int] | None:
    """The most tokens that each caption has in a call; calls are of all captions, or of one after another.
    None where some captions alone are in them, and one was cut."""
    most = [0] * count
    for cutting in (True, False):
        tokens = [each for call in calls if (call.limit is not None) == cutting for each in call.tokens]
        if len(tokens) % count == 0:
            most = [max(most[at], *tokens[at::count]) if tokens else most[at] for at in range(count)]
        elif cutting and any(each > (call.limit or 0) for call in calls if call.limit for each in call.tokens):
            return None
    return most


def _by_characters(calls: Sequence[_Call], captions: Sequence[str]) -> list[int] | None:
    """The tokens of captions that are tokenized piece by piece, all pieces of one before those of the next."""
    pieces = iter([each for call in calls for each in zip(call.texts, call.tokens, strict=True)])
    found = []
    for caption in captions:
        length = tokens = 0
        while length < len(caption):
            text, count = next(pieces, (caption, 0))
            length, tokens = length + len(text), tokens + count
        if length != len(caption):
            return None
        found.append(tokens)
    return found
