"""Images that cannot be used: each is skipped by name, or ends a unit, and `bigdit extract` reports it."""

import json
import os
import re

import pytest
from commands import DIGITS, SINGLE, in_process, with_set
from extracting import all_indices, configured, parts
from tiny_sources import save

from bigdit.commands.extract import print_skipped
from bigdit.errors import UserError
from bigdit.extract.extract import extract
from bigdit.store import FeatureStore


def command(images, features, *more):
    settings = with_set([f"data.images={images}", f"data.features={features}", "data.workers=1"])
    return in_process("extract", "--config", DIGITS, *settings, *more)


@pytest.mark.slow
def test_the_command_reports_what_was_skipped_and_why(flawed, tmp_path):
    done = command(flawed, tmp_path / "f", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rate = report["images_per_s"]
    assert rate == pytest.approx(2 / report["seconds"], rel=0.01)  # of those that were encoded
    (shown,) = re.findall(r"4/4 ([\d.]+) images/s 0:00:00", done.stderr)
    assert rate - 0.1 < float(shown) < 4 * rate + 1  # the bar begins once the sources are listed
    assert (report["parts"], report["images"], len(report["workers"])) == (1, 4, 1)
    store = report["store"]
    assert (store["images"], store["encoded"], store["buckets"]) == (4, 2, {"4x4x4": 2})
    assert [(item["index"], item["name"]) for item in store["skipped"]] == [(1, "b.png"), (3, "d.png")]
    assert store["skipped"][0]["reason"].startswith("damaged image: ")
    assert store["skipped"][1]["reason"] == "caption d.txt is missing"
    assert store == json.loads((tmp_path / "f/report.json").read_text())
    assert all_indices(tmp_path / "f") == [0, 2]

    again = command(flawed, tmp_path / "f", "--workers", "2")
    assert f"{tmp_path}/f: 2 of 4 images encoded (2 of 4x4x4)" in again.stdout
    assert "nothing was left to do" in again.stdout
    assert "2 skipped:\n  b.png: damaged image" in again.stdout


def test_a_mended_file_of_a_table_is_found_by_its_content(tmp_path):
    (tmp_path / "list.csv").write_text("image,caption\na.png,a\nb.png,b\n")
    save(tmp_path / "a.png")
    asked = tmp_path / "list.csv", tmp_path / "f"
    assert "a table names" not in command(*asked).stdout
    save(tmp_path / "b.png")
    done = command(*asked)
    assert f"{tmp_path}/f: 1 of 2 images encoded" in done.stdout
    assert done.stdout.endswith("after mending files that a table names, run `bigdit extract --by-content`\n")
    done = command(*asked, "--by-content")
    assert f"{tmp_path}/f: 2 of 2 images encoded" in done.stdout


def test_captions_are_measured_over_parts_and_reported_wherever_a_store_is_shown(tmp_path):
    """Each caption of an image counts, and one that two images share counts twice."""
    captions = {"a": ["a cat", "x" * 50, "y" * 20], "b": ["x" * 50], "c": ["z" * 15], "d": ["z" * 16]}
    for name, texts in captions.items():
        save(tmp_path / f"images/{name}.png", None)
        (tmp_path / f"images/{name}.json").write_text(json.dumps(texts))
    more = with_set(["encoders.text.max_tokens=16", "data.part_size=1"])
    done = command(tmp_path / "images", tmp_path / "f", *more)
    assert done.returncode == 0, done.stderr
    line = (  # a byte is a token, and one ends a caption
        "4 of 6 captions were cut at 16 tokens by tokenizer, the longest has 51; raise encoders.text.max_tokens to "
        "keep more; the first: a.png, b.png, d.png\n"
    )
    line = (
        "captions have 6 to 51 tokens by tokenizer, at most 16 are kept; quartiles 16, 17, 51; the longest: a.png\n"
        + line
    )
    assert line in done.stdout
    report = json.loads((tmp_path / "f/report.json").read_text())
    assert report["captions"] == 6
    cut = {"tokenizer": "tokenizer", "captions": 4, "longest": 51, "limit": 16, "key": "encoders.text.max_tokens"}
    assert report["cut"] == [cut | {"samples": ["a.png", "b.png", "d.png"]}]
    figures = {"shortest": 6, "quartiles": [16, 17, 51], "longest": 51, "longest_of": "a.png"}
    assert report["lengths"] == [{"tokenizer": "tokenizer", "limit": 16, "captions": 6, **figures}]
    shown = in_process("features", "info", tmp_path / "f").stdout
    assert all(" ".join(each.split()) in " ".join(shown.split()) for each in line.splitlines())
    overrides = [*SINGLE, f"data.images={tmp_path}/images", f"data.features={tmp_path}/f"]
    dry = in_process("train", "--config", DIGITS, "--dry-run", *with_set(overrides), *more)
    assert dry.returncode == 0, dry.stderr
    assert "".join(f"note: {each}" for each in line.splitlines(keepends=True)) in dry.stderr


def test_nothing_is_encoded_for_a_run_that_cannot_train(flawed, tmp_path):
    done = command(flawed, tmp_path / "f", "--set", "train.steps=20")
    assert done.returncode == 1
    assert done.stderr == (
        "error: train.warmup_steps is 50, beyond train.steps 20; a run that cannot train is not encoded\n"
    )
    assert not (tmp_path / "f").exists()


def test_each_bad_file_is_one_line_and_the_others_are_encoded(flawed, tmp_path, capfdbinary):
    """Names that are not UTF-8 or steer terminals, a link to itself, and weights that fp32 cannot hold."""
    for name in (b"bytes \xff.png", b"esc \x1b[31m.png", b"line\nbreak [b].png"):
        (flawed / os.fsdecode(name)).write_bytes(b"")
    (flawed / "loop.png").symlink_to("loop.png")
    (flawed / "loop.txt").write_text("a circle")
    (flawed / "c.json").write_text('{"caption": "a", "weights": 1e39}')
    report = extract(*configured(flawed, tmp_path / "f", "data.buckets=[[8, 8]]"), workers=1)
    assert report.store.encoded == 1
    assert {each.name: each.reason for each in report.store.skipped}.items() >= {
        r"bytes \xff.png": r"caption bytes \xff.txt is missing",
        r"esc \x1b[31m.png": r"caption esc \x1b[31m.txt is missing",
        r"line\nbreak [b].png": r"caption line\nbreak [b].txt is missing",
        "loop.png": "path loop.png: Too many levels of symbolic links",
        "c.png": "caption c.json has the weight 1e+39; weights are numbers, 0 or from 1.2e-38 to 3.4e+38",
    }.items()
    assert json.loads((tmp_path / "f/report.json").read_text()) == report.store.model_dump(mode="json")
    assert all_indices(tmp_path / "f") == [0]
    print_skipped(report.store.skipped)
    printed = capfdbinary.readouterr().out
    assert rb"esc \x1b[31m.png: caption esc \x1b[31m.txt is missing" in printed
    assert b"\x1b" not in printed


@pytest.mark.slow
def test_a_source_without_one_usable_image_is_an_error(flawed, tmp_path):
    for caption in flawed.glob("*.txt"):
        caption.unlink()
    with pytest.raises(UserError, match=r"none of 4 images can be used, the first a\.png: caption a\.txt is mis"):
        extract(*configured(flawed, tmp_path / "f", "data.buckets=[[8, 8]]"), workers=1)
    with pytest.raises(UserError, match=r"all images of .* were skipped; report\.json there says why"):
        FeatureStore.open(tmp_path / "f")


@pytest.mark.slow
def test_a_image_that_vanishes_stops_the_unit_and_is_no_skip(flawed, tmp_path):
    (flawed / "a.png").unlink()
    (flawed / "a.png").symlink_to("/proc/self/mem")  # an existing file whose start cannot be read
    with pytest.raises(UserError, match=r"data\.images: .*a\.png cannot be read: Input/output error; run again"):
        extract(
            *configured(f"{{path: {flawed}, follow_links: true}}", tmp_path / "f", "data.buckets=[[8, 8]]"), workers=1
        )
    assert parts(tmp_path / "f") == {}


def test_a_folder_that_cannot_be_made_is_one_line(flawed, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    done = command(flawed, tmp_path / "file/features")
    line = f"error: data.features: cannot write {tmp_path}/file/features: Not a directory; choose another\n"
    assert (done.returncode, done.stderr) == (1, line)
