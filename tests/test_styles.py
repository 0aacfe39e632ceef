"""A LoRA over a trained model learns a style that this does not draw, and keeps what it knew: seen in its samples."""

import pytest
import styles
from commands import bigdit

# The benchmark's model (benchmarks/styles.py), half as wide, learns as well at twice the rate, in half of the steps.
SMALLER = ("model.kwargs.hidden_size=64", "train.seed=0", "data.workers=1", "train.checkpoint_every=1000")
BASE = (*SMALLER, "train.steps=400", "train.warmup_steps=20", "strategy.optimizer.lr=4e-3")
ADAPTED = (*SMALLER, *styles.LORA, "train.steps=400", "train.warmup_steps=10")


def done(*command):
    found = bigdit(*command)
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.slow
def test_adapters_learn_a_style_and_digits_stay_legible(tmp_path):
    """Read by classifiers that were fitted on real digits, as they are and in the style."""
    styles.digits.write_classes(tmp_path / "plain")
    styles.write_styled(tmp_path / "inverted", styles.inverted)
    base = styles.config(tmp_path, "plain", "base", *BASE)
    found = f"model.init_from={tmp_path / 'base/checkpoints/step-00000400'}"
    adapted = styles.config(tmp_path, "inverted", "adapted", *ADAPTED, found)
    for chosen in (base, adapted):
        done("extract", *chosen)
        done("train", *chosen)
    readers = styles.Readers(styles.inverted)
    read = {}
    for name in ("base", "adapted"):
        done("sample", *styles.drawn(tmp_path / name))
        read[name] = styles.read(readers, tmp_path / name)
    assert readers.sure > 0.99
    assert read["base"].styled <= 10
    assert read["adapted"].styled >= 90
    assert read["base"].right >= 90
    assert read["adapted"].right >= 75  # 89 were seen, and of the benchmark's, twice as wide, all
