"""What sorting captions by length saves, against batches in the order given: padded as pipelines do, or little.

A T5 in a PixArt-Σ pipeline, on one core, with captions of about 103 tokens, as Sana's are. All ways give the same
states, which is checked; they are timed in turns, and the medians printed. One caption at a time, as extraction does it
on a CPU, is as fast as batches there: matrix products have enough to do, and nothing is padded.

python benchmarks/data/text_batches.py [CAPTIONS] [ROUNDS]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from bigdit import libraries
from bigdit.config.encoders import TextEncoderConfig
from bigdit.encoders.load import load_text_encoder
from bigdit.store.fp8 import dequantise, quantise
from bigdit.store.text import Text

BATCH, MOST = 16, 300
SIZES = {"d_model": 384, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 6, "feed_forward_proj": "gated-gelu"}

Encode = Callable[[Sequence[str]], list[Text]]


def captions(count: int) -> list[str]:
    """Words of lengths whose logarithm is normal: a byte is a token here, and the end one more."""
    draw = random.Random(0)
    lengths = [min(max(round(draw.lognormvariate(4.47, 0.57)), 8), MOST - 1) for _ in range(count)]
    return ["".join(" " if i % 7 == 6 else draw.choice("abcdefgh") for i in range(n - 1)) + "z" for n in lengths]


def save_pipeline(folder: Path) -> None:
    """The text half of a PixArt-Σ pipeline, with a vocabulary of bytes."""
    torch.manual_seed(0)
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    model = transformers.T5EncoderModel(transformers.T5Config(**SIZES, vocab_size=len(tokenizer)))
    model.save_pretrained(folder / "text_encoder")
    parts = {"tokenizer": "ByT5Tokenizer", "text_encoder": "T5EncoderModel"}
    index = {name: ["transformers", class_name] for name, class_name in parts.items()}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "PixArtSigmaPipeline", **index}))


def padded(folder: Path, longest: bool) -> Encode:
    """In the order given, padded to the pipeline's length or to the longest of each batch."""
    model = transformers.T5EncoderModel.from_pretrained(
        folder / "text_encoder", use_safetensors=True, trust_remote_code=False
    ).eval()
    tokenizer = transformers.ByT5Tokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> list[Text]:
        found = []
        for start in range(0, len(texts), BATCH):
            asked = {"padding": "longest" if longest else "max_length", "max_length": MOST, "truncation": True}
            batch = tokenizer(list(texts[start : start + BATCH]), **asked, return_tensors="pt")
            states = model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
            found += [Text(row[mask]) for row, mask in zip(states, batch.attention_mask.bool(), strict=True)]
        return found

    return encode


def main(count: int = 96, rounds: int = 5) -> None:
    libraries.prepare()
    torch.set_num_threads(1)
    texts = captions(count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pipeline(folder)
        ways: dict[str, Encode] = {
            f"padded to {MOST}": padded(folder, longest=False),
            "padded to the longest": padded(folder, longest=True),
            "sorted by length": load_text_encoder(TextEncoderConfig(pipeline=folder), batch_size=BATCH).encode,
            "one at a time": load_text_encoder(TextEncoderConfig(pipeline=folder), batch_size=1).encode,
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        encoded: dict[str, list[Text]] = {}
        for _ in range(rounds):
            for way, encode in ways.items():
                began = time.perf_counter()
                encoded[way] = encode(texts)
                seconds[way].append(time.perf_counter() - began)
    first, *others = encoded.values()
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert torch.allclose(one.states, two.states, atol=1e-4)

    tokens = sum(len(text.states) for text in first)
    print(f"{count} captions of {tokens / count:.0f} tokens (mean), batches of {BATCH}, medians of {rounds} rounds")
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    slowest = next(iter(medians.values()))
    for way, median in medians.items():
        print(f"{way:22} {1000 * median / count:6.1f} ms a caption  {slowest / median:.2f}×")
    states = torch.cat([text.states for text in first])
    error = (dequantise(*quantise(states), torch.float32) - states).norm() / states.norm()
    print(f"stored: {MOST * count / tokens:.2f}× less without padding; in 8 bits half of that, off by {error:.1%}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
