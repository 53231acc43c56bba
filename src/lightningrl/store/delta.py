"""How is a call written as a difference to an earlier call, its base? Pure functions of bytes, exact both ways. `calls`
has a worked example.

    prompt     The first `shared` ids are those of the base's prompt and completion. The other ids are stored.
    request    Its JSON starts with `head` bytes of the base's request and ends with `tail` bytes of it. In between,
               long `blocks` may also be the base's. The rest is stored.
    response   Its JSON is stored after that rest. JSON has no raw newline, so a newline separates them.
    logprobs   Byte by byte: first all lowest bytes, and so on. The highest bytes (sign and exponent) come after the
               response.

The rest, the response and the highest bytes are deflated together. The preset dictionary is text that they probably
repeat: the end of the base's shared history, the base's own rest, and its response.

So a turn costs as much as is new in it. The client's echo of the last answer takes a few bytes, and tools and system
prompt take none.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightningrl.prefix import common_prefix
from lightningrl.types import Floats, Ints

WINDOW = 32 * 1024
"""Bytes that deflate can look back."""

HISTORY = 4096
"""Bytes of the shared part of the request in the dictionary. They save 15 % of a short call."""

SHORT = 4096
"""Shorter bodies are deflated at level 4, longer ones at level 1. Level 4 saves 5 % of a call of 50 tokens and costs
2 us. Of a call of 2,000 tokens it would save 14 % and cost 50 us (`benchmarks/store.py`).
"""

LONG = 8192
"""Bytes between head and tail, on both sides, from which on blocks are searched. Deflate finds shorter repeats."""

PROBE, LOOKUPS = 64, 16
"""Bytes that are searched for at once, and the number of searches that may fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The parts of a call that another call is written as a difference to."""

    ids: Ints
    """Prompt and completion."""
    request: bytes
    """JSON."""
    response: bytes
    """JSON."""
    depth: int = 0
    """Number of bases behind it."""

    @property
    def size(self) -> int:
        """Bytes of memory, approximately."""
        return self.ids.nbytes + len(self.request) + len(self.response) + 300


NOTHING = Content(ids=np.zeros(0, np.int32), request=b"", response=b"", depth=-1)
"""The base of a call without one."""

Block: TypeAlias = tuple[int, int, int]
"""(start, start, length): first in the base's request between head and tail, then in the call's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The ids, logprobs, request and response of a call, as they are stored."""

    shared: int
    """Number of first ids that are the base's."""
    ids: bytes
    """The other ids of the prompt, and the completion, packed."""
    logprobs: bytes
    """3 bytes each; 4 in rows of the first schema."""
    head: int
    """Number of first bytes of the request that are the base's."""
    tail: int
    """Number of last bytes of the request that are the base's."""
    blocks: tuple[Block, ...]
    """In order, without overlaps."""
    body: bytes | str
    """Deflated: the rest of the request, a newline, the response, a newline, the highest bytes of the logprobs.
    A string in rows of the first schema: the request, a newline, the response.
    """


def write(content: Content, logprobs: Floats, base: Content, *, prompt_length: int) -> Delta:
    """`content` and its logprobs as a difference to `base`."""
    shared = min(common_prefix(base.ids, content.ids), prompt_length)
    old, new = np.frombuffer(base.request, np.uint8), np.frombuffer(content.request, np.uint8)
    head = common_prefix(old, new)
    tail = common_prefix(old[head:][::-1], new[head:][::-1])
    earlier, between = base.request[head : len(old) - tail], content.request[head : len(new) - tail]
    blocks = _blocks(earlier, between) if len(earlier) > LONG < len(between) else ()
    numbers = logprobs.astype("<f4", copy=False).tobytes()
    body = b"%b\n%b\n%b" % (_outside(between, [block[1:] for block in blocks]), content.response, numbers[3::4])
    return Delta(
        shared=shared,
        ids=pack(content.ids[shared:]),
        logprobs=numbers[0::4] + numbers[1::4] + numbers[2::4],
        head=head,
        tail=tail,
        blocks=blocks,
        body=_deflate(body, _dictionary(base, earlier, head=head, blocks=blocks)),
    )


def read(delta: Delta, base: Content) -> tuple[Content, Floats]:
    """The call and its logprobs, from `write`'s delta and the same base."""
    request, response, highest = read_text(delta, base)
    if isinstance(delta.body, str):
        logprobs = np.frombuffer(delta.logprobs, "<f4")
    else:
        planes = np.frombuffer(delta.logprobs + highest, np.uint8).reshape(4, -1)
        logprobs = np.ascontiguousarray(planes.T).view("<f4").ravel()
    ids = np.concatenate((base.ids[: delta.shared], unpack(delta.ids)))
    return Content(ids=ids, request=request, response=response, depth=base.depth + 1), logprobs


