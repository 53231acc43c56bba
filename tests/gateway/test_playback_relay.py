"""Answers that another server gave are played back without asking it again."""

from typing import Any

import pytest

from lightningrl.branches import why_void
from lightningrl.types import Branch

from .conftest import Stage
from .test_playback import branch_of, ended, replayed
from .test_relay import EVENT, drips, handing_on, says

USER: Any = {"role": "user", "content": "say a word"}
PICTURE: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}


def asked(tool_id: str) -> dict[str, Any]:
    call = {"id": tool_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return {"model": "gpt", "messages": [*messages, {"role": "tool", "tool_call_id": tool_id, "content": "r"}]}


async def test_relayed_answers_are_played_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async with handing_on(stage, monkeypatch) as between:
        there, trunk = between.there, between.attempt
        path, stream = "/v1/chat/completions", {"model": "gpt", "messages": [USER], "stream": True}
        there.answer = says(b'{"id":"one","text":"x"}')
        picture = {**stream, "messages": [PICTURE]}
        live = [await between.post(path, asked("call_1")), await between.post(path, picture)]
        there.answer = says(EVENT + b"data: [DONE]\n\n", kind=b"text/event-stream")
        live.append(await between.post(path, stream))
        calls = await ended(stage, trunk)
        there.answer = drips
        there.asked.clear()

        between.attempt = await branch_of(stage, trunk, None)
        again = [await between.post(path, asked("call_other")), await between.post(path, picture)]
        between.gateway.sessions._sessions.clear()
        again.append(await between.post(path, stream))
        assert [answer.content for answer in again] == [answer.content for answer in live]
        assert again[2].headers["content-type"] == live[2].headers["content-type"]
        played = await between.calls()
        assert replayed(played) == [call.id for call in calls]
        assert [call.capture for call in played] == ["upstream"] * 3
        refused = await between.post(path, {"model": "gpt", "messages": [{"role": "user", "content": "say another"}]})
        assert refused.status_code == 409 and "all 3 recorded calls have been answered" in refused.text
        assert there.asked == []


async def test_an_upstream_counts_tokens_for_a_branch_but_not_for_a_replay(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with handing_on(stage, monkeypatch) as between:
        path, counts = "/v1/chat/completions", ("/v1/messages/count_tokens", {"model": "gpt", "messages": [USER]})
        trunk = between.attempt
        await between.post(path, {"model": "gpt", "messages": [USER]})
        calls = await ended(stage, trunk)
        between.there.answer = says(b'{"input_tokens": 12345}')
        between.attempt = await branch_of(stage, trunk, calls[0].id)
        assert (await between.post(*counts)).json() == {"input_tokens": 12345}
        between.attempt = await branch_of(stage, trunk, None, rollout_id="replay")
        assert (await between.post(*counts)).json()["input_tokens"] < 100
        assert await between.calls() == []


async def test_a_branch_at_a_relayed_call_asks_the_upstream(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async with handing_on(stage, monkeypatch) as between:
        path, trunk = "/v1/chat/completions", between.attempt
        for number in (1, 2, 3):
            between.there.answer = says(b'{"number":%d}' % number)
            await between.post(path, {"model": "gpt", "messages": [USER] * number})
        calls = await ended(stage, trunk)
        between.there.asked.clear()
        between.attempt = await branch_of(stage, trunk, calls[1].id)
        between.there.answer = says(b'{"error":"busy"}', status=503)
        bodies: list[Any] = [{"model": "gpt", "messages": [USER] * number} for number in (1, 2, 9)]
        assert (await between.post(path, bodies[0])).json() == {"number": 1}
        assert (await between.post(path, bodies[1])).status_code == 503  # and its record is free again
        between.there.answer = says(b'{"number":"new"}')
        for body in bodies[1:]:
            between.gateway.sessions._sessions.clear()
            assert (await between.post(path, body)).json() == {"number": "new"}
        played = await between.calls()
        assert replayed(played) == [calls[0].id, None, None, None]
        assert len(between.there.asked) == 3
        branch = Branch(attempt_id=trunk.id, call_id=calls[1].id)
        assert why_void(branch, trunk=calls, calls=played) is None
