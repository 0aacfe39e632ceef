"""The pipeline around exported weights: whole or absent, with files of its own, none of them damaged."""

import json
import os
import shutil
import signal
import subprocess

import pytest
import torch
from commands import BIN, ROOT
from disks import mounted
from running import until
from safetensors.torch import load_file, save_file

from bigdit import checkpoint
from bigdit.checkpoint.folder import write_state
from bigdit.commands import export as export_command
from bigdit.errors import UserError
from bigdit.files import alone

INDEX = {
    "_class_name": "SanaPipeline",
    "transformer": ["diffusers", "SanaTransformer2DModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"],
}
WEIGHTS = "text_encoder/model.safetensors"
SHARDS = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
WHOLE = {"README.md", "model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer"}


def write_pipeline(folder):
    """A pipeline whose transformer may be a Sana, as far as its files tell."""
    for part in ("scheduler", "text_encoder", "tokenizer", "transformer"):
        (folder / part).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    (folder / "text_encoder/config.json").write_text('{"architectures": ["T5EncoderModel"]}')
    (folder / "tokenizer/tokenizer.json").write_text("{}")
    save_file({"a": torch.arange(9.0)}, folder / WEIGHTS)
    return folder


def fed_by(pipeline, trained, output):
    """The output of a run that started from the pipeline's transformer."""
    found, _ = checkpoint.latest(trained)
    shutil.copytree(trained / "checkpoints", output / "checkpoints")
    run = found.state["run"]
    run = run | {"model": run["model"] | {"init_from": str(pipeline / "transformer")}}
    write_state(output / "checkpoints" / found.folder.name, found.state | {"run": run})
    return output


@pytest.fixture
def pipeline(tmp_path):
    return write_pipeline(tmp_path / "a hub/snapshots/0123")


@pytest.fixture
def output(pipeline, trained, tmp_path):
    return fed_by(pipeline, trained, tmp_path / "run")


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_exported_files_may_be_changed_in_place(pipeline, output, tmp_path):
    blob = tmp_path / "a hub/blobs/4567"
    blob.parent.mkdir()
    (pipeline / WEIGHTS).rename(blob)
    (pipeline / WEIGHTS).symlink_to(blob)  # like a hub cache's
    (pipeline / "text_encoder/more").mkdir()
    (pipeline / "text_encoder/more/vocab").write_bytes(b"v")
    whole = tmp_path / "a b/exported"
    export_command.run(output, whole)
    assert (names(whole), names(whole.parent)) == (WHOLE, {"exported"})
    assert (whole / "text_encoder/more/vocab").read_bytes() == b"v"
    assert torch.equal(load_file(whole / WEIGHTS)["a"], torch.arange(9.0))
    assert not (whole / WEIGHTS).is_symlink()
    for file in (path for path in whole.rglob("*") if path.is_file()):
        with open(file, "r+b") as opened:
            opened.write(b"changed")
    assert torch.equal(load_file(blob)["a"], torch.arange(9.0))
    assert (pipeline / "text_encoder/more/vocab").read_bytes() == b"v"
    checkpoint.verify(checkpoint.latest(output)[0])


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def pipe(file):
    file.unlink()
    os.mkfifo(file)


def dangle(file):
    file.unlink(missing_ok=True)
    file.symlink_to("blob")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda base: cut(base / WEIGHTS), f"/{WEIGHTS} is damaged or cut off ("),
        (lambda base: dangle(base / WEIGHTS), f"/{WEIGHTS} is a link to blob, which is missing"),
        (
            lambda base: (base / "tokenizer/secret").symlink_to("/proc/self/environ"),
            "/tokenizer/secret is a link out of its folder; copy there what it leads to",
        ),
        (lambda base: (base / "tokenizer/all").symlink_to("/proc/self"), "/tokenizer/all is a link out of its folder"),
        (
            lambda base: pipe(base / "tokenizer/tokenizer.json"),
            "/tokenizer/tokenizer.json cannot be read: it is a named pipe, and a regular file was expected",
        ),
        (lambda base: (base / WEIGHTS).unlink(), "/text_encoder has no weights"),
        (
            lambda base: (base / f"{WEIGHTS}.index.json").write_text(SHARDS),
            "/text_encoder/model-00001-of-00002.safetensors is missing, which model.safetensors.index.json names",
        ),
        (lambda base: (base / "tokenizer/tokenizer.json").write_text("{"), "/tokenizer/tokenizer.json is no JSON ("),
        (lambda base: shutil.rmtree(base / "tokenizer"), "/tokenizer is missing"),
        (
            lambda base: (base / "scheduler/scheduler_config.json").write_text("{"),
            "/scheduler/scheduler_config.json is not a config of diffusers: it is not JSON",
        ),
        (
            lambda base: (base / "scheduler/scheduler_config.json").write_text("[1]"),
            "/scheduler/scheduler_config.json is not a config of diffusers: it holds no JSON object",
        ),
        (
            lambda base: (base / "scheduler/scheduler_config.json").write_text('{"num_train_timesteps": "many"}'),
            "/scheduler/scheduler_config.json makes no FlowMatchEulerDiscreteScheduler: ",
        ),
        (
            lambda base: (base / "model_index.json").write_text(
                json.dumps(INDEX | {"scheduler": ["diffusers", "", 1]})
            ),
            "/model_index.json names no scheduler of diffusers",
        ),
        (lambda base: (base / "model_index.json").write_text("{"), "/model_index.json is not a config of diffusers"),
    ],
    ids=[
        *("cut", "dangling", "link", "folder", "pipe", "no weights", "no shard", "tokenizer", "no part"),
        *("scheduler", "list", "junk", "three", "index"),
    ],
)
def test_of_a_damaged_pipeline_the_transformer_alone_is_written(damage, why, pipeline, output, tmp_path, capfd):
    damage(pipeline)
    export_command.run(output, tmp_path / "out")
    note, wrote = capfd.readouterr().err.splitlines()
    assert note.startswith("note: the transformer is written without a pipeline: ")
    assert f"{pipeline}{why}" in note
    assert wrote.startswith("wrote ")
    assert names(tmp_path / "out") == {"README.md", "transformer"}


