"""A global batch that the processes do not divide is filled up with samples of weight 0, and equals one process's
steps."""

import pytest
from commands import DIGITS, PIXART, SINGLE, TINY, reading, run_ranks, with_set

from bigdit.train.monitor.metrics import read_metrics

pytestmark = pytest.mark.slow

BATCH = 7
FSDP2 = ("strategy.engine=fsdp2", "strategy.ds_config=null")
DDP = ("strategy.engine=ddp", "strategy.ds_config=null")
CASES = {
    "fp32": {
        "ddp": (3, "strategy.micro_batch_size=3", *DDP),
        "zero 1": (2, "strategy.micro_batch_size=2", "strategy.ds_config.zero_optimization.stage=1"),
        "hsdp": (4, "strategy.micro_batch_size=1", "strategy.dp_replicate=2", *FSDP2),
    },
    "shared": {"cp 2": (4, "strategy.micro_batch_size=2", "strategy.cp=2", *FSDP2)},
    "fp16": {
        "fsdp2": (3, "strategy.micro_batch_size=3", *FSDP2),
        "hsdp": (4, "strategy.micro_batch_size=2", "strategy.dp_replicate=2", *FSDP2),
    },
    "online": {
        "fsdp2": (2, "strategy.micro_batch_size=3", *FSDP2),
        "zero 2": (3, "strategy.micro_batch_size=3"),
    },
}
"""Processes and settings, by what the one process also has. DeepSpeed trains no fp16 on CPUs."""
ALIKE = {
    "fp32": ("strategy.precision=fp32",),
    "shared": (PIXART, "strategy.precision=fp32", "encoders.text.max_tokens=32"),
    "fp16": ("strategy.precision=fp16",),
    "online": ("strategy.precision=fp32", "data.buckets=[[8,8]]"),
}
# Sums of gradients have another order: see test_curves.py. fp16 has three more bits than bf16. Norms of gradients
# differ by 5e-4 in fp16, even where processes divide the batch, and are not compared.
TOLERANCE = {"fp16": 3e-3 / 8}


def trained(output, count, *settings):
    """The rows of a run's metrics."""
    settings = [
        *TINY,
        "train.steps=4",
        *settings,
        f"strategy.global_batch_size={BATCH}",
        f"strategy.world_size={count}",
    ]
    if PIXART in settings:
        settings = [each for each in settings if not each.startswith("model.")]
    done = run_ranks(count, "-m", "bigdit.train", "--config", DIGITS, *with_set([*settings, f"output={output}"]))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (f"strategy.micro_batch_size={BATCH}" in settings) == ("with weight 0" not in done.stderr)
    return read_metrics(output / "metrics.jsonl")


@pytest.mark.parametrize("kind", CASES)
def test_the_steps_are_those_of_one_process(features, images, tmp_path, kind):
    data = [f"data.images={images}", *reading(None)] if kind == "online" else reading(features)
    alone = trained(tmp_path / "alone", 1, *ALIKE[kind], *data, *SINGLE, f"strategy.micro_batch_size={BATCH}")
    assert len(alone) == 4
    for name, (count, *case) in CASES[kind].items():
        rows = trained(tmp_path / name, count, *ALIKE[kind], *data, *case)
        for row, other in zip(rows, alone, strict=True):
            assert row["loss"] == pytest.approx(other["loss"], rel=TOLERANCE.get(kind, 2e-5)), name
            assert (row["grad_norm"] is None) == (other["grad_norm"] is None), name  # a step that overflows in fp16
            if row["grad_norm"] is not None and kind != "fp16":
                assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-5), name


def test_fsdp2_adds_up_passes_in_fp32_and_one_process_in_fp16_where_they_overflow(features, tmp_path):
    """So it skips fewer of the first steps. In one pass they skip the same, as above."""
    ways = {
        "one process": (1, "strategy.micro_batch_size=4", *SINGLE),
        "fsdp2": (1, "strategy.micro_batch_size=4", *FSDP2),
        "hsdp": (4, "strategy.micro_batch_size=1", "strategy.dp_replicate=2", *FSDP2),
    }
    data = (f"data.features={features}", "strategy.precision=fp16", "train.steps=3")
    skipped = {
        name: [row.get("skipped", False) for row in trained(tmp_path / name, *way, *data)] for name, way in ways.items()
    }
    in_passes = [True, False, False]
    assert skipped == {"one process": [True, True, False], "fsdp2": in_passes, "hsdp": in_passes}
