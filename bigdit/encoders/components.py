"""Loads the text encoders and tokenizers of a diffusers pipeline in a folder, without transformer and VAE.

Pipelines put templates around captions, and cut them in different places. To find both, the calls of their tokenizers
are recorded. This is cheap, since only a text that fills the whole length is tokenized again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import diffusers
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from bigdit.catalog.names import refusal
from bigdit.config.data import EncodersConfig, TextEncoderConfig, VaeCodec
from bigdit.documents import read_json, weight_files
from bigdit.encoders.folder import VOCABULARY, check_files, lacks_vocabulary, load_from, read_config, weights_sample
from bigdit.encoders.host_bytes import WEIGHTS
from bigdit.encoders.recipes import RECIPES
from bigdit.errors import UserError, nearest
from bigdit.store.tensors import config_digest, lines_digest, weights_digest

KEY = "encoders.text.pipeline"
_FILES = "encoders.text.files"
_INDEX, _TOKENIZER = "model_index.json", "tokenizer_config.json"
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
    # Image encoders and their processors.
    *("CLIPVisionModel", "CLIPVisionModelWithProjection", "CLIPImageProcessor", "CLIPImageProcessorPil"),
    *("SiglipVisionModel", "SiglipImageProcessor", "SiglipImageProcessorPil"),
)
"""The allowed classes of transformers; tokenizers and processors also with `Fast`. Others, such as AutoModel, may load
any class, and code from the folder."""

_READ_PARTS = {
    "BriaPipeline": ("vae", "transformer"),
    **dict.fromkeys(("HunyuanVideo15ImageToVideoPipeline", "HunyuanVideo15Pipeline"), ("vae",)),
}
"""Parts that do not encode text, but whose attributes these pipelines read."""


class _Absent:
    """Stands for a missing VAE or transformer. Pipelines read its channels, shift and dtype."""

    config = SimpleNamespace(block_out_channels=(), latent_channels=None, shift_factor=0.0)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __bool__(self) -> bool:
        return False


def load_text_pipeline(
    folder: Path, dtype: torch.dtype, device: torch.device, files: Mapping[str, Path] = MappingProxyType({})
) -> Any:
    """The pipeline in `folder`, with only its text encoders and tokenizers, in eval mode on `device`.

    `files`: weights of text encoders that are not in the folder, by name. Weights come only from safetensors, and
    classes only from transformers. Raises UserError if a part is missing or incomplete, or the pipeline is not in
    RECIPES.
    """
    index = _supported(folder)
    class_name = index["_class_name"]
    pipeline = getattr(diffusers, class_name)
    parts = {name: entry for name, entry in index.items() if is_text(name) and isinstance(entry, list) and any(entry)}
    encoders = [name for name in parts if not name.startswith("tokenizer")]
    if unknown := [name for name in files if name not in encoders]:
        raise UserError(f"{_FILES} has {unknown[0]}, which {folder} has not; {nearest(unknown[0], encoders)}")
    loaded = {
        name: load_part(KEY, folder, name, entry, dtype, device, files.get(name)) for name, entry in parts.items()
    }
    parameters = inspect.signature(pipeline.__init__).parameters
    _check_all(folder, class_name, [name for name in parameters if is_text(name)], loaded)
    absent: dict[str, Any] = {
        name: None for name, each in parameters.items() if each.default is each.empty and name != "self"
    }
    absent |= dict.fromkeys(_READ_PARTS.get(class_name, ()), _Absent(dtype))
    if "requires_safety_checker" in parameters:  # no images are generated
        absent["requires_safety_checker"] = False
    try:
        return pipeline(**(absent | RECIPES[class_name].set_in(index) | loaded))
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{KEY}: no {class_name} can be built from {folder}: {' '.join(str(error).split())}") from None


def describe(config: TextEncoderConfig, folder: Path, pipeline: Any) -> dict[str, Any]:
    """The class and digests of each text encoder and tokenizer. Reads all weights."""
    described: dict[str, Any] = {}
    for name, part in sorted(pipeline.components.items()):
        if part is None or not is_text(name):
            continue
        if isinstance(part, torch.nn.Module):
            saved = read_config(KEY, folder / name)
            digests = {
                "config": config_digest(saved),
                "weights": weights_digest(part.state_dict()),
                "weights_sample": weights_sample(config.weights_of(name), config.dtype),
            }
        else:
            part = part.tokenizer if isinstance(part, ProcessorTokenizer) else part
            digests = {"vocabulary": tokenizer_digest(part)}
        described[name] = {"class_name": type(part).__name__, **digests}
    return described


def read_index(setting: str, folder: Path) -> dict[str, Any]:
    """The index of a pipeline's folder. Raises UserError, which names `setting`."""
    try:
        index = read_json(folder / _INDEX)
        if not isinstance(index["_class_name"], str):
            raise TypeError
    except OSError as error:
        if folder.is_file():
            raise UserError(
                f"{setting}: {folder} is one file, without tokenizer and configuration; give the folder of a diffusers "
                f"pipeline, and the file as {_FILES}, such as {{text_encoder: {folder.name}}}"
            ) from None
        raise UserError(
            f"{setting}: {folder / _INDEX} cannot be read ({error.strerror}); expected the folder of a diffusers "
            "pipeline"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{setting}: {folder / _INDEX} does not name a pipeline's class") from None
    return index


def is_text(name: str) -> bool:
    """Whether a part of a pipeline is a text encoder or a tokenizer."""
    return _TEXT.fullmatch(name) is not None


def _supported(folder: Path) -> dict[str, Any]:
    """The index of a pipeline's folder. Raises UserError if its captions are not encoded here."""
    index = read_index(KEY, folder)
    name = index["_class_name"]
    if name not in RECIPES:
        why = refusal("model", name) or f", which is not supported; {nearest(name, RECIPES)}"
        raise UserError(f"{KEY}: {folder} holds a {name}{why}")
    return index


def _check_all(folder: Path, class_name: str, names: Sequence[str], loaded: Mapping[str, Any]) -> None:
    """Raise UserError if a pipeline with several texts lacks a part. Other pipelines may lack parts."""
    recipe = RECIPES[class_name]
    missing = [name for name in names if name not in loaded]
    if missing and (recipe.separate or recipe.streams):
        raise UserError(
            f"{KEY}: {folder / _INDEX} names no {' and no '.join(missing)}, which {class_name} needs for captions; "
            "save them there with save_pretrained, and name their classes in it"
        )


def lacking(encoders: EncodersConfig) -> list[str]:
    """`encoders.image.path vae/config.json`: each file of the encoders that is missing, with its key; nothing is
    loaded."""
    image, text = encoders.image, encoders.text
    found = []
    if isinstance(image, VaeCodec) and image.path.is_dir():
        found += [f"encoders.image.path {path}" for path in _missing(image.path)]
    if text is None or text.pipeline is None or not text.pipeline.is_dir():
        return found
    index = _supported(text.pipeline)
    parts = [name for name, entry in index.items() if is_text(name) and isinstance(entry, list) and any(entry)]
    for name in parts or ["text_encoder", "tokenizer"]:
        folder, weights = text.pipeline / name, name not in text.files
        tokens = name.startswith("tokenizer")
        absent = _missing_of_tokenizer(folder, index.get(name)) if tokens else _missing(folder, weights)
        found += [f"{KEY} {path}" for path in absent]
    return found


def _missing_of_tokenizer(folder: Path, entry: Any) -> list[Path]:
    """The folder of a tokenizer if it is missing, or the files that it lacks."""
    if not folder.is_dir():
        return [folder]
    kind = _class_of(entry[0], entry[1], folder) if isinstance(entry, list) and len(entry) == 2 else None
    lacks = lacks_vocabulary(kind, folder)
    return [folder / _TOKENIZER] * (not (folder / _TOKENIZER).is_file()) + [folder / VOCABULARY] * lacks


def _missing(folder: Path, weights: bool = True) -> list[Path]:
    """The files that the folder of a model lacks."""
    try:
        files = weight_files(folder, *WEIGHTS)[0] or [folder / WEIGHTS[0]]
    except (OSError, ValueError):  # loading says why
        files = []
    return [each for each in (folder / "config.json", *(files if weights else ())) if not each.exists()]


def load_part(
    setting: str,
    folder: Path,
    name: str,
    entry: list[str],
    dtype: torch.dtype,
    device: torch.device,
    file: Path | None = None,
) -> Any:
    """Load one part of the class in the index, if the class is allowed. `file`: its weights, if not in the folder.

    Raises UserError, which names `setting`.
    """
    library, class_name = entry if list(map(type, entry)) == [str, str] else ("", str(entry)[:60])
    key, place = f"{setting}: {name}", folder / name
    found = _class_of(library, class_name, place)
    if found is None:
        raise UserError(
            f"{setting}: {folder / _INDEX} has {library}.{class_name} as {name}, which is not supported; "
            f"{nearest(class_name, CLASSES)}"
        )
    check_files(key, place)
    if not issubclass(found, transformers.PreTrainedModel):  # a tokenizer or an image processor
        if name.startswith("tokenizer") and place.is_dir() and not (place / _TOKENIZER).is_file():
            raise UserError(f"{key}: {place}: {_TOKENIZER} is missing; fetch the model by `hf download`")
        return load_from(found, key, place)
    read_config(key, place)
    config = {"config": _inner_config(setting, place)} if found is T5GemmaEncoder else {}
    if file is None:
        model = load_from(found, key, place, dtype=dtype, **config)
    else:
        config.setdefault("config", load_from(found.config_class, key, place))
        model = load_from(found, f"{_FILES}.{name}", file, dtype=dtype, **config)
    config = model.config.get_text_config()
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values are not used again
    return model.to(device)


def _class_of(library: str, class_name: str, place: Path) -> Any:
    """A class of CLASSES, or None. transformers does not export T5Gemma's encoder, and PRX's folder names it as a class
    of diffusers."""
    if class_name == "T5GemmaEncoder":
        return T5GemmaEncoder
    if library != "transformers":
        return None
    if place.name.startswith("tokenizer") and class_name.endswith("Processor"):
        return ProcessorTokenizer
    return getattr(transformers, class_name, None) if class_name.removesuffix("Fast") in CLASSES else None


def _inner_config(key: str, place: Path) -> Any:
    """The config of T5Gemma's encoder. The folder has it alone, or within T5Gemma's."""
    saved = read_config(key, place)
    return transformers.T5GemmaConfig(encoder=saved.get("encoder", saved)).encoder


Lengths = tuple[list[int] | None, int | None]
"""The tokens of each caption with its template, and the length at which the tokenizer cuts. Tokens are None if calls do
not show which caption is which. The length is None if other code cuts."""


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the class, the numbered vocabulary and the chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    lines = [f"{number} {token!r}".encode() for token, number in vocabulary]
    if template := getattr(tokenizer, "chat_template", None):
        lines.append(repr(template).encode())
    return lines_digest([type(tokenizer).__name__.encode(), *lines])


class ProcessorTokenizer:
    """The tokenizer of a processor of text, images and videos, with the processor's interface for text.

    The processor itself needs torchvision. Source: transformers 5.23, ProcessorMixin.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls, place: Path, *, local_files_only: bool, trust_remote_code: bool = False
    ) -> ProcessorTokenizer:
        """Load it from a processor's folder."""
        assert not trust_remote_code
        return cls(AutoTokenizer.from_pretrained(place, local_files_only=local_files_only, trust_remote_code=False))

    def __call__(self, text: list[str], images: None = None, videos: None = None, **options: Any) -> Any:
        """Tokenize texts."""
        return self.tokenizer(text, **options)

    def apply_chat_template(
        self, conversations: list[Any], *, tokenize: bool, return_dict: bool, **options: Any
    ) -> Any:
        """Tokenize chats. Adds special tokens unless a text begins with one. Raises UserError without a template."""
        assert tokenize and return_dict  # noqa: PT018
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"encoders.text.pipeline: {self.tokenizer.name_or_path} has no chat_template.jinja, which its "
                "processor needs; save it there"
            )
        prompt = options.pop("add_generation_prompt", False)
        texts = self.tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=prompt)
        first = self.tokenizer.bos_token
        return self(texts, add_special_tokens=first is None or not texts[0].startswith(first), **options)

    def decode(self, tokens: Any) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(tokens)


