"""The process that workers are forked from, which has imported the libraries once and does not hear Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext

import torch

from bigdit.die_with_parent import undisturbed
from bigdit.libraries import switched_on

_LONGEST = 107 - len("/pymp-12345678/listener-12345678")
"""Of the path of a folder in which multiprocessing makes sockets, in bytes. Source: unix(7); arbitrary_address in
multiprocessing/connection.py, Python 3.11."""


def server() -> ForkServerContext:
    """Where processes that encode or verify are started.

    torch's threads and locks do not survive a fork of this process. Forked from a server that has imported it, and done
    nothing else, workers start at once, and share the memory of the libraries. Where there is a GPU, they are forked
    from one that has imported nothing: libraries ask it what it can as they are imported (torchao does), and CUDA does
    not survive a fork either.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([] if torch.cuda.is_available() else ["bigdit.extract.preload"])
    _find_room_for_sockets()
    resource_tracker.ensure_running()  # whose own start lets signals through again
    with undisturbed(), switched_on("PYTHONSAFEPATH"):  # for the reason of checkout.own_module
        forkserver.ensure_running()
    return context


def _find_room_for_sockets() -> None:
    """They are made in TMPDIR, or in the system's folder for such files where the path of that is too long for them."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST:
        return
    asked, tempfile.tempdir = tempfile.tempdir, "/tmp"
    try:
        util.get_temp_dir()  # made once a process, and taken away at its end
    finally:
        tempfile.tempdir = asked
