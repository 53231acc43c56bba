"""How does a request that comes again get the answer that it was given? From the calls that it left in the store.

The response is the recorded one, and a stream is made of it anew. The answer of an upstream is sent as it was recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from lightningrl.dialects.base import ChatRequest, Dialect, Refused, Reply
from lightningrl.gateway.delivery import Answered, Delivery, delivery_of
from lightningrl.gateway.http import Send
from lightningrl.gateway.relay import Forwarded
from lightningrl.gateway.upstream import Relayed
from lightningrl.store import Store
from lightningrl.types import Attempt, Call


class Recorded:
    """An answer that is in the store. See `answering.Work`."""

    def __init__(self, dialect: Dialect, request: ChatRequest, calls: Sequence[Call]) -> None:
        """`calls`: those of the request, in their order."""
        self._answer: Answered | Relayed
        self.delivery: Callable[[Send], Delivery]
        if calls[0].capture == "upstream":
            begun = Reply(id=calls[0].id, request=request, created=0, prompt_tokens=0, reused_tokens=0, choices=())
            self._answer = _relayed(calls[0], dialect.stream(begun).media_type)
            self.delivery = partial(Forwarded, dialect, begun)
            return
        reply = _joined([dialect.reply(request, call.response) for call in calls])
        self._answer = Answered(reply=reply, body=calls[0].response if len(calls) == 1 else None)
        self.delivery = partial(delivery_of, dialect, replace(reply, choices=()))

    def sampled(self) -> bool:
        return True

    async def run(self, delivery: Any) -> Answered | Relayed:
        return self._answer


async def recorded(
    store: Store, attempt: Attempt, dialect: Dialect, request: ChatRequest, *, request_id: str
) -> Recorded:
    """The answer that the request of this name got. Raises `Refused` if that was a request of another kind."""
    calls = [call for call in await store.calls([attempt.id]) if call.request_id == request_id]
    calls = [call for call in calls if call.capture != "incomplete"]
    if any(call.dialect != dialect.name for call in calls):
        message = f"the request `{request_id}` was of the dialect `{calls[0].dialect}`"
        raise Refused(409, message, code="request_id_reused", hint="give each request a name of its own", final=True)
    return Recorded(dialect, request, calls)


def _joined(replies: Sequence[Reply]) -> Reply:
    """One reply of the replies to each choice."""
    choices = (choice for reply in replies for choice in reply.choices)
    return replace(replies[0], choices=tuple(replace(choice, index=place) for place, choice in enumerate(choices)))


def _relayed(call: Call, media_type: str) -> Relayed:
    """The answer of an upstream. What is no JSON object was recorded as text."""
    text = call.response.get("stream")
    is_text = set(call.response) == {"stream"} and isinstance(text, str)
    body = str(text).encode() if is_text else msgspec.json.encode(call.response)
    kind = media_type if is_text else "application/json"
    return Relayed(status=200, headers=[(b"content-type", kind.encode())], body=bytearray(body), broken=None)
