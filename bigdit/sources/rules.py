"""Rules of a source for its captions: one for all, a trigger word, shuffled tags. Mirrored and cropped variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash
from PIL import Image

from bigdit.config.data import MAX_PIXELS, SourceConfig, TagsConfig
from bigdit.sources.protocol import Caption, Contents, Fit, Item, Several, Source


@dataclass(frozen=True)
class Rules:
    """The rules for captions of a source, as SourceConfig has them."""

    caption: str | None
    before: str
    after: str
    tags: TagsConfig | None

    @classmethod
    def of(cls, config: SourceConfig) -> Rules | None:
        """The rules of a source; None without any."""
        found = cls(config.caption, config.caption_prefix, config.caption_suffix, config.tags)
        return None if found == cls(None, "", "", None) else found

    def apply(self, captions: tuple[Caption, ...]) -> tuple[Caption, ...]:
        """The captions to encode, each once."""
        found: dict[str, float] = {}
        for caption in captions if self.caption is None else (Caption(self.caption),):
            variants = [caption.text] if self.tags is None else shuffled(caption.text, self.tags)
            for text in variants:
                whole = f"{self.before}{text}{self.after}"
                found[whole] = found.get(whole, 0) + caption.weight / len(variants)
        return tuple(Caption(*each) for each in found.items())


def shuffled(text: str, tags: TagsConfig) -> list[str]:
    """The variants of a caption of tags, the first as it is written. The others depend on the seed and the text."""
    parts = [part.strip() for part in text.split(tags.separator) if part.strip()]
    first, rest = parts[: tags.keep], parts[tags.keep :]
    joint = f"{tags.separator.strip()} "

    def variant(number: int) -> str:
        def draw(what: str, place: int) -> int:
            return int(xxhash.xxh3_64_intdigest(f"{what}{number}/{place}/{text}".encode(), tags.seed))

        kept = [place for place in range(len(rest)) if draw("drop", place) >= tags.dropout * 2**64]
        if not kept and not first and rest:  # of one tag something is left
            kept = [min(range(len(rest)), key=lambda place: draw("keep", place))]
        order = sorted(kept, key=lambda place: draw("order", place)) if tags.shuffle else kept
        return joint.join([*first, *(rest[place] for place in order)])

    return [text, *map(variant, range(1, tags.variants))]


@dataclass(frozen=True)
class RuledItem(Item):
    """An item whose captions follow `rules`."""

    index: int
    name: str
    item: Item
    rules: Rules

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        contents = self.item.read(max_pixels)
        return dataclasses.replace(contents, captions=self.rules.apply(contents.captions))


class Ruled(Several):
    """A source whose captions follow `rules`."""

    def __init__(self, source: Source, rules: Rules) -> None:
        super().__init__(source, 1, f"with {rules}")
        self._rules = rules

    def _item(self, index: int, item: Item) -> RuledItem:
        return RuledItem(index, item.name, item, self._rules)


@dataclass(frozen=True)
class VariedItem(Item):
    """An item cropped at `crop_at`, and mirrored if `flipped`."""

    index: int
    name: str
    item: Item
    crop_at: float
    flipped: bool

    def read(self, max_pixels: int = MAX_PIXELS) -> Contents:
        """As Item.read."""
        contents = self.item.read(max_pixels)
        found = dataclasses.replace(contents, fit=Fit(self.crop_at))
        if not self.flipped:
            return found
        mask = contents.mask
        turned = None if mask is None else lambda: None if (read := mask()) is None else _flipped(read)
        return dataclasses.replace(found, decode=lambda: _mirrored(contents.decode()), mask=turned)


def _mirrored(found: Image.Image | Iterator[Image.Image]) -> Image.Image | Iterator[Image.Image]:
    return _flipped(found) if isinstance(found, Image.Image) else map(_flipped, found)


def _flipped(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


class Varied(Several):
    """The crops of each item of a source, one after another, and their mirror images."""

    def __init__(self, source: Source, crops: int, flip: bool) -> None:
        places = [0.5] if crops == 1 else [number / (crops - 1) for number in range(crops)]
        self._variants = [(place, flipped) for flipped in (False, True)[: 1 + flip] for place in places]
        self._crops = crops
        super().__init__(source, len(self._variants), f"as {self._variants}")

    def _item(self, index: int, item: Item) -> VariedItem:
        place, flipped = self._variants[index % len(self._variants)]
        named = item.name if self._crops == 1 else f"{item.name} cropped at {place:g}"
        return VariedItem(index, f"{named} mirrored" if flipped else named, item, place, flipped)
