"""Training on disks that are full or cannot be written: a line, nothing lost, and it goes on with room."""

from disks import mounted, remount
from training import run

from bigdit import checkpoint
from bigdit.train.metrics import read_metrics


def errors(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]


def test_a_full_disk_while_saving_loses_nothing_and_the_run_goes_on_with_room(features, tmp_path, capfd):
    with mounted(tmp_path / "small", "size=64m") as disk:
        more = ("train.steps=8", "train.checkpoint_every=2", "train.keep_checkpoints=9")
        assert run(features, disk / "run", *more, "train.steps=2") == 0
        whole = sum(file.stat().st_size for file in (disk / "run").rglob("*") if file.is_file())
        saved = sum(file.stat().st_size for file in (disk / "run/checkpoints").rglob("*") if file.is_file())
        remount(disk, f"size={(whole + saved * 3 // 2) // 1024}k")
        assert run(features, disk / "run", *more) == 1
        (line,) = errors(capfd)
        assert line.startswith(f"error: cannot write the checkpoint {disk}/run/checkpoints/step-0000000")
        assert "No space left on device" in line
        assert line.endswith(" make room for one checkpoint more than train.keep_checkpoints, or choose another output")
        found, _ = checkpoint.latest(disk / "run")
        checkpoint.verify(found)
        assert found.step == 4
        remount(disk, "size=64m")
        assert run(features, disk / "run", *more) == 0
        rows = [row["step"] for row in read_metrics(disk / "run/metrics.jsonl")]
        assert rows == list(range(8))
        assert checkpoint.latest(disk / "run")[0].step == 8


def test_an_output_that_can_no_longer_be_written_is_one_line(features, tmp_path, capfd):
    with mounted(tmp_path / "small", "size=64m") as disk:
        assert run(features, disk / "run", "train.steps=2") == 0
        remount(disk, "ro")
        assert run(features, disk / "run", "train.steps=4") == 1
        assert errors(capfd) == [f"error: cannot write {disk}/run/lock: Read-only file system; choose another output"]
