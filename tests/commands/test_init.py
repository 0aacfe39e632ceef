"""`bigdit init` writes a run.yaml for a model, a GPU and a folder of images, from options or questions."""

import os
import pty
import subprocess

import pytest
from commands import BIN, ROOT, environment_with, in_process
from tiny_sources import save

from bigdit.config.stages import load_run

DIT = ("--model", "dit-s-8", "--gpu", "rtx-3060-12g", "--lora", "0")


def answered(folder, answers, *options):
    """The output and status of the command on a terminal, with a line for each question."""
    ours, theirs = pty.openpty()
    program = [str(BIN / "bigdit"), "init", *options]
    with subprocess.Popen(
        program, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, env=environment_with({})
    ) as process:
        os.close(theirs)
        os.write(ours, "".join(f"{line}\n" for line in answers).encode())
        out, _ = process.communicate(timeout=300)
    os.close(ours)
    return out.decode(), process.returncode


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_it_asks_for_what_is_left_out_and_writes_a_run_that_loads(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / f"photos/{name}/1.png", None)
    wrong = ["dit-s-9", "nowhere", "rtx-30", "some"]
    right = ["dit-s-8", "photos", "rtx-3060-12g", "0"]
    out, status = answered(tmp_path, [each for pair in zip(wrong, right, strict=True) for each in pair])
    assert status == 0, out
    assert out.count("Error: ") == 4
    for question in ("Model (a name", "[sana-600m]", "Folder of images", "GPU (a name", "Rank of LoRA"):
        assert question in out
    assert "found 2 images in photos" in out
    assert "FITS: needs " in out
    (folder,) = (tmp_path / "plans").iterdir()
    *_, extract, train = out.splitlines()
    assert extract == f"  bigdit extract --config plans/{folder.name}/run.yaml"
    assert train == f"  bigdit train --config plans/{folder.name}/run.yaml"
    assert "Fill in" not in (folder / "run.yaml").read_text()
    run = load_run(folder / "run.yaml", [])
    assert (str(run.data.images[0].path), run.data.images[0].label) == ("photos", "folder")
    assert (str(run.data.features), str(run.output)) == (f"features/{folder.name}", f"runs/{folder.name}")
    out, status = answered(tmp_path, [], *DIT, "--images", "photos")
    assert (status, "exists already, and was not changed; name another folder" in out) == (1, True)


def test_images_are_no_videos(tmp_path):
    save(tmp_path / "photos/1.png", "a photo")
    options = ("--model", "wan2.1-t2v-1.3b", "--gpu", "rtx-4090", "--lora", "16", "--images", str(tmp_path / "photos"))
    done = in_process("init", *options, "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: --images: {tmp_path}/photos holds 1 image and no video, and wan2.1-t2v-1.3b trains on 81 frames; name "
        "a folder of videos, or a model of images\n"
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "--model is missing; give it, or run `bigdit init` on a terminal, where it asks"),
        ([*DIT, "--images", "nowhere"], f"--images: nowhere does not exist in {ROOT}; name the folder of your images"),
        (["--model", "dit-s-9", "--gpu", "a40", "--images", "docs", "--lora", "0"], "--model 'dit-s-9' is not in the"),
        ([*DIT, "--images", "README.md"], "data.images: README.md is a .md file; give a folder of images or videos"),
        ([*DIT, "--images", "bigdit/store"], "data.images: bigdit/store holds no images"),
        ([*DIT, "--images", "docs", "--out", "docs"], "--out: docs exists already, and was not changed; name another"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(options, line):
    done = in_process("init", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {line}")  # before the plan, whose start is logged
