"""Encodes captions of edits by a pipeline whose text encoder also reads the images to edit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import BatchFeature, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from bigdit.catalog.context import DEGREES
from bigdit.catalog.families import MOST_ASPECT, editor_of, resized
from bigdit.config.data import TextEncoderConfig
from bigdit.encoders.components import KEY, describe, load_text_pipeline, read_index
from bigdit.encoders.folder import DTYPES, check_files, load_from
from bigdit.encoders.protocol import MAX_TOKENS, BatchSize, Images, Keep, as_it_is
from bigdit.errors import UserError
from bigdit.store.tensors import config_digest
from bigdit.store.text import Length, Text

TOKENS = 512
"""The default of max_tokens: the max_sequence_length of both pipelines, although neither uses it."""
_IMAGE = "<|image_pad|>"


class EditTextEncoder:
    """The text encoder of the pipeline in a folder, such as QwenImageEditPipeline.

    Its states are those of the images and of the caption. `max_tokens` is the most of both together. Pipelines do not
    cut captions. Here they are cut, since stores and plans need a limit.
    """

    pooled_dim: int | None = None
    streams: Mapping[str, tuple[int, int]] = {}

    def __init__(self, config: TextEncoderConfig, references: int, device: torch.device | str) -> None:
        assert config.pipeline is not None
        named = read_index(KEY, config.pipeline)["_class_name"]
        most = editor_of(named).references
        if not 0 < references <= most:
            raise UserError(
                f"{KEY}: the text encoder of {config.pipeline}, a {named}, reads the images to edit, and "
                f"data.references is {references}; set it to {'1' if most == 1 else f'1 to {most}'}"
            )
        self._config, self._folder, self._references = config, config.pipeline, references
        self._device, self._size = torch.device(device), BatchSize(1)
        self._pipeline = load_text_pipeline(config.pipeline, DTYPES[config.dtype], self._device, config.files)
        place = config.pipeline / "processor"
        check_files(f"{KEY}: processor", place)
        seeing: Qwen2VLImageProcessorPil = load_from(Qwen2VLImageProcessorPil, f"{KEY}: processor", place)
        self._pipeline.processor = self._processor = _Processor(seeing, self._pipeline.tokenizer)
        self._seen = editor_of(type(self._pipeline).__name__).seen or 0
        self._longest = config.max_tokens or TOKENS
        square = Image.new("RGB", (32, 32))
        probe = self._states("", [square] * references)
        # The states of the template, without its first part, which the pipeline drops.
        seen = self._as_seen([square] * references)
        self._template = len(probe) - sum(self._processor.tokens(each.height, each.width) for each in seen)
        if self._longest <= self._template:
            raise UserError(
                f"{MAX_TOKENS} is {config.max_tokens}, and the template takes {self._template}; more was expected"
            )
        self.dim = int(probe.shape[1])
        self.max_tokens = self._longest + references * self._most_tokens()

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that changes the texts, with digests of the weights."""
        return {
            "class_name": type(self._pipeline).__name__,
            "components": describe(self._config, self._folder, self._pipeline),
            "processor": config_digest(self._processor.described()),
            "dtype": self._config.dtype,
            "stored": self._config.stored,
            "max_tokens": self.max_tokens,
            "max_sequence_length": self._longest,
            "dim": self.dim,
            "pooled_dim": None,
        }

    def modules(self) -> list[nn.Module]:
        """The text encoder, which contains the image encoder."""
        return [part for part in self._pipeline.components.values() if isinstance(part, nn.Module)]

    def encode(self, captions: Sequence[str], kept: Keep = as_it_is, images: Images = ()) -> list[Text]:
        """The texts of captions, each with the images that it edits, one at a time as QwenImageEditPlusPipeline
        needs."""
        pairs = list(zip(captions, images, strict=True))
        return self._size.map(lambda some: [kept(self._text(*pair)) for pair in some], pairs)

    def null(self) -> Text:
        """The text of the empty caption without images. Dropped captions have their own, with their images."""
        return Text(self._states("", None))

    def _text(self, caption: str, images: Sequence[Image.Image]) -> Text:
        tokenizer, limit = self._pipeline.tokenizer, self._longest - self._template
        found = tokenizer(caption, add_special_tokens=False, return_offsets_mapping=True)
        count = len(found["input_ids"])
        cut, at = caption, limit
        while at and len(tokenizer(cut, add_special_tokens=False)["input_ids"]) > limit:
            cut, at = caption[: found["offset_mapping"][at - 1][1]], at - 1
        return Text(self._states(cut, images), lengths=(Length("tokenizer", count, limit, MAX_TOKENS),))

    @torch.no_grad()
    def _states(self, caption: str, images: Sequence[Image.Image] | None) -> torch.Tensor:
        """The states [tokens, dim] of template, images and caption."""
        seen = None if images is None else self._as_seen(images)
        states, _ = self._pipeline.encode_prompt(prompt=[caption], image=seen, device=self._device)
        return states[0].clone()

    def _as_seen(self, images: Sequence[Image.Image]) -> list[Image.Image]:
        """The images in the size that the text encoder reads."""
        sizes = [resized(self._seen, image.height, image.width) for image in images]
        resize = self._pipeline.image_processor.resize
        return [resize(image, *size) for image, size in zip(images, sizes, strict=True)]

    def _most_tokens(self) -> int:
        """The most tokens of an image whose sides differ at most MOST_ASPECT times.

        It is rounded up to a multiple of the most GPUs that share a sample.
        """
        ratios = (MOST_ASPECT ** (step / 2048 - 1) for step in range(4097))
        sizes = {resized(self._seen, 1, ratio) for ratio in ratios}
        most = max(self._processor.tokens(*size) for size in sizes)
        return -(-most // max(DEGREES)) * max(DEGREES)


class _Processor:
    """The interface of Qwen2.5-VL's processor for texts and images, which itself needs torchvision.

    Source: transformers 5.23, Qwen2_5_VLProcessor.
    """

    def __init__(self, images: Qwen2VLImageProcessorPil, tokenizer: PreTrainedTokenizerBase) -> None:
        self._images, self._tokenizer = images, tokenizer

    def described(self) -> dict[str, Any]:
        """The settings that change which pixels are read."""
        names = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor")
        saved = self._images.to_dict()
        return {name: saved[name] for name in names}

    def tokens(self, height: int, width: int) -> int:
        """The number of tokens of an image of this size."""
        merged: int = self._images.merge_size**2
        return int(self._images.get_number_of_image_patches(height, width)) // merged

    def __call__(
        self, text: list[str], images: list[Image.Image] | None, padding: bool, return_tensors: str
    ) -> BatchFeature:
        """The tokens of texts, and the patches of images. A text has one mark for each token of an image."""
        if images is None:
            return BatchFeature(dict(self._tokenizer(text, padding=padding, return_tensors=return_tensors)))
        seen = self._images(images=images, return_tensors=return_tensors)
        counts = iter((seen["image_grid_thw"].prod(dim=1) // self._images.merge_size**2).tolist())
        pieces = (each.split(_IMAGE) for each in text)
        marked = [first + "".join(_IMAGE * next(counts) + piece for piece in rest) for first, *rest in pieces]
        return BatchFeature({**self._tokenizer(marked, padding=padding, return_tensors=return_tensors), **seen})
