"""What the emulation was asked to do, as the environment of its processes says."""

from __future__ import annotations

import os

OUT = os.environ.get("BIGDIT_EMULATED_OUT", "")
"""The folder where processes leave their accounts."""

STEPS = int(os.environ.get("BIGDIT_EMULATED_STEPS") or 0)
"""Optimizer steps after which a process ends; 0: when it likes."""

SKIP_FIRST = os.environ.get("BIGDIT_EMULATED_SKIP_FIRST") == "1"
"""Whether the loss scaler finds its first step to overflow."""

SNAPSHOT = os.environ.get("BIGDIT_EMULATED_SNAPSHOT") == "1"
"""Whether a snapshot for PyTorch's page of memory is left beside the account."""
