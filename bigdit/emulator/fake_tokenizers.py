"""Tokenizers of `--fake-weights`: of the published ones' class, size and special tokens.

Their pieces are common words, and runs of up to three letters of others. So a caption has about as many ids as with the
published tokenizer, up to twice as many where its words are rare. That changes bytes only where captions are not
padded.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from bigdit.files import write_text

_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
_WORD = "▁"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_ASCII = [chr(code) for code in range(33, 127)]


def write_tokenizer(kind: str, folder: Path) -> None:
    """Write the files of a tokenizer of repositories.json, for transformers 4.45 and later."""
    recipe = document()["tokenizers"][kind]
    folder.mkdir(parents=True, exist_ok=True)
    _WRITERS[recipe["model"]](recipe, folder)
    special = {role: token for role, (token, _) in recipe["special"].items()}
    config = {"tokenizer_class": recipe["class"], "model_max_length": recipe["longest"], **special}
    if "extra_ids" in recipe:
        config["extra_ids"] = recipe["extra_ids"]
        config["additional_special_tokens"] = [f"<extra_id_{number}>" for number in range(recipe["extra_ids"])]
    added = {number: token for token, number in recipe["special"].values()}
    added.update(enumerate(recipe.get("added", ()), start=max(added) + 1))
    if recipe["model"] != "unigram":  # its special tokens are pieces
        config["added_tokens_decoder"] = {
            str(number): {"content": added[number], "special": True, **_PLAIN} for number in sorted(added)
        }
    if recipe["class"] == "Qwen2Tokenizer":
        config["chat_template"] = _CHAT
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", special)


_PLAIN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _merges(start: str = "", end: str = "") -> list[tuple[str, str]]:
    """The merges of a byte pair encoding that makes common words, and of others runs of three letters. `start` or `end`
    marks those at a word's start or end."""
    pairs = [(a, b) for a in _LETTERS for b in _LETTERS]
    if end:
        pairs += [(a, b + end) for a, b in pairs]
        runs = pairs + [(a, first + second) for a in _LETTERS for first, second in pairs]
        return _with_words(runs, ([*word[:-1], word[-1] + end] for word in _words()))
    threes = [(a, b, c) for a in _LETTERS for b, c in pairs]
    inside = [*pairs, *((a, b + c) for a, b, c in threes), *((a + b, c) for a, b, c in threes)]
    starts = [(start, a) for a in _LETTERS] + [(start, a + b) for a, b in pairs] + [(start + a, b) for a, b in pairs]
    starts += [(start, a + b + c) for a, b, c in threes]
    starts += [(start + a, b + c) for a, b, c in threes] + [(start + a + b, c) for a, b, c in threes]
    return _with_words(inside + starts, ([*mark, *word] for word in _with_capitals() for mark in ("", start)))


def _with_words(merges: list[tuple[str, str]], words: Iterable[list[str]]) -> list[tuple[str, str]]:
    """The merges, and those that join what they leave of each word."""
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    for pieces in words:
        while len(pieces) > 1:
            place = min(range(len(pieces) - 1), key=lambda i: ranks.get((pieces[i], pieces[i + 1]), len(ranks)))
            left, right = pieces[place : place + 2]
            ranks.setdefault((left, right), len(ranks))
            pieces[place : place + 2] = [left + right]
    return [*ranks]


def _words() -> list[str]:
    """Common words of captions and of pipelines' templates. Published tokenizers have one token for most of them."""
    return " ".join(document()["words"]).split()


def _with_capitals() -> list[str]:
    return [*_words(), *map(str.capitalize, _words())]


def _write_bpe(recipe: dict[str, Any], folder: Path) -> None:
    """vocab.json and merges.txt over bytes. CLIP marks a word's last letter, GPT-2 its first."""
    clip = recipe["class"] == "CLIPTokenizer"
    alphabet = [*_byte_characters()]
    tokens = alphabet + [f"{byte}</w>" for byte in alphabet] if clip else alphabet
    special = {number: token for token, number in recipe["special"].values() if number >= len(tokens)}
    merges = _merges(end="</w>") if clip else _merges(start="Ġ")
    tokens += dict.fromkeys(left + right for left, right in merges)
    vocabulary = _vocabulary(tokens, recipe["size"], special)
    _write_json(folder / "vocab.json", vocabulary)
    write_text(folder / "merges.txt", "\n".join(["#version: 0.2", *(f"{a} {b}" for a, b in merges)]) + "\n")


