"""Encodes captions by a diffusers pipeline's own `encode_prompt`, with as little padding as possible."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from bigdit.catalog.families import mask_of
from bigdit.config.data import TextEncoderConfig
from bigdit.encoders.components import (
    KEY,
    ProcessorTokenizer,
    TokenizerCalls,
    describe,
    is_text,
    load_text_pipeline,
)
from bigdit.encoders.folder import DTYPES
from bigdit.encoders.protocol import MAX_TOKENS, BatchSize, Images, Keep, as_it_is, encode_by_length, is_clip
from bigdit.encoders.recipes import RECIPES, EncodingRecipe, Padding
from bigdit.errors import UserError
from bigdit.shortage import ran_out
from bigdit.store.text import Length, Text

_PROBE = 16  # tokens; at this length an encoder costs nothing
_LENGTH = "max_sequence_length"
_MORE = inspect.Parameter.VAR_KEYWORD
# Arguments whose defaults in `__call__` differ from those in `encode_prompt`. The pipeline's `__call__` decides.
_SET_BY_CALL = (_LENGTH, "complex_human_instruction", "clean_caption")


class PipelineTextEncoder:
    """The text encoders of the pipeline in a folder."""

    def __init__(self, config: TextEncoderConfig, device: torch.device | str, batch_size: int) -> None:
        assert config.pipeline is not None
        self._config, self._folder = config, config.pipeline
        self.trained = False
        self._device = torch.device(device)
        self._pipeline = load_text_pipeline(config.pipeline, DTYPES[config.dtype], self._device, config.files)
        self._class_name = type(self._pipeline).__name__
        self._recipe = RECIPES[self._class_name]
        self._size = BatchSize(1 if self._recipe.alone else batch_size)
        self._arguments = _arguments(self._pipeline, self._device)
        self._calls = TokenizerCalls(_tokenizers(self._pipeline))
        self._longest = self._length_asked(config.max_tokens)
        # The number of stored states (layers times tokens) shows only at the whole length.
        length = self._longest if self._recipe.padding == "kept" and self._recipe.streams else _PROBE
        given = self._encode_empty(length)
        probe = texts_of(self._recipe, given)[0]
        self._probed = {name: limit for name, (_, limit) in self._calls.lengths([""]).items()}
        self._dropped = self._template_dropped(probe)
        self.dim = int(probe.states.shape[1])
        self.pooled_dim = None if probe.pooled is None else len(probe.pooled)
        template = len(probe.states) - length if self._longest else len(probe.states)
        self.max_tokens = self._longest + template if self._recipe.padding == "kept" else self._longest
        self._check_length(config.max_tokens)
        streams = {name: shape_of(given[name]) for name in self._recipe.streams}
        for name, recipe in self._recipe.separate.items():
            streams[name] = shape_of(self._returned(recipe, [""], self._longest)["states"])
        self.streams: Mapping[str, tuple[int, int]] = streams

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that changes the texts, with digests of the weights."""
        instruction = self._arguments.get("complex_human_instruction")
        streams = {name: {"max_tokens": most, "dim": dim} for name, (most, dim) in self.streams.items()}
        return {
            "class_name": self._class_name,
            "components": describe(self._config, self._folder, self._pipeline),
            "dtype": self._config.dtype,
            "stored": self._config.stored,
            "max_tokens": self.max_tokens,
            _LENGTH: self._longest or None,
            "dim": self.dim,
            "pooled_dim": self.pooled_dim,
            **({"streams": streams} if streams else {}),
            **({"complex_human_instruction": "\n".join(instruction)} if instruction else {}),
            **({"clean_caption": True} if self._arguments.get("clean_caption") else {}),
            **{name: list(self._pipeline.config[name]) for name in self._recipe.settings},
        }

    def _encode_empty(self, length: int) -> dict[str, Any]:
        """The returned values for the empty caption. Raises UserError if the parts do not fit together."""
        try:
            return self._returned(self._recipe, [""], length)
        except Exception as error:  # for unexpected parts, the pipeline raises any class
            if ran_out(error):
                raise
            absent = sorted(name for name, part in self._pipeline.components.items() if is_text(name) and part is None)
            if absent:
                raise UserError(
                    f"{KEY}: {self._folder} has no {' and no '.join(absent)}, and {self._class_name} cannot encode "
                    "captions without; fetch the whole pipeline by `hf download`"
                ) from None
            raise UserError(
                f"{KEY}: {self._folder} cannot encode the empty caption: {' '.join(str(error).split())}; its "
                "tokenizers and text encoders may be of different models, or the caption has no token"
            ) from None

    def modules(self) -> list[nn.Module]:
        """The text encoders."""
        return [part for part in self._pipeline.components.values() if isinstance(part, nn.Module)]

    def clips(self) -> dict[str, nn.Module]:
        """The CLIP encoders, by their names."""
        parts = self._pipeline.components
        return {name: parts[name] for name in sorted(parts) if is_clip(parts[name])}

    def encode(self, captions: Sequence[str], kept: Keep = as_it_is, images: Images = ()) -> list[Text]:
        """The texts of captions in the dtype of the encoders, without padding that the transformer does not see."""
        tokens = self._count_tokens(captions)

        def encode(places: Sequence[int]) -> list[Text]:
            longest = max(tokens[place] for place in places)
            return self._encode([captions[place] for place in places], longest + self._template_tokens + 1)

        return encode_by_length(captions, tokens, self._size, encode, kept)

    def null(self) -> Text:
        """The text of the pipeline's default negative prompt, or of the empty caption if it has none."""
        if "null_states" not in self._recipe.gives:
            return self.encode([""])[0]
        return self._call([""], self._longest, prefix="null_", do_classifier_free_guidance=True)[0]

    def _encode(self, captions: list[str], length: int) -> list[Text]:
        """Encode captions padded and cut to about `length`, or to the pipeline's own length if padding matters.

        Templates and cleaning change the number of tokens. So a caption that fills the whole length may have been cut.
        Then all are encoded again at twice the length.
        """
        length = min(self._recipe.allowed(length), self._longest) if self._recipe.fits else self._longest
        while True:
            texts = self._call(captions, length)
            if length == self._longest or max(len(text.states) for text in texts) < length:
                return texts
            length = min(2 * length, self._longest)

    def _call(self, captions: list[str], length: int, prefix: str = "", **arguments: bool) -> list[Text]:
        """The texts that `encode_prompt` gives for captions padded to `length`. `prefix` selects returned values."""
        texts = texts_of(self._recipe, self._returned(self._recipe, captions, length, **arguments), prefix)
        lengths = self._lengths(self._recipe, captions, length)
        for name, recipe in self._recipe.separate.items():
            more = texts_of(recipe, self._returned(recipe, captions, length, **arguments), prefix)
            texts = with_streams(texts, {name: more})
            further = self._lengths(recipe, captions, length)
            lengths = [one + two for one, two in zip(lengths, further, strict=True)]
        return [replace(text, lengths=each) for text, each in zip(texts, lengths, strict=True)]

    def _lengths(self, recipe: EncodingRecipe, captions: list[str], length: int) -> list[tuple[Length, ...]]:
        """The lengths of each of the captions that were encoded last."""
        found: list[tuple[Length, ...]] = [()] * len(captions)
        for name, (tokens, limit) in self._calls.lengths(captions).items():
            if tokens is None:  # this tokenizer reads only some of the captions
                return [self._lengths_of_one(recipe, caption, length) for caption in captions]
            at, key = self._limit(name, limit, length)
            template, most = (at - length, self._longest) if key else (0, at)
            for place, count in enumerate(tokens):
                found[place] += (Length(name, count - template, most, key),)
        return found

    def _lengths_of_one(self, recipe: EncodingRecipe, caption: str, length: int) -> tuple[Length, ...]:
        self._returned(recipe, [caption], length)
        return self._lengths(recipe, [caption], length)[0]

    def _limit(self, name: str, limit: int | None, length: int) -> tuple[int, str | None]:
        """The tokens, with the template, at which captions of `length` are cut, and the key that sets it."""
        if limit is None:
            return length, MAX_TOKENS
        if name == "tokenizer" and self._recipe.padding == "masked" and 0 < length + self._dropped < limit:
            return length + self._dropped, MAX_TOKENS
        return limit, MAX_TOKENS if limit == length or limit != self._probed.get(name, limit) else None

    def _template_dropped(self, empty: Text) -> int:
        """The number of template tokens whose states the pipeline drops. `empty`: the text of the empty caption."""
        tokens, _ = self._calls.lengths([""]).get("tokenizer", (None, None))
        return max(tokens[0] - len(empty.states), 0) if tokens else 0

    def _returned(self, recipe: EncodingRecipe, captions: list[str], length: int, **arguments: bool) -> dict[str, Any]:
        """The values that `encode_prompt` returns, by name, as `by_name`."""
        all_arguments = self._arguments | dict(recipe.arguments) | arguments
        if _LENGTH in all_arguments:
            all_arguments[_LENGTH] = length
        if "batch_size" in all_arguments:
            all_arguments["batch_size"] = len(captions)
        if recipe.length is not None:
            setattr(*self._length_place(recipe.length), length)
        self._calls.clear()
        # A copy, since ZImagePipeline writes its template into the list.
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            returned = self._pipeline.encode_prompt(prompt=list(captions), **all_arguments)
        return by_name(recipe, returned)

    @functools.cached_property
    def _template_tokens(self) -> int:
        """The number of tokens around a caption, which is that of the empty caption."""
        return len(self._encode([""], _PROBE)[0].states) if self._recipe.fits else 0

    def _count_tokens(self, captions: Sequence[str]) -> list[int]:
        """The number of tokens of each caption without template, or of characters if tokens would save nothing."""
        if not self._recipe.fits or not captions:
            return [len(caption) for caption in captions]
        return [len(ids) for ids in self._pipeline.tokenizer(list(captions), add_special_tokens=False).input_ids]

    def _length_asked(self, max_tokens: int | None) -> int:
        """The length at which captions are cut; 0 for a pipeline with a fixed length."""
        length = self._recipe.length
        most = getattr(*self._length_place(length)) if length else self._arguments.get(_LENGTH, 0)
        return int(most if max_tokens is None or not most else max_tokens)

    def _length_place(self, length: str) -> tuple[Any, str]:
        """The object with a recipe's length (the pipeline or a part of it), and its name there."""
        part, _, name = length.rpartition(".")
        return (getattr(self._pipeline, part) if part else self._pipeline), name

    def _check_length(self, max_tokens: int | None) -> None:
        """Raise UserError for a length that the pipeline does not support."""
        allowed = self._recipe.allowed(self._longest)
        if self._longest != allowed:
            raise UserError(
                f"encoders.text.max_tokens is {max_tokens}, and {self._class_name} needs a multiple of "
                f"{self._recipe.multiple}; nearest: {allowed}"
            )
        if max_tokens not in (None, self._longest or self.max_tokens):
            raise UserError(
                f"encoders.text.max_tokens: {self._class_name} has the fixed length {self.max_tokens}; leave it out"
            )


