"""Masks beside images, and opacity as a mask: from their pixels to the loss's weight."""

import json
import shutil

import numpy as np
import pytest
import torch
from extracting import configured, parts
from PIL import Image
from tiny_sources import gradient, opened, reason, save
from training import run

from bigdit import objectives
from bigdit.catalog.families import LOSS_MASK
from bigdit.dist import World
from bigdit.errors import UserError
from bigdit.extract.extract import extract
from bigdit.loader.order import Order
from bigdit.loader.stream import FeatureStream
from bigdit.objective_spec import DdpmSpec, FlowMatchingSpec
from bigdit.store import FeatureStore
from bigdit.train.monitor.metrics import read_metrics

SIDE = 128


def half(left, right, width=SIDE, height=SIDE):
    """A gray image of two values."""
    values = np.full((height, width), left, np.uint8)
    values[:, width // 2 :] = right
    return Image.fromarray(values)


@pytest.fixture
def images(tmp_path):
    """Two images with masks, one beside it and mirrored by `flip`, and one without; and a source without masks."""
    folder = tmp_path / "images"
    save(folder / "a.png", "a", gradient(SIDE, SIDE))
    half(255, 0).save(folder / "a.mask.png")
    save(folder / "b.png", "b", gradient(SIDE, SIDE))
    save(tmp_path / "plain/c.png", "c", gradient(SIDE, SIDE))
    return [{"path": str(folder), "mask": "file", "flip": True}, str(tmp_path / "plain")]


def batches(root):
    """The masks of each sample, by its index in the source."""
    store = FeatureStore.open(root)
    order = Order(store.index.counts, store.index.shapes, 1, 0)
    stream = FeatureStream(store, World(), order, micro_batch_size=1, grad_accum_steps=1, seed=0, caption_dropout=0.0)
    found = {}
    for step in range(int(store.index.counts.sum())):
        ((shape, (part,), (row,), _),) = stream.samples(step)
        (batch,) = stream.micro_batches(step)
        found[int(store.part(int(part)).rows[shape][row, 0])] = batch.extras[LOSS_MASK][0].float()
    return found


def test_masks_are_cropped_and_mirrored_with_their_images(images, tmp_path, capsys):
    configuration, model = configured(json.dumps(images), tmp_path / "f")
    report = extract(configuration, model)
    assert report.store is not None
    assert (report.store.encoded, report.store.skipped) == (5, [])  # a mask is no image
    found = batches(tmp_path / "f")
    sides = found[0].shape
    left = torch.zeros(sides)
    left[:, : sides[1] // 2] = 1
    assert torch.equal(found[0], left)
    assert torch.equal(found[1], left.flip(1))
    for index in (2, 3, 4):
        assert torch.equal(found[index], torch.ones(sides))
    again = extract(configured(json.dumps(images), tmp_path / "g")[0], model)
    assert again.store is not None
    assert parts(tmp_path / "f") == parts(tmp_path / "g")
    half(0, 255).save(tmp_path / "images/a.mask.png")
    extract(configuration, model)
    assert "2 edited: a.png, a.png mirrored; only changes are encoded" in capsys.readouterr().err
    changed = [mask for index, mask in batches(tmp_path / "f").items() if index >= len(found)]
    assert all(any(torch.equal(mask, each) for mask in changed) for each in (left, left.flip(1)))


def test_opacity_is_a_mask(tmp_path):
    image = gradient(SIDE, SIDE).convert("RGBA")
    image.putalpha(half(255, 51))
    save(tmp_path / "images/a.png", "a", image)
    save(tmp_path / "images/b.png", "b", gradient(SIDE, SIDE))
    source = json.dumps({"path": str(tmp_path / "images"), "mask": "alpha"})
    extract(*configured(source, tmp_path / "f"))
    found = batches(tmp_path / "f")
    assert found[0].unique().tolist() == pytest.approx([0.2, 1], abs=1e-3)
    assert torch.equal(found[1], torch.ones_like(found[1]))


def test_masks_are_found_by_any_name_of_an_image_and_are_none_themselves(tmp_path, capsys):
    def masks(**asked):
        items = opened({"path": str(tmp_path), **asked}).items(0, 9)
        return {item.name: item.load().mask for item in items if item.name[1:] == ".png"}, [
            *(item.name for item in items if item.name[1:] != ".png"),
            *capsys.readouterr().err.splitlines(),
        ]

    for name in "abc":
        save(tmp_path / f"{name}.png", "a caption")
    found, printed = masks(mask="file")
    assert list(found.values()) == [None] * 3
    missing = f"data.images.mask is file, and {tmp_path} holds no x.mask.png beside x.png: all images count in full"
    assert printed == [missing]
    for name, value in (("a.mask.PNG", 10), ("b.Mask.jpg", 20), ("b.mask.png", 30), ("z.mask.png", 40)):
        Image.new("L", (8, 8), value).save(tmp_path / name)
    found, printed = masks(mask="file")
    assert [None if mask is None else mask.getpixel((0, 0)) for mask in found.values()] == [10, 30, None]
    assert printed == []
    _, printed = masks()  # there is no image z, so it is one itself
    assert printed == ["z.mask.png", f"data.images: other files in {tmp_path} are ignored: 3 masks"]


def test_masks_of_another_folder_have_the_paths_of_their_images(tmp_path, capsys, monkeypatch):
    """Also where that folder is within the images'. A changed mask is found as one beside its image is."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "below/b.png", "c.png"):
        save(tmp_path / "images" / name, "a caption")
    for folder in ("masks", "images/masks"):
        (tmp_path / folder / "below").mkdir(parents=True)
        for name, value in (("a.png", 10), ("below/b.webp", 20), ("z.png", 40)):
            Image.new("L", (8, 8), value).save(tmp_path / folder / name, lossless=True)
    within = opened({"path": "images", "mask": "images/masks"}).items(0, 9)
    assert [item.name for item in within] == ["a.jpg", "below/b.png", "c.png"]
    assert within[0].load().mask.getpixel((0, 0)) == 10
    shutil.rmtree("images/masks")
    identity = opened({"path": "images", "mask": "masks"}).identity
    for folder in ("masks/", f"{tmp_path}/masks"):
        found = opened({"path": "images", "mask": folder})
        masks = [item.load().mask for item in found.items(0, 9)]
        assert [None if mask is None else mask.getpixel((0, 0)) for mask in masks] == [10, 20, None]
        assert found.identity == identity
    assert capsys.readouterr().err == ""
    half(10, 20).save("masks/a.png")
    changed = opened({"path": "images", "mask": "masks"})
    assert changed.identity != identity
    assert reason(changed.items(0, 1)[0]) == "mask of 128 × 128 pixels for an image of 8 × 8 pixels"
    (tmp_path / "none").mkdir()
    opened({"path": "images", "mask": "none"})
    line = "data.images.mask is none, and it holds no image with the name of one in images: all images count in full\n"
    assert capsys.readouterr().err == line
    with pytest.raises(
        UserError, match=r"^data\.images\.mask: the folder mask does not exist .*; did you mean masks\?"
    ):
        opened({"path": "images", "mask": "mask"})
    (tmp_path / "mask").touch()
    with pytest.raises(UserError, match=r"^data\.images\.mask: mask is not a folder; file and alpha are known, too$"):
        opened({"path": "images", "mask": "mask"})


@pytest.mark.parametrize("end", ["_mask", "-masklabel", "_Mask"])
def test_masks_named_as_for_other_trainers_are_none_themselves(end, tmp_path, capsys):
    save(tmp_path / "a.png", "a caption")
    save(tmp_path / "b.jpg", "a caption")
    save(tmp_path / "b_mask.png", "a photo of a carnival mask")
    Image.new("L", (8, 8), 10).save(tmp_path / f"a{end}.png")
    Image.new("L", (8, 8), 10).save(tmp_path / f"no{end}.png")
    items = opened({"path": str(tmp_path), "mask": "file"}).items(0, 9)
    assert [item.name for item in items] == ["a.png", "b.jpg", "b_mask.png", f"no{end}.png"]
    first, second = (item.load().mask for item in items[:2])
    assert first.getpixel((0, 0)) == 10
    assert second is None
    capsys.readouterr()
    assert len(opened(str(tmp_path))) == 4
    assert f"other files in {tmp_path} are ignored: 1 mask" in capsys.readouterr().err


def test_bad_masks_are_a_line_each(tmp_path):
    for name in "abcd":
        save(tmp_path / f"{name}.png", "a caption")
    half(255, 0, 8, 9).save(tmp_path / "a.mask.png")
    half(0, 0, 8, 8).save(tmp_path / "d.mask.png")
    (tmp_path / "b.mask.png").write_bytes(b"no image")
    a, b, c, d = opened({"path": str(tmp_path), "mask": "file"}).items(0, 9)
    assert reason(a) == "mask of 8 × 9 pixels for an image of 8 × 8 pixels"
    assert reason(b).startswith("mask: damaged image: ")
    assert c.load().mask is None
    assert reason(d) == "mask is black everywhere: nothing of the image would be trained"
    (tmp_path / "list.csv").write_text("path,caption\na.png,x\n")
    with pytest.raises(UserError, match=r"data\.images\.mask: .*list\.csv is of kind csv; it is for folders of images"):
        opened({"path": str(tmp_path / "list.csv"), "mask": "alpha"})
    with pytest.raises(UserError, match=r"data\.images\.mask is for images, and data\.buckets has frames; leave"):
        opened({"path": str(tmp_path), "mask": "file"}, buckets=[(5, 8, 8)], fps=8)


@pytest.mark.parametrize("objective", [FlowMatchingSpec(), FlowMatchingSpec(weighting="cosmap"), DdpmSpec()])
@pytest.mark.parametrize("sides", [(4, 6), (3, 4, 6)])
def test_the_loss_of_a_place_is_multiplied_by_its_mask(objective, sides):
    latents = torch.randn(2, 5, *sides, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(1))

    def loss(mask):
        prediction = torch.zeros_like(latents, requires_grad=True)
        found = objectives.loss(objective, lambda *_: prediction, latents, [1, 2], torch.float32, 6, mask=mask)
        found.backward()
        return float(found), prediction.grad

    (whole, grads), (ones, same), (part, masked) = loss(None), loss(torch.ones_like(mask)), loss(mask)
    assert ones == pytest.approx(whole)
    assert torch.allclose(same, grads)
    places = mask[:, None] if len(sides) == 2 else mask[:, None, None]
    assert torch.allclose(masked, grads * places)
    assert 0 < part < whole


def test_a_run_with_masks_trains_from_its_cache_as_from_its_images(images, tmp_path):
    settings = [f"data.images={json.dumps(images)}", f"data.buckets=[[{SIDE}, {SIDE}]]", "data.part_size=4"]
    extract(*configured(json.dumps(images), tmp_path / "f", *settings))
    settings += ["train.steps=3", "train.warmup_steps=0", "strategy.micro_batch_size=2", "strategy.global_batch_size=2"]
    losses = {}
    for name, features in (("cached", tmp_path / "f"), ("online", None), ("whole", None)):
        if name == "whole":
            del images[0]["mask"]
            (tmp_path / "images/a.mask.png").unlink()
            settings[0] = f"data.images={json.dumps(images)}"
        assert run(features, tmp_path / name, *settings) == 0
        losses[name] = [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
    assert len(losses["cached"]) == 3
    assert losses["cached"] == losses["online"]
    assert sum(losses["cached"]) < sum(losses["whole"])
