"""Who may ask: who has the token, at this address, from this page. Everybody on this machine can reach the port, and
any page in the browser can have it asked."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 4096
"""Of a question; they have some hundred."""


class Gate:
    """An ASGI app before another one: refuses all but GET and POST of JSON under `/TOKEN/`, at a Host and from an
    Origin that are 127.0.0.1 or localhost with the `port`. A page elsewhere whose name was bound anew to 127.0.0.1 has
    its own name as Host. Every answer gets the `headers`."""

    def __init__(self, app: App, token: str, port: int, headers: dict[str, str]) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        refused = self._refused(scope)
        if refused is None:
            await self._app(scope, receive, with_headers)
            return
        status, why = refused
        body = json.dumps({"error": why}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await with_headers({"type": "http.response.body", "body": body})

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason, of whatever is wrong first; None where nothing is."""
        if scope["type"] != "http":
            return 400, "there is nothing but http here"
        found: list[tuple[bytes, bytes]] = scope["headers"]
        headers = dict(found)
        hosts = [value for name, value in found if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return 421, "another Host was asked for; this one is 127.0.0.1 with its port"
        origin = headers.get(b"origin")
        if origin is not None and origin.removeprefix(b"http://") not in self._hosts:
            return 403, "another page asks; this server answers its own alone"
        given = scope["path"].encode().removeprefix(b"/").partition(b"/")[0]  # of `OPTIONS *` too
        if not secrets.compare_digest(given, self._token):
            return 403, "the token is missing or another one; open the address that `bigdit whatif` printed"
        if scope["method"] not in ("GET", "POST"):
            return 405, f"{scope['method']} was asked; there are GET and POST"
        if scope["method"] == "POST":
            return _unfit(headers)
        return None


def _unfit(headers: dict[bytes, bytes]) -> tuple[int, str] | None:
    """What is wrong with what is posted, by what is said of it."""
    if headers.get(b"content-type", b"").split(b";")[0].strip() != b"application/json":
        return 415, "application/json was expected"
    length = headers.get(b"content-length", b"")
    if not length.isdigit():
        return 411, "the length of the question was expected beside it"
    if len(length) > 9 or int(length) > MOST_BYTES:
        return 413, f"a question has {MOST_BYTES} bytes at most"
    return None