def _tokenizers(pipeline: Any) -> dict[str, PreTrainedTokenizerBase]:
    parts = {
        name: part.tokenizer if isinstance(part, ProcessorTokenizer) else part
        for name, part in pipeline.components.items()
        if name.startswith("tokenizer")
    }
    return {name: part for name, part in parts.items() if isinstance(part, PreTrainedTokenizerBase)}


def _arguments(pipeline: Any, device: torch.device) -> dict[str, Any]:
    """The arguments of `encode_prompt` without the captions."""
    called = inspect.signature(type(pipeline).__call__).parameters
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(pipeline.encode_prompt).parameters
    arguments: dict[str, Any] = {"device": device} if "device" in parameters else {}
    if "do_classifier_free_guidance" in parameters:
        arguments["do_classifier_free_guidance"] = False
    for name, parameter in parameters.items():
        if name in _SET_BY_CALL and name in called:
            arguments[name] = called[name].default
        elif name == "batch_size":
            arguments[name] = 1
        elif parameter.default is parameter.empty and name != "prompt" and parameter.kind is not _MORE:
            arguments[name] = None  # prompt_2, prompt_3: the same prompt
    return arguments


def by_name(recipe: EncodingRecipe, returned: Sequence[Any]) -> dict[str, Any]:
    """The returned values by the names of the recipe, each [B, …].

    Several layers [L, B, T, D] become [B, L T, D]. Joined layers [B, T, L, D] become [B, T, L D].
    """
    given = dict(zip(recipe.gives, returned, strict=True))
    layers = {
        name: each.flatten(2) if recipe.joined else each.transpose(0, 1).flatten(1, 2)
        for name, each in given.items()
        if isinstance(each, torch.Tensor) and each.dim() == 4
    }
    return given | layers


