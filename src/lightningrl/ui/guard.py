"""May this request be answered? Looks at its method, its host, the page that sent it, and its key.

A browser lets any web page send requests to this server, and tells where they come from. A page of another origin gets
nothing. Its own domain may even resolve to this server's address (DNS rebinding): then the `Host` header names it.
"""

import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightningrl.gateway.hosts import Hosts

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
"""Content security policy: only files of this server, and no scripts or styles inside the page."""
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Refusal(Exception):
    def __init__(self, status: int, message: str, hint: str) -> None:
        super().__init__(message)
        self.status, self.message, self.hint = status, message, hint


class Guard:
    """The app behind these checks. Every response gets the security headers."""

    def __init__(self, app: ASGIApp, *, key: str | None, host: str) -> None:
        self._app, self._key, self._hosts = app, key, Hosts([host] if host else [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        extra = dict(HEADERS)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(extra)
            await send(message)

        try:
            self._check(scope, headers)
            if self._key is not None:
                extra |= self._admit(scope, headers, self._key)
        except Refusal as refusal:
            body = msgspec.json.encode({"error": {"message": refusal.message, "hint": refusal.hint}})
            await Response(body, refusal.status, media_type="application/json")(scope, receive, sending)
            return
        # a name in a path may have an encoded slash: the routes decode each name by itself
        await self._app({**scope, "path": scope["raw_path"].decode("ascii")}, receive, sending)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if not all(self._hosts.admits(name) for name in headers.getlist("host")):
            raise Refusal(421, f"this server is not `{host:.80}`", "open the address that was printed")
        if scope["method"] not in ("GET", "HEAD"):
            raise Refusal(405, f"`{scope['method']:.20}` is not allowed", "the page only reads: use GET")
        site = headers.get("sec-fetch-site", "none")
        followed = headers.get("sec-fetch-dest") == "document" and scope["path"] == "/"  # a link to the page
        if _foreign(headers.get("origin"), host=host) or (site not in ("same-origin", "none") and not followed):
            raise Refusal(403, "another web page has sent this request", "open the page itself")

    def _admit(self, scope: Scope, headers: Headers, key: str) -> Mapping[str, str]:
        """Headers that give the key to the browser, if it came in the address of the page. Raises `Refusal`."""
        cookie = f"lightningrl-{scope['server'][1]}"  # cookies do not tell ports apart
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0] if scope["path"] == "/" else ""
        if _same(asked, key):
            return {"set-cookie": f"{cookie}={key}; Path=/; HttpOnly; SameSite=Strict"}
        kept = cookie_parser(headers.get("cookie", "")).get(cookie, "")
        if not _same(kept, key) and not (scheme.lower() == "bearer" and _same(bearer, key)):
            raise Refusal(401, "this page needs its key", "open the address with `?key=` that was printed")
        return {}


def _same(given: str, key: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), key.encode())


def _foreign(origin: str | None, *, host: str) -> bool:
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc != host
    except ValueError:  # no URL, e.g. `http://[`
        return True
