"""The text half of a diffusers pipeline in a folder, its encoders and tokenizers, and no transformer and no VAE.

Pipelines put templates around captions and cut them in different places; the calls of their tokenizers show both. It
costs next to nothing: only a text that fills the whole length is tokenized again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from bigdit.documents import read_json
from bigdit.encoders.folder import check_complete, check_files, read_config, weights_sample
from bigdit.encoders.recipes import RECIPES
from bigdit.errors import UserError, nearest
from bigdit.store.tensors import config_digest, lines_digest, weights_digest

KEY = "encoders.text.pipeline"
_INDEX = "model_index.json"
_TEXT = re.compile(r"(text_encoder|tokenizer)(_\d)?")
CLASSES = (
    # Text encoders.
    *("BertModel", "CLIPTextModel", "CLIPTextModelWithProjection", "Gemma2Model", "GemmaModel", "GlmModel"),
    *("LlamaForCausalLM", "LlamaModel", "Mistral3ForConditionalGeneration", "Qwen2Model", "Qwen2_5_VLTextModel"),
    *("Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3Model", "Qwen3VLModel", "Qwen3VLTextModel"),
    *("T5EncoderModel", "T5GemmaEncoder", "UMT5EncoderModel"),
    # Tokenizers.
    *("BertTokenizer", "ByT5Tokenizer", "CLIPTokenizer", "GemmaTokenizer", "LlamaTokenizer", "PreTrainedTokenizer"),
    *("Qwen2Tokenizer", "T5Tokenizer", "TokenizersBackend"),
    # Image encoders and what prepares their images.
    *("CLIPVisionModel", "CLIPVisionModelWithProjection", "CLIPImageProcessor", "CLIPImageProcessorPil"),
)
"""Classes of transformers that parts are loaded as, tokenizers and processors also by their names with `Fast`. Others,
such as AutoModel, may load any class, and code from the folder."""

_ASKED = {"BriaPipeline": ("vae", "transformer"), "HunyuanVideo15Pipeline": ("vae",)}
"""Parts that encode no text, and of which these pipelines ask something all the same."""


class _Absent:
    """No VAE or transformer, as far as pipelines ask one for its channels, its shift and its dtype, there or not."""

    config = SimpleNamespace(block_out_channels=(), latent_channels=None, shift_factor=0.0)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __bool__(self) -> bool:
        return False


def load_text_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The pipeline that `folder` holds, with nothing loaded but what encodes text, in eval mode on `device`.

    Weights come from safetensors and classes from transformers alone. Raises UserError where one is missing or
    incomplete, or the pipeline is not one of RECIPES.
    """
    index = read_index(KEY, folder)
    class_name = index["_class_name"]
    if class_name not in RECIPES:
        raise UserError(f"{KEY}: {folder} holds a {class_name}, which has no recipe; {nearest(class_name, RECIPES)}")
    pipeline = getattr(diffusers, class_name)
    there = {name: entry for name, entry in index.items() if _is_text(name) and isinstance(entry, list) and any(entry)}
    loaded = {name: load_part(KEY, folder, name, entry, dtype, device) for name, entry in there.items()}
    parameters = inspect.signature(pipeline.__init__).parameters
    _check_all(folder, class_name, [name for name in parameters if _is_text(name)], loaded)
    absent: dict[str, Any] = {
        name: None for name, each in parameters.items() if each.default is each.empty and name != "self"
    }
    absent |= dict.fromkeys(_ASKED.get(class_name, ()), _Absent(dtype))
    if "requires_safety_checker" in parameters:  # pictures are not its affair here
        absent["requires_safety_checker"] = False
    try:
        return pipeline(**(absent | RECIPES[class_name].said(index) | loaded))
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{KEY}: {folder} holds no {class_name} that can be made: {' '.join(str(error).split())}"
        ) from None