@dataclass(frozen=True)
class _Call:
    """The texts of one call, their numbers of tokens before the cut, and the length of the cut."""

    texts: Sequence[str]
    tokens: Sequence[int]
    limit: int | None


class TokenizerCalls:
    """Records the calls of tokenizers, by name, since `clear`."""

    def __init__(self, tokenizers: Mapping[str, PreTrainedTokenizerBase]) -> None:
        self._calls: dict[str, list[_Call]] = {name: [] for name in tokenizers}
        for name, tokenizer in tokenizers.items():
            _record(tokenizer, self._calls[name])

    def clear(self) -> None:
        """Forget the calls."""
        for calls in self._calls.values():
            calls.clear()

    def lengths(self, captions: Sequence[str]) -> dict[str, Lengths]:
        """The lengths of these captions in each tokenizer that was called."""
        found: dict[str, Lengths] = {}
        for name, calls in self._calls.items():
            limit = max((call.limit for call in calls if call.limit is not None), default=None)
            if calls:
                tokens = _by_characters(calls, captions) if limit is None else _by_order(calls, len(captions))
                found[name] = tokens, limit
        return found


def full_length(tokenizer: Any, text: str, kind: Any = None, special: bool = True) -> int:
    """The number of tokens of a text without a cut. `kind`: the class of the tokenizer, if it is a subclass."""
    called = kind or type(tokenizer)
    return len(called.__call__(tokenizer, text, verbose=False, add_special_tokens=special)["input_ids"])


