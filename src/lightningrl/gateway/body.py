"""What is in the body of a request? Unpacks it, and decodes its JSON, within limits."""

import hashlib
import zlib
from typing import Any

import msgspec

from lightningrl.dialects.base import Refused
from lightningrl.gateway.threads import in_thread

LARGE = 1024 * 1024
"""Larger bodies, in bytes, are decoded off the event loop."""
TEXTS_LIMIT, VALUES_LIMIT = 400_000, 2_000_000
"""Limits of the JSON in a large body. Decoding takes up to 1.6 µs a text and 0.15 µs a value, and holds the GIL."""
NESTING_LIMIT = 100
"""Objects and lists within each other. Templates, stores and schemas may not handle more."""


async def understood(path: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON object in a body, and a digest of path and body: a repeated request has the same. Raises as `decode`."""
    return await in_thread(_understood, path, body) if len(body) > LARGE else _understood(path, body)


def _understood(path: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    return decode(body), hashlib.blake2b(path.encode("utf-8", "surrogatepass") + b"\n" + body, digest_size=16).digest()


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises `Refused`, also for NaN, lone surrogates and invalid UTF-8."""
    if len(body) > LARGE:
        _check_size(body)
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise _too_deep() from error
    if not isinstance(raw, dict):
        raise Refused(400, "the body is not a JSON object", code="invalid_json")
    if body.count(b"{") + body.count(b"[") > NESTING_LIMIT and _depth_exceeds(raw, NESTING_LIMIT):
        raise _too_deep()
    return raw


def unpacked(body: bytes, encoding: str, *, limit: int) -> bytes:
    """Decompress a body. Raises `Refused` if it is broken, or has more than `limit` bytes."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        message, hint = f"the body's encoding `{encoding}` is not known here", "send it plain, or as gzip"
        raise Refused(415, message, code="unsupported_encoding", hint=hint)
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either of them
    try:
        plain = unpacker.decompress(body, limit)
    except zlib.error as error:
        raise Refused(400, f"the body is not `{encoding}`: {error}", code="invalid_encoding") from error
    if unpacker.unconsumed_tail:
        raise too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        what = "has data after its end" if unpacker.eof else "breaks off"
        message, hint = f"the body's `{encoding}` {what}", "send it as one whole stream"
        raise Refused(400, message, code="invalid_encoding", hint=hint)
    return plain


def too_large(limit: int) -> Refused:
    return Refused(413, f"the body has more than `{limit}` bytes", code="too_large", hint="shorten the conversation")


def _check_size(body: bytes) -> None:
    """Before decoding: count texts by their quotes, and values by the commas between them."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    texts = plain.count(b'"') // 2
    values = 0 if texts > TEXTS_LIMIT else sum(part.count(b",") for part in plain.split(b'"')[::2])
    if texts > TEXTS_LIMIT or values > VALUES_LIMIT:
        message = f"the body has more than `{TEXTS_LIMIT}` texts or `{VALUES_LIMIT}` values"
        raise Refused(413, message, code="too_large", hint="shorten the conversation")


def _depth_exceeds(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        children: list[object] = []
        for parent in level:
            if isinstance(parent, dict):
                children += parent.values()
            elif isinstance(parent, list):
                children += parent
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _too_deep() -> Refused:
    message = f"the body is nested deeper than `{NESTING_LIMIT}`"
    return Refused(400, message, code="invalid_json", hint="send flatter JSON")