def describe(folder: Path, pipeline: Any, dtype: str) -> dict[str, Any]:
    """Class and digests of each part that encodes text; all weights are read for it."""
    described: dict[str, Any] = {}
    for name, part in sorted(pipeline.components.items()):
        if part is None or not _is_text(name):
            continue
        if isinstance(part, torch.nn.Module):
            saved = read_config(KEY, folder / name)
            digests = {
                "config": config_digest(saved),
                "weights": weights_digest(part.state_dict()),
                "weights_sample": weights_sample(folder / name, dtype),
            }
        else:
            part = part.tokenizer if isinstance(part, Words) else part
            digests = {"vocabulary": tokenizer_digest(part)}
        described[name] = {"class_name": type(part).__name__, **digests}
    return described


def read_index(setting: str, folder: Path) -> dict[str, Any]:
    """What a pipeline's folder says that it holds; `setting` is named in errors, which are UserErrors."""
    try:
        index = read_json(folder / _INDEX)
        if not isinstance(index["_class_name"], str):
            raise TypeError
    except OSError as error:
        raise UserError(
            f"{setting}: {folder / _INDEX} cannot be read ({error.strerror}); a diffusers pipeline's folder was "
            "expected"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{setting}: {folder / _INDEX} does not name a pipeline's class") from None
    return index


def _is_text(name: str) -> bool:
    return _TEXT.fullmatch(name) is not None


def _check_all(folder: Path, class_name: str, wanted: Sequence[str], loaded: Mapping[str, Any]) -> None:
    """Raise UserError where a pipeline lacks one of several texts, which others can do without."""
    recipe = RECIPES[class_name]
    missing = [name for name in wanted if name not in loaded]
    if missing and (recipe.beside or recipe.streams):
        raise UserError(
            f"{KEY}: {folder / _INDEX} names no {' and no '.join(missing)}, which {class_name} encodes captions by; "
            "save them there with save_pretrained, and name their classes in it"
        )


def load_part(setting: str, folder: Path, name: str, entry: list[str], dtype: torch.dtype, device: torch.device) -> Any:
    """One part, of the class that the index names, if that is one of transformers. Raises UserError, which names
    `setting`."""
    library, class_name = entry if list(map(type, entry)) == [str, str] else ("", str(entry)[:60])
    key, place = f"{setting}: {name}", folder / name
    found = _class_of(library, class_name, place)
    if found is None:
        raise UserError(
            f"{setting}: {folder / _INDEX} asks for {library}.{class_name} as {name}, which is not loaded; "
            f"{nearest(class_name, CLASSES)}"
        )
    check_files(key, place)
    if issubclass(found, transformers.PreTrainedModel):
        read_config(key, place)
    try:
        if not issubclass(found, transformers.PreTrainedModel):
            tokenizer = found  # or an image processor: neither has weights
            return tokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        config = {"config": _inner_config(setting, place)} if found is T5GemmaEncoder else {}
        model, info = found.from_pretrained(
            place,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **config,
        )
    except Exception as error:  # what the libraries make of files that they were not written for is of any class
        raise UserError(f"{key}: {place} cannot be loaded: {' '.join(str(error).split())}") from None
    check_complete(key, place, info)
    config = model.config.get_text_config()
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values of a caption are not asked for again
    return model.to(device).eval()


def _class_of(library: str, class_name: str, place: Path) -> Any:
    """One of CLASSES; None for any other. T5Gemma's encoder alone is a class that transformers does not show, and PRX's
    folder names it as diffusers' own."""
    if class_name == "T5GemmaEncoder":
        return T5GemmaEncoder
    if library != "transformers":
        return None
    if place.name.startswith("tokenizer") and class_name.endswith("Processor"):
        return Words
    return getattr(transformers, class_name, None) if class_name.removesuffix("Fast") in CLASSES else None


def _inner_config(key: str, place: Path) -> Any:
    """The config of T5Gemma's encoder, which its folder has whole or as a part of T5Gemma's."""
    saved = read_config(key, place)
    return transformers.T5GemmaConfig(encoder=saved.get("encoder", saved)).encoder


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
