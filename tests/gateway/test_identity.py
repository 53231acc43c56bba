"""Whose call is it, and what happens to callers who are nobody?"""

import asyncio

import openai
import pytest

from lightningrl.gateway.identity import split_path, token_of

from .conftest import Stage

USER = {"role": "user", "content": "say a word"}


@pytest.mark.parametrize(
    ("path", "token", "rest"),
    [
        ("/v1/chat/completions", None, "/chat/completions"),
        ("/chat/completions", None, "/chat/completions"),
        ("/r/abc/v1/chat/completions", "abc", "/chat/completions"),
        ("/r/abc/chat/completions/", "abc", "/chat/completions"),
        ("/r/", None, "/"),
        ("/", None, "/"),
    ],
)
def test_paths_may_carry_a_token_and_a_version(path: str, token: str | None, rest: str) -> None:
    assert split_path(path) == (token, rest)


def test_baggage_goes_before_path_before_key() -> None:
    key = (b"authorization", b"Bearer  from-key ")
    baggage = (b"baggage", b"other=1, lightningrl.token = from%2Dbaggage ;p=1,x=y")
    assert token_of([key, baggage], "from-path") == "from-baggage"
    assert token_of([key, (b"baggage", b"other=1")], "from-path") == "from-path"
    assert token_of([key], None) == "from-key"
    assert token_of([(b"authorization", b"Basic eA==")], None) is None


async def test_each_way_of_identifying_leads_to_its_attempt(stage: Stage) -> None:
    attempts = [await stage.begin(f"r{n}") for n in range(3)]
    ways = [
        {"base_url": f"{stage.url}/v1", "api_key": attempts[0].token},
        {"base_url": f"{stage.url}/r/{attempts[1].token}/v1", "api_key": "none"},
        {"base_url": stage.url, "api_key": "none", "default_headers": {"baggage": f"lightningrl.token={attempts[2].token}"}},
    ]
    for way in ways:
        async with openai.AsyncOpenAI(**way) as client:  # type: ignore[arg-type]
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    assert [len(await stage.calls(attempt)) for attempt in attempts] == [1, 1, 1]


async def test_a_token_opens_its_own_running_attempt_and_nothing_else(stage: Stage) -> None:
    attempt = await stage.begin()
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await client.with_options(api_key="stranger").chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert unknown.value.code == "invalid_api_key"
        assert stage.engine.asked == []
        await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        await stage.store.finish(attempt.id, "succeeded")
        with pytest.raises(openai.AuthenticationError) as late:
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert late.value.code == "attempt_ended"
    assert len(await stage.calls(attempt)) == len(stage.engine.asked) == 1


async def test_an_answer_that_comes_after_the_end_of_its_attempt_is_not_given(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.engine.delay_s = 0.05
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=0) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))  # type: ignore[list-item]
        while not stage.engine.asked:
            await asyncio.sleep(0.005)
        await stage.store.finish(attempt.id, "timeout")
        with pytest.raises(openai.AuthenticationError, match="ended"):
            await asking
    assert await stage.calls(attempt) == []


async def test_concurrent_attempts_do_not_mix(stage: Stage) -> None:
    attempts = [await stage.begin(f"r{n}") for n in range(20)]
    stage.engine.delay_s = 0.002
    # an engine that repeats the last word it was asked
    stage.engine.script = lambda prompt_ids, sampling: [*prompt_ids[-6:-3], stage.template.turn_end_id or 0]

    async def talk(number: int) -> None:
        messages: list[dict[str, str]] = []
        async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempts[number].token) as client:
            for turn in range(3):
                messages.append({"role": "user", "content": f"{number} {turn}"})
                answer = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})

    await asyncio.gather(*(talk(number) for number in range(20)))
    for number, attempt in enumerate(attempts):
        calls = await stage.calls(attempt)
        assert [call.request["messages"][-1]["content"] for call in calls] == [f"{number} {turn}" for turn in range(3)]
        assert [call.capture for call in calls] == ["rendered", "bridged", "bridged"]
        assert all(call.id.startswith(f"chatcmpl-r{number}.1-") for call in calls)
