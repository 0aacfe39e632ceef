"""The signals that end training in order; what SLURM, launchers, terminals and people send."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A shell has what it starts in the background pass over the first, nohup over the other: so it stays.
_LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """Those of `SIGNALS` that this process is to take."""
    return [each for each in SIGNALS if each not in _LEFT_IGNORED or signal.getsignal(each) is not signal.SIG_IGN]
