"""The other side of a row: a script of a project's checkout, as it stands, on pictures of noise."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PICTURES = 4
"""Each is taken `--repeats` times: a multiple of every batch."""


def command(document: dict[str, Any], row: dict[str, Any], way: str, **places: object) -> list[str]:
    """The script's command line; `places` are what its arguments name in braces."""
    text = re.sub(r"@([\w-]+)", lambda name: document["arguments"][name[1]], f"@{row['project']} {row['theirs'][way]}")
    return [row["script"], "--pretrained_model_name_or_path", row["repository"], *shlex.split(text.format(**places))]


def make_pictures(folder: Path, size: int) -> None:
    """`pictures/` without captions, `captioned/` with one each, and captioned.json, which has finetrainers take it."""
    draw = np.random.default_rng(0)
    for name in ("pictures", "captioned"):
        (folder / name).mkdir(parents=True)
        for number in range(PICTURES):
            pixels = draw.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    lines = [json.dumps({"file_name": f"{number}.png", "caption": f"noise {number}"}) for number in range(PICTURES)]
    (folder / "captioned/metadata.jsonl").write_text("\n".join(lines))
    captioned = {"data_root": str(folder / "captioned"), "dataset_type": "image", "reshape_mode": "bicubic"}
    named = {"datasets": [captioned | {"image_resolution_buckets": [[size, size]]}]}
    (folder / "captioned.json").write_text(json.dumps(named))
