"""Sampling: an image for each caption, the same for the same seed, and errors in one line."""

import json
import os
import signal
import subprocess
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import BIN, ROOT, bigdit, in_process
from PIL import Image
from running import until

from bigdit import libraries
from bigdit.checkpoint import latest
from bigdit.errors import UserError
from bigdit.sampling import Sampler, SamplingOptions
from bigdit.sampling.grid import grid_png


@pytest.fixture(scope="module")
def sampled(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("samples")
    captions = out / "captions.txt"
    captions.write_text("a handwritten one\n\na handwritten two\n")
    chosen = ["--caption", "a handwritten six", "--captions", captions, "--size", "8x12", "--steps", "4", "--json"]
    done = bigdit("sample", "--checkpoint", trained, "--out", out / "first", *chosen)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def pixels(folder, rows):
    return [np.asarray(Image.open(folder / row["file"])) for row in rows]


def test_one_image_a_caption_and_a_grid(sampled):
    out, report = sampled
    rows = report["images"]
    assert [row["caption"] for row in rows] == ["a handwritten six", "a handwritten one", "a handwritten two"]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    images = pixels(out / "first", rows)
    assert [(image.shape, image.dtype) for image in images] == [((8, 12), np.uint8)] * 3
    assert Image.open(out / "first/grid.png").size[0] > 300
    assert json.loads((out / "first/samples.json").read_text()) == report


def test_an_image_depends_on_its_caption_and_seed_alone(sampled, trained):
    out, report = sampled
    chosen = ["--caption", "a handwritten one", "--seed", "1", "--size", "8x12", "--steps", "4", "--json"]
    done = bigdit("sample", "--checkpoint", trained / "checkpoints/step-00000008", "--out", out / "second", *chosen)
    assert done.returncode == 0, done.stderr
    alone = pixels(out / "second", json.loads(done.stdout)["images"])[0].astype(int)
    among = pixels(out / "first", report["images"])[1].astype(int)
    # another batch size takes other kernels, which round otherwise: one step of 255 at a rounding border
    assert np.abs(alone - among).max() <= 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "error: no caption was given; pass --caption TEXT, --label CLASS, or --captions FILE"),
        (["--caption", "x", "--size", "8by8"], "error: --size expects HEIGHTxWIDTH in pixels"),
        (
            ["--caption", "x", "--sampler", "dpm"],
            "error: --sampler 'dpm': unknown sampler; did you mean dpmsolver++? for flow_matching: euler, ",
        ),
        (["--caption", "x", "--sampler", "DDIM"], "unknown sampler; did you mean ddim? for flow_matching: "),
        (
            ["--caption", "x", "--sampler", "lms"],
            "error: --sampler 'lms': unknown sampler; for flow_matching: ",
        ),
        (["--label", "3"], "error: --label is '3', and this model takes captions; pass --caption TEXT"),
        (["--caption", "x", "--size", "8x9"], "error: --size 8x9 does not divide by the codec's 2; nearest: 8x8"),
        (
            ["--caption", "x", "--size", "99998x99998"],
            "error: --size is 99998x99998, and a side has 65535 pixels at most",
        ),
        (
            ["--caption", "x", "--size", "65534x65534"],
            # five times 4 × 32767 × 32767 numbers of 4 bytes
            "error: --size 65534x65534: generating 1 at once takes 80.00 GiB at least, and",
        ),
        (
            ["--caption", "x", "--seed", "9" * 20],
            f"error: --seed is '{'9' * 20}', and {2**63 - 1} or less was expected",
        ),
        (["--caption", "x", "--guidance", "inf"], "error: --guidance is inf, and a finite number was expected"),
        (
            ["--caption", "x", "--negative", "y", "--guidance", "1"],
            "error: --negative has no effect with --guidance 1; pass another --guidance",
        ),
        (
            ["--caption", "x", "--sampler", "ddim"],
            "error: --sampler is ddim, and a model trained by flow_matching takes euler, heun, dpmsolver++ or unipc",
        ),
        (["--captions", "none.txt"], "error: --captions none.txt does not exist\n"),
        (
            ["--captions", "/dev/null"],
            "error: --captions /dev/null cannot be read: it is a device, and a regular file was",
        ),
    ],
)
def test_errors(trained, tmp_path, arguments, error):
    done = in_process("sample", "--checkpoint", trained, "--out", tmp_path / "out", *arguments)
    assert done.returncode == 1
    assert error in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_file_of_captions_is_read_as_captions_of_images_are(trained, tmp_path):
    file = tmp_path / "list.txt"
    for data, problem in (
        (b" \n", f" {file} is empty; write a caption or a class into each line"),
        ("café".encode("latin1"), f": caption {file} is not UTF-8; save it as UTF-8"),
    ):
        file.write_bytes(data)
        done = in_process("sample", "--checkpoint", trained, "--out", tmp_path / "out", "--captions", file)
        assert (done.returncode, done.stderr) == (1, f"error: --captions{problem}\n")


