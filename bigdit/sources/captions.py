"""Captions (text, or JSON of texts with weights) and labels of images, and the rules of a source for its captions."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from bigdit import log
from bigdit.config.data import WEIGHTS, SourceConfig, TagsConfig, is_weight
from bigdit.files import IS_LFS_POINTER, is_lfs_pointer, leads_out
from bigdit.sources.disk import CAPTION_BYTES, read_file
from bigdit.sources.image import SUFFIXES as IMAGES
from bigdit.sources.protocol import Caption, Contents, DerivedItem, Item, Several, Source, Unusable
from bigdit.units import how_many

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""The first bytes of files in UTF-16, as Windows and Excel write them."""


def json_captions(data: bytes, name: str) -> tuple[Caption, ...] | None:
    """The captions of a `.json` file. None for an object without captions, such as metadata of other programs.

    Forms: "text"; ["text", …]; {"caption": "text"}; {"captions": ["text", …], "weights": [number, …]}. Missing weights
    are 1, and other keys are ignored. Raises Unusable for any other form.
    """
    try:
        value: Any = json.loads(decoded(data, name))
    except (ValueError, RecursionError):
        raise Unusable(f"caption {name} is not JSON") from None
    weights: Any = None
    if isinstance(value, dict):
        if not value.keys() & {"caption", "captions"}:
            return None
        value, weights = value.get("captions", value.get("caption")), value.get("weights")
    texts = value if isinstance(value, list) else [value]
    if weights is None:
        weights = [1.0] * len(texts)
    return weighted(texts, weights if isinstance(weights, list) else [weights], name)


def weighted(texts: Sequence[Any], weights: Sequence[Any], name: str) -> tuple[Caption, ...]:
    """Captions from texts and their weights, without texts that are null, empty, or of weight 0.

    Raises Unusable if none is left, if the lengths differ, and for values that are not texts and weights.
    """
    if len(texts) != len(weights):
        raise Unusable(f"caption {name} has {how_many(len(texts), 'text')} and {how_many(len(weights), 'weight')}")
    captions = []
    for text, weight in zip(texts, weights, strict=True):
        if text is None:
            continue
        if not isinstance(text, str):
            raise Unusable(f"caption {name} holds {type(text).__name__}, not text")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not (weight == 0 or is_weight(weight)):
            raise Unusable(f"caption {name} has the weight {str(weight)[:20]}; weights are numbers, 0 or {WEIGHTS}")
        if text.strip() and weight:
            try:
                text.encode()  # JSON can escape half a character
            except UnicodeEncodeError:
                raise Unusable(f"caption {name} is not UTF-8") from None
            captions.append(Caption(text.strip(), float(weight)))
    if not captions:
        raise Unusable(f"caption {name} is empty")
    return tuple(captions)


def decoded(data: bytes, name: str) -> str:
    """The text of a file. Raises Unusable for other encodings than UTF-8 and UTF-16."""
    if is_lfs_pointer(data):
        raise Unusable(f"caption {name} {IS_LFS_POINTER}")
    try:
        text = data.decode("utf-16" if data.startswith(UTF_16) else "utf-8-sig")
    except UnicodeDecodeError:
        raise Unusable(f"caption {name} is not UTF-8; save it as UTF-8") from None
    if "\0" in text:  # UTF-32, or UTF-16 without its mark
        raise Unusable(f"caption {name} has zero bytes, as other encodings do; save it as UTF-8")
    return text


FOLDER = "folder"
"""The `label` of a source whose images have the first folder of their path as their class."""

Label = str | int
"""The name of a class, or its number."""


def folder_label(name: str) -> str:
    """The first folder of a relative path. Raises Unusable without one, or if its name is not printable."""
    first, below, _ = name.partition("/")
    if not below:
        raise Unusable("image outside a class folder; put it into a folder with the name of its class")
    if not first.isprintable():  # bytes that are not UTF-8 are not printable either
        raise Unusable("image in a folder whose name is not printable text")
    return first


def json_label(data: bytes, key: str, name: str) -> Label:
    """The label under `key` in the JSON file `name`. Raises Unusable if there is none."""
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise Unusable(f"label {name} is not JSON") from None
    return label_of(value.get(key) if isinstance(value, dict) else None, f"{name}: {key}")