def _write_sentencepiece_bpe(recipe: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, and tokenizer.model for slow tokenizers, of a BPE over characters, with bytes for unknown ones,
    as Gemma's."""
    special = {number: token for token, number in recipe["special"].values()}
    letters = [_WORD, *_ASCII]
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + letters
    merges = _merges(start=_WORD)
    tokens += dict.fromkeys(left + right for left, right in merges)
    vocabulary = _vocabulary(tokens, recipe["size"], special)
    proto = _sentencepiece(recipe, vocabulary, lambda number: -float(number))
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = proto.trainer_spec.BPE, True
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = proto.normalizer_spec.remove_extra_whitespaces = False
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    begin = recipe["special"]["bos_token"][0]
    first = {"SpecialToken": {"id": begin, "type_id": 0}}
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": number, "content": special[number], "special": True, **_PLAIN} for number in sorted(special)
            ],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _WORD},
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {begin: {"id": begin, "ids": [recipe["special"]["bos_token"][1]], "tokens": [begin]}},
            },
            "decoder": {"type": "Replace", "pattern": {"String": _WORD}, "content": " "},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": recipe["special"]["unk_token"][0],
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": vocabulary,
                "merges": [f"{left} {right}" for left, right in merges],
            },
        },
    )


def _write_unigram(recipe: dict[str, Any], folder: Path) -> None:
    """spiece.model of a unigram model. All pieces are equally likely, so a word has as few pieces as possible."""
    special = {number: token for token, number in recipe["special"].values()}
    tokens = _vocabulary(_pieces(recipe["size"] - len(special)), recipe["size"], special)
    proto = _sentencepiece(recipe, tokens, lambda number: -10.0)
    proto.trainer_spec.model_type = proto.trainer_spec.UNIGRAM
    proto.normalizer_spec.name = "nmt_nfkc"
    proto.normalizer_spec.precompiled_charsmap = _nfkc()
    (folder / "spiece.model").write_bytes(proto.SerializeToString())


def _sentencepiece(recipe: dict[str, Any], tokens: dict[str, int], score: Callable[[int], float]) -> Any:
    """sentencepiece's model of `tokens`, with the score of each number, without type and normalizer."""
    proto: Any = _messages().ModelProto()
    kinds = proto.SentencePiece
    special = {number for _, number in recipe["special"].values()}
    for token, number in tokens.items():
        kind = kinds.CONTROL if number in special else kinds.BYTE if _BYTE.fullmatch(token) else kinds.NORMAL
        kind = kinds.UNKNOWN if number == recipe["special"]["unk_token"][1] else kind
        proto.pieces.add(piece=token, score=score(number) if kind == kinds.NORMAL else 0.0, type=kind)
    trainer = proto.trainer_spec
    trainer.vocab_size = len(tokens)
    trainer.pad_id, trainer.bos_id, trainer.eos_id, trainer.unk_id = (
        recipe["special"].get(role, (None, -1))[1] for role in ("pad_token", "bos_token", "eos_token", "unk_token")
    )
    return proto


def _nfkc() -> bytes:
    """sentencepiece's own map of characters, which T5 uses too, from a model that is trained on one letter.

    T5's tokenizer in transformers 5.14.1 needs a map, and sentencepiece 0.2.3 checks it.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter("a"), model_writer=model, model_type="char", vocab_size=4, minloglevel=2
    )
    found: bytes = _messages().ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap
    return found


def _messages() -> Any:  # protobuf's module has no types
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2


_WRITERS = {"bpe": _write_bpe, "sentencepiece-bpe": _write_sentencepiece_bpe, "unigram": _write_unigram}


def _pieces(room: int) -> list[str]:
    """`room` pieces: single characters, common words, then runs of letters by length, at the start of words and within
    them."""
    runs = (
        mark + "".join(letters)
        for length in itertools.count(2)
        for mark in (_WORD, "")
        for letters in itertools.product(_LETTERS, repeat=length)
    )
    words = (mark + word for word in _with_capitals() for mark in (_WORD, ""))
    pieces = dict.fromkeys([_WORD, *_ASCII, *(_WORD + letter for letter in _LETTERS), *words])
    return [*itertools.islice(dict.fromkeys(itertools.chain(pieces, itertools.islice(runs, room))), room)]


def _vocabulary(tokens: list[str], size: int, special: dict[int, str]) -> dict[str, int]:
    """A vocabulary with special tokens at their numbers, the others in order around them, and fillers up to `size`
    tokens or the last special one."""
    rest = itertools.chain(tokens, (f"<unused{number}>" for number in itertools.count()))
    numbers = range(max(size, *(number + 1 for number in special)) if special else size)
    return {special[number] if number in special else next(rest): number for number in numbers}


def _byte_characters() -> Iterator[str]:
    """The printable stand-ins of the 256 bytes. Source: GPT-2's encoder, `bytes_to_unicode`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    yield from map(chr, printable)
    yield from (chr(256 + number) for number in range(256 - len(printable)))


def _write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


@cache
def document() -> dict[str, Any]:
    """repositories.json."""
    found: dict[str, Any] = json.loads((resources.files(__package__) / "repositories.json").read_text("utf-8"))
    return found
