"""T5 from transformers: captions to the hidden states of their tokens, without padding."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, T5Config, T5EncoderModel

from bigdit.catalog.families import too_large
from bigdit.config.data import T5_TOKENS, TextEncoderConfig
from bigdit.encoders.components import full_length, tokenizer_digest
from bigdit.encoders.folder import DTYPES, check_files, load_from, read_config, weights_sample
from bigdit.encoders.protocol import CPU_BATCH, MAX_TOKENS, BatchSize, Images, Keep, as_it_is, encode_by_length
from bigdit.errors import UserError, nearest
from bigdit.store.tensors import config_digest, weights_digest
from bigdit.store.text import Length, Text

_KEY = "encoders.text"
# The arguments of the encoder. Other arguments of T5Config belong to the decoder or the tokenizer.
_ENCODER_ARGUMENTS = tuple(
    name
    for name, parameter in inspect.signature(T5Config.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
    and name not in ("vocab_size", "pad_token_id", "eos_token_id", "is_decoder", "is_encoder_decoder", "use_cache")
    and name not in ("num_decoder_layers", "classifier_dropout")
)


class T5TextEncoder:
    """A T5 encoder in eval mode; `dim` is the width of its hidden states."""

    def __init__(
        self, config: TextEncoderConfig, device: torch.device | str = "cpu", batch_size: int = CPU_BATCH
    ) -> None:
        """Load from `config.path`, or initialise from `config.seed`. Raises UserError if that is not possible."""
        self._device = torch.device(device)
        self._config = config
        model, self._tokenizer, self._described = _from_folder(config) if config.path else _from_seed(config)
        self._model = model.to(self._device, DTYPES[config.dtype]).eval()
        self._size = BatchSize(batch_size)
        self.max_tokens = config.max_tokens or T5_TOKENS
        self.dim = int(model.config.d_model)
        self.pooled_dim: int | None = None
        self.streams: Mapping[str, tuple[int, int]] = {}

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that changes the texts, with digests of the weights."""
        path, dtype = self._config.path, self._config.dtype
        return {
            "class_name": self._config.class_name,
            "config": config_digest(self._described),
            "weights": weights_digest(self._model.state_dict()),
            **({"weights_sample": weights_sample(path, dtype)} if path else {"seed": self._config.seed}),
            "tokenizer": tokenizer_digest(self._tokenizer),
            "dtype": dtype,
            "stored": self._config.stored,
            "max_tokens": self.max_tokens,
            "dim": self.dim,
        }

    def modules(self) -> list[nn.Module]:
        """The encoder."""
        return [self._model]

    def encode(self, captions: Sequence[str], kept: Keep = as_it_is, images: Images = ()) -> list[Text]:
        """The hidden states of captions, of at most max_tokens tokens, without padding."""
        if not captions:
            return []
        ids = self._tokenizer(list(captions), truncation=True, max_length=self.max_tokens).input_ids
        if not all(ids):
            raise UserError(
                f"{_KEY}.path: the tokenizer in {self._config.path} gives the caption {captions[ids.index([])]!r} no "
                "token, not even an end of text; save the tokenizer of the encoder there"
            )

        def encode(places: Sequence[int]) -> list[Text]:
            texts = self._read([ids[place] for place in places])
            return [self._with_length(captions[place], text) for place, text in zip(places, texts, strict=True)]

        return encode_by_length(captions, [len(each) for each in ids], self._size, encode, kept)

    def null(self) -> Text:
        """The text of the empty caption."""
        return self.encode([""])[0]

    def _with_length(self, caption: str, text: Text) -> Text:
        """The text with its length before the cut."""
        tokens = len(text.states)
        if tokens == self.max_tokens:
            tokens = full_length(self._tokenizer, caption)
        return replace(text, lengths=(Length("tokenizer", tokens, self.max_tokens, MAX_TOKENS),))

    @torch.no_grad()
    def _read(self, ids: list[list[int]]) -> list[Text]:
        """The states of each caption's tokens, in one pass."""
        padded = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self._device)
        hidden = self._model(input_ids=padded.input_ids, attention_mask=padded.attention_mask).last_hidden_state
        return [Text(states[mask]) for states, mask in zip(hidden, padded.attention_mask.bool(), strict=True)]


def _from_folder(config: TextEncoderConfig) -> tuple[T5EncoderModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Weights and tokenizer of a folder."""
    assert config.path is not None
    saved = read_config(f"{_KEY}.path", config.path)
    if saved.get("model_type") != "t5":
        raise UserError(f"{_KEY}.path: {config.path} holds a {saved.get('model_type')}, expected a t5")
    check_files(f"{_KEY}.path", config.path)
    tokenizer = load_from(AutoTokenizer, f"{_KEY}.path", config.path)
    model = load_from(T5EncoderModel, f"{_KEY}.path", config.path, dtype=torch.float32)
    return model, tokenizer, saved


def _from_seed(config: TextEncoderConfig) -> tuple[T5EncoderModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Random weights of `config.seed`, and ByT5's tokenizer, whose vocabulary is bytes."""
    arguments = config.config or {}
    problems = [
        f"{key}: T5Config's encoder has no such key; {nearest(key, _ENCODER_ARGUMENTS)}"
        for key in arguments
        if key not in _ENCODER_ARGUMENTS
    ]
    if problems := problems or too_large(arguments):
        raise UserError(*(f"{_KEY}.config.{problem}" for problem in problems))
    tokenizer = ByT5Tokenizer()
    try:
        with torch.random.fork_rng(devices=[]):  # do not change the process's random numbers
            torch.manual_seed(config.seed)
            model = T5EncoderModel(T5Config(**arguments, vocab_size=len(tokenizer)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{_KEY}.config: T5EncoderModel rejects it: {' '.join(str(error).split())}") from None
    return model, tokenizer, arguments
