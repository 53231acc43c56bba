"""Recorded attempts for tests of tools: the calls that a scripted server has answered, and their playback."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from lightningrl.runner import tool_hooks
from lightningrl.runner.attach import Identity, identity
from lightningrl.runner.tool_playback import ToolPlayback
from lightningrl.tracing.tool_results import Recorded, tool_results
from lightningrl.types import Branch, Call, Sampling
from tests.recipes.conftest import completion, response

Answer = str | dict[str, Any]


def wish(name: str, arguments: str, *, id: str) -> dict[str, Any]:
    """A tool call, as OpenAI writes it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def recorded(
    requests: Sequence[Mapping[str, Any]], answers: Sequence[Answer], *, dialect: str = "openai.chat"
) -> list[Call]:
    """The calls of one attempt, one after the other."""
    return [
        call(place, request, answer, dialect=dialect)
        for place, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]


def call(place: int, request: Mapping[str, Any], answer: Answer, *, dialect: str = "openai.chat", **more: Any) -> Call:
    message = answer if isinstance(answer, dict) else {"content": answer}
    message = {"role": "assistant", "content": None, **message}
    chat = dialect == "openai.chat"
    return Call(
        id=f"c{place}",
        attempt_id="trunk.1",
        index=place,
        agent="",
        policy="policy",
        policy_version=0,
        dialect=dialect,
        request=request,
        prompt_ids=np.array([place], np.int32),
        completion_ids=np.array([1], np.int32),
        logprobs=np.array([0.0], np.float32),
        sampling=Sampling(),
        finish_reason="stop",
        **{
            "response": completion(message, "m") if chat else response(message, number=place),
            "capture": "bridged" if place else "rendered",
            "parent_call_id": f"c{place - 1}" if place else None,
            "started_at": float(2 * place),
            "ended_at": float(2 * place + 1),
            **more,
        },
    )


@contextmanager
def playing(
    trunk: Sequence[Call], *, tools: Literal["safe", "never"] = "safe", call_id: str | None = None
) -> Iterator[ToolPlayback]:
    """The block belongs to a branch of the trunk's attempt. `call_id`: the branching call."""
    results = tool_results(trunk, Branch(attempt_id="trunk.1", call_id=call_id))
    playback = ToolPlayback(Recorded(tools=tools, results=results))
    tool_hooks.install()
    nowhere = urlsplit("http://127.0.0.1:9")
    before = identity.set(Identity(token="lrl-test", gateway=nowhere, tools=playback))
    yield playback
    identity.reset(before)
