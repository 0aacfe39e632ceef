"""Online features with damaged, changed or missing images, kills and full disks. Each is one line, and a resumed run
equals an undisturbed one."""

import io
import os
import re
import signal

import pytest
import tiny_sources
import torch
from commands import DIGITS, ONLINE, SINGLE, TINY, bigdit, with_set
from disks import mounted, remount
from PIL import Image
from running import BIGDIT, running
from training import exported, run

from bigdit import checkpoint
from bigdit.train.monitor.metrics import read_metrics

COUNT = 10


@pytest.fixture
def folder(tmp_path):
    """Ten gray images of the bucket's size, and their captions."""
    for number in range(COUNT):
        image = tiny_sources.gradient(8, 8).convert("L").point(lambda value, add=number: value // 2 + 9 * add)
        tiny_sources.save(tmp_path / "images" / f"{number}.png", f"digit {number}", image)
    return tmp_path / "images"


def online(*images):
    """Overrides of the digits' tiny run that encodes these images in each step, four to a part."""
    listed = ",".join(map(str, images))
    sizes = ("data.buckets=[[8,8]]", "data.part_size=4", "strategy.micro_batch_size=4")
    return (f"data.images=[{listed}]", *sizes, "train.warmup_steps=0")


def taken(output):
    return [row["step"] for row in read_metrics(output / "metrics.jsonl")]


def printed(capfd, start):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith(start)]


