"""Checkpoints are whole or absent, verified, kept by the run's course, and never of weights that are not finite."""

import json
import math
import shutil

import pytest
import torch
from resuming import started, strategy
from tiny_models import SANA as MODEL
from whole import whole_state

from bigdit import checkpoint
from bigdit.checkpoint import saver
from bigdit.checkpoint.saver import kept_steps
from bigdit.dist import World
from bigdit.errors import UserError

DESCRIBED = {"model": MODEL.model_dump(mode="json"), "run": {}, "data": None}


def keep(output, engine_and_average, *steps, keeping, found=None):
    """Save at each of the steps, as a run that resumes from `found`. Returns the names that are left."""
    engine, ema = engine_and_average
    described = DESCRIBED | {"strategy": engine.strategy.model_dump(mode="json")}
    with checkpoint.Saver(output, checkpoint.Peers(), keeping, found=found) as saving:
        for step in steps:
            saving.save(engine, ema, step, described)
    return names(output)


def names(output):
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def step_of(name):
    return int(name.removeprefix("step-"))


def there(output):
    return [step_of(name) for name in names(output) if name != "latest"]


def test_the_last_stay_and_those_of_chosen_steps(tmp_path, engine_and_average):
    keep(tmp_path, engine_and_average, *range(2, 21, 2), keeping=checkpoint.Keeping(2, every=6))
    assert there(tmp_path) == [6, 12, 18, 20]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000020\n"
    assert kept_steps([1, 2, 3, 4], 1, None) == [4]
    assert kept_steps([5], 3, 2) == [5]


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path, engine_and_average):
    """With fewer to keep than before. The newest state is that of this course, whatever its number."""
    keep(tmp_path, engine_and_average, 2, 4, 6, 8, keeping=checkpoint.Keeping(4))
    (tmp_path / "checkpoints/latest").write_text("step-00000004\n")
    found, notices = checkpoint.latest(tmp_path)
    assert (found.step, found.lineage, notices) == (4, [2, 4], [])
    keep(tmp_path, engine_and_average, 5, keeping=checkpoint.Keeping(1), found=found)
    assert there(tmp_path) == [5, 6, 8]  # 2 and 4 belong to its course; 6 and 8 to the other
    assert checkpoint.latest(tmp_path)[0].step == 5


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "is missing"),
        (b"step-8/../..\n", "holds 'step-8/../..', which is no checkpoint's name"),
        (b"\xff\x00", "cannot be read"),
        (b"", "holds '', which is no checkpoint's name"),
    ],
)
def test_where_latest_is_lost_the_newest_is_found_and_reported(tmp_path, engine_and_average, content, why):
    keep(tmp_path, engine_and_average, 2, 4, 6, keeping=checkpoint.Keeping(3))
    earlier, _ = checkpoint.find_checkpoint(tmp_path / "checkpoints/step-00000004")
    keep(tmp_path, engine_and_average, 5, keeping=checkpoint.Keeping(3), found=earlier)
    (tmp_path / "checkpoints/step-00000002/engine/rank-00000-of-00001.safetensors").unlink()
    pointer = tmp_path / "checkpoints/latest"
    pointer.unlink() if content is None else pointer.write_bytes(content)
    found, (notice,) = checkpoint.latest(tmp_path)
    assert found.step == 5  # saved last, though 6 is the higher number
    assert notice.startswith(f"{pointer} {why}")
    assert notice.endswith("; step-00000005 was saved last")


def test_nothing_whole_is_reported(tmp_path, engine_and_average):
    assert checkpoint.latest(tmp_path) == (None, [])
    keep(tmp_path, engine_and_average, 2, keeping=checkpoint.Keeping(1))
    (tmp_path / "checkpoints/latest").unlink()
    (tmp_path / "checkpoints/step-00000002/state.json").unlink()
    root = tmp_path / "checkpoints"
    assert checkpoint.latest(tmp_path) == (
        None,
        [f"{root}/latest is missing, and no checkpoint in {root} is whole"],
    )


