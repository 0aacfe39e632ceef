"""The process that workers are forked from, which has imported the libraries once and does not hear Ctrl-C."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

import torch

from bigdit.lifeline import undisturbed


def server() -> ForkServerContext:
    """Where processes that encode or verify are started.

    torch's threads and locks do not survive a fork of this process. Forked from a server that has imported it, and done
    nothing else, workers start at once, and share the memory of the libraries. Where there is a GPU, they are forked
    from one that has imported nothing: libraries ask it what it can as they are imported (torchao does), and CUDA does
    not survive a fork either.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([] if torch.cuda.is_available() else ["bigdit.extract.preload"])
    resource_tracker.ensure_running()  # whose own start lets signals through again
    with undisturbed():
        forkserver.ensure_running()
    return context