def test_what_cannot_be_drawn_is_refused_before_weights_are_loaded(trained):
    """Of a checkpoint without weights: only its document is read."""
    found, _ = latest(trained)
    sampler = Sampler(replace(found, folder=trained / "absent"), torch.device("cpu"))
    for options, line in (
        (SamplingOptions(7, 7), r"^--size 7x7 does not divide by the codec's 2; nearest: 8x8$"),
        (SamplingOptions(8, 8, sampler="ddim"), r"^--sampler is ddim, and a model trained by flow_matching takes "),
    ):
        with pytest.raises(UserError, match=line):
            sampler.check(options, {"--caption": ["x"]})
    with pytest.raises(UserError, match="absent"):
        sampler.model()


@pytest.mark.slow
def test_what_a_killed_command_had_drawn_is_there_and_whole(trained, tmp_path):
    (tmp_path / "captions.txt").write_text("".join(f"number {number}\n" for number in range(2000)))
    command = [
        BIN / "bigdit",
        "sample",
        "--checkpoint",
        trained,
        "--captions",
        tmp_path / "captions.txt",
        "--size",
        "8x8",
    ]
    out = tmp_path / "out"
    process = subprocess.Popen([*command, "--out", out], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    until(lambda: process.poll() is not None or len(list(out.glob("0*.png"))) > 60)  # more than a batch
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    images = sorted(out.glob("0*.png"))
    assert [file.name for file in images] == [f"{number:05d}.png" for number in range(len(images))]
    assert {np.asarray(Image.open(file)).shape for file in images} == {(8, 8)}
    assert not (out / "samples.json").exists()


def test_a_folder_of_other_images_is_refused(sampled, trained):
    out, _ = sampled
    before = {file: file.stat().st_mtime_ns for file in (out / "first").iterdir()}
    done = in_process("sample", "--checkpoint", trained, "--out", out / "first", "--caption", "x")
    assert (done.returncode, done.stderr) == (
        1,
        f"error: --out {out / 'first'} holds files already; name another folder\n",
    )
    assert before == {file: file.stat().st_mtime_ns for file in (out / "first").iterdir()}


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "file").touch()
    for out, why in ((tmp_path / "file", "Not a directory"), ("/proc/s", "No such file or directory")):
        done = in_process("sample", "--checkpoint", tmp_path, "--out", out, "--caption", "x")
        assert done.stderr == f"error: --out: cannot write {out}: {why}; choose another\n"


@pytest.mark.parametrize("sampler", ["heun", "dpmsolver++", "unipc"])
def test_a_sampler_and_a_negative_text_are_chosen(sampled, trained, tmp_path, sampler):
    chosen = ["--caption", "a handwritten six", "--size", "8x12", "--steps", "4", "--json", "--sampler", sampler]
    done = bigdit("sample", "--checkpoint", trained, "--out", tmp_path, *chosen, "--negative", "a handwritten one")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["negative"] == "a handwritten one"
    out, plain = sampled
    assert (pixels(tmp_path, report["images"])[0] != pixels(out / "first", plain["images"])[0]).any()


def test_no_checkpoint(tmp_path):
    done = in_process("sample", "--checkpoint", tmp_path, "--out", tmp_path / "out", "--caption", "x")
    assert done.returncode == 1
    assert f"error: --checkpoint {tmp_path}: neither a checkpoint nor the output of a run" in done.stderr


def test_of_an_export_the_run_is_named(trained, tmp_path):
    for inside in ("checkpoints", "exports/step-00000008", "exports/step-00000008/transformer"):
        done = in_process("sample", "--checkpoint", trained / inside, "--out", tmp_path / "out", "--caption", "x")
        assert done.returncode == 1
        assert done.stderr.endswith(f"that saved one; name {trained}, or one of {trained}/checkpoints\n")


def test_a_letter_that_the_font_lacks_is_no_warning():
    with warnings.catch_warnings(record=True) as printed:
        libraries.prepare()
        image = grid_png([np.zeros((4, 4), np.uint8)], ["日本"])
    assert image.startswith(b"\x89PNG")
    assert not printed