def label_of(value: Any, where: str) -> Label:
    """A cell or a JSON value as a label. Raises Unusable, which names `where`, for what is neither text nor integer."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Unusable(f"label {where} is {str(value)[:20]!r}; expected the name or the number of a class")


def reads_captions(config: SourceConfig) -> bool:
    """Whether the images of a source have their own captions: it sets neither a label nor one caption for all."""
    return config.label is None and config.caption is None


CaptionFiles = tuple[str, str]
"""The names of the JSON and the text file with an image's captions, in the folder of the image."""

TEXTS = (".txt", ".caption")
SUFFIXES = (".json", *TEXTS)


def usual_files(stem: str) -> CaptionFiles:
    """`a.json` and `a.txt`."""
    return f"{stem}.json", f"{stem}.txt"


def odd_names(names: Collection[str]) -> dict[str, str]:
    """The caption files whose suffix is in capitals, or whose letters are decomposed (NFD), as macOS writes them.

    The keys are the plain forms of their names.
    """
    found = (name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES)
    return {plain: name for name in found if (plain := plain_name(name)) != name}


def caption_files(image: str, names: Collection[str], odd: Mapping[str, str]) -> CaptionFiles:
    """The caption files of an image among the `names` of its folder: `a.json`, and `a.txt` or `a.caption`.

    The suffix may also follow the whole name of the image, as in `a.png.txt`. `odd`: as `odd_names` returns it.
    """
    stem = os.path.splitext(image)[0]
    found = []
    for suffixes, default in zip(((".json",), TEXTS), usual_files(stem), strict=True):
        candidates = (base + suffix for base in (stem, image) for suffix in suffixes)
        found.append(next(filter(None, (_actual_name(name, names, odd) for name in candidates)), default))
    return found[0], found[1]


def _actual_name(name: str, names: Collection[str], odd: Mapping[str, str]) -> str | None:
    if name in names or (not odd and name.isascii()):
        return name if name in names else None
    plain = plain_name(name)
    return plain if plain in names else odd.get(plain)


def plain_name(name: str) -> str:
    """The name in NFC, with the suffixes of captions and images in small letters."""
    stem, suffix = os.path.splitext(unicodedata.normalize("NFC", name))
    first, inner = os.path.splitext(stem)
    return f"{first}{inner.lower() if inner.lower() in IMAGES else inner}{suffix.lower()}"


def read_captions(files: CaptionFiles, read: Callable[[str], bytes | None]) -> tuple[Caption, ...]:
    """The captions in an image's JSON, or else its text as one caption. Raises Missing if there are none.

    `read` returns the bytes of the file with a name, or None if it is missing.
    """
    in_json, in_text = files
    data = read(in_json)
    if data is not None and (captions := json_captions(data, in_json)) is not None:
        return captions
    if (text := read(in_text)) is None:
        without = "" if data is None else f", and {in_json} has neither caption nor captions"
        raise Missing(f"caption {in_text} is missing{without}")
    return weighted([decoded(text, in_text)], [1.0], in_text)


class Missing(Unusable):
    """An image without a caption."""


def captions_of(root: Path, folder: Path, files: CaptionFiles, follow_links: bool) -> tuple[Caption, ...]:
    """The captions in `files` of a folder. Raises as `read_captions`."""
    return read_captions(files, lambda name: read_linked(root, folder / name, follow_links, CAPTION_BYTES))


def read_linked(root: Path, path: Path, follow_links: bool, limit: int) -> bytes | None:
    """The bytes of a file, or None if there is none. Raises as `check_link` and `read_file`."""
    with contextlib.suppress(FileNotFoundError):
        check_link(root, path, follow_links)
        return read_file(path, limit)
    return None


def check_link(root: Path, path: Path, follow_links: bool) -> None:
    """Raise Unusable for a link out of `root`, unless links are followed."""
    if not follow_links and leads_out(root, path):
        raise Unusable(f"{path.name} is a link out of its folder; set follow_links of the source to read it")


