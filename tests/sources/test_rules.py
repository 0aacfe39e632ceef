"""A source's rules for captions: one for all, text before and after, variants of tags. Crops and mirror images."""

import json
import pickle

import numpy as np
import pytest
from commands import DIGITS, in_process, with_set
from PIL import Image
from tiny_sources import gradient, opened, save, snapshot, texts, write_tar

from bigdit.config.stages import load_run
from bigdit.encoders.latents import bucket_pixels
from bigdit.errors import UserError

TAGS = ["one", "two", "three", "four", "five"]


def items(images, **more):
    source = opened(images, **more)
    return source.identity["digest"], pickle.loads(pickle.dumps(source.items(0, 99)))


def test_one_caption_for_all_needs_none_beside_the_images(tmp_path):
    save(tmp_path / "folder/a.png", None)
    save(tmp_path / "folder/b.png", "its own")
    (tmp_path / "list.csv").write_text("path\nfolder/a.png\n")
    snapshot(tmp_path / "parquet", "0.parquet", [1])
    write_tar(tmp_path / "0.tar", [("a.png", (tmp_path / "folder/a.png").read_bytes())])
    for name in ("folder", "list.csv", "parquet", "0.tar"):
        source = {"path": str(tmp_path / name), "caption": "a dog"}
        digest, found = items(source, features=tmp_path / "features")
        assert {tuple(texts(item)) for item in found} == {(("a dog", 1),)}
        assert items(source | {"caption": "a cat"}, features=tmp_path / "features")[0] != digest
    digest, _ = items({"path": str(tmp_path / "folder"), "caption": "a dog"})
    (tmp_path / "folder/b.txt").write_text("another that is not read")
    assert items({"path": str(tmp_path / "folder"), "caption": "a dog"})[0] == digest


def test_text_before_and_after_each_caption_of_one_source(tmp_path):
    for name in ("one", "two"):
        save(tmp_path / name / "a.png", None)
        (tmp_path / name / "a.json").write_text('["short", "long"]')
    ruled = {"path": str(tmp_path / "one"), "caption_prefix": "sks, ", "caption_suffix": "."}
    digest, (one, two) = items([ruled, str(tmp_path / "two")])
    assert texts(one) == [("sks, short.", 1), ("sks, long.", 1)]
    assert texts(two) == [("short", 1), ("long", 1)]
    assert items([str(tmp_path / "one"), str(tmp_path / "two")])[0] != digest


def test_letters_that_are_joined_to_captions_are_a_line(tmp_path, capsys):
    save(tmp_path / "a.png", "a cat")
    for rules, line in (
        ({"caption_prefix": "sks"}, "caption_prefix 'sks' is joined to captions without a space; write \"sks \""),
        ({"caption_suffix": "oil"}, "caption_suffix 'oil' is joined to captions without a space; write \" oil\""),
        ({"caption_prefix": "sks ", "caption_suffix": ", oil"}, ""),
    ):
        opened({"path": str(tmp_path), **rules})
        assert capsys.readouterr().err == (line and f"data.images.{line}\n")


def variants(tmp_path, text="one, two, three, four, five", prefix="", **tags):
    save(tmp_path / "a.png", text)
    _, (item,) = items({"path": str(tmp_path), "tags": tags, "caption_prefix": prefix})
    assert sum(weight for _, weight in texts(item)) == pytest.approx(1)
    return [text for text, _ in texts(item)]


def test_tags_are_shuffled_and_dropped_by_seed(tmp_path):
    found = variants(tmp_path, variants=6, keep=2)
    assert found[0] == ", ".join(TAGS)
    assert len(set(found)) == len(found) > 3  # each once
    for text in found:
        assert text.split(", ")[:2] == TAGS[:2]
        assert sorted(text.split(", ")) == sorted(TAGS)
    assert found == variants(tmp_path, variants=6, keep=2)
    assert found != variants(tmp_path, variants=6, keep=2, seed=1)
    assert variants(tmp_path, variants=6, shuffle=False) == [", ".join(TAGS)]
    many = variants(tmp_path, variants=1000, keep=1, dropout=0.5)
    assert all(text.split(", ")[0] == "one" for text in many)
    _, (item,) = items({"path": str(tmp_path), "tags": {"variants": 1000, "keep": 1, "dropout": 0.5}})
    left = sum((len(text.split(", ")) - 1) * weight for text, weight in texts(item))
    assert left == pytest.approx(4 / 2, abs=0.15)
    assert "" not in variants(tmp_path, variants=50, dropout=0.95)


def test_separators_prefixes_and_texts_without_tags(tmp_path):
    assert set(variants(tmp_path, "a; b", variants=20, separator=";", prefix="sks ")) == {"sks a; b", "sks b; a"}
    assert variants(tmp_path, "a sentence", variants=20, dropout=0.5) == ["a sentence"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"tags": {"variants": 0}}, "data.images.tags.variants is 0, and 1 or more was expected"),
        ({"tags": {"dropout": 1}}, "data.images.tags.dropout is 1, and a number below 1 was expected"),
        ({"caption": " "}, "data.images: caption is blank; leave it out, and captions of their own are read"),
        (
            {"tags": {"separator": ""}},
            "data.images.tags.separator is '', and a text of 1 or more characters was expected",
        ),
        ({"path": ""}, "data.images.path: it is empty; a path was expected, and . is the current folder"),
        ({"caption": "a", "captions": "b"}, "caption replaces the captions of all images, and captions names columns"),
        ({"caption_prefix": "a", "label": "folder"}, "caption_prefix and label are both set, and a model takes one"),
        ({"instance_prompt": "a"}, "data.images.instance_prompt: unknown key; did you mean data.images.caption?"),
    ],
)
def test_rules_that_do_not_go_together_are_one_line(source, problem):
    with pytest.raises(UserError) as error:
        load_run(DIGITS, [f"data.images={json.dumps({'path': 'x'} | source)}"])
    assert problem in str(error.value)
    assert len(error.value.problems) == 1


