"""A run whose processes share samples has the losses, validation and images of one process, and resumes on another
number of processes."""

import numpy as np
import pytest
from commands import DIGITS, PIXART, SINGLE, in_process, run_ranks, with_set
from PIL import Image

from bigdit.train.monitor.metrics import read_metrics

RUN = (
    *(PIXART, "strategy.micro_batch_size=4", "strategy.global_batch_size=8", "strategy.ema={decay: 0.9}"),
    *("train={steps: 6, checkpoint_every: 3, seed: 6}", "validation={samples: 6, every: 3}"),
    *("samples={captions: [a handwritten six, a seven, a zero], every: 3, steps: 2}", "encoders.text.max_tokens=32"),
)
SHARED = ("strategy.engine=fsdp2", "strategy.ds_config=null")
TOLERANCE = 2e-5


def trained(features, output, processes, *more):
    settings = with_set([*RUN, f"data.features={features}", f"output={output}", *more])
    done = run_ranks(processes, "-m", "bigdit.train", "--config", DIGITS, *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def rows(output):
    """The loss, norm of the gradients and validation of each step."""
    return [
        [
            row["loss"],
            row["grad_norm"],
            *(row[key] for key in sorted(row) if key.startswith("val") and "by_t" not in key),
        ]
        for row in read_metrics(output / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_a_run_is_that_of_one_process_and_resumes_on_others(features, tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    trained(features, alone, 1, *SINGLE)
    trained(features, shared, 2, *SHARED, "strategy.cp=2", "train.steps=3")
    done = trained(features, shared, 2, *SHARED)
    assert "resum" in done.stdout + done.stderr
    found, wanted = rows(shared), rows(alone)
    assert [len(row) for row in found] == [len(row) for row in wanted]
    assert len(wanted[2]) > 2
    for row, other in zip(found, wanted, strict=True):
        assert row == pytest.approx(other, rel=TOLERANCE)
    for step in (3, 6):
        file = f"samples/step-{step:08d}.png"
        with Image.open(alone / file) as one, Image.open(shared / file) as other:
            assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 2  # of 255, at a rounding border


def test_what_does_not_divide_is_refused_before_anything_runs(features, tmp_path):
    def refused(*more):
        settings = with_set([*RUN, *SHARED, f"data.features={features}", f"output={tmp_path}", *more])
        done = in_process("train", "--config", DIGITS, "--dry-run", *settings)
        assert done.returncode == 1, done.stdout
        return done.stderr

    assert "latents of 4 × 4 × 6 are 6 tokens" in refused("strategy.cp=4", "strategy.world_size=4")
    assert "4 heads of" in refused("strategy.cp=8", "strategy.world_size=8")
    assert "how to split the tokens of LuminaNextDiT2DModel" in refused(
        "strategy.cp=2",
        "model={class_name: LuminaNextDiT2DModel, kwargs: {in_channels: 4, cross_attention_dim: 64}}",
    )
