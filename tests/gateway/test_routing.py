"""Which policy answers which call, and in which role? And calls that go to other servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from lightningrl.dialects.base import ChatRequest, Refused
from lightningrl.gateway import Route, create_app
from lightningrl.gateway.routing import choose, fingerprint, model, role
from lightningrl.gateway.upstream import Upstream
from lightningrl.gateway.visitors import Guests
from lightningrl.messages import Message

from .conftest import Stage, serving

USER: Any = {"role": "user", "content": "say a word"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}


def request(model: str = "m", system: str = "", tools: tuple[Any, ...] = ()) -> ChatRequest:
    messages = (Message(role="system", content=system),) if system else ()
    return ChatRequest(body={}, model=model, messages=(*messages, Message(role="user", content="x")), tools=tools)


def test_the_first_route_whose_patterns_all_fit_is_taken() -> None:
    routes = [
        Route(model="exact", policy="1"),
        Route(model="glob-*", caller="planner", policy="2"),
        Route(model="glob-*", policy="3"),
        Route(system="*write a title*", policy="4"),
        Route(fingerprint=fingerprint(request(system="special", tools=(TOOL,))), policy="5"),
        Route(policy="6"),
    ]

    def policy(asked: ChatRequest, caller: str = "") -> str:
        return choose(routes, asked, caller=caller).policy

    assert policy(request("exact")) == "1"
    assert [policy(request("glob-x"), "planner"), policy(request("glob-x"))] == ["2", "3"]
    assert policy(request(system="please write a title for it")) == "4"
    assert policy(request(system="special", tools=(TOOL,))) == "5"
    assert policy(request(system="special")) == "6"
    with pytest.raises(Refused, match="no route for model `m`"):
        choose(routes[:1], request(), caller="")


def test_every_model_that_a_route_fits_can_be_looked_up() -> None:
    routes = [Route(model="judge", policy="upstreams.judge"), Route(model="gpt-*")]
    for name in ("judge", "gpt-4o", "policy"):
        entry = model(routes, name)
        assert (entry["id"], entry["name"]) == (name, f"models/{name}")
    with pytest.raises(Refused, match="no model `claude`"):
        model(routes, "claude")


def test_a_fingerprint_is_of_instructions_and_tools_alone() -> None:
    reordered = {"function": {"parameters": TOOL["function"]["parameters"], "name": "look"}, "type": "function"}  # type: ignore[index]
    assert fingerprint(request("a", "s", (TOOL,))) == fingerprint(request("b", "s", (reordered,)))
    assert len({fingerprint(request(system=s, tools=t)) for s in ("", "s") for t in ((), (TOOL,))}) == 4


def test_a_role_is_named_by_its_route_else_by_the_caller_else_by_the_model() -> None:
    assert role(Route(agent="writer"), request(), caller="x") == "writer"
    assert role(Route(), request(), caller="x") == "x"
    assert role(Route(), request(), caller="") == "m"


async def test_telemetry_names_the_agent(stage: Stage) -> None:
    attempt = await stage.begin()
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
        for headers in ({"baggage": "gen_ai.agent.name=the%20planner"}, {"x-agent-name": "critic"}):
            await client.chat.completions.create(model="m", messages=[USER], extra_headers=headers)
    assert [call.agent for call in await stage.calls(attempt)] == ["the planner", "critic"]


@asynccontextmanager
async def relaying(stage: Stage, upstream: Upstream, **more: Any) -> AsyncIterator[str]:
    """A gateway whose side calls go to an upstream, which is the stage itself."""
    routes = [Route(system="*title*", policy="upstreams.other", agent="titles"), Route()]
    app = create_app(
        store=stage.store,
        chat=stage.template,
        engines={"policy": stage.engine},
        routes=routes,
        upstreams=[upstream],
        max_length=2000,
        **more,
    )
    async with serving(app) as url:
        yield url
    await upstream.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_side_call_is_relayed_as_it_is_and_recorded_without_tokens(
    stage: Stage, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = await stage.begin("there"), await stage.begin("here")
    monkeypatch.setenv("OTHER_KEY", there.token)
    system: Any = {"role": "system", "content": "write a title"}
    upstream = Upstream("other", url=f"{stage.url}/v1", key_env="OTHER_KEY", model="checker")
    async with (
        relaying(stage, upstream) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=here.token, max_retries=0) as client,
    ):
        if stream:
            pieces = await client.chat.completions.create(model="m", messages=[system, USER], stream=True)
            text = "".join([piece.choices[0].delta.content or "" async for piece in pieces])
        else:
            text = (await client.chat.completions.create(model="m", messages=[system, USER])).choices[
                0
            ].message.content or ""
        await client.chat.completions.create(model="m", messages=[USER])
    assert text == "hello"
    relayed, own = await stage.calls(here)
    assert (relayed.policy, relayed.agent, relayed.capture) == ("upstreams.other", "titles", "upstream")
    assert len(relayed.prompt_ids) == len(relayed.completion_ids) == 0
    assert relayed.request["model"] == "m"
    assert ("[DONE]" if stream else "hello") in str(relayed.response)
    assert (own.policy, own.capture) == ("policy", "rendered")
    assert [(call.request["model"], call.policy) for call in await stage.calls(there)] == [("checker", "frozen")]


async def test_an_upstreams_refusal_comes_back_as_it_is_and_silence_as_502(stage: Stage) -> None:
    attempt = await stage.begin()
    system: Any = {"role": "system", "content": "write a title"}
    for address, status in ((f"{stage.url}/v1", 401), ("http://127.0.0.1:1", 502)):
        upstream = Upstream("other", url=address)
        async with (
            relaying(stage, upstream) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=attempt.token, max_retries=0) as client,
        ):
            with pytest.raises(openai.APIStatusError) as raised:
                await client.chat.completions.create(model="m", messages=[system, USER])
        assert raised.value.status_code == status
    assert {call.capture for call in await stage.calls(attempt)} == {"incomplete"}


async def test_embeddings_are_relayed_if_an_upstream_is_configured(stage: Stage) -> None:
    attempt = await stage.begin()
    asked: list[Any] = []

    async def vectors(scope: Any, receive: Any, send: Any) -> None:
        asked.append((scope["path"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send(
            {
                "type": "http.response.body",
                "body": b'{"object":"list","model":"e","data":[{"object":"embedding","index":0,"embedding":[0.5]}]}',
            }
        )

    async with (
        serving(vectors) as there,
        relaying(stage, Upstream("other", url=f"{there}/v1"), embeddings="upstreams.other") as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=attempt.token) as client,
    ):
        answer = await client.embeddings.create(model="e", input="x", encoding_format="float")
    assert answer.data[0].embedding == [0.5]
    assert asked[0][0] == "/v1/embeddings"
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
        with pytest.raises(openai.NotFoundError, match="embeddings"):
            await client.embeddings.create(model="e", input="x")


async def test_each_session_name_of_a_visitor_gets_an_attempt(stage: Stage) -> None:
    guests = Guests(stage.store)
    app = create_app(
        store=stage.store, chat=stage.template, engines={"policy": stage.engine}, max_length=2000, visitors=guests
    )
    async with serving(app) as url, openai.AsyncOpenAI(base_url=url, api_key="sk-whatever") as client:

        async def talk(headers: dict[str, str]) -> None:
            await client.chat.completions.create(model="m", messages=[USER], extra_headers=headers)

        await asyncio.gather(*(talk({"session_id": f"s{n % 3}"}) for n in range(9)), talk({}))
        own = await guests.attempt("s1")
        await client.with_options(api_key=own.token).chat.completions.create(
            model="m", messages=[USER], extra_headers={"session_id": "s2"}
        )
    counts = {name: len(await stage.calls(attempt)) for name, attempt in guests.attempts.items()}
    assert counts == {"s0": 3, "s1": 4, "s2": 3, None: 1}
    async with httpx2.AsyncClient() as bare:
        strict = await bare.post(
            f"{stage.url}/v1/chat/completions", json={"model": "m", "messages": [USER]}, headers={"session_id": "s1"}
        )
    assert strict.status_code == 401
