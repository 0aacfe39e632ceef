"""Weights in diffusers' format: written where the run says, and read back as they were written or not at all."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from training import run

from bigdit.commands import export as export_command
from bigdit.errors import UserError

FILE = "diffusion_pytorch_model.safetensors"


def test_exports_are_written_where_the_run_says_and_at_its_end(features, tmp_path):
    more = ("train.steps=7", "train.checkpoint_every=1", "train.export_every=3", "train.ema={decay: 0.9}")
    assert run(features, tmp_path, *more) == 0
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == [f"step-{step:08d}" for step in (3, 6, 7)]
    export_command.run(tmp_path, tmp_path / "again")
    for name in ("transformer", "transformer_ema"):
        last, again = (
            load_file(folder / name / FILE) for folder in (tmp_path / "exports/step-00000007", tmp_path / "again")
        )
        assert last.keys() == again.keys()
        assert all(torch.equal(last[key], again[key]) for key in last)
        assert json.loads((tmp_path / "again" / name / "checksums.json").read_text()).keys() == {"config.json", FILE}
    with pytest.raises(UserError, match=r"^--out .*/again is there already; name a folder that is not$"):
        export_command.run(tmp_path, tmp_path / "again")


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: flip(folder / FILE), f"/{FILE} is damaged: its checksum is not the one in checksums.json"),
        (lambda folder: flip(folder / "config.json"), "/config.json is damaged: its checksum is not the one in"),
        (lambda folder: (folder / FILE).unlink(), f" lacks {FILE}, which its checksums.json names; copy it again, or"),
        (lambda folder: (folder / "config.json").unlink(), " lacks config.json, which its checksums.json names"),
        (
            lambda folder: (folder / "checksums.json").write_text("{"),
            "/checksums.json is damaged or cannot be read (not",
        ),
        (lambda folder: (folder / "checksums.json").write_text("[]"), "/checksums.json is damaged or cannot be read"),
        (
            lambda folder: shutil.copy(folder / FILE, folder / "model.safetensors"),
            "/model.safetensors is no part of its export: checksums.json does not name it; take it away",
        ),
    ],
    ids=["weights", "config", "no weights", "no config", "half", "none", "more"],
)
def test_a_damaged_or_half_copied_export_is_no_start(features, trained, tmp_path, capfd, damage, problem):
    folder = tmp_path / "copied"
    shutil.copytree(trained / "exports/step-00000008/transformer", folder)
    damage(folder)
    assert run(features, tmp_path / "run", f"model.init_from={folder}", "train.steps=2") == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {folder}{problem}")


def test_a_folder_without_checksums_is_read_as_others_write_it(features, trained, tmp_path):
    folder = tmp_path / "copied"
    shutil.copytree(trained / "exports/step-00000008/transformer", folder)
    (folder / "checksums.json").unlink()
    assert run(features, tmp_path / "run", f"model.init_from={folder}", "train.steps=2") == 0


def test_a_half_copied_checkpoint_is_one_line(features, trained, tmp_path, capfd):
    output = tmp_path / "run"
    shutil.copytree(trained, output)
    folder = output / "checkpoints/step-00000008"
    (folder / "engine/rank-00000-of-00001.safetensors").unlink()
    assert run(features, output, "train.steps=9") == 1
    assert f"error: the checkpoint {folder} lacks engine/rank-00000-of-00001.safetensors; " in capfd.readouterr().err
    assert run(features, tmp_path / "other", f"model.init_from={folder}", "train.steps=2") == 1
    assert f"error: the checkpoint {folder} lacks engine/rank-00000-of-00001.safetensors; " in capfd.readouterr().err
    (folder / "state.json").unlink()
    assert run(features, output, "train.steps=9") == 1
    assert f"error: {folder} is not a checkpoint: it holds no state.json; " in capfd.readouterr().err
