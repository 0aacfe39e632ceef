"""What starts is this bigdit and its own imports, whatever lies in the current folder."""

import warm
from commands import BIN, DIGITS, SINGLE, TINY, environment_with, with_set
from gpus import empty_cache


def test_no_process_takes_another_checkout_or_a_module_of_the_users_for_its_own(images, tmp_path):
    """It holds for processes of emulated GPUs, of encoders and of training."""
    (tmp_path / "bigdit").mkdir()
    (tmp_path / "bigdit/__init__.py").write_text("raise SystemExit('of another checkout')")
    (tmp_path / "random.py").write_text("raise SystemExit('of the user')")
    short = ("train.steps=1", "train.warmup_steps=0", "output=run")
    own = [*TINY, *SINGLE, *short, f"data.images={images}", "data.features=features"]
    two = ("strategy.engine=fsdp2", "strategy.world_size=2")
    environment = environment_with({"BIGDIT_CACHE": str(empty_cache(tmp_path / "cache"))})
    for command in (
        ("profile", "--model", "dit-s-8", "--gpu", "a40", "--strategy", "single"),
        ("extract", "--config", DIGITS, *with_set(own)),
        ("train", "--config", DIGITS, *with_set([*own, *two])),
    ):
        done = warm.run([str(part) for part in (BIN / "bigdit", *command)], [environment], tmp_path, 300)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/checkpoints/step-00000001").is_dir()