def test_what_an_interrupted_run_left_is_removed_and_reported(tmp_path, engine_and_average, capfd):
    keep(tmp_path, engine_and_average, 2, keeping=checkpoint.Keeping(1))
    left = tmp_path / "checkpoints/.tmp-step-00000001"
    (left / "engine").mkdir(parents=True)
    (left / "engine/rank-00000-of-00001.safetensors").write_bytes(b"half")
    keep(tmp_path, engine_and_average, 4, keeping=checkpoint.Keeping(1), found=checkpoint.latest(tmp_path)[0])
    assert names(tmp_path) == ["latest", "step-00000004"]
    assert f"note: removed {left}, which an interrupted run had left" in capfd.readouterr().err


def test_pruning_that_is_interrupted_leaves_no_half_checkpoint(tmp_path, engine_and_average, monkeypatch):
    keep(tmp_path, engine_and_average, 2, keeping=checkpoint.Keeping(1))
    remove = shutil.rmtree

    def interrupted(folder, **options):
        if folder.exists() and folder.name == ".tmp-step-00000002":
            (folder / "state.json").unlink()
            raise KeyboardInterrupt
        remove(folder, **options)

    monkeypatch.setattr("shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path, engine_and_average, 4, keeping=checkpoint.Keeping(1), found=checkpoint.latest(tmp_path)[0])
    monkeypatch.undo()
    assert names(tmp_path) == [".tmp-step-00000002", "latest", "step-00000004"]
    found, notices = checkpoint.latest(tmp_path)
    assert (found.step, notices) == (4, [])
    checkpoint.verify(found)
    checkpoint.remove_unfinished(tmp_path / "checkpoints")
    assert keep(tmp_path, engine_and_average, 6, keeping=checkpoint.Keeping(1), found=found) == [
        "latest",
        "step-00000006",
    ]


def test_what_a_killed_run_did_not_prune_the_next_one_does(tmp_path, engine_and_average, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(saver, "prune", lambda *_: None)
        keep(tmp_path, engine_and_average, 2, 4, keeping=checkpoint.Keeping(1))
    assert there(tmp_path) == [2, 4]
    keep(tmp_path, engine_and_average, 6, keeping=checkpoint.Keeping(1), found=checkpoint.latest(tmp_path)[0])
    assert there(tmp_path) == [6]


def test_what_cannot_be_removed_is_a_line(tmp_path, monkeypatch):
    (tmp_path / ".tmp-step-00000001").mkdir()
    (tmp_path / ".tmp-loop").symlink_to(tmp_path / ".tmp-loop")

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(UserError) as refused:
        checkpoint.remove_unfinished(tmp_path)
    assert str(refused.value) == (
        f"cannot remove {tmp_path}/.tmp-step-00000001, which an interrupted run had left: Read-only file system"
    )
    monkeypatch.undo()
    checkpoint.remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_in_the_place_of_another_is_refused(tmp_path, engine_and_average):
    keep(tmp_path, engine_and_average, 2, 4, keeping=checkpoint.Keeping(2))
    root = tmp_path / "checkpoints"
    (root / "step-00000004").rename(tmp_path / "aside")
    shutil.copytree(root / "step-00000002", root / "step-00000004")
    with pytest.raises(UserError, match=r"step-00000004 holds step-00000002: its folder has the name of another; to r"):
        checkpoint.latest(tmp_path)


def test_a_state_without_its_checksum_is_damaged(tmp_path, engine_and_average):
    keep(tmp_path, engine_and_average, 2, keeping=checkpoint.Keeping(2))
    file = tmp_path / "checkpoints/step-00000002/state.json"
    state = json.loads(file.read_text())
    del state["checksum"]
    file.write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"state\.json is damaged \('checksum'\)"):
        checkpoint.latest(tmp_path)


def test_a_step_that_was_changed_is_found_out(tmp_path, engine_and_average):
    keep(tmp_path, engine_and_average, 2, 4, keeping=checkpoint.Keeping(2))
    file = tmp_path / "checkpoints/step-00000004/state.json"
    file.write_text(file.read_text().replace('"step": 4', '"step": 5'))
    with pytest.raises(UserError) as refused:
        checkpoint.latest(tmp_path)
    assert str(refused.value) == (
        f"{file} is damaged: its checksum does not match its content; "
        f"to resume from the one before, write step-00000002 into {tmp_path}/checkpoints/latest"
    )


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"checksum": 1}', "\x00"])
def test_a_state_of_anything_is_a_line(tmp_path, engine_and_average, text):
    keep(tmp_path, engine_and_average, 2, keeping=checkpoint.Keeping(2))
    file = tmp_path / "checkpoints/step-00000002/state.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"state\.json is damaged.*; there is no other; choose another output"):
        checkpoint.latest(tmp_path)