def test_crops_and_mirror_images_are_samples_of_their_own(tmp_path):
    """Only for one source: the other is unchanged. They are encoded as they are shown."""
    for name in ("one", "two"):
        for at in range(3):
            save(tmp_path / f"{name}/{at}.png", f"caption {at}", gradient(24, 8).point(lambda value, at=at: value + at))
    plain = [str(tmp_path / "one"), str(tmp_path / "two")]
    varied = [{"path": plain[0], "flip": True, "crops": 3, "caption_prefix": "sks "}, plain[1]]
    source = opened(varied)
    assert len(source) == 3 * 6 + 3
    assert [len(source.items(*span)) for span in ((0, 1), (5, 13), (17, 19), (20, 99))] == [1, 8, 2, 1]
    found = pickle.loads(pickle.dumps(source.items(0, 99)))
    assert [item.index for item in found] == list(range(21))
    assert [item.name.removeprefix(f"{plain[0]}: ") for item in found[6:12]] == [
        "1.png cropped at 0",
        "1.png cropped at 0.5",
        "1.png cropped at 1",
        "1.png cropped at 0 mirrored",
        "1.png cropped at 0.5 mirrored",
        "1.png cropped at 1 mirrored",
    ]
    whole = np.asarray(Image.open(tmp_path / "one/1.png")).transpose(2, 0, 1)
    samples = [item.load() for item in found[6:12]]
    pixels = [bucket_pixels(each.image, [(8, 8)], "rgb", each.fit)[1] for each in samples]
    for number, start in enumerate((0, 8, 16)):
        assert np.array_equal(pixels[number], whole[:, :, start : start + 8])
        assert np.array_equal(pixels[3 + number], whole[:, :, ::-1][:, :, start : start + 8])
    assert {text for item in found[6:12] for text in texts(item)} == {("sks caption 1", 1)}
    assert sum(entry.count for entry in source.entries()) == 21
    identities = source.identity["sources"]
    assert identities[0] != opened(plain).identity["sources"][0]
    assert identities[1] == opened(plain).identity["sources"][1]
    assert opened(plain, min_side=9).identity["digest"] == opened(plain).identity["digest"]  # of their files
    assert opened(plain, min_side=9).identity["sources"] != opened(plain).identity["sources"]


@pytest.mark.parametrize("form", ["folder", "list"])
def test_references_are_mirrored_with_their_image(tmp_path, form):
    save(tmp_path / "a.png", "turn it", gradient(16, 8))
    names = ["a.reference.png", "a.reference2.png"]
    for at, name in enumerate(names):
        gradient(16, 8).rotate(180).point(lambda value, at=at: value + at).save(tmp_path / name)
    (tmp_path / "list.jsonl").write_text(json.dumps({"image": "a.png", "caption": "turn it", "reference": names}))
    path = str(tmp_path if form == "folder" else tmp_path / "list.jsonl")
    whole, mirrored = (item.load() for item in opened({"path": path, "flip": True}, references=2).items(0, 9))
    assert len(whole.references) == len(mirrored.references) == 2
    for one, other in zip((whole.image, *whole.references), (mirrored.image, *mirrored.references), strict=True):
        assert np.array_equal(np.asarray(one)[:, ::-1], np.asarray(other))


def test_frames_of_a_video_are_mirrored_alike(tmp_path):
    frames = [gradient(16, 8), gradient(16, 8).transpose(Image.Transpose.FLIP_TOP_BOTTOM)]
    save(tmp_path / "a.gif", "a", frames[0], save_all=True, append_images=frames[1:], duration=100)
    source = opened({"path": str(tmp_path), "flip": True}, buckets=[(2, 8, 16)], fps=10)
    one, other = (list(item.load().image) for item in source.items(0, 2))
    assert len(one) == len(other) == 2
    for frame, mirrored in zip(one, other, strict=True):
        assert np.array_equal(np.asarray(frame)[:, ::-1], np.asarray(mirrored))


def test_small_images_are_skipped_by_extraction_and_variants_are_encoded(tmp_path):
    save(tmp_path / "in/a.png", "a", gradient(24, 8))
    save(tmp_path / "in/b.png", "b", gradient(7, 7))
    source = json.dumps({"path": str(tmp_path / "in"), "flip": True})
    settings = [f"data.images={source}", f"data.features={tmp_path / 'f'}", "data.workers=1", "data.min_side=8"]
    done = in_process("extract", "--config", DIGITS, *with_set(settings))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "f/report.json").read_text())
    assert (report["images"], report["encoded"]) == (4, 2)
    assert [each["name"] for each in report["skipped"]] == ["b.png", "b.png mirrored"]
    assert report["skipped"][0]["reason"] == "image of 7 × 7 pixels; data.min_side is 8"
