"""Which attempt does a request belong to, and what happens to requests without a valid token?"""

import asyncio

import openai
import pytest

from lightningrl.gateway.identity import Caller, caller_of, is_local, split_path

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
        ("/v1beta/models/m:generateContent", None, "/models/m:generateContent"),
        ("/r/abc/v1alpha/x", "abc", "/x"),
        ("/v10/x", None, "/x"),
        ("/v1x/y", None, "/v1x/y"),
        ("/v1", None, "/"),
        ("/v1/v1/messages", None, "/messages"),
        ("/r/abc/v1/v1beta/models/m:generateContent", "abc", "/models/m:generateContent"),
        ("//v1//chat/completions", None, "/chat/completions"),
        ("//r/abc//v1//messages", "abc", "/messages"),
        ("/r//v1/messages", None, "/messages"),
    ],
)
def test_paths_may_carry_a_token_and_a_version(path: str, token: str | None, rest: str) -> None:
    assert split_path(path) == (token, rest)


def caller_with(
    *headers: tuple[bytes, bytes], path_token: str | None = None, query: str = "", peer: str = "127.0.0.1"
) -> Caller:
    return caller_of(
        {"headers": headers, "query_string": query.encode(), "client": (peer, 40000)}, path_token=path_token
    )


def token_of(headers: list[tuple[bytes, bytes]], path_token: str | None = None, query: str = "") -> str | None:
    return caller_with(*headers, path_token=path_token, query=query).token


def test_baggage_overrides_path_and_path_overrides_key() -> None:
    key = (b"authorization", b"Bearer  from-key ")
    baggage = (b"baggage", b"other=1, lightningrl.token = from%2Dbaggage ;p=1,x=y")
    assert token_of([key, baggage], "from-path") == "from-baggage"
    assert token_of([key, (b"baggage", b"other=1")], "from-path") == "from-path"
    assert token_of([key]) == "from-key"
    assert token_of([]) is None
    assert token_of([baggage, (b"baggage", b"more=1"), (b"baggage", b"")]) == "from-baggage"


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ((b"authorization", b"bearer x"), "x"),
        ((b"authorization", b"Basic x"), None),
        ((b"authorization", b"x"), None),
        ((b"authorization", b""), None),
        ((b"x-api-key", b"x"), "x"),
        ((b"x-goog-api-key", b"x"), "x"),
        ((b"api-key", b" x "), "x"),
    ],
)
def test_every_vendors_key_header_is_read(header: tuple[bytes, bytes], token: str | None) -> None:
    assert token_of([header]) == token


def test_a_key_may_be_in_the_query() -> None:
    assert token_of([], query="alt=sse&key=a%2Db") == "a-b"
    assert token_of([(b"x-api-key", b"first")], query="key=second") == "first"


def test_sessions_agents_and_retries_are_read() -> None:
    headers = [
        (b"session_id", b"s1"),
        (b"baggage", b"gen_ai.agent.name=the%20planner"),
        (b"x-stainless-retry-count", b"2"),
    ]
    caller = caller_with(*headers)
    assert (caller.token, caller.session, caller.agent, caller.retries) == (None, "s1", "the planner", 2)
    assert caller_with((b"x-agent-name", b"a"), (b"x-stainless-retry-count", "²".encode())).retries == 0


@pytest.mark.parametrize("host", [b"127.0.0.1:8000", b"localhost:8000", b"LOCALHOST", b"[::1]:8000", b"127.1.2.3"])
@pytest.mark.parametrize("origin", [None, b"http://localhost:3000", b"http://127.0.0.1"])
def test_programs_and_pages_of_this_machine_are_local(host: bytes, origin: bytes | None) -> None:
    headers = [(b"host", host), *([] if origin is None else [(b"origin", origin)])]
    assert all(is_local(caller_with(*headers, peer=peer)) for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"))
    assert not any(
        is_local(caller_with(*headers, peer=peer))
        for peer in ("10.0.0.7", "192.168.1.1", "fe80::1", "::ffff:10.0.0.7", "")
    )


@pytest.mark.parametrize(
    "host",
    [
        b"",
        b"evil.example",
        b"10.0.0.1",
        b"localhost.evil.example",
        b"127.0.0.1.evil.example",
        b"evil@",
        b"[",
        b"0.0.0.0",
    ],
)
def test_a_foreign_host_header_is_not_local(host: bytes) -> None:
    assert not is_local(caller_with((b"host", host)))


@pytest.mark.parametrize(
    "origin", [b"null", b"", b"https://evil.example", b"http://localhost.evil.example", b"http://[", b"file://"]
)
def test_a_foreign_origin_is_not_local(origin: bytes) -> None:
    assert not is_local(caller_with((b"host", b"localhost:8000"), (b"origin", origin)))


async def test_each_way_of_identifying_leads_to_its_attempt(stage: Stage) -> None:
    attempts = [await stage.begin(f"r{n}") for n in range(3)]
    ways = [
        {"base_url": f"{stage.url}/v1", "api_key": attempts[0].token},
        {"base_url": f"{stage.url}/r/{attempts[1].token}/v1", "api_key": "none"},
        {
            "base_url": stage.url,
            "api_key": "none",
            "default_headers": {"baggage": f"lightningrl.token={attempts[2].token}"},
        },
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


async def test_an_answer_that_comes_after_the_end_of_its_attempt_is_refused(stage: Stage) -> None:
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
    # an engine that repeats the last word of the prompt
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
