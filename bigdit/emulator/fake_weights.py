"""`--fake-weights`: a hub cache of pipelines whose weights are holes in files. from_pretrained downloads nothing.

Tokenizers have the right class, size and special tokens, but their pieces are common words, and runs of up to three
letters of others. So a caption has about as many ids as with the published tokenizer, up to twice as many where its
words are rare. That changes bytes only where captions are not padded. Repositories are written from the catalogue: the
configs of a pipeline, or of one component.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from bigdit.catalog.models import CatalogModel, Vae, model
from bigdit.catalog.names import load_json
from bigdit.documents import parse_json, read_mapping
from bigdit.errors import UserError, nearest
from bigdit.files import write_json, write_text
from bigdit.processes import own_module

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


_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".onnx", ".msgpack", ".h5", ".gguf")


def lay_out(names: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Write the repositories to a hub cache in `folder`; returns the environment variables for scripts to find it.

    A name is that of a repository in the catalogue, or `NAME=FOLDER` or `NAME=REPOSITORY`: NAME is then made from a
    folder with configs, or from a repository in the catalogue. The user's own cache is linked. The network is not used.
    `environment`: variables with which a CUDA build of torch can be imported without CUDA. Raises UserError for names
    and folders from which nothing can be built.
    """
    hub = folder / "hub"
    hub.mkdir(parents=True, exist_ok=True)
    write_text(hub / "version.txt", "1")  # otherwise transformers 4 assumes another layout
    dtypes = {}
    for name in names:
        asked, _, source = name.partition("=")
        snapshot = _new_snapshot(hub, asked)
        dtypes[str(snapshot)] = _write_configs(asked, source or asked, snapshot)
    _write_weights(dtypes, environment)
    for laid in dtypes:
        _write_empty_configs(Path(laid))
    _link_own(hub)
    return {"HF_HUB_CACHE": str(hub), "HUGGINGFACE_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}


def _new_snapshot(hub: Path, name: str) -> Path:
    """The folder of a repository's one revision. Source: huggingface_hub's guide `manage-cache`."""
    if name.count("/") > 1 or name.startswith(("/", ".")):
        raise UserError(
            f"--fake-weights {name}: not the name of a repository; write --fake-weights NAME={name}, with the script's "
            "name for it"
        )
    revision = hashlib.sha1(name.encode()).hexdigest()
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    if snapshot.exists():
        raise UserError(f"--fake-weights {name} was given twice")
    snapshot.mkdir(parents=True)
    write_text(repository / "refs" / "main", revision)
    return snapshot


def _write_configs(name: str, source: str, snapshot: Path) -> str:
    """Write a repository without its weights; returns their dtype."""
    if Path(source).is_dir():
        return _copy_configs(name, Path(source), snapshot)
    if source != name and source.startswith(("/", ".", "~")):
        raise UserError(f"--fake-weights {name}={source}: there is no such folder")
    found = repository(source)
    for path, config in found.configs.items():
        write_json(snapshot / path, config)
    for tokenizer, kind in found.tokenizers.items():
        write_tokenizer(kind, snapshot / tokenizer)
    return found.dtype


def _copy_configs(name: str, source: Path, snapshot: Path) -> str:
    """Copy all files but weights, and make the tokenizers that the folder lacks according to model_index.json."""
    if not any(source.rglob("config.json")):
        raise UserError(
            f"--fake-weights {name}={source}: the folder has no config.json; a pipeline has one for each model"
        )
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and not path.name.endswith((*_WEIGHTS, ".index.json")):
            (snapshot / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, snapshot / relative)
    kinds = {recipe["class"]: kind for kind, recipe in reversed(document()["tokenizers"].items())}
    for part, class_name in _tokenizers(snapshot / "model_index.json", f"--fake-weights {name}={source}").items():
        if not (snapshot / part).is_dir():
            kind = kinds.get(class_name.removesuffix("Fast"))
            if kind is None:
                raise UserError(
                    f"--fake-weights {name}={source}: lacks {part}/, and a {class_name} cannot be generated; copy the "
                    "tokenizer's files there"
                )
            write_tokenizer(kind, snapshot / part)
    return "float32"


def _tokenizers(index: Path, asked: str) -> dict[str, str]:
    """The tokenizers in a model_index.json, and their classes, without null entries, which the script passes itself.

    Raises UserError if it is damaged.
    """
    if not index.is_file():
        return {}
    parts = read_mapping(index, parse_json, f"{asked}: its model_index.json", "an object of components")
    found = {}
    for part, value in parts.items():
        if part.startswith("tokenizer") and value not in (None, [None, None]):
            if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)):
                raise UserError(f"{asked}: {part} in its model_index.json is no [library, class]")
            found[part] = value[1]
    return found


def _write_empty_configs(snapshot: Path) -> None:
    """Write empty config.json files into tokenizers' folders without one: offline, transformers 5.14.1 fails without
    them, even if the cache knows that they do not exist."""
    for found in snapshot.rglob("tokenizer_config.json"):
        if not found.with_name("config.json").exists():
            write_json(found.with_name("config.json"), {})


def _write_weights(dtypes: Mapping[str, str], environment: Mapping[str, str] | None) -> None:
    """Write the weights, in a separate process that imports torch, diffusers and transformers."""
    done = subprocess.run(
        [sys.executable, *own_module("bigdit.emulator.fake_models")],
        input=json.dumps(dtypes),
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})} if _built_for_cuda() else None,
    )
    if done.returncode == 1:
        problems = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        if problems:
            raise UserError(*problems)
    if done.returncode:
        raise RuntimeError(f"bigdit.emulator.fake_models exited with {done.returncode}:\n{done.stderr}")


