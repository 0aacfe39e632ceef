"""Training on full or read-only disks: one line, nothing lost, and it resumes once there is room."""

import pytest
from commands import DIGITS, SINGLE, TINY, bigdit, with_set
from disks import mounted, remount
from training import run

from bigdit import checkpoint
from bigdit.cli import main
from bigdit.train.monitor.metrics import read_metrics


def errors(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]


def test_a_full_disk_while_saving_loses_nothing_and_the_run_continues_with_room(features, tmp_path, capfd):
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
        assert rows == list(range(1, 9))
        assert checkpoint.latest(disk / "run")[0].step == 8


def test_an_output_that_can_no_longer_be_written_is_one_line(features, tmp_path, capfd):
    with mounted(tmp_path / "small", "size=64m") as disk:
        assert run(features, disk / "run", "train.steps=2") == 0
        remount(disk, "ro")
        assert run(features, disk / "run", "train.steps=4") == 1
        assert errors(capfd) == [f"error: cannot write {disk}/run/lock: Read-only file system; choose another output"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"), [("size=64k", "No space left on device, "), ("size=1m,ro", "Read-only file system; ")]
)
def test_a_compilers_cache_that_cannot_be_written_is_named(features, tmp_path, options, reason):
    settings = (*TINY, *SINGLE, f"data.features={features}", f"output={tmp_path}/run", "strategy.compile_blocks=true")
    with mounted(tmp_path / "cache", options) as cache:
        done = bigdit("train", "--config", DIGITS, *with_set(settings), TORCHINDUCTOR_CACHE_DIR=cache)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert line.startswith(f"error: strategy.compile_blocks: torch's compiler cannot write {cache}")
    assert f": {reason}" in line
    assert line.endswith("; set TORCHINDUCTOR_CACHE_DIR to another folder")


def used(folder):
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def test_a_full_disk_at_a_snapshot_and_at_a_page_is_a_line_and_both_come_with_room(features, tmp_path, capfd):
    of_averages = ("train.checkpoint_every=9", "train.snapshot_every=1", "strategy.ema.widths=[0.05,0.1]")
    with mounted(tmp_path / "small", "size=64m") as disk:
        output, snapshots = disk / "run", disk / "run/ema_snapshots"
        assert run(features, output, *of_averages, "train.steps=2") == 0
        remount(disk, f"size={(used(disk) + used(snapshots) // 4) // 1024}k")
        assert run(features, output, *of_averages, "train.steps=4") == 1
        (line,) = errors(capfd)
        assert line.startswith(f"error: cannot write the snapshot of the EMA {snapshots}/step-00000003: ")
        assert "No space left on device" in line
        assert sorted(each.name for each in snapshots.iterdir()) == ["step-00000001", "step-00000002"]
        filled = sum(1 for _ in filling(disk / "filler"))
        assert filled > 0
        with pytest.raises(SystemExit, match="1"):
            main(["report", str(output)])
        (line,) = errors(capfd)
        assert line.startswith(f"error: cannot write {output}/report.html: No space left on device, ")
        (disk / "filler").unlink()
        remount(disk, "size=64m")
        assert run(features, output, *of_averages, "train.steps=4") == 0
        assert len(list(snapshots.iterdir())) == 4
        with pytest.raises(SystemExit, match="0"):
            main(["report", str(output)])
        assert "all of 4 steps" in (output / "report.html").read_text()


def filling(file):
    """Write a file until the disk is full, a block at a time."""
    with open(file, "wb", buffering=0) as opened:
        try:
            while opened.write(bytes(4096)) == 4096:
                yield
        except OSError:
            return