def read_text(delta: Delta, base: Content) -> tuple[bytes, bytes, bytes]:
    """(request, response, highest bytes of the logprobs) of the call. Its ids and logprobs may be missing, and so may
    the ids of the base.
    """
    if isinstance(delta.body, str):
        request, _, response = delta.body.encode().partition(b"\n")
        return request, response, b""
    end = len(base.request) - delta.tail
    earlier = base.request[delta.head : end]
    dictionary = _dictionary(base, earlier, head=delta.head, blocks=delta.blocks)
    rest, response, highest = zlib.decompressobj(-15, zdict=dictionary).decompress(delta.body).split(b"\n", 2)
    history = memoryview(base.request)  # its slices copy nothing: long requests are most of the time
    request = b"".join((history[: delta.head], _inside(rest, earlier, delta.blocks), history[end:]))
    return request, response, highest


def _blocks(old: bytes, new: bytes) -> tuple[Block, ...]:
    """Long runs of bytes that both contain, in the same order. Parts of `old` are searched in `new`, and each match is
    extended in both directions.
    """
    found: list[Block] = []
    old_array, new_array = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    step = max(LONG // 2, len(old) // LOOKUPS)
    old_end = new_end = place = 0
    while place + PROBE <= len(old):
        match = new.find(old[place : place + PROBE], new_end)
        if match < 0:
            place += step
            continue
        before = common_prefix(old_array[old_end:place][::-1], new_array[new_end:match][::-1])
        length = before + common_prefix(old_array[place:], new_array[match:])
        found.append((place - before, match - before, length))
        old_end, new_end = place - before + length, match - before + length
        place = old_end
    return tuple(found)


def _outside(text: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
    """`text` without these spans of (start, length)."""
    pieces: list[bytes] = []
    end = 0
    for start, length in spans:
        pieces.append(text[end:start])
        end = start + length
    return b"".join((*pieces, text[end:]))


def _inside(rest: bytes, earlier: bytes, blocks: tuple[Block, ...]) -> bytes:
    """`rest` with the blocks of `earlier` put back in. The inverse of `_outside`."""
    pieces: list[bytes] = []
    end = used = 0
    for old_start, start, length in blocks:
        pieces += (rest[used : used + start - end], earlier[old_start : old_start + length])
        used += start - end
        end = start + length
    return b"".join((*pieces, rest[used:]))


def pack(ids: Ints) -> bytes:
    """A format byte, then the ids: 2 bytes each if all are below 65,536; 18 bits if below 262,144; else 4 bytes."""
    used = int(np.bitwise_or.reduce(ids))
    if not 0 <= used < 1 << 18:
        return b"\0" + ids.astype("<i4").tobytes()
    low = ids.astype("<u2").tobytes()
    if used < 1 << 16:
        return b"\1" + low
    high = np.zeros(-(-len(ids) // 4) * 4, np.uint8)
    high[: len(ids)] = ids >> 16
    return b"\2" + low + (high.view("<u4") * _GATHER >> 24).astype(np.uint8).tobytes()


def unpack(packed: bytes) -> Ints:
    if packed[0] == 0:
        return np.frombuffer(packed, "<i4", offset=1)
    if packed[0] == 1:
        return np.frombuffer(packed, "<u2", offset=1).astype(np.int32)
    count = (len(packed) - 1) * 4 // 9
    low = np.frombuffer(packed, "<u2", count, offset=1).astype(np.int32)
    high = np.frombuffer(packed, np.uint8, offset=1 + 2 * count)
    return low | ((high[:, None] >> _SHIFTS) & 3).ravel()[:count].astype(np.int32) << 16


_GATHER = np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)
"""Four bytes of two bits each, times this number, have these eight bits side by side in the highest byte."""

_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def _dictionary(base: Content, earlier: bytes, *, head: int, blocks: tuple[Block, ...]) -> bytes:
    """Text that a call probably repeats. The nearer to the end, the cheaper a reference."""
    rest = _outside(earlier, [(start, length) for start, _, length in blocks])
    return (base.request[max(0, head - HISTORY) : head] + rest + base.response)[-WINDOW:]


def _deflate(text: bytes, dictionary: bytes) -> bytes:
    """Raw deflate with a window as small as the text, since setting up a large window costs more than using it."""
    bits = min(15, max(10, (len(text) + len(dictionary)).bit_length()))
    deflate = zlib.compressobj(4 if len(text) < SHORT else 1, zlib.DEFLATED, -bits, bits - 7, zdict=dictionary)
    return deflate.compress(text) + deflate.flush()
