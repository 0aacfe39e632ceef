"""The page, and what its script asks: GET /TOKEN/, POST /TOKEN/run and /TOKEN/rehearse."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from bigdit.config.wrong import wrong
from bigdit.documents import parse_json
from bigdit.errors import UserError, shown
from bigdit.live.answers import Answer, Answers
from bigdit.live.asked import Asked
from bigdit.live.gate import App, Gate
from bigdit.live.newest import DroppedError, Newest
from bigdit.rehearse import WorkerError
from bigdit.report.words import between, span

_SCRIPT = re.compile(r'<script type="module">(.*?)</script>', re.DOTALL)


def app(page: str, answers: Answers, token: str, port: int) -> App:
    """The server's app, which answers about `answers` with `page` around them. Each kind of question has a thread."""

    async def shown_page(_: Request) -> Response:
        return HTMLResponse(page)

    paths = {"run": answers.run, "rehearse": answers.rehearse}
    asks = [Route(f"/{token}/{name}", _asks(answer), methods=["POST"]) for name, answer in paths.items()]
    inner = Starlette(routes=[Route(f"/{token}/", shown_page, methods=["GET"]), *asks])
    return Gate(inner, token, port, headers(page))


def headers(page: str) -> dict[str, str]:
    """What browsers are told of every answer: this page's own scripts alone run, and reach this server alone."""
    scripts = " ".join(f"'sha256-{_digest(text)}'" for text in _SCRIPT.findall(page))
    policy = {
        "default-src": "'none'",
        "script-src": scripts,
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asks(answer: Callable[[Asked], Answer]) -> Callable[[Request], Awaitable[Response]]:
    newest: Newest[Asked, Answer] = Newest(answer)

    async def asks(request: Request) -> Response:
        """What was found, or in a line why there is no answer: `error`, or `dropped` for a newer question."""
        try:
            asked = _asked(await request.body())
        except UserError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        try:
            found = await asyncio.wrap_future(newest.ask(asked))
        except DroppedError as dropped:
            return JSONResponse({"dropped": str(dropped)})
        except UserError as error:
            return JSONResponse({"error": str(error)})
        except WorkerError as error:
            return JSONResponse({"error": str(error).splitlines()[0].rstrip(":")})
        except Exception:
            print(shown(traceback.format_exc()), end="", file=sys.stderr)
            return JSONResponse({"error": "this is a bug in bigdit: the terminal has what it says"})
        return JSONResponse(_document(found))

    return asks


def _asked(body: bytes) -> Asked:
    """Raises UserError for what is no question."""
    try:
        document = parse_json(body)
        return Asked.model_validate(document)
    except ValidationError as error:
        if not isinstance(document, dict):
            raise UserError("a JSON object was expected") from None
        raise UserError(*wrong(error, document, Asked)) from None
    except ValueError:
        raise UserError("JSON was expected") from None


def _document(found: Answer) -> dict[str, Any]:
    """As JSON, with the speed in words, as the page's grid has it."""
    step, images = found.seconds_per_step, found.samples_per_second_per_card
    said = {
        "seconds_per_step": step and span(step),
        "samples_per_second_per_card": images and between(images),
    }
    return found.model_dump(mode="json") | said
