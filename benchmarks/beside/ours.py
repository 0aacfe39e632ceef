"""bigdit's own side of a row: a run of the row's model, and a store of features that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from recipes import make_store

from bigdit.emulator.interpreter import cuda_python

ROOT = Path(__file__).parents[2]
SIZE = 1024
BATCHES = 4
"""Of different samples in the store: a step reads as it does in a long run."""


def command(row: dict[str, Any], batch: int, steps: int, weights: Path, folder: Path) -> list[str]:
    """`bigdit train` for so many steps of `batch` samples; what it reads and writes lies in `folder`, which is new."""
    folder.mkdir()
    document, config = run(row, batch, steps, weights, folder), folder / "run.yaml"
    arguments = json.loads((weights / "transformer/config.json").read_text())
    make_store(folder / "features", row["model"], document, arguments, each=BATCHES * batch)
    config.write_text(yaml.safe_dump(document))
    main = "from bigdit.cli import main; main()"
    return [str(cuda_python()), "-W", "ignore", "-c", main, "train", "--config", str(config)]


def took_less(folder: Path) -> bool:
    """Whether a step ran out of memory there, and was taken again in smaller micro-batches."""
    return (folder / "run/out_of_memory.json").exists()


def run(row: dict[str, Any], batch: int, steps: int, weights: Path, folder: Path) -> dict[str, Any]:
    """The run's config. What the row does not say is as bigdit has it by itself."""
    return {
        "model": {"name": row["model"], "init_from": str(weights / "transformer")},
        "data": {
            "images": "pictures",  # features are there, so that none is looked at
            "features": str(folder / "features"),
            "buckets": [[SIZE, SIZE]],
            "caption_dropout": 0.0,
        },
        "encoders": {
            "image": {"name": "vae", "class_name": row["vae"], "path": str(weights / "vae")},
            "text": {"pipeline": str(weights)},
        },
        "objective": {"shift": 3.0},
        "strategy": {"micro_batch_size": batch, "optimizer": {"name": "adamw", "weight_decay": 1.0e-4}}
        | row["strategy"],
        "train": {"steps": steps, "checkpoint_every": steps},
        "output": str(folder / "run"),
    }
