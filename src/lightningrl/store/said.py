"""In which rollouts was this said? Searches the stored bodies of calls, newest attempt only, call by call.

A call is stored as a difference to its base, so what it repeats of an earlier call of the same attempt was searched
there. Only the part of its request that is new is searched, with as much before and after it as the text is long, and
its response. The request of a call whose base is in another attempt is searched as a whole.

Bodies are searched as the JSON that they are: all strings and numbers, but not the names of fields. Missed is a text
that is split over several strings, e.g. over two parts of a message, and one in JSON within JSON within JSON.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lightningrl.store.calls import blocks_of
from lightningrl.store.connection import Connection
from lightningrl.store.delta import NOTHING, Content, Delta, read_text

TOLD = """
    SELECT seq FROM attempts WHERE rollout = ? AND number = coalesce(
        (SELECT accepted FROM rollouts WHERE seq = ?), (SELECT max(number) FROM attempts WHERE rollout = ?))
"""
BODIES = "SELECT seq, base, head, tail, blocks, body FROM calls WHERE attempt = ? ORDER BY seq"
BODY = "SELECT seq, base, head, tail, blocks, body FROM calls WHERE seq = ?"

BEFORE, AFTER = 60, 120
"""Bytes around a hit that are shown."""

QUOTE = re.compile(rb'(?<!\\)(?:\\\\)*"')
"""The beginning or end of a string in JSON."""
ESCAPED = re.compile(r'\\(u[0-9a-fA-F]{4}|["\\/bfnrt])')
UNESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": " ", "f": " "}
EMPTY = np.zeros(0, np.int32)


def search(connection: Connection, text: str, *, places: Sequence[int]) -> dict[int, str]:
    """`Records.said`"""
    wanted = _needles(text)
    others: dict[int, Content] = {}
    found: dict[int, str] = {}
    for place in places:
        row = connection.execute(TOLD, (place, place, place)).fetchone()
        hit = None if row is None else _in_attempt(connection, row[0], wanted, others=others)
        if hit is not None:
            found[place] = hit
    return found


def _needles(text: str) -> list[bytes]:
    """The text as it is in JSON, and as it is in JSON within JSON, e.g. in the arguments of a tool."""
    once = msgspec.json.encode(text).decode()[1:-1]
    twice = msgspec.json.encode(once).decode()[1:-1]
    return [needle.encode().lower() for needle in dict.fromkeys((once, twice))]


def _in_attempt(
    connection: Connection, attempt: int, wanted: Sequence[bytes], *, others: dict[int, Content]
) -> str | None:
    """The first hit in the calls of an attempt. `others`: calls of other attempts that are bases here."""
    known: dict[int, Content] = {}
    for row in connection.execute(BODIES, (attempt,)):
        seq, base = row[:2]
        repeats = base in known
        known[seq] = content = _content_of(row, known[base] if repeats else _base(connection, base, others))
        start, end = _new_part(row, content, margin=len(wanted[-1])) if repeats else (0, len(content.request))
        hit = _hit(content.request, wanted, start=start, end=end) or _hit(content.response, wanted)
        if hit is not None:
            return hit
    return None


def _new_part(row: tuple[Any, ...], content: Content, *, margin: int) -> tuple[int, int]:
    """(start, end) of what a request says that its base does not, and of what may begin or end a hit there."""
    head, tail = row[2:4]
    return max(0, head - margin), len(content.request) - max(0, tail - margin)


def _base(connection: Connection, seq: int | None, known: dict[int, Content]) -> Content:
    """A call of another attempt. It and all bases behind it are added to `known`."""
    rows: list[tuple[Any, ...]] = []
    behind = seq
    while behind is not None and behind not in known:
        rows.append(connection.execute(BODY, (behind,)).fetchone())
        behind = rows[-1][1]
    for row in reversed(rows):
        known[row[0]] = _content_of(row, NOTHING if row[1] is None else known[row[1]])
    return NOTHING if seq is None else known[seq]


def _content_of(row: tuple[Any, ...], base: Content) -> Content:
    """The texts of a call, without its ids."""
    _, _, head, tail, blocks, body = row
    written = Delta(shared=0, ids=b"", logprobs=b"", head=head, tail=tail, blocks=blocks_of(blocks), body=body)
    request, response, _ = read_text(written, base)
    return Content(ids=EMPTY, request=request, response=response)


def _hit(text: bytes, wanted: Sequence[bytes], *, start: int = 0, end: int | None = None) -> str | None:
    """The first hit that begins and ends there, with some words around it, as plain text on one line."""
    lower = text[start:end].lower()
    for needle in wanted:
        place = lower.find(needle)
        while place >= 0 and _is_name(text, start + place + len(needle)):
            place = lower.find(needle, place + 1)
        if place >= 0:
            return _around(text, start + place, start + place + len(needle))
    return None


def _is_name(text: bytes, place: int) -> bool:
    """Whether the string that goes on at this place is the name of a field."""
    quote = QUOTE.search(text, place)
    return quote is not None and text[quote.end() : quote.end() + 1] == b":"


def _around(text: bytes, start: int, end: int) -> str:
    """The string that the hit is in, cut to a readable length."""
    before, after = text[max(0, start - BEFORE) : start], text[end : end + AFTER]
    left = "…" if start > BEFORE else ""
    right = "…" if end + AFTER < len(text) else ""
    quotes = list(QUOTE.finditer(before))
    if quotes:
        before, left = before[quotes[-1].end() :], ""
    quote = QUOTE.search(after)
    if quote is not None:
        after, right = after[: quote.start()], ""
    plain = ESCAPED.sub(_unescaped, (before + text[start:end] + after).decode(errors="ignore"))
    whole = plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # an emoji is two escapes
    return f"{left}{' '.join(whole.split())}{right}"


def _unescaped(escape: re.Match[str]) -> str:
    sign = escape[1]
    return chr(int(sign[1:], 16)) if sign.startswith("u") else UNESCAPED.get(sign, sign)
