"""What `encode_prompt` of each diffusers pipeline returns, and how it treats padding.

Tokenizers, templates, layers and masks are in the pipeline's own code. A recipe has what its signature does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from bigdit.catalog.names import load_json
from bigdit.strategy import Strict

Padding = Literal["masked", "zeroed", "attended", "kept"]


_OWN = ("-", "states", "mask", "pooled")
"""The names in `EncodingRecipe.gives` that are no further texts."""


class EncodingRecipe(Strict):
    """How to encode captions by a pipeline.

    `gives`: the names of the returned values, in order. `-` is ignored. `null_…` is the unconditional text. Names other
    than `states`, `mask` and `pooled` are further texts. They have a mask `…_mask`, or are stored whole.

    `padding`. masked: neither text encoder nor transformer sees it, or there is none. zeroed: the text encoder does not
    see it, and the transformer gets zeros. attended: only the text encoder sees it. kept: the transformer sees it, even
    if there is a mask.

    `arguments`: further arguments of the call. `separate`: further texts that need their own call, by name. `rare`:
    texts that most captions do not have. `length`: the attribute with the length of captions, if it is no argument;
    `a.b` is an attribute of part a. `multiple`: lengths must be multiples of it. `alone`: captions are encoded one at a
    time, since results depend on the batch. `joined`: several layers are returned as [B, T, L, D], as features of one
    text. `settings`: keys of the folder's index that change texts. `notes`: what is odd.
    """

    gives: tuple[str, ...]
    padding: Padding
    arguments: dict[str, int] = {}
    separate: dict[str, EncodingRecipe] = {}
    rare: tuple[str, ...] = ()
    length: str | None = None
    multiple: int = 1
    alone: bool = False
    joined: bool = False
    settings: tuple[str, ...] = ()
    notes: str = ""

    @property
    def fits(self) -> bool:
        """Whether a batch may be padded to its longest caption without changing the states of tokens."""
        return self.padding in ("masked", "zeroed") and not self.alone

    def allowed(self, length: int) -> int:
        """The smallest allowed length that is at least `length`."""
        return -(-length // self.multiple) * self.multiple

    def set_in(self, index: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in the index of a pipeline's folder."""
        return {name: index[name] for name in self.settings if index.get(name) is not None}

    def keeps(self, name: str) -> bool:
        """Whether the padding of a further text is stored. "" stands for the text itself."""
        if name in self.separate:
            return self.separate[name].keeps("")
        return f"{name}_mask" not in self.gives if name else self.padding == "kept"

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the further texts that this call returns."""
        further = [name for name in self.gives if name not in _OWN and not name.startswith("null_")]
        return tuple(name for name in further if not name.endswith("_mask"))


RECIPES = {name: EncodingRecipe.model_validate(each) for name, each in load_json("families.json")["recipes"].items()}
