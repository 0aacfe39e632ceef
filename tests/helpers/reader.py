"""Folders of people who follow the docs: images, and runs as small as possible."""

from __future__ import annotations

import shutil
from pathlib import Path

import warm
import yaml
from commands import BIN, DIGITS, ROOT, SINGLE, TINY, environment_with
from PIL import Image
from plan_files import TINY_KWARGS, plan_of, run_yaml, write
from tiny_videos import moving_square

from bigdit.recipes import recipe

RECIPES = {
    "sana-1600m-a40": ("data.features=features/sana",),
    "sana-1600m-lora-rtx-3060": (
        "data.features=features/my",
        "model.init_from=runs/my/checkpoints/step-00000008",
        "strategy.lora={rank: 2}",
    ),
}
"""Runs that pages extract and train: what a tiny run changes, beside name and output."""

SET = (
    *TINY,
    *SINGLE,
    "train.steps=8",
    "strategy.ema={widths: [0.05, 0.1]}",
    "train.snapshot_every=1",
    "data.images=images",
    "data.part_size=null",
)


def reader_folder(folder, images):
    """A folder with `images`, `my.yaml` for features/my and runs/my, `run.yaml` with two stages, and RECIPES."""
    folder.mkdir()
    (folder / "images").symlink_to(images)
    my = _run(*SET, "data.features=features/my", "output=runs/my")
    stages = [{"data": {"features": "features/my"}, "train": {"steps": steps}} for steps in (2, 3)]
    progressive = _run(*SET, "train.steps=null", "output=runs/progressive") | {"stages": stages}
    of_recipes = {
        name: _run(*SET, "strategy.ema=null", "train.snapshot_every=null", f"output={recipe(name).run['output']}", *own)
        for name, own in RECIPES.items()
    }
    _write(folder, my=my, run=progressive, **of_recipes)
    return folder


def ddpm_folder(folder, reader):
    """`my.yaml` with another objective, over the same cache."""
    folder.mkdir()
    (folder / "features").symlink_to(reader / "features")
    _write(folder, my=_run(*SET, "objective={name: ddpm}", "data.features=features/my", "output=runs/my"))
    return folder


def planned_folder(folder, reader):
    """Two plans for one process, each with its run.yaml."""
    folder.mkdir()
    (folder / "features").symlink_to(reader / "features")
    data = yaml.safe_load(DIGITS.read_text())["data"] | {"features": "features/my"}
    planned = plan_of(kwargs=TINY_KWARGS)
    for name in ("sana", "flux"):
        own = folder / "plans" / name
        own.mkdir(parents=True)
        write(planned, own)
        train = {"steps": 3, "warmup_steps": 1}
        run_yaml(own, planned, train=train, data=data, output=f"runs/{name}", plan="plan.yaml")
    return folder


def classes_folder(folder, images):
    """`my.yaml` for a model of two classes, with a folder of images a class."""
    names = ("n01440764", "n01443537")
    for name in names:
        (folder / "classes" / name).mkdir(parents=True)
    for number, image in enumerate(sorted(Path(images).glob("*.png"))[:32]):
        shutil.copy(image, folder / "classes" / names[number % 2])
    my = _run(
        *("model.kwargs.hidden_size=16", "model.kwargs.depth=1", "model.kwargs.num_classes=2"),
        *("train.steps=2", "train.warmup_steps=0", "strategy.micro_batch_size=8", "data.part_size=null"),
        *("data.images={path: classes, label: folder}", "data.features=features/my", "output=runs/my"),
        of=ROOT / "launch/recipes/digits-classes.yaml",
    )
    _write(folder, my=my)
    return folder


def videos_folder(folder, *changed):
    """`my.yaml` for a video model with few tokens at any size: each token stands for 11 frames of 32 × 32 pixels."""
    (folder / "clips").mkdir(parents=True)
    for number in range(4):
        moving_square(folder / f"clips/{number}.mp4", rightwards=number % 2 == 0)
    my = _run(
        *("model.kwargs.num_attention_heads=1", "model.kwargs.attention_head_dim=12", "model.kwargs.num_layers=1"),
        *("model.kwargs.in_channels=1024", "model.kwargs.out_channels=1024", "model.kwargs.patch_size=[11, 1, 1]"),
        *("data.buckets=[[11, 32, 32]]", "data.fps=16", "encoders.image.factor=32", "data.workers=1"),
        *("train.steps=2", "train.warmup_steps=0", "strategy.micro_batch_size=2", "train.checkpoint_every=null"),
        *("data.part_size=null", "data.images=clips", "data.features=features/my", "output=runs/my", *changed),
        of=ROOT / "launch/recipes/digits-moving.yaml",
    )
    _write(folder, my=my)
    return folder


def first_frames_folder(folder):
    """The same for videos that start from an image, and an image to start from."""
    videos_folder(folder, "model.kwargs.in_channels=2049", "encoders.first_frame={}")  # both latents and the mask
    Image.new("RGB", (32, 32), "orange").save(folder / "fox.png")
    return folder


def run_there(folder, words, timeout=300):
    """Run a page's bigdit command in that folder, after removing `exported` and `samples` of the page before."""
    for made in ("exported", "samples"):
        shutil.rmtree(folder / made, ignore_errors=True)
    return warm.run([str(BIN / words[0]), *words[1:]], [environment_with({})], folder, timeout)


def _write(folder, **documents):
    for name, document in documents.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))


def _run(*changed, of=DIGITS):
    """The digits' run with these keys changed; null removes a key."""
    document = yaml.safe_load(of.read_text())
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
