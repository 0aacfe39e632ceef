"""Weights in diffusers' format: written where the run says, and read back unchanged or not at all."""

import json
import os
import shutil

import pytest
import torch
from commands import DIGITS, SINGLE, TINY, in_process, reading, with_set
from diffusers import SanaTransformer2DModel
from resuming import save
from safetensors.torch import load_file
from training import launched, run
from whole import full_weights

from bigdit import checkpoint
from bigdit.commands import export as export_command
from bigdit.config.stages import load_run
from bigdit.errors import UserError
from bigdit.train.saves import export_missed

FILE = "diffusion_pytorch_model.safetensors"


def test_exports_are_written_where_the_run_says_and_at_its_end(features, tmp_path):
    more = ("train.steps=7", "train.checkpoint_every=1", "train.export_every=3", "strategy.ema={decay: 0.9}")
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
    with pytest.raises(UserError, match=r"^--out .*/again exists already; name a new folder$"):
        export_command.run(tmp_path, tmp_path / "again")


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda folder: flip(folder / FILE),
            f"/{FILE} is damaged: its checksum differs from that in checksums.json",
        ),
        (lambda folder: flip(folder / "config.json"), "/config.json is damaged: its checksum differs from that in"),
        (lambda folder: (folder / FILE).unlink(), f" lacks {FILE}, which its checksums.json names; copy it again, or"),
        (lambda folder: (folder / "config.json").unlink(), " lacks config.json, which its checksums.json names"),
        (
            lambda folder: (folder / "checksums.json").write_text("{"),
            "/checksums.json is damaged or cannot be read (not",
        ),
        (lambda folder: (folder / "checksums.json").write_text("[]"), "/checksums.json is damaged or cannot be read"),
        (
            lambda folder: shutil.copy(folder / FILE, folder / "model.safetensors"),
            "/model.safetensors is not part of its export: checksums.json does not name it; remove it",
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
    assert line.startswith(f"error: model.init_from: {folder}{problem}")


def test_a_folder_without_checksums_is_read_as_others_write_it(features, trained, tmp_path):
    folder = tmp_path / "copied"
    shutil.copytree(trained / "exports/step-00000008/transformer", folder)
    (folder / "checksums.json").unlink()
    assert run(features, tmp_path / "run", f"model.init_from={folder}", "train.steps=2") == 0


def test_a_half_copied_checkpoint_is_one_line(features, trained, tmp_path, capfd):
    output = tmp_path / "run"
    shutil.copytree(trained, output)
    folder = output / "checkpoints/step-00000008"
    file = folder / "engine/rank-00000-of-00001.safetensors"
    lacks = f"the checkpoint {folder} lacks engine/{file.name}; "
    settings = [*TINY, *SINGLE, f"data.features={features}", f"output={output}", "train.steps=9"]
    for damage, problem in (
        (lambda: os.truncate(file, file.stat().st_size // 2), f"{file} is damaged: its checksum differs from that in "),
        (file.unlink, lacks),
    ):
        damage()
        assert run(features, output, "train.steps=9") == 1
        refused = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert refused[0].startswith(f"error: {problem}")
        dry = in_process("train", "--dry-run", "--config", DIGITS, *with_set(settings))
        assert (dry.returncode, dry.stderr.splitlines()[-1:]) == (1, refused)
    assert run(features, tmp_path / "other", f"model.init_from={folder}", "train.steps=2") == 1
    assert f"error: model.init_from: {lacks}" in capfd.readouterr().err
    (folder / "state.json").unlink()
    assert run(features, output, "train.steps=9") == 1
    assert f"error: {folder} is not a checkpoint: it holds no state.json; " in capfd.readouterr().err


def test_an_export_is_what_diffusers_loads(tmp_path, engine_and_average):
    engine, ema = engine_and_average
    save(tmp_path, engine, ema, checkpoint.Peers())
    found, _ = checkpoint.latest(tmp_path)
    checkpoint.export(found, tmp_path / "out")
    for folder, average in (("transformer", None), ("transformer_ema", ema)):
        model, info = SanaTransformer2DModel.from_pretrained(tmp_path / "out" / folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        expected = full_weights(engine, average)
        assert all(torch.equal(tensor.view(-1), expected[name]) for name, tensor in model.named_parameters())
    file = next((tmp_path / "out/transformer").glob("*.safetensors"))
    assert file.stat().st_mode & 0o777 == (tmp_path / "out/transformer/config.json").stat().st_mode & 0o777


def test_an_export_that_an_interrupted_run_owes_is_made(tmp_path, engine_and_average, capfd):
    engine, ema = engine_and_average
    save(tmp_path, engine, ema, checkpoint.Peers())
    found, _ = checkpoint.latest(tmp_path)
    config = (f"output={tmp_path}", *SINGLE, "train.steps=9")
    export_missed(load_run(DIGITS, config), [9], found)
    assert not (tmp_path / "exports").exists()  # it is neither the last nor one that is named
    due = load_run(DIGITS, (*config, "train.export_every=1"))
    export_missed(due, [9], found)
    folder = tmp_path / "exports/step-00000001"
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "transformer", "transformer_ema"]
    assert capfd.readouterr().err == f"note: wrote {folder}, which an interrupted run had left out\n"
    export_missed(due, [9], found)
    assert capfd.readouterr().err == ""


def test_a_large_export_is_written_file_by_file(tmp_path, engine_and_average, monkeypatch):
    engine, ema = engine_and_average
    save(tmp_path, engine, ema, checkpoint.Peers())
    monkeypatch.setitem(checkpoint.export.__globals__, "_MOST", "20KB")
    checkpoint.export(checkpoint.latest(tmp_path)[0], tmp_path / "out")
    files = sorted((tmp_path / "out/transformer").glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "out/transformer/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert {name for file in files for name in load_file(file)} == index["weight_map"].keys()
    model = SanaTransformer2DModel.from_pretrained(tmp_path / "out/transformer")
    expected = full_weights(engine)
    assert all(torch.equal(tensor.view(-1), expected[name]) for name, tensor in model.named_parameters())


LUMINA = (
    "model={class_name: Lumina2Transformer2DModel, kwargs: {hidden_size: 24, num_layers: 2, num_refiner_layers: 1, "
    "num_attention_heads: 2, num_kv_heads: 1, multiple_of: 8, axes_dim_rope: [4, 4, 4], axes_lens: [40, 20, 20], "
    "in_channels: CHANNELS, patch_size: 1, sample_size: 8, cap_feat_dim: WIDTH}}"
)


def test_a_whole_model_is_one_file_beside_the_folder(features, trained, tmp_path):
    """With ComfyUI's names, and the folder's numbers."""
    kwargs = checkpoint.latest(trained)[0].state["model"]["kwargs"]
    model = LUMINA.replace("CHANNELS", str(kwargs["in_channels"])).replace("WIDTH", str(kwargs["caption_channels"]))
    more = (*SINGLE, *reading(features), f"output={tmp_path}", "train.steps=2", "train.warmup_steps=1", model)
    assert launched(DIGITS, [*more, "strategy.ema={decay: 0.9}"]) == 0
    export_command.run(tmp_path, tmp_path / "out", single_file="bf16")
    folder = tmp_path / "out/single_file"
    names = [f"Lumina2Transformer2DModel{ema}-bf16.safetensors" for ema in ("", "-ema")]
    assert sorted(json.loads((folder / "checksums.json").read_text())) == sorted(names)
    for name, kind in zip(names, ("transformer", "transformer_ema"), strict=True):
        whole, parts = load_file(folder / name), load_file(tmp_path / "out" / kind / FILE)
        joined = torch.cat([parts[f"layers.1.attn.to_{each}.weight"] for each in "qkv"])
        assert torch.equal(whole["layers.1.attention.qkv.weight"], joined.bfloat16())
        assert sum(each.numel() for each in whole.values()) == sum(each.numel() for each in parts.values())
    with pytest.raises(UserError, match=r"^--single-file: neither ComfyUI .* reads SanaTransformer2DModel from one"):
        export_command.run(trained, tmp_path / "other", single_file="fp8")
    assert not (tmp_path / "other").exists()
