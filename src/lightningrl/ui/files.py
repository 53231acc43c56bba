"""The files of the page, each with its type, compressed. A browser that has a file does not get it again."""

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lightningrl.errors import Missing

PAGE = Path(__file__).parent / "page"
NAME = re.compile(r"(?=.{1,200}$)(?:[a-z0-9][\w-]*/)*[a-z0-9][\w.-]*", re.ASCII | re.IGNORECASE)
"""A path that cannot leave the folder: no part of it begins with a dot. A disk refuses names that are too long."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Suffix → content type. Files of other types are not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a file holds."""

    tag: str
    """Equal for equal content."""
    plain: bytes
    packed: bytes
    """Compressed with gzip."""


async def serve_file(request: Request) -> Response:
    """A file of the page; the address `/` is `index.html`. Raises `Missing`."""
    name = request.path_params.get("name") or "index.html"
    file = PAGE / name
    if not NAME.fullmatch(name) or file.suffix not in TYPES or not file.is_file():
        raise Missing("there is nothing at this address", hint="the page begins at `/`; docs/page.md lists the API")
    content = _content(file, file.stat().st_mtime_ns)
    headers = {"etag": content.tag, "cache-control": "no-cache"}  # ask each time whether it has changed
    headers["vary"] = "accept-encoding"
    if file.suffix == ".html":
        headers["link"] = _modules()
    if content.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(content.plain, media_type=TYPES[file.suffix], headers=headers)
    return Response(content.packed, media_type=TYPES[file.suffix], headers=headers | {"content-encoding": "gzip"})


@lru_cache(maxsize=256)
def _content(file: Path, changed_ns: int) -> Content:
    """The content of a file that was changed at this time."""
    plain = file.read_bytes()
    tag = f'W/"{hashlib.blake2b(plain, digest_size=12).hexdigest()}"'
    return Content(tag=tag, plain=plain, packed=gzip.compress(plain, mtime=0))


@cache
def _modules() -> str:
    """A header that names all modules, so that a browser loads them at once, not one import after another."""
    found = sorted(file.relative_to(PAGE).as_posix() for file in PAGE.rglob("*") if file.suffix in (".js", ".mjs"))
    return ", ".join(f"<{name}>; rel=modulepreload" for name in found)