def half_a_jpeg():
    file = io.BytesIO()
    tiny_sources.gradient(90, 90).save(file, "JPEG")
    return file.getvalue()[: file.tell() // 2]


def huge():
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


DAMAGES = {
    "3.png": {
        b"": "damaged image: the file is empty",
        b"I am a text": "damaged image: it is none of PNG, JPEG, ",
        half_a_jpeg(): "damaged image: OSError: image file is truncated",
        huge(): "image of 400000000 pixels; data.max_pixels allows 89478485",
    },
    "3.txt": {
        b" \n": "caption 3.txt is empty",
        b"\xff": "caption 3.txt is not UTF-8; save it as UTF-8",
        None: "caption 3.txt is missing",
    },
}


def test_a_sample_that_is_damaged_on_the_way_is_named_once_and_the_next_is_trained_on_in_its_place(
    folder, tmp_path, capfd
):
    """It holds for each kind of damage. A resumed run takes the same steps as one that was not stopped."""
    whole = {name: (folder / name).read_bytes() for name in DAMAGES}
    steps = ("strategy.global_batch_size=4", "data.caption_dropout=0", "train.lr_schedule=constant")
    losses = []
    for case, (name, contents, why) in enumerate(
        (name, contents, why) for name, damages in DAMAGES.items() for contents, why in damages.items()
    ):
        (folder / name).unlink()
        if contents is not None:
            (folder / name).write_bytes(contents)
        capfd.readouterr()
        output = tmp_path / f"run-{case}"
        for length in (3, 5) if case == 0 else (5,):
            assert run(None, output, *online(folder), *steps, f"train.steps={length}") == 0
        first, *others = [line for line in printed(capfd, "note: ") if "skipped" in line]
        assert first.startswith(f"note: data.images: 3.png is skipped: {why}")
        assert first.endswith("; 4.png is taken instead")
        rows = read_metrics(output / "metrics.jsonl")
        count = sum(row.get("skipped_samples", 0) for row in rows)
        assert count == 2  # of 20 samples, ten an epoch
        if case:
            assert others == [f"note: 2 of 20 samples skipped; {output}/metrics.jsonl counts them"]
        losses.append([row["loss"] for row in rows])
        (folder / name).write_bytes(whole[name])
    assert all(each == losses[0] for each in losses)  # the same as in a folder where 3 is a copy of 4
    for name in ("3.png", "3.txt"):
        (folder / name).write_bytes((folder / name.replace("3", "4")).read_bytes())
    assert run(None, tmp_path / "copied", *online(folder), *steps, "train.steps=5") == 0
    assert [row["loss"] for row in read_metrics(tmp_path / "copied/metrics.jsonl")] == losses[0]
    assert not [line for line in printed(capfd, "note: ") if "skipped" in line]


def test_a_damaged_sample_that_fills_up_a_batch_is_counted_once(folder, tmp_path):
    """Two passes of two samples for a global batch of three: the last place repeats the first with weight 0."""
    (folder / "3.png").write_bytes(b"I am a text")
    counts = []
    for micro in (3, 2):
        output = tmp_path / str(micro)
        sizes = (f"strategy.micro_batch_size={micro}", "strategy.global_batch_size=3", "train.steps=10")
        assert run(None, output, *online(folder), *sizes) == 0
        counts.append([row.get("skipped_samples", 0) for row in read_metrics(output / "metrics.jsonl")])
    assert counts[0] == counts[1]
    assert sum(counts[0]) == 3


def test_a_source_without_one_usable_sample_ends_a_run_though_another_has_some(folder, tmp_path, capfd):
    more = tmp_path / "more"
    for number in range(2):
        tiny_sources.save(more / f"{number}.png", "")
    assert run(None, tmp_path / "run", *online(folder, more), "train.steps=2") == 1
    (line,) = printed(capfd, "error: ")
    assert re.fullmatch(
        r"error: data\.images: none of 2 images of a source can be used: .*more: (0|1)\.png is skipped: "
        r"caption \1\.txt is empty",
        line,
    )


def test_images_that_are_others_when_a_run_continues_are_reported_or_refused(folder, tmp_path, capfd):
    """Their order depends on their number and names."""
    output, more = tmp_path / "run", tmp_path / "more"
    assert run(None, output, *online(folder), "train.steps=1") == 0
    where = f"{output}/checkpoints/step-00000001"
    refused = f"error: data.images has other images than {where} was trained on: "
    (folder / "3.png").rename(tmp_path / "3.png")
    assert run(None, output, *online(folder), "train.steps=2") == 1
    assert printed(capfd, "error: ") == [
        f"{refused}9 now, and 10 then; restore them, put new ones into a source at the end of the list, or "
        "choose another output"
    ]
    tiny_sources.save(folder / "3.png", "digit 3", tiny_sources.gradient(12, 12))
    for number in (10, 11):  # they fill up its last part
        tiny_sources.save(folder / f"0{number}.png", "digit", tiny_sources.gradient(8, 8))
    assert run(None, output, *online(folder), "train.steps=2") == 1
    (line,) = printed(capfd, "error: ")
    assert line.startswith(f"{refused}12 now, and 10 then; ")
    more.mkdir()
    for file in folder.glob("01*"):
        file.rename(more / file.name)
    assert run(None, output, *online(folder, more), "train.steps=2") == 0
    length, changed, added, _ = printed(capfd, "note: ")
    assert length == f"note: {where} was trained with train.steps 1, and resumes with 2"
    assert changed.startswith(f"note: 1 of 1 source of data.images changed since {where}: ")
    assert added.startswith("note: data.images has 1 part more (2 samples) than before: new samples enter with epoch ")
    assert run(None, output, *online(folder), "train.steps=3") == 1
    (line,) = printed(capfd, "error: ")
    assert "was trained on: 10 now, and 10 + 2 then; " in line


def test_an_image_that_vanishes_is_skipped_and_a_folder_that_is_none_is_a_line(folder, tmp_path, capfd):
    (folder / "3.png").unlink()
    (folder / "3.png").symlink_to(tmp_path / "nothing")
    assert run(None, tmp_path / "run", *online(folder), "train.steps=2") == 0
    first, *_ = [line for line in printed(capfd, "note: ") if "skipped" in line]
    assert first.startswith("note: data.images: 3.png is skipped: 3.png is a link ")
    done = bigdit(
        "train", "--config", DIGITS, "--dry-run", *with_set([*TINY, *SINGLE, *online(tmp_path / "none"), *ONLINE])
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: data.images: the folder {tmp_path}/none does not exist\n"


def test_a_full_disk_and_one_that_cannot_be_written_lose_nothing(folder, tmp_path, capfd):
    with mounted(tmp_path / "small", "size=64m") as disk:
        more = (*online(folder), "train.checkpoint_every=2", "train.keep_checkpoints=9")
        assert run(None, disk / "run", *more, "train.steps=2") == 0
        used = sum(file.stat().st_size for file in disk.rglob("*") if file.is_file())
        saved = sum(file.stat().st_size for file in (disk / "run/checkpoints").rglob("*") if file.is_file())
        remount(disk, f"size={(used + saved * 3 // 2) // 1024}k")
        assert run(None, disk / "run", *more, "train.steps=8") == 1
        (line,) = printed(capfd, "error: ")
        assert line.startswith(f"error: cannot write the checkpoint {disk}/run/checkpoints/step-0000000")
        found, _ = checkpoint.latest(disk / "run")
        checkpoint.verify(found)
        remount(disk, "size=64m,ro")
        assert run(None, disk / "run", *more, "train.steps=8") == 1
        assert printed(capfd, "error: ") == [
            f"error: cannot write {disk}/run/lock: Read-only file system; choose another output"
        ]
        remount(disk, "size=64m,rw")
        assert run(None, disk / "run", *more, "train.steps=8") == 0
        assert taken(disk / "run") == list(range(1, 9))


@pytest.mark.slow
def test_killed_and_reported_to_end_it_comes_to_the_weights_of_a_run_that_was_not(folder, tmp_path):
    """It prints nothing but its own lines."""
    more = (*SINGLE, *online(folder), "train.steps=30", "train.checkpoint_every=3", "train.export_every=30")
    assert run(None, tmp_path / "whole", *more) == 0
    output = tmp_path / "run"
    with running(BIGDIT, None, output, *more) as first:
        first.until_it_trains()
        os.killpg(first.process.pid, signal.SIGKILL)
        assert first.ends() == -signal.SIGKILL
    with running(BIGDIT, None, output, *more) as second:
        second.until_it_trains().process.send_signal(signal.SIGTERM)
        ended = second.ends()
        assert ended == 143 or taken(output)[-1] == 30, second.stderr
        assert "Warning" not in second.stderr
    assert run(None, output, *more) == 0
    assert taken(output) == list(range(1, 31))
    found, other = (exported(checkpoint.latest(each)[0], "transformer") for each in (output, tmp_path / "whole"))
    assert found.keys() == other.keys()
    assert all(torch.equal(found[name], each) for name, each in other.items())


@pytest.mark.slow
def test_of_two_processes_one_that_is_killed_ends_both_and_a_damaged_image_ends_none(folder, tmp_path):
    """Two processes train as one does."""
    output, two = tmp_path / "run", ("strategy.engine=fsdp2", "strategy.ds_config=null", *online(folder))
    with running(BIGDIT, None, output, *two) as first:
        ranks = first.until_it_trains().ranks()
        os.kill(ranks[1], signal.SIGKILL)
        assert first.ends() == 137
        (line,) = [each for each in first.stderr.splitlines() if each.startswith("error: ")]
        assert line.startswith(f"error: rank 1 (process {ranks[1]} on ")
    (folder / "3.png").write_bytes(b"I am a text")
    settings = ("train.steps=4", "strategy.precision=fp32")
    with running(BIGDIT, None, tmp_path / "two", *two, *settings) as second:
        assert second.ends() == 0, second.stderr
        (line,) = [
            each for each in second.stderr.splitlines() if each.startswith("note: data.images: 3.png is skipped")
        ]
        assert line.endswith("; 4.png is taken instead")
    assert run(None, tmp_path / "one", *online(folder), *settings) == 0
    found, others = (read_metrics(tmp_path / each / "metrics.jsonl") for each in ("two", "one"))
    assert [row.get("skipped_samples") for row in found] == [row.get("skipped_samples") for row in others]
    assert sum(row.get("skipped_samples", 0) for row in found) == 6
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in others], rel=1e-4)


def test_captions_that_are_cut_on_the_way_are_counted(folder, tmp_path, capfd):
    """The first is reported at once, and all are counted at the end."""
    for number in (3, 7):
        (folder / f"{number}.txt").write_text("digit " * 8 * number)
    settings = (
        "train.steps=5",
        "strategy.global_batch_size=4",
        "encoders.text.max_tokens=100",
        "data.caption_dropout=0",
    )
    assert run(None, tmp_path / "run", *online(folder), *settings) == 0
    first, last = (line for line in printed(capfd, "note: ") if "captions were cut" in line)
    assert first.startswith("note: 2 of 8 captions were cut at 100 tokens by tokenizer, the longest has ")
    ended = "note: 4 of 20 captions were cut at 100 tokens by tokenizer, the longest has 336; raise encoders.text."
    assert last.startswith(ended)
    assert last.endswith(("; the first: 3.png, 7.png", "; the first: 7.png, 3.png"))