def log_ignored(key: str, root: Path, ignored: Counter[str]) -> None:
    """Log the kinds of files in a folder that are neither images nor captions."""
    if kinds := counted(ignored):
        lists = any(suffix in kind.lower() for kind in ignored for suffix in LISTS)
        fix = "; to read a list or a table, name its path" if lists else ""
        log.notice(f"{key}: other files in {root} are ignored: {kinds}{fix}{conversion(ignored)}")


def counted(ignored: Counter[str]) -> str:
    """`2 .heic files, 1 linked folder`."""
    return ", ".join(how_many(count, kind) for kind, count in ignored.most_common(5) if count)


_UNREAD = {
    "images to PNG or JPEG": ".heic .heif .jxl .jp2 .psd .svg .tga .exr .dng .cr2 .nef .arw .raw",
    "videos to MP4": ".wmv .flv .ts .mts .m2ts .mpg .mpeg .3gp .ogv .vob",
}


def conversion(ignored: Iterable[str]) -> str:
    """What to do with files of images and videos that are not read; empty without any."""
    found = {kind.partition(" ")[0].lower() for kind in ignored}
    return "".join(f"; convert {what}" for what, suffixes in _UNREAD.items() if found & {*suffixes.split()})


OF_SAMPLES = "samples.json"  # `bigdit sample` writes it beside images and captions, which it repeats
LISTS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
"""Suffixes of lists of images. A list is a source by itself."""


@dataclass(frozen=True)
class Rules:
    """The rules of a source for its captions, as in SourceConfig."""

    caption: str | None
    before: str
    after: str
    tags: TagsConfig | None

    @classmethod
    def of(cls, config: SourceConfig) -> Rules | None:
        """The rules of a source; None without any."""
        found = cls(config.caption, config.caption_prefix, config.caption_suffix, config.tags)
        return None if found == cls(None, "", "", None) else found

    @property
    def joined(self) -> str | None:
        """A warning if the prefix or suffix runs into the words of a caption, for want of a space."""
        ends = ("prefix", self.before, self.before[-1:], "{} "), ("suffix", self.after, self.after[:1], " {}")
        for name, text, sign, spaced in ends:
            if sign.isascii() and sign.isalnum():
                return f'caption_{name} {text!r} is joined to captions without a space; write "{spaced.format(text)}"'
        return None

    def apply(self, contents: Contents) -> Contents:
        """The contents with the captions to encode, each once."""
        found: dict[str, float] = {}
        for caption in contents.captions if self.caption is None else (Caption(self.caption),):
            variants = [caption.text] if self.tags is None else shuffled(caption.text, self.tags)
            for text in variants:
                whole = f"{self.before}{text}{self.after}"
                found[whole] = found.get(whole, 0) + caption.weight / len(variants)
        return replace(contents, captions=tuple(Caption(*each) for each in found.items()))


def shuffled(text: str, tags: TagsConfig) -> list[str]:
    """The variants of a caption of tags. The first is the caption itself. The others depend on seed and text."""
    parts = [part.strip() for part in text.split(tags.separator) if part.strip()]
    first, rest = parts[: tags.keep], parts[tags.keep :]
    joint = f"{tags.separator.strip()} "

    def variant(number: int) -> str:
        def draw(what: str, place: int) -> int:
            return int(xxhash.xxh3_64_intdigest(f"{what}{number}/{place}/{text}".encode(), tags.seed))

        kept = [place for place in range(len(rest)) if draw("drop", place) >= tags.dropout * 2**64]
        if not kept and not first and rest:  # one tag stays, so that the caption is not empty
            kept = [min(range(len(rest)), key=lambda place: draw("keep", place))]
        order = sorted(kept, key=lambda place: draw("order", place)) if tags.shuffle else kept
        return joint.join([*first, *(rest[place] for place in order)])

    return [text, *map(variant, range(1, tags.variants))]


class Ruled(Several):
    """A source whose captions follow `rules`."""

    def __init__(self, source: Source, rules: Rules) -> None:
        super().__init__(source, 1, f"with {rules}")
        self._rules = rules

    def _item(self, index: int, item: Item) -> DerivedItem:
        return DerivedItem(index, item.name, item, self._rules.apply)
