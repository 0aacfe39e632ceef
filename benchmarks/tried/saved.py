"""What a run saves: the bytes of its checkpoint on disk, and how many checkpoints exist at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bigdit.checkpoint.folder import Saved as Folder
from bigdit.checkpoint.saver import kept_steps
from bigdit.config.run import EXPORTS
from bigdit.config.stages import Stage
from bigdit.engines.state import EMA
from bigdit.recipes import DiskNeed
from bigdit.train.saves import due, is_due


def saved(checkpoint: Folder, output: Path, stages: Sequence[Stage]) -> DiskNeed:
    """A checkpoint of `output` and its export, and how many a run of these stages keeps."""
    steps = [step for each in stages for step in range(each.start + 1, each.end + 1) if due(each.run, step, each.end)]
    ends, train = [each.end for each in stages], stages[-1].run.train
    there = [kept_steps(steps[:count], train.keep_checkpoints, train.keep_every) for count in range(len(steps) + 1)]
    files, kinds = sorted(checkpoint.engine.iterdir()), Counter[str]()
    for file in files:
        kinds += bytes_of_kinds(file)
    return DiskNeed(
        weights_bytes=kinds["weights"],
        optimizer_bytes=kinds["optimizer"],
        ema_bytes=kinds["averages"],
        checkpoint_bytes=sum(file.stat().st_size for file in files),
        checkpoints=len(there[-1]),
        checkpoints_at_once=1 + max(map(len, there[:-1])),
        export_bytes=sum(
            file.stat().st_size for file in (output / EXPORTS / checkpoint.folder.name).rglob("*.safetensors")
        ),
        exports=sum(is_due(each.run, ends, step) for each in stages for step in steps if each.start < step <= each.end),
    )


def bytes_of_kinds(file: Path) -> Counter[str]:
    """Bytes of a checkpoint file's tensors by kind, named as in `engines/state.py`."""
    with open(file, "rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    found = Counter[str]()
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            found[_kind(name.split(".")[0])] += end - begin
    return found


def _kind(first: str) -> str:
    if first.startswith(EMA):
        return "averages"
    return "weights" if first == "master" else "optimizer"
