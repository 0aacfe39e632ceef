"""The workspace that cuDNN takes for each convolution of the catalogue's VAEs and of patch embeddings, on a real GPU.

python benchmarks/on_gpu/convolutions.py shapes
python benchmarks/on_gpu/convolutions.py measure OUT [--seconds 400]
python benchmarks/on_gpu/convolutions.py table
bigdit emulate --gpu h200-sxm -- PYTHON benchmarks/on_gpu/convolutions.py measure OUT
python benchmarks/on_gpu/convolutions.py compare OUT

`shapes` collects the convolutions by running each VAE on meta tensors, and writes convolutions.json beside this file.
`measure` needs a GPU, torch and that file alone; OUT is the file with the bytes filled in. `table` counts the rows by
the copies that the workspace is made of. `compare` holds what an emulated GPU takes against what the real one took.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONVOLUTIONS = Path(__file__).with_suffix(".json")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
LARGEST = 3 << 29
"""Elements of an input that is still measured: 3 GiB in 16 bits."""


def patches() -> Iterator[dict[str, Any]]:
    """Patch embeddings and feed-forward convolutions of transformers; their gradients are measured too."""
    embeddings = [
        (4, 1152, 128, 2), (4, 1152, 32, 2), (4, 1024, 32, 2), (4, 768, 32, 4), (4, 1152, 64, 2), (4, 1408, 128, 2),
        (16, 1536, 128, 2), (16, 2432, 128, 2), (16, 3072, 128, 2), (32, 2240, 32, 1), (32, 1152, 32, 1),
        (3, 768, 224, 16), (3, 1152, 256, 16),
    ]  # fmt: skip
    videos = [(16, 1536, 21, 60, 104), (16, 5120, 21, 60, 104), (16, 3072, 13, 60, 90), (48, 3072, 13, 44, 80)]
    for samples in (1, 2, 4, 8, 16):
        for channels, width, side, patch in embeddings:
            yield _row([samples, channels, side, side], [width, channels, patch, patch], [patch] * 2, [0] * 2)
        for channels, width, *extent in videos if samples <= 2 else ():
            yield _row([samples, channels, *extent], [width, channels, 1, 2, 2], [1, 2, 2], [0] * 3)
        for width in (1120, 2240):
            inner = 5 * width // 2
            for side in (16, 32, 64):
                yield _row([samples, width, side, side], [2 * inner, width, 1, 1], [1] * 2, [0] * 2)
                yield _row([samples, 2 * inner, side, side], [2 * inner, 1, 3, 3], [1] * 2, [1] * 2, 2 * inner)
                yield _row([samples, inner, side, side], [width, inner, 1, 1], [1] * 2, [0] * 2)


def _row(x: list[int], weight: list[int], stride: list[int], padding: list[int], groups: int = 1) -> dict[str, Any]:
    return {"x": x, "weight": weight, "stride": stride, "padding": padding, "groups": groups, "trained": True}


def shapes() -> None:
    """Write the convolutions of all VAEs, encoding and decoding, and those of `patches`."""
    import diffusers
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from bigdit.catalog.models import models
    from bigdit.encoders.latents import VIDEO_VAES

    found: dict[str, dict[str, Any]] = {}

    class Collect(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op is torch.ops.aten.convolution.default and not args[6]:
                x, weight, _, stride, padding, _, _, _, groups = args
                row = _row([*x.shape], [*weight.shape], [*stride], [*padding], groups) | {"trained": False}
                found.setdefault(json.dumps(row), row)
            return op(*args, **(kwargs or {}))

    vaes = {json.dumps([m.vae.class_name, m.vae.kwargs]): m.vae for m in models() if m.vae and m.vae.kwargs is not None}
    for spec in vaes.values():
        with torch.device("meta"):
            vae = getattr(diffusers, spec.class_name)(**spec.kwargs).to(torch.bfloat16).eval()
        video = spec.class_name in VIDEO_VAES
        videos = [(1, 3, 17, 480, 832), (1, 3, 9, 704, 1280), (1, 3, 1, 512, 512), (1, 3, 1, 1024, 1024)]
        images = [(1, 3, 256, 256), (1, 3, 512, 512), (8, 3, 512, 512), (1, 3, 1024, 1024), (1, 3, 832, 1216)]
        for size in videos if video else images:
            with torch.no_grad(), Collect():
                encoded = vae.encode(torch.empty(size, device="meta", dtype=torch.bfloat16))
                latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
                if spec.class_name != "AutoencoderKLLTXVideo":  # its decoder wants a timestep
                    vae.decode(latents)
    _write(CONVOLUTIONS, [*found.values(), *patches()])


def measure(out: Path, seconds: float) -> None:
    """Fill in, for each dtype, the bytes that a convolution and its gradients take beyond their results."""
    import torch

    until = time.perf_counter() + seconds
    rows = [row for row in json.loads(CONVOLUTIONS.read_text()) if math.prod(row["x"]) < LARGEST]
    where = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    for dtype in DTYPES:
        for row in rows:
            if time.perf_counter() > until:
                break
            row |= {dtype: _measured(row, dtype)} | where
    _write(out, rows)


def _measured(row: dict[str, Any], dtype: str) -> dict[str, int] | str:
    import torch

    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    like = {"device": "cuda", "dtype": getattr(torch, DTYPES[dtype])}
    extent = len(row["x"]) - 2
    settings = (row["stride"], row["padding"], [1] * extent, False, [0] * extent, row["groups"])

    def beyond(call: Any) -> tuple[int, Any]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        stats = torch.cuda.memory_stats()
        return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"], result

    try:
        x, weight = torch.empty(row["x"], **like), torch.empty(row["weight"], **like)
        workspace, y = beyond(lambda: torch.ops.aten.convolution(x, weight, None, *settings))
        bytes_of = {"forward": workspace}
        for name, mask in (("input", [True, False, False]), ("weight", [False, True, False])) if row["trained"] else ():
            gradient = torch.empty_like(y)
            bytes_of[name], _ = beyond(
                lambda g=gradient, m=mask: torch.ops.aten.convolution_backward(g, x, weight, None, *settings, m)
            )
        return bytes_of
    except RuntimeError as error:
        return str(error).splitlines()[0][:120]


def copies(row: dict[str, Any], dtype: str) -> int:
    """Bytes of channels-last copies of input, weight and result, channels in multiples of 16 bytes."""
    size, multiple = (2, 8) if dtype in ("bf16", "fp16") else (4, 4)
    x, weight = row["x"], row["weight"]
    result = [
        (n + 2 * p - k) // s + 1
        for n, p, k, s in zip(x[2:], row["padding"], weight[2:], row["stride"], strict=True)
    ]  # fmt: skip

    def padded(shape: list[int]) -> int:
        return size * shape[0] * (-(-shape[1] // multiple) * multiple) * math.prod(shape[2:])

    outputs = -(-weight[0] // multiple) * multiple
    return padded(x) + padded([outputs, *weight[1:]]) + padded([x[0], weight[0], *result])


def table() -> None:
    """Print, for each dtype and kind of convolution, how many rows follow each rule."""
    counts: Counter[tuple[str, ...]] = Counter()
    for row in json.loads(CONVOLUTIONS.read_text()):
        for dtype in DTYPES:
            if isinstance(found := row.get(dtype), dict):
                counts[dtype, _kind(row), _rule(found["forward"], copies(row, dtype))] += 1
    print("| dtype | convolution | workspace | rows |\n| --- | --- | --- | --- |")
    for key, count in sorted(counts.items()):
        print(f"| {' | '.join(key)} | {count} |")


def compare(out: Path) -> None:
    """Print, for each dtype and direction, in how many rows an emulated GPU takes what the real one took."""
    shape = ("x", "weight", "stride", "padding", "groups")
    found = {str([row[key] for key in shape]): row for row in json.loads(out.read_text())}
    counts: Counter[tuple[str, ...]] = Counter()
    for row in json.loads(CONVOLUTIONS.read_text()):
        emulated = found[str([row[key] for key in shape])]
        for dtype in DTYPES:
            for way, taken in row[dtype].items():
                off = abs(taken - emulated[dtype][way])
                grade = "within 512 bytes" if off < 512 else "within 1 %" if off <= 0.01 * taken else "off"
                counts[dtype, way, grade] += 1
    print("| dtype | of | workspace | rows |\n| --- | --- | --- | --- |")
    for key, count in sorted(counts.items()):
        print(f"| {' | '.join(key)} | {count} |")


def _kind(row: dict[str, Any]) -> str:
    if row["groups"] > 1:
        return "grouped"
    if math.prod(row["weight"][2:]) == 1:
        return "1 × 1"
    narrow = ", fewer than 8 input channels" if row["weight"][1] < 8 else ""
    if row["weight"][2:] == row["stride"]:
        return f"patches{narrow}"
    return f"{len(row['stride'])}D{narrow}"


def _rule(workspace: int, copied: int) -> str:
    if workspace == 0:
        return "none"
    if 0 <= workspace - copied < 200:
        return "copies of input, weight and result"
    return "these and at most 17 MiB" if 0 <= workspace - copied < 17 << 20 else "other"


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("shapes")
    measuring = what.add_parser("measure")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--seconds", type=float, default=400.0)
    what.add_parser("table")
    what.add_parser("compare").add_argument("out", type=Path)
    options = parser.parse_args()
    match options.what:
        case "shapes":
            shapes()
        case "measure":
            measure(options.out, options.seconds)
        case "table":
            table()
        case "compare":
            compare(options.out)


if __name__ == "__main__":
    main()
