"""The files of the page, each with its type. A browser that has a file does not get it again."""

import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lightningrl.ui.shelf import Missing

PAGE = Path(__file__).parent / "page"
NAME = re.compile(r"(?:[a-z0-9][\w-]*/)*[a-z0-9][\w.-]*", re.ASCII | re.IGNORECASE)
"""A path that cannot leave the folder: no part of it begins with a dot."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Suffix → content type. Files of other types are not served."""


async def serve_file(request: Request) -> Response:
    """A file of the page; the address `/` is `index.html`. Raises `Missing`."""
    name = request.path_params.get("name") or "index.html"
    file = PAGE / name
    if not NAME.fullmatch(name) or file.suffix not in TYPES or not file.is_file():
        raise Missing("there is nothing at this address", hint="the page begins at `/`; docs/page.md lists the API")
    content = file.read_bytes()
    tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "no-cache"}  # ask each time whether it has changed
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[file.suffix], headers=headers)
