"""bigdit's commands as a user starts them, and overrides for tiny runs of the digits."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from bigdit.cli import main
from bigdit.train.processes.launch import free_port

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "launch/recipes/digits.yaml"
BIN = Path(sys.executable).parent
HELPERS = ":".join(f"{ROOT}/{each}" for each in (".", "tests/helpers", "tests/helpers/processes", "tests/helpers/tiny"))
"""PYTHONPATH for scripts that import these helpers."""

# The demo's model with two narrow blocks, in the precision that people train in.
TINY = (
    "strategy.precision=bf16",
    "model.kwargs.num_layers=2",
    "model.kwargs.num_attention_heads=4",
    "model.kwargs.attention_head_dim=8",
    "model.kwargs.num_cross_attention_heads=4",
    "model.kwargs.cross_attention_head_dim=8",
    "model.kwargs.cross_attention_dim=32",
    "strategy.micro_batch_size=8",
    "strategy.global_batch_size=16",
    "train.warmup_steps=2",
    "train.steps=8",
)

# A model whose samples several processes can share.
PIXART = (
    "model={class_name: PixArtTransformer2DModel, kwargs: {in_channels: 4, out_channels: 4, num_layers: 2, "
    "num_attention_heads: 4, attention_head_dim: 8, cross_attention_dim: 32, caption_channels: 64, sample_size: 4, "
    "patch_size: 2, use_additional_conditions: false}}"
)

ONLINE = ("strategy.features=online", "data.features=null")
SINGLE = ("strategy.engine=single", "strategy.world_size=1", "strategy.ds_config=null")


def reading(features):
    """Overrides for a run that reads this cache, or that encodes in each step if it is None."""
    return ONLINE if features is None else (f"data.features={features}",)


def environment_with(variables):
    """This process's environment for commands of tests, with `variables` set."""
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"} | variables


def run_command(*command, timeout=300, **environment):
    """Run a command in the repository's root. Raises subprocess.TimeoutExpired after `timeout` s."""
    return warm.run([str(part) for part in command], [environment_with(environment)], ROOT, timeout)


def bigdit(*arguments, timeout=300, **environment):
    """Run the command line tool as a user does, with its libraries already imported."""
    program = [str(part) for part in (BIN / "bigdit", *arguments)]
    return warm.run(program, [environment_with(environment)], ROOT, timeout)


def in_process(*arguments, **environment):
    """Run the same command in this process, twenty times as fast, where only its output and exit status matter."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as within:
        patch = within.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment_with(environment).items():
            patch.setenv(name, str(value))
        within.enter_context(contextlib.chdir(ROOT))
        within.enter_context(contextlib.redirect_stdout(out))
        within.enter_context(contextlib.redirect_stderr(err))
        ended = within.enter_context(pytest.raises(SystemExit))
        main([str(part) for part in arguments])
    return subprocess.CompletedProcess(arguments, ended.value.code, out.getvalue(), err.getvalue())


def run_ranks(count, *program, timeout=300, **environment):
    """Run a script, or `-m MODULE`, in `count` processes as torchrun starts them."""
    own = environment_with(environment)
    if count > 1:
        own |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [own | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}) for rank in range(count)]
    return warm.run([sys.executable, *(str(part) for part in program)], ranks, ROOT, timeout)


def with_set(overrides):
    """`--set` for each override. The last value of a key wins, so a test's value replaces a shared one."""
    last = {override.partition("=")[0]: override for override in overrides}
    return [part for override in last.values() for part in ("--set", override)]
