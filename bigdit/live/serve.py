"""A server for this machine alone, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from bigdit import log
from bigdit.errors import UserError
from bigdit.live.answers import Answers
from bigdit.live.app import app

ADDRESS = "127.0.0.1"


def serve(page: str, answers: Answers, at: socket.socket, *, browser: bool) -> None:
    """Hand out `page` and answer there, after printing the address. Raises KeyboardInterrupt for Ctrl-C."""
    server, url = prepared(page, answers, at)
    print(url, flush=True)
    log.notice("each change of the page runs; Ctrl-C ends it")
    if browser and _has_display():
        webbrowser.open(url)
    server.run(sockets=[at])


def prepared(page: str, answers: Answers, at: socket.socket) -> tuple[uvicorn.Server, str]:
    """A server that is to run there, and its address with a token of its own."""
    token, number = secrets.token_urlsafe(24), at.getsockname()[1]
    config = uvicorn.Config(
        app(page, answers, token, number),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config), f"http://{ADDRESS}:{number}/{token}/"


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Within, SIGTERM ends this process as an exception does: what it has started ends with it."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def listening(port: int | None) -> Iterator[socket.socket]:
    """A port of this machine alone. Raises UserError where it is taken."""
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((ADDRESS, port or 0))
        except OSError as error:
            raise UserError(
                f"--port {port}: {(error.strerror or str(error)).lower()}; leave it out for one that is free"
            ) from None
        made.listen()  # the browser waits here until the server has begun
        yield made


def _has_display() -> bool:
    """Whether a browser has a screen to show itself on, and no terminal in its place."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
