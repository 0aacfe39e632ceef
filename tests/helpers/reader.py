"""The folder of somebody who follows the pages: pictures, and runs of theirs as small as can be."""

from __future__ import annotations

import shutil

import warm
import yaml
from commands import BIN, DIGITS, SINGLE, TINY, environment_with

SET = (
    *TINY,
    *SINGLE,
    "train.steps=8",
    "train.ema={widths: [0.05, 0.1]}",
    "train.snapshot_every=1",
    "data.images=pictures",
    "data.part_size=null",
)


def reader_folder(folder, pictures):
    """`pictures`, `my.yaml` with features/my and runs/my, and `run.yaml`, which has two stages."""
    folder.mkdir()
    (folder / "pictures").symlink_to(pictures)
    my = _run(*SET, "data.features=features/my", "output=runs/my")
    stages = [{"data": {"features": "features/my"}, "train": {"steps": steps}} for steps in (2, 3)]
    progressive = _run(*SET, "train.steps=null", "output=runs/progressive") | {"stages": stages}
    for name, document in (("my.yaml", my), ("run.yaml", progressive)):
        (folder / name).write_text(yaml.safe_dump(document))
    return folder


def run_there(folder, words, timeout=300):
    """A page's command of bigdit, in that folder, which has no `exported` and `samples` of the page before;
    stdout, stderr and returncode."""
    for made in ("exported", "samples"):
        shutil.rmtree(folder / made, ignore_errors=True)
    return warm.run([str(BIN / words[0]), *words[1:]], [environment_with({})], folder, timeout)


def _run(*changed):
    """The digits' run with so much changed; null leaves a key out."""
    document = yaml.safe_load(DIGITS.read_text())
    for each in changed:
        path, _, text = each.partition("=")
        *sections, key = path.split(".")
        at = document
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = yaml.safe_load(text)
        if at[key] is None:
            del at[key]
    return document
