"""Sources of several kinds through `bigdit extract` into one store, and its report of skipped samples."""

import io
import json

import pytest
from commands import DIGITS, ROOT, in_process, with_set
from PIL import Image
from stores import read_rows
from tiny_sources import png, snapshot, write_tar
from tiny_videos import video

from bigdit.store import FeatureStore


@pytest.fixture
def sources(tmp_path):
    """A folder, a CSV, tars and Parquet: fifteen images, four of which cannot be used."""
    (tmp_path / "folder").mkdir()
    for number in range(3):
        (tmp_path / f"folder/{number}.png").write_bytes(png(number))
        (tmp_path / f"folder/{number}.txt").write_text(f"number {number}")
    (tmp_path / "folder/1.txt").unlink()
    rows = "folder/0.png,a zero,an early zero\nfolder/9.png,a nine,a late nine\n"
    (tmp_path / "list.csv").write_text(f"path,short,long\n{rows}")
    wide = io.BytesIO()
    Image.new("L", (12, 8), 77).save(wide, "png")
    good = [("a.png", png(3)), ("a.json", b'["three", "a three"]')]
    bad = [("b.png", png(4)[:50]), ("b.txt", b"four"), ("c.txt", b"no image")]
    write_tar(tmp_path / "tars/0.tar", [*good, *bad])
    write_tar(tmp_path / "tars/1.tar", [("d.png", wide.getvalue()), ("d.txt", b"wide")])
    snapshot(tmp_path / "table", "a.parquet", range(5, 11))
    return [
        str(tmp_path / "folder"),
        {"path": str(tmp_path / "list.csv"), "captions": {"short": 1, "long": 2}},
        str(tmp_path / "tars/{0..1}.tar"),
        str(tmp_path / "table"),
    ]


@pytest.mark.slow
def test_a_store_of_every_kind_of_source(sources, tmp_path):
    root = tmp_path / "features"
    settings = [f"data.images={json.dumps(sources)}", f"data.features={root}", "data.part_size=4", "data.workers=1"]
    done = in_process("extract", "--config", DIGITS, *with_set(settings), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["store"]
    assert (report["images"], report["encoded"]) == (15, 11)
    assert report["buckets"] == {"4x4x4": 10, "4x4x6": 1}
    assert [(item["index"], item["name"]) for item in report["skipped"]] == [
        (1, f"{tmp_path}/folder: 1.png"),
        (4, f"{tmp_path}/list.csv: folder/9.png"),
        (6, f"{tmp_path}/tars/{{0..1}}.tar: 0.tar/b"),
        (7, f"{tmp_path}/tars/{{0..1}}.tar: 0.tar/c"),
    ]
    reasons = [item["reason"] for item in report["skipped"]]
    assert reasons[:2] == [
        "caption 1.txt is missing",
        "image 9.png is missing; its path is relative to the table (list.csv row 2)",
    ]
    assert reasons[2].startswith("damaged image: ")
    assert reasons[3] == "sample of 0 images among txt, not of one"

    store = FeatureStore.open(root)
    bucket = (4, 4, 4)
    latents, _, indices = read_rows(store, bucket, range(store.buckets[bucket]))
    found = {index: round((float(sample.mean()) + 1) * 127.5) for index, sample in zip(indices, latents, strict=True)}
    assert found == {0: 0, 2: 2, 3: 0, 5: 3, 9: 5, 10: 6, 11: 7, 12: 8, 13: 9, 14: 10}


@pytest.mark.slow
def test_clips_of_videos_in_shares_that_begin_within_one(tmp_path):
    """A video that is too short is skipped by name. The end of a video goes into a bucket that it has frames for."""
    (tmp_path / "videos").mkdir()
    for name, count in (("a", 15), ("b", 9)):
        video(tmp_path / f"videos/{name}.mp4", range(0, 125 * count, 125), caption=f"of {name}")
    sizes = ["data.part_size=2", "encoders.image.color=rgb", "encoders.image.factor=2", "model.kwargs.in_channels=12"]
    asked = [f"data.images={{path: {tmp_path}/videos, clips: 3}}", "data.buckets=[[5, 8, 8], [3, 8, 8]]", *sizes]
    settings = with_set([*asked, "data.workers=1", f"data.features={tmp_path}/features"])
    for share in (("--end-index", "2"), ()):
        done = in_process("extract", "--config", ROOT / "launch/recipes/digits-moving.yaml", *settings, *share)
        assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "features/report.json").read_text())
    assert (report["images"], report["encoded"]) == (6, 5)
    assert report["buckets"] == {"12x5x4x4": 4, "12x3x4x4": 1}
    (skipped,) = report["skipped"]
    assert (skipped["name"], skipped["reason"]) == ("b.mp4 from 1.25 s", "the video ends before this clip")
    latents, _, indices = read_rows(FeatureStore.open(tmp_path / "features"), (12, 5, 4, 4), range(4))
    assert indices == [0, 1, 2, 3]
    brightness = latents.float().mean((1, 3, 4))[:3].flatten()
    assert (brightness.diff() > 0).all()  # a video's frames brighten one after another
