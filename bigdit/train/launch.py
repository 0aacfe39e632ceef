"""Start the launcher that the engine wants: deepspeed's, torchrun, or none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bigdit.config.run import EngineConfig


def launch(engine: EngineConfig, config: Path, overrides: Sequence[str], plan: Path | None = None) -> int:
    """Run `python -m bigdit.train` under the engine's launcher; returns the exit status, 0 or a failure's."""
    arguments = ["--config", str(config), *(part for override in overrides for part in ("--set", override))]
    arguments += [] if plan is None else ["--plan", str(plan)]
    status = subprocess.run([*command(engine), *arguments], env=os.environ | _environment(), check=False).returncode
    return status if status >= 0 else 128 - status  # a signal, as a shell reports it


def command(engine: EngineConfig) -> list[str]:
    """The command line up to the training module's own arguments."""
    python = [sys.executable, "-m"]
    if engine.name == "deepspeed":
        options = [
            "--log_level",
            "warning",
            "--num_gpus",
            str(engine.processes),
            "--master_port",
            str(free_port()),
            "--module",
        ]
        return [*python, "deepspeed.launcher.runner", *options, "bigdit.train"]
    if engine.name == "fsdp2":
        options = ["--standalone", "--nproc-per-node", str(engine.processes), "-m"]
        return [*python, "torch.distributed.run", *options, "bigdit.train"]
    return [*python, "bigdit.train"]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment() -> dict[str, str]:
    """So that DeepSpeed's launcher does not guess at an accelerator on a machine without one."""
    import torch  # here: it takes a second, and only launching needs it

    return {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