def shape_of(states: torch.Tensor) -> tuple[int, int]:
    """(T, D) of states [B, T, D]."""
    _, tokens, dim = states.shape
    return tokens, dim


def texts_of(recipe: EncodingRecipe, given: Mapping[str, Any], prefix: str = "") -> list[Text]:
    """The texts in the returned values whose names begin with `prefix`."""
    texts = _sequences(given[f"{prefix}states"], given.get(f"{prefix}mask"), recipe.padding)
    pooled = given.get(f"{prefix}pooled")
    if pooled is not None:
        texts = [replace(text, pooled=vector.clone()) for text, vector in zip(texts, pooled, strict=True)]
    streams = {}
    for name in recipe.streams:
        mask = given.get(f"{prefix}{mask_of(name)}")
        streams[name] = _sequences(given[f"{prefix}{name}"], mask, "kept" if mask is None else "masked")
    return with_streams(texts, streams)


def with_streams(texts: Sequence[Text], streams: Mapping[str, Sequence[Text]]) -> list[Text]:
    """The texts with further streams. `streams`: by name, one for each text."""
    return [
        replace(text, streams={**text.streams, **{name: each[i] for name, each in streams.items()}})
        for i, text in enumerate(texts)
    ]


def _sequences(states: Any, mask: torch.Tensor | None, padding: Padding) -> list[Text]:
    """A copy of each caption's states [T, dim], without padding unless it is kept."""
    if padding == "zeroed":
        return [Text(each[: int(each.any(dim=1).sum())].clone()) for each in states]
    if mask is None:
        return [Text(each.clone()) for each in states]
    if padding != "kept":
        return [Text(each[shown.bool()]) for each, shown in zip(states, mask, strict=True)]
    return [Text(each.clone(), unmasked=_count_shown(shown)) for each, shown in zip(states, mask, strict=True)]


def _count_shown(mask: torch.Tensor) -> int:
    """The number of states that a mask [T] shows. Raises UserError if they are not the first ones."""
    shown = int(mask.sum())
    if not mask[:shown].all():
        raise UserError("encoders.text.pipeline: a tokenizer there pads on the left; it must pad on the right")
    return shown
