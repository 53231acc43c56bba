"""Whose call is it? The attempt's token, wherever an agent's SDK was able to put it.

In this order: `baggage: lightningrl.token=…` (set per task by instrumentation), `/r/<token>/…` in the path, the API key.
"""

from collections.abc import Iterable
from urllib.parse import unquote

BAGGAGE = "lightningrl.token"


def token_of(headers: Iterable[tuple[bytes, bytes]], path_token: str | None) -> str | None:
    """None if the request carries no token at all."""
    found = {name: value.decode("latin-1") for name, value in headers if name in (b"baggage", b"authorization")}
    return _from_baggage(found.get(b"baggage", "")) or path_token or _from_bearer(found.get(b"authorization", ""))


def split_path(path: str) -> tuple[str | None, str]:
    """`/r/<token>/v1/chat/completions` → (token, `/chat/completions`); either part in front may be missing."""
    token = None
    if path.startswith("/r/"):
        token, _, rest = path[3:].partition("/")
        path = f"/{rest}"
    if path.startswith("/v1/"):
        path = path[3:]
    return token or None, path.rstrip("/") or "/"


def _from_baggage(header: str) -> str | None:
    """W3C baggage: `key=value;property, key=value`, values percent-encoded."""
    for member in header.split(","):
        key, _, value = member.partition(";")[0].partition("=")
        if key.strip() == BAGGAGE:
            return unquote(value.strip()) or None
    return None


def _from_bearer(header: str) -> str | None:
    scheme, _, value = header.partition(" ")
    return value.strip() or None if scheme.lower() == "bearer" else None