def test_a_flipped_bit_anywhere_is_found(tmp_path, engine_and_average):
    keep(tmp_path, engine_and_average, 2, keeping=checkpoint.Keeping(1))
    found, _ = checkpoint.latest(tmp_path)
    (file,) = found.files()
    content = file.read_bytes()
    for at in (3, 200, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[at] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"is damaged: its checksum differs from that in state\.json; there is no"):
            checkpoint.verify(found)
    file.write_bytes(content)
    checkpoint.verify(found)
    other = file.with_name("rank-00001-of-00002.safetensors")
    other.write_bytes(content)
    with pytest.raises(UserError, match=r"rank-00001-of-00002\.safetensors is not part of its checkpoint"):
        checkpoint.verify(found)


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path):
    """The thread writes a copy, which later steps do not change."""
    engine, ema, step, peers = started(strategy(), World())
    described = DESCRIBED | {"strategy": engine.strategy.model_dump(mode="json")}
    with checkpoint.Saver(tmp_path, peers, checkpoint.Keeping(9)) as saving:
        expected = []
        for number in range(1, 4):
            step()
            expected.append(whole_state(engine, ema))
            saving.save(engine, ema, number, described)
            with torch.no_grad():
                for master in engine.masters:
                    master.add_(0.01)
            step()
    for number, state in enumerate(expected, start=1):
        found = checkpoint.find_checkpoint(tmp_path / f"checkpoints/step-{number:08d}")[0]
        again, average, _, _ = started(strategy(), World(), seed=3, found=found)
        assert all(torch.equal(tensor, state[name]) for name, tensor in whole_state(again, average).items())


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    engine, ema, _, _ = started(strategy(), World())
    keep(tmp_path, (engine, ema), 2, keeping=checkpoint.Keeping(1))
    name = engine.shards()[3].name
    engine.masters[3].view(-1)[:2] = torch.tensor([math.nan, math.inf])
    with pytest.raises(UserError) as refused:
        keep(tmp_path, (engine, ema), 4, keeping=checkpoint.Keeping(1), found=checkpoint.latest(tmp_path)[0])
    root = tmp_path / "checkpoints"
    assert str(refused.value) == (
        f"NaN or infinity in 2 weights, the first in {name}: {root}/step-00000004 is not written, and "
        f"{root}/step-00000002 is the last that is good; lower strategy.optimizer.lr, lengthen "
        "train.warmup_steps, or set strategy.gradient_clipping"
    )
    assert names(tmp_path) == ["latest", "step-00000002"]
    assert checkpoint.latest(tmp_path)[0].step == 2


def test_a_full_disk_leaves_what_was_there(tmp_path, engine_and_average, monkeypatch):
    keep(tmp_path, engine_and_average, 2, keeping=checkpoint.Keeping(1))

    def to_a_full_disk(tensors, file, metadata):
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    monkeypatch.setattr(saver, "save_file", to_a_full_disk)
    with pytest.raises(UserError) as refused:
        keep(tmp_path, engine_and_average, 4, keeping=checkpoint.Keeping(1), found=checkpoint.latest(tmp_path)[0])
    root = tmp_path / "checkpoints"
    assert str(refused.value).startswith(f"cannot write the checkpoint {root}/step-00000004: ")
    assert "No space left on device" in str(refused.value)
    assert str(refused.value).endswith(
        " are free there; make room for one checkpoint more than train.keep_checkpoints, or choose another output"
    )
    assert names(tmp_path) == ["latest", "step-00000002"]
    assert checkpoint.latest(tmp_path)[0].step == 2
    checkpoint.verify(checkpoint.latest(tmp_path)[0])


def test_a_file_in_the_place_of_the_checkpoints_is_said_so(tmp_path, engine_and_average):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"^cannot write the checkpoint [^;]*; no folder is there; make room"):
        keep(tmp_path, engine_and_average, 2, keeping=checkpoint.Keeping(1))