def _built_for_cuda() -> bool:
    """Whether torch here is built for CUDA. A CPU build rejects an emulated GPU."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return re.search(r"^cuda\b.*= '", Path(found.origin).with_name("version.py").read_text(), re.MULTILINE) is not None


def _link_own(hub: Path) -> None:
    """Link the other repositories of the user's own cache."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    folder = Path(own).expanduser()
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.is_dir() and not entry.name.startswith(".") and not (hub / entry.name).exists():
            (hub / entry.name).symlink_to(entry.resolve())


class Repository(NamedTuple):
    """A repository without weights.

    `configs`: JSON documents by path. `tokenizers`: the kind of each (in repositories.json) by folder; `""` is the
    repository itself. `dtype` of the weights: torch's name without `torch.`.
    """

    configs: dict[str, dict[str, Any]]
    tokenizers: dict[str, str]
    dtype: str


@cache
def document() -> dict[str, Any]:
    """repositories.json."""
    found: dict[str, Any] = json.loads((resources.files(__package__) / "repositories.json").read_text("utf-8"))
    return found


def known() -> tuple[str, ...]:
    """The names of the repositories that can be written."""
    return tuple(document()["repositories"])


def option_for(name: str) -> str:
    """The option for a repository: its name, or its name and what has its configs."""
    is_known = name.casefold() in (each.casefold() for each in known())
    like = "=LIKE, a folder with its configs or a repository of the catalogue with the same"
    return f"--fake-weights {name}" + ("" if is_known else like)


def repository(name: str) -> Repository:
    """The repository of that name, in any case of letters. Raises UserError if the catalogue has none."""
    entries = {known.casefold(): entry for known, entry in document()["repositories"].items()}
    entry = entries.get(name.casefold())
    if entry is None:
        raise UserError(
            f"--fake-weights {name}: the catalogue does not know this repository; {nearest(name, known())}; for any "
            f"other, {option_for(name)}"
        )
    dtype: str = entry["dtype"]
    if "model" in entry:
        return _pipeline(entry, dtype)
    if "vae" in entry:
        vae = Vae(name=entry["vae"], **load_json("models.json")["vaes"][entry["vae"]])
        return Repository({"config.json": _vae(vae)}, {}, dtype)
    encoder = _text_encoder(entry["text_encoder"], None, dtype)
    return Repository({"config.json": encoder}, {"": entry["tokenizer"]}, dtype)


def _pipeline(entry: dict[str, Any], dtype: str) -> Repository:
    found: CatalogModel = model(entry["model"])
    recipe = document()["pipelines"][found.spec.class_name]
    scheduler = {**recipe["scheduler"], **entry.get("scheduler", {})}
    configs: dict[str, dict[str, Any]] = {
        "transformer/config.json": {"_class_name": found.spec.class_name, **found.spec.kwargs},
        "vae/config.json": _vae(found.vae),
        "scheduler/scheduler_config.json": scheduler,
    }
    if second := entry.get("transformer_2"):  # Wan 2.2's expert for little noise
        other = model(second).spec
        configs["transformer_2/config.json"] = {"_class_name": other.class_name, **other.kwargs}
    tokenizers = {}
    for number, (encoder, class_name, tokenizer) in enumerate(recipe["text"], start=1):
        suffix = "" if number == 1 else f"_{number}"  # as in diffusers' pipelines
        configs[f"text_encoder{suffix}/config.json"] = _text_encoder(encoder, class_name, dtype)
        tokenizers[f"tokenizer{suffix}"] = tokenizer
    index = _index(entry.get("pipeline", recipe["pipeline"]), configs, tokenizers)
    boundary = {"boundary_ratio": entry["boundary_ratio"]} if "boundary_ratio" in entry else {}
    configs["model_index.json"] = index | boundary
    return Repository(configs, tokenizers, dtype)


def _index(pipeline: str, configs: dict[str, dict[str, Any]], tokenizers: dict[str, str]) -> dict[str, Any]:
    """diffusers' model_index.json: the library and the class of each component."""
    parts = {
        path.split("/")[0]: ["diffusers", config["_class_name"]]
        if "_class_name" in config
        else ["transformers", config["architectures"][0]]
        for path, config in configs.items()
    }
    parts |= {name: ["transformers", document()["tokenizers"][kind]["class"]] for name, kind in tokenizers.items()}
    return {"_class_name": pipeline, "_diffusers_version": "0.31.0", **dict(sorted(parts.items()))}


def _vae(vae: Vae) -> dict[str, Any]:
    if vae.kwargs is None:
        raise UserError(f"the catalogue has no constructor arguments of {vae.name}; give a folder with its configs")
    return {"_class_name": vae.class_name, **vae.kwargs}


def _text_encoder(name: str, class_name: str | None, dtype: str) -> dict[str, Any]:
    """The config of a text encoder for transformers 4 and later. Other keys have their classes' defaults."""
    entry = load_json("models.json")["text_encoders"][name]
    if class_name in document()["around"]:
        around = document()["around"][class_name]
        inner = {"text_config": {**entry["kwargs"], **around["text_config"]}}
        return {"architectures": [class_name], "torch_dtype": dtype, **around, **inner}
    model_type = entry["config_class"].removesuffix("Config").replace("CLIPText", "clip_text_model").lower()
    return {
        "architectures": [class_name or entry["class_name"]],
        "model_type": model_type,
        "torch_dtype": dtype,
        **entry["kwargs"],
    }
