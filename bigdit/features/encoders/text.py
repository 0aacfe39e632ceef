"""Text encoders from transformers: captions to the hidden states of their tokens, without padding."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, T5Config, T5EncoderModel

from bigdit.config.run import TextEncoderConfig
from bigdit.errors import UserError, nearest
from bigdit.features.digest import config_digest, lines_digest, weights_digest
from bigdit.features.encoders.folder import check_complete, read_config
from bigdit.features.text import Text

_KEY = "encoders.text"
_BATCH = 32  # captions that are encoded at once
# What an encoder of a given width may be asked for; the rest of T5Config is the decoder's or the tokenizer's.
_ENCODER_ARGUMENTS = tuple(
    name
    for name, parameter in inspect.signature(T5Config.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
    and name not in ("vocab_size", "pad_token_id", "eos_token_id", "is_decoder", "is_encoder_decoder", "use_cache")
    and name not in ("num_decoder_layers", "classifier_dropout")
)


class T5TextEncoder:
    """A T5 encoder in fp32 and eval mode; `dim` is the width of its hidden states."""

    def __init__(self, config: TextEncoderConfig, device: torch.device | str = "cpu") -> None:
        """Load from `config.path`, or draw from `config.seed`. Raises UserError where that is not possible."""
        self._device = torch.device(device)
        model, self._tokenizer, described = _from_folder(config) if config.path else _from_seed(config)
        self._model = model.to(self._device).eval()
        self.max_tokens = config.max_tokens
        self.dim = int(model.config.d_model)
        self.pooled_dim = None
        self.identity = {
            "class_name": config.class_name,
            "config": config_digest(described),
            "weights": weights_digest(model.state_dict()),
            "tokenizer": _tokenizer_digest(self._tokenizer),
            "max_tokens": config.max_tokens,
            "dim": self.dim,
        }

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> list[Text]:
        """Captions to hidden states fp32 of at most max_tokens tokens; padding is masked and cut off."""
        order = sorted(range(len(captions)), key=lambda i: (len(captions[i]), i))  # little padding in a batch
        encoded: dict[int, Text] = {}
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            tokens = self._tokenizer(
                [captions[i] for i in chosen],
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            ).to(self._device)
            hidden = self._model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
            for i, states, mask in zip(chosen, hidden, tokens.attention_mask.bool(), strict=True):
                encoded[i] = Text(states[mask])
        return [encoded[i] for i in range(len(captions))]

    def null(self) -> Text:
        """The text of the empty caption."""
        return self.encode([""])[0]


def _from_folder(config: TextEncoderConfig) -> tuple[T5EncoderModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Weights and tokenizer of save_pretrained, from safetensors only: a pickle can run code."""
    assert config.path is not None
    saved = read_config(f"{_KEY}.path", config.path)
    if saved.get("model_type") != "t5":
        raise UserError(f"{_KEY}.path: {config.path} holds a {saved.get('model_type')}, and a t5 was expected")
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, local_files_only=True)
        model, info = T5EncoderModel.from_pretrained(
            config.path, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{_KEY}.path: {config.path} cannot be loaded: {' '.join(str(error).split())}") from None
    check_complete(f"{_KEY}.path", config.path, info)
    return model, tokenizer, saved


def _from_seed(config: TextEncoderConfig) -> tuple[T5EncoderModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Random weights of `config.seed`, and ByT5's tokenizer, whose vocabulary is the bytes."""
    arguments = config.config or {}
    wrong = [key for key in arguments if key not in _ENCODER_ARGUMENTS]
    if wrong:
        raise UserError(
            *(
                f"{_KEY}.config.{key}: T5Config's encoder has no such key; {nearest(key, _ENCODER_ARGUMENTS)}"
                for key in wrong
            )
        )
    tokenizer = ByT5Tokenizer()
    try:
        with torch.random.fork_rng(devices=[]):  # the process's own random numbers go on undisturbed
            torch.manual_seed(config.seed)
            model = T5EncoderModel(T5Config(**arguments, vocab_size=len(tokenizer)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{_KEY}.config: T5EncoderModel refuses it: {' '.join(str(error).split())}") from None
    return model, tokenizer, arguments


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """The class and the numbered vocabulary."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    lines = (f"{number} {token!r}".encode() for token, number in vocabulary)
    return lines_digest([type(tokenizer).__name__.encode(), *lines])
