"""The commands of bigdit as a user starts them, and the overrides of tiny runs of the digits."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "launch/recipes/digits.yaml"
BIN = Path(sys.executable).parent
HELPERS = f"{ROOT}:{Path(__file__).parent}"
"""The PYTHONPATH of scripts that import what tests share."""

# A smaller sibling of the demo's model: two narrow blocks.
TINY = (
    "model.kwargs.num_layers=2",
    "model.kwargs.num_attention_heads=4",
    "model.kwargs.attention_head_dim=8",
    "model.kwargs.num_cross_attention_heads=4",
    "model.kwargs.cross_attention_head_dim=8",
    "model.kwargs.cross_attention_dim=32",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
    "train.warmup_steps=2",
    "train.steps=8",
)

SINGLE = ("engine.name=single", "engine.processes=1", "engine.ds_config=null")


def run_command(*command, timeout=300, **environment):
    """Run a real command from the repository's root; stdout, stderr and returncode, never more than `timeout` s."""
    threads = {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | threads | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def bigdit(*arguments, **options):
    """The command line tool, as a user starts it."""
    return run_command(BIN / "bigdit", *arguments, **options)


def with_set(overrides):
    """`--set` for each override."""
    return [part for override in overrides for part in ("--set", override)]