def _record(tokenizer: PreTrainedTokenizerBase, calls: list[_Call]) -> None:
    """Make a tokenizer record its calls. It becomes a subclass, since Python looks up `__call__` in classes only."""
    kind: Any = type(tokenizer)

    def call(self: Any, text: Any = None, *args: Any, **options: Any) -> Any:
        found = kind.__call__(self, text, *args, **options)
        texts = [text] if isinstance(text, str) else text
        if isinstance(texts, list) and all(isinstance(each, str) for each in texts):
            limit = options.get("max_length") if options.get("truncation") else None
            special = options.get("add_special_tokens", True)
            tokens = [
                full_length(self, each, kind, special) if count == limit else count
                for each, count in zip(texts, _counts(found), strict=True)
            ]
            calls.append(_Call(texts, tokens, limit))
        return found

    tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _counts(found: Mapping[str, Any]) -> list[int]:
    """The number of tokens of each text of a call, without padding."""
    shown = found["attention_mask"]
    if isinstance(shown, torch.Tensor):
        return [int(count) for count in shown.sum(dim=-1)]
    return [sum(row) for row in (shown if not shown or isinstance(shown[0], list) else [shown])]


def _by_order(calls: Sequence[_Call], count: int) -> list[int] | None:
    """The most tokens of each caption in any call. A call has all captions, or the next one.

    None if calls have only some captions, and one was cut.
    """
    most = [0] * count
    for cutting in (True, False):
        tokens = [each for call in calls if (call.limit is not None) == cutting for each in call.tokens]
        if len(tokens) % count == 0:
            most = [max(most[at], *tokens[at::count]) if tokens else most[at] for at in range(count)]
        elif cutting and any(each > (call.limit or 0) for call in calls if call.limit for each in call.tokens):
            return None
    return most


def _by_characters(calls: Sequence[_Call], captions: Sequence[str]) -> list[int] | None:
    """The numbers of tokens of captions that are tokenized in pieces, caption by caption."""
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
