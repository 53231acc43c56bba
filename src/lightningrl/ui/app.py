"""The ASGI app: files of the page, JSON, and changes while a run goes on. `Guard` looks at every request first."""

from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lightningrl.errors import LightningError, Missing, UserError
from lightningrl.ui.ask import Ask
from lightningrl.ui.files import serve_file
from lightningrl.ui.guard import Guard
from lightningrl.ui.live import Live
from lightningrl.ui.routes import API, Answer
from lightningrl.ui.shelf import Shelf

EVENTS = "/api/runs/{run}/events"


def create_app(shelf: Shelf, live: Live, *, key: str | None = None, host: str = "") -> ASGIApp:
    """The app. `key`: what callers must know; None: nothing. `host`: one more name of this server."""

    async def events(request: Request) -> Response:
        name = _ask(shelf, request).book.name
        return live.stream(name, lambda: shelf.book(name))

    routes = [
        *(Route(path, _answering(shelf, answer)) for path, answer in API.items()),
        Route(EVENTS, events),
        Route("/", serve_file),
        Route("/{name:path}", serve_file),
    ]
    app = Starlette(
        routes=routes, exception_handlers={LightningError: _refused, HTTPException: _http, Exception: _broken}
    )
    return Guard(app, key=key, host=host)


def as_json(value: Any, *, status: int = 200) -> Response:
    """A response. NaN and infinity become null."""
    body = msgspec.json.encode(value)
    return Response(body, status, media_type="application/json", headers={"cache-control": "no-store"})


def complaint(message: str, hint: str | None, *, status: int) -> Response:
    return as_json({"error": {"message": message, "hint": hint}}, status=status)


def _answering(shelf: Shelf, answer: Answer) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def endpoint(request: Request) -> Response:
        return as_json(await answer(_ask(shelf, request)))

    return endpoint


def _ask(shelf: Shelf, request: Request) -> Ask:
    names = {name: unquote(value) for name, value in request.path_params.items()}
    return Ask(shelf=shelf, names=names, query=request.query_params)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, LightningError)
    status = 404 if isinstance(error, Missing) else 400 if isinstance(error, UserError) else 503
    return complaint(error.message, error.hint, status=status)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return complaint(error.detail.lower(), "docs/page.md lists the addresses", status=error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    """A mistake of ours. Starlette raises it again, so that its trace is in the log."""
    return complaint(
        f"{type(error).__name__}: {error}", "the process that serves this page has logged the trace", status=500
    )
