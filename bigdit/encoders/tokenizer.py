"""Tokenizers: what tells one from another, and those within processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bigdit.errors import UserError
from bigdit.store.digest import lines_digest


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