def test_of_a_model_of_a_part_of_t_only_an_expert_is_written_alone(pipeline, output, tmp_path, capfd):
    found, _ = checkpoint.latest(output)
    part = {"objective": {"name": "flow_matching", "t_range": [0.5, 1.0]}}
    write_state(found.folder, found.state | {"run": found.state["run"] | part})
    for number, second in enumerate((None, "SanaTransformer2DModel")):
        index = INDEX | {"transformer_2": [second and "diffusers", second]}
        (pipeline / "model_index.json").write_text(json.dumps(index))
        export_command.run(output, tmp_path / f"{number}")
    assert names(tmp_path / "0") == WHOLE
    assert names(tmp_path / "1") == {"README.md", "transformer"}
    assert f"{pipeline} has two experts; replace the one that training started from" in capfd.readouterr().err


def test_adapters_are_said_to_be_loaded_where_they_belong(pipeline, output, tmp_path, capfd):
    found, _ = checkpoint.latest(output)
    run = found.state["run"]
    for number, (kind, name) in enumerate(
        (("lora", "transformer"), ("lora", "transformer_2"), ("loha", "transformer"))
    ):
        strategy = {"strategy": run["strategy"] | {"lora": {"rank": 2, "kind": kind}, "precision": "bf16"}}
        model = {"model": run["model"] | {"init_from": str(pipeline / name)}}
        write_state(found.folder, found.state | {"run": run | strategy | model})
        export_command.run(output, tmp_path / f"{number}")
    first, second, other = (line for line in capfd.readouterr().err.splitlines() if line.startswith("note: "))
    assert first.endswith(f"load them over {pipeline}, by SanaPipeline's load_lora_weights")
    assert second.endswith("by SanaPipeline's load_lora_weights with load_into_transformer_2=True")
    assert other.endswith(f"peft's PeftModel.from_pretrained loads it over the transformer of {pipeline}")


def test_a_full_disk_holds_nothing_of_an_export(output, pipeline, tmp_path):
    save_file({"a": torch.zeros(1 << 18)}, pipeline / WEIGHTS)
    with mounted(tmp_path / "disk", "size=600k") as disk:
        with pytest.raises(
            UserError,
            match=r"^--out: cannot export to .*/out: No space left on device, .* free; choose",
        ):
            export_command.run(output, disk / "out")
        assert names(disk) == set()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path):
    with (
        mounted(tmp_path / "disk", "ro") as disk,
        pytest.raises(UserError, match=r"^--out: cannot write .*: Read-only"),
    ):
        export_command.run(tmp_path / "no run", disk / "out")
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"^--out .*/out exists already; name a new folder$"):
        export_command.run(tmp_path / "no run", tmp_path / "out")


def test_of_two_exports_to_a_folder_one_is_refused(output, tmp_path):
    with (
        alone(tmp_path / "out"),
        pytest.raises(UserError, match=r"^another process is writing .*/out; wait for it, or"),
    ):
        export_command.run(output, tmp_path / "out")
    assert names(tmp_path).isdisjoint({"out", ".tmp-out", ".tmp-out.lock"})


def test_what_appeared_meanwhile_stays(output, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/theirs").touch()
    with pytest.raises(UserError, match=r"^cannot export to .*/out: .*not empty"):
        checkpoint.export(checkpoint.latest(output)[0], tmp_path / "out", replace=False)
    assert names(tmp_path / "out") == {"theirs"}
    assert ".tmp-out" not in names(tmp_path)


def test_ctrl_c_while_weights_are_read_is_no_damage(output, tmp_path, monkeypatch):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # commands that end in this process leave it to the kernel
    reader = torch.distributed.checkpoint.HuggingFaceStorageReader
    monkeypatch.setattr(reader, "read_data", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        export_command.run(output, tmp_path / "out")
    assert names(tmp_path).isdisjoint({"out", ".tmp-out", ".tmp-out.lock"})


@pytest.mark.slow
def test_killed_exports_look_whole_at_no_moment_and_the_next_one_clears_up(output, pipeline, tmp_path):
    with open(pipeline / WEIGHTS, "r+b") as file:  # all holes, which a copy fills
        size = 1 << 28
        header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    out, half = tmp_path / "out", tmp_path / ".tmp-out"
    for sent, status, left in ((signal.SIGINT, 130, set()), (signal.SIGKILL, -9, {".tmp-out", ".tmp-out.lock"})):
        command = [BIN / "bigdit", "export", "--checkpoint", output, "--out", out]
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        until(lambda: (half / WEIGHTS).exists() and (half / WEIGHTS).stat().st_size)
        process.send_signal(sent)
        assert (process.wait(60), out.exists()) == (status, False)
        assert {name for name in names(tmp_path) if name.startswith(".tmp-")} == left
    export_command.run(output, out)
    assert (names(out), (out / WEIGHTS).stat().st_size) == (WHOLE, (pipeline / WEIGHTS).stat().st_size)
