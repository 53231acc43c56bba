"""An unmodified agent gets a recorded attempt's answers again, and goes its own way from one call on."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import openai
import pytest

from lightningrl.branches import DIFFERS, why_void
from lightningrl.engine.base import Delta
from lightningrl.gateway import Route, create_app
from lightningrl.gateway.limits import Limits
from lightningrl.types import Attempt, Branch, Call, Rollout, Task

from .conftest import Stage, serving

BODY: Any = {"model": "m", "messages": [{"role": "user", "content": "say a word"}]}
ANSWERS = ["red", "green", "blue"]


async def agent(stage: Stage, attempt: Attempt, questions: Sequence[str] = ("one", "two", "three")) -> list[str]:
    """Asks in turn, with its whole history. Returns the answers."""
    said: list[str] = []
    messages: list[Any] = []
    async with openai.AsyncOpenAI(api_key=attempt.token, base_url=f"{stage.url}/v1", max_retries=2) as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(model="m", messages=messages, temperature=0.5)
            said.append(answer.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": said[-1]})
    return said


async def ask(stage: Stage, attempt: Attempt, *, headers: dict[str, str] | None = None, **more: Any) -> httpx2.Response:
    async with httpx2.AsyncClient() as client:
        return await client.post(
            f"{stage.url}/v1/chat/completions",
            json={**BODY, **more},
            headers={"x-api-key": attempt.token, **(headers or {})},
        )


def texts(response: httpx2.Response) -> list[str]:
    return [choice["message"]["content"] for choice in response.json()["choices"]]


def replayed(calls: Sequence[Call]) -> list[str | None]:
    return [call.replays for call in calls]


async def ended(stage: Stage, trunk: Attempt) -> list[Call]:
    await stage.store.finish(trunk.id, "succeeded")
    stage.engine.asked.clear()
    return await stage.calls(trunk)


async def recorded(stage: Stage) -> tuple[Attempt, list[Call]]:
    """An attempt that has ended, and its calls."""
    trunk = await stage.begin("trunk")
    stage.says(*ANSWERS)
    assert await agent(stage, trunk) == ANSWERS
    return trunk, await ended(stage, trunk)


async def branch_of(
    stage: Stage, trunk: Attempt, call_id: str | None, *, rollout_id: str = "branch", **sampling: Any
) -> Attempt:
    task = Task(id="t", input={}, split="train")
    branch = Branch(attempt_id=trunk.id, call_id=call_id)
    await stage.store.enqueue([Rollout(id=rollout_id, group_id="g", task=task, branch=branch, sampling=sampling)])
    [(_, attempt)] = await stage.store.claim("w", limit=1, lease_s=60)
    return attempt


def void(trunk: Sequence[Call], calls: Sequence[Call], call_id: str | None) -> str:
    return why_void(Branch(attempt_id=trunk[0].attempt_id, call_id=call_id), trunk=trunk, calls=calls) or ""


async def test_an_attempt_is_played_back_without_the_engine(stage: Stage) -> None:
    trunk, calls = await recorded(stage)
    stage.says("never")
    attempt = await branch_of(stage, trunk, None)
    assert await agent(stage, attempt) == ANSWERS
    assert stage.engine.asked == []
    again = await stage.calls(attempt)
    assert replayed(again) == [call.id for call in calls]
    for call, record in zip(again, calls, strict=True):
        assert call.id != record.id and call.attempt_id == attempt.id
        assert call.response == record.response
        assert call.completion_ids.tolist() == record.completion_ids.tolist()
        assert call.prompt_ids.tolist() == record.prompt_ids.tolist()
        assert call.logprobs.tolist() == record.logprobs.tolist()
        assert (call.sampling, call.finish_reason) == (record.sampling, record.finish_reason)
        assert (call.policy_version, call.capture) == (record.policy_version, record.capture)
    assert again[1].parent_call_id == again[0].id
    assert void(calls, again, None) == ""
    assert void(calls, again[:2], None).startswith("void: it ended after 2 of 3")
    assert void(calls, [*again[:2], again[1]], None).startswith("void: it ended after 2 of 3")  # one was given twice


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_the_branching_call_and_what_follows_are_sampled(stage: Stage, place: int) -> None:
    trunk, calls = await recorded(stage)
    stage.says("pink")
    attempt = await branch_of(stage, trunk, calls[place].id)
    assert await agent(stage, attempt) == ANSWERS[:place] + ["pink"] * (3 - place)
    assert len(stage.engine.asked) == 3 - place
    again = await stage.calls(attempt)
    assert replayed(again) == [call.id for call in calls[:place]] + [None] * (3 - place)
    assert again[place].prompt_ids.tolist() == calls[place].prompt_ids.tolist()
    assert again[place].sampling.seed != calls[place].sampling.seed
    assert void(calls, again, calls[place].id) == ""


async def test_a_branch_with_the_seed_of_its_trunk_samples_the_same_again(stage: Stage) -> None:
    trunk = await stage.begin("trunk", seed=5)
    assert len([await ask(stage, trunk) for _ in range(3)]) == 3
    calls = await ended(stage, trunk)
    attempt = await branch_of(stage, trunk, calls[1].id, seed=5)
    for _ in range(3):
        stage.gateway.sessions._sessions.clear()
        await ask(stage, attempt)
    again = await stage.calls(attempt)
    assert replayed(again) == [calls[0].id, None, None]
    assert [call.sampling.seed for call in again] == [call.sampling.seed for call in calls]


async def test_a_request_that_differs_is_refused_and_recorded(stage: Stage) -> None:
    trunk, calls = await recorded(stage)
    attempt = await branch_of(stage, trunk, calls[2].id)
    with pytest.raises(openai.ConflictError) as refused:
        await agent(stage, attempt, ["one", "another two", "three"])
    assert refused.value.code == "replay_differs"
    again = await stage.calls(attempt)
    assert [call.capture for call in again] == ["rendered", "incomplete"]  # and no retries
    reason = f'{DIFFERS}message 3 (user) has "another two" instead of "two" (call 2)'
    assert (again[1].index, again[1].capture_reason) == (1, reason)
    assert void(calls, again, calls[2].id) == f"void: call 2 {reason}"
    stage.gateway.sessions._sessions.clear()
    with pytest.raises(openai.ConflictError, match="an earlier request differed"):
        await agent(stage, attempt, ["one"])  # known, but played back already
    assert stage.engine.asked == []


@pytest.mark.parametrize("kind", ["branch", "replay", "cassette"])
async def test_a_request_that_the_trunk_was_refused_is_refused_again(stage: Stage, kind: str) -> None:
    """The agent goes on after both refusals: as it did in the trunk."""
    long = [{"role": "user", "content": "say a word " * 2000}]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "no such type"}}}

    async def stubborn(stage: Stage, attempt: Attempt) -> list[tuple[int, str]]:
        refused = [await ask(stage, attempt, messages=long), await ask(stage, attempt, response_format=schema)]
        said = await agent(stage, attempt)
        return [*((answer.status_code, answer.json()["error"]["code"]) for answer in refused), (200, "".join(said))]

    trunk = await stage.begin("trunk")
    stage.says(*ANSWERS)
    wanted = [(400, "context_length_exceeded"), (400, "invalid_schema"), (200, "redgreenblue")]
    assert await stubborn(stage, trunk) == wanted
    calls = await ended(stage, trunk)
    stage.says("blue")
    place = calls[2].id if kind == "branch" else None
    if kind == "cassette":
        app = create_app(store=stage.store, chat=stage.template, engines={}, max_length=2000, cassette=calls)
        async with serving(app) as url:
            played = Stage(store=stage.store, template=stage.template, engine=stage.engine, gateway=app, url=url)
            attempt = await played.begin("played")
            assert await stubborn(played, attempt) == wanted
    else:
        attempt = await branch_of(stage, trunk, place)
        assert await stubborn(stage, attempt) == wanted
    assert void(calls, await stage.calls(attempt), place) == ""


async def test_a_pure_replay_gives_what_it_has_and_refuses_the_rest(stage: Stage) -> None:
    trunk, calls = await recorded(stage)
    attempt = await branch_of(stage, trunk, None)
    with pytest.raises(openai.ConflictError, match="it calls once more; all 3 recorded calls"):
        await agent(stage, attempt, ["one", "two", "three", "four"])
    assert replayed(await stage.calls(attempt)) == [*(call.id for call in calls), None]
    with pytest.raises(openai.ConflictError, match="asks call 1 once more; the record has it once"):
        await agent(stage, attempt, ["one"])
    assert stage.engine.asked == []


async def test_a_session_that_is_rebuilt_goes_on_where_it_was(stage: Stage) -> None:
    trunk = await stage.begin("trunk")
    stage.says(*"abcd")
    for _ in range(4):
        await ask(stage, trunk)
    calls = await ended(stage, trunk)
    stage.says("x")
    attempt = await branch_of(stage, trunk, calls[2].id)
    said: list[str] = []
    for _ in range(6):  # as after a kill: only the store is left
        stage.gateway.sessions._sessions.clear()
        said += texts(await ask(stage, attempt))
    assert said == ["a", "b", "x", "x", "x", "x"]
    assert replayed(await stage.calls(attempt)) == [calls[0].id, calls[1].id, None, None, None, None]


async def test_calls_in_parallel_are_played_back_beside_the_branching_one(stage: Stage) -> None:
    trunk = await stage.begin("trunk")
    stage.says(*"abc")
    stage.engine.delay_s = 0.2
    await asyncio.gather(*(ask(stage, trunk) for _ in range(3)))
    calls = await ended(stage, trunk)
    stage.says("x")
    for place in range(3):
        attempt = await branch_of(stage, trunk, calls[place].id, rollout_id=f"branch{place}")
        answers = await asyncio.gather(*(ask(stage, attempt) for _ in range(3)))
        others = [call for call in calls if call.id != calls[place].id]
        wanted = [call.response["choices"][0]["message"]["content"] for call in others]
        assert sorted(text for answer in answers for text in texts(answer)) == sorted([*wanted, "x"])
        again = await stage.calls(attempt)
        assert sorted(found for found in replayed(again) if found) == [call.id for call in others]
        assert void(calls, again, calls[place].id) == ""


async def test_a_parallel_conversation_goes_its_own_way_before_the_branching_call_is_answered(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the trunk, b0 overlaps with a0, and b1 began after a0 had ended. In the branch, a0 takes longer than b1."""
    begun, gate, generate = asyncio.Event(), asyncio.Event(), stage.engine.generate

    async def slow(prompt_ids: Sequence[int], **more: Any) -> AsyncIterator[Delta]:
        if not begun.is_set():
            begun.set()
            await gate.wait()
        async for delta in generate(prompt_ids, **more):
            yield delta

    monkeypatch.setattr(stage.engine, "generate", slow)
    trunk = await stage.begin("trunk")
    a0 = asyncio.create_task(ask(stage, trunk))
    await begun.wait()
    stage.says("b0")
    await agent(stage, trunk, ["one"])
    gate.set()
    await a0
    stage.says("b1")
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "b0"}]
    await ask(stage, trunk, messages=[*said, {"role": "user", "content": "two"}])
    calls = await ended(stage, trunk)
    attempt = await branch_of(stage, trunk, calls[0].id)
    stage.says("new")
    begun.clear()
    gate.clear()
    a0 = asyncio.create_task(ask(stage, attempt))
    await begun.wait()
    assert await agent(stage, attempt) == ["b0", "new", "new"]
    gate.set()
    assert texts(await a0) == ["new"]
    again = await stage.calls(attempt)
    assert replayed(again) == [None, calls[1].id, None, None]
    assert void(calls, again, calls[0].id) == ""


async def test_of_several_answers_to_one_request_only_the_branching_one_is_sampled(stage: Stage) -> None:
    trunk = await stage.begin("trunk")
    stage.says(*"abc")
    await ask(stage, trunk, n=3)
    calls = await ended(stage, trunk)
    stage.says("x")
    attempt = await branch_of(stage, trunk, calls[1].id)
    whole = await ask(stage, attempt, n=3)
    assert texts(whole) == ["a", "x", "c"]
    assert whole.json()["id"] == calls[0].id
    assert len(stage.engine.asked) == 1
    assert replayed(await stage.calls(attempt)) == [calls[0].id, None, calls[2].id]
    more = await branch_of(stage, trunk, calls[1].id, rollout_id="more")
    refused = await ask(stage, more, n=4)
    assert refused.status_code == 409 and "`4` answers instead of `3`" in refused.text


async def test_an_answer_that_breaks_gives_its_record_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, calls = await recorded(stage)
    question: Any = {"messages": [{"role": "user", "content": "one"}]}
    attempt = await branch_of(stage, trunk, calls[0].id)
    stage.engine.error = RuntimeError("boom")
    assert (await ask(stage, attempt, **question)).status_code == 503
    stage.engine.error = None
    stage.says("pink")
    assert texts(await ask(stage, attempt, **question)) == ["pink"]
    assert [call.capture for call in await stage.calls(attempt)] == ["incomplete", "rendered"]
    assert void(calls, await stage.calls(attempt), calls[0].id) == ""


async def test_a_played_back_stream_that_breaks_can_be_asked_again(stage: Stage) -> None:
    trunk = await stage.begin("trunk")
    stage.says("a long answer " * 300)
    whole = await ask(stage, trunk, stream=True)
    calls = await ended(stage, trunk)
    attempt = await branch_of(stage, trunk, None)
    async with (
        httpx2.AsyncClient() as client,
        client.stream(
            "POST",
            f"{stage.url}/v1/chat/completions",
            json={**BODY, "stream": True},
            headers={"x-api-key": attempt.token},
        ) as answer,
    ):
        await anext(answer.aiter_raw(64))
    while not await stage.calls(attempt):
        await asyncio.sleep(0.01)
    retried = await ask(stage, attempt, stream=True, headers={"x-stainless-retry-count": "1"})
    found = [call for call in await stage.calls(attempt) if call.capture != "incomplete"]
    assert replayed(found) == [calls[0].id]
    if len(await stage.calls(attempt)) == 2:  # else the client had left when all was written
        assert retried.content == whole.content


async def test_a_named_request_gets_the_same_answer_when_it_comes_again(stage: Stage) -> None:
    trunk, calls = await recorded(stage)
    attempt = await branch_of(stage, trunk, None)
    question: Any = {"messages": [{"role": "user", "content": "one"}], "headers": {"x-lightningrl-request": "name"}}
    first = await ask(stage, attempt, **question)
    stage.gateway.sessions._sessions.clear()
    again = await ask(stage, attempt, **question)
    assert first.content == again.content
    assert replayed(await stage.calls(attempt)) == [calls[0].id]


async def test_a_branch_of_an_attempt_that_cannot_be_repeated_says_why(stage: Stage) -> None:
    trunk, calls = await recorded(stage)
    attempt = await branch_of(stage, trunk, "chatcmpl-other", rollout_id="no-call")
    assert "has no complete call `chatcmpl-other`" in (await ask(stage, attempt)).text
    unknown = Attempt(id="unknown.1", rollout_id="unknown", number=1, token="")
    attempt = await branch_of(stage, unknown, None, rollout_id="no-attempt")
    refused = await ask(stage, attempt)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
    assert "`unknown.1` does not exist" in refused.text
    running = await stage.begin("running")
    attempt = await branch_of(stage, running, None, rollout_id="of-running")
    assert "`running.1` has not ended" in (await ask(stage, attempt)).text
    assert await stage.calls(attempt) == []
    assert void(calls, [], calls[0].id).startswith("void: it ended after 0 recorded calls")


async def test_a_branch_of_a_branch_knows_the_ids_that_agents_know(stage: Stage) -> None:
    trunk, calls = await recorded(stage)
    first = await branch_of(stage, trunk, calls[2].id)
    stage.says("pink")
    assert await agent(stage, first) == ["red", "green", "pink"]
    between = await ended(stage, first)
    second = await branch_of(stage, first, None, rollout_id="second")
    assert await agent(stage, second) == ["red", "green", "pink"]
    again = await stage.calls(second)
    assert replayed(again) == [call.id for call in between]
    assert [call.response["id"] for call in again] == [calls[0].id, calls[1].id, between[2].id]


async def test_a_branch_meets_the_limits_where_its_trunk_does(stage: Stage) -> None:
    trunk, calls = await recorded(stage)
    attempt = await branch_of(stage, trunk, calls[2].id)
    stage.says("pink")
    spent = sum(len(call.completion_ids) for call in calls[:2])
    stage.gateway.sessions._limits = Limits(tokens=spent + 1)
    assert await agent(stage, attempt) == ["red", "green", "pink"]
    for _ in range(2):
        refused = await ask(stage, attempt)
        assert refused.status_code == 403 and "tokens have been sampled" in refused.text
        stage.gateway.sessions._sessions.clear()
    other = await branch_of(stage, trunk, calls[2].id, rollout_id="other")
    stage.gateway.sessions._limits = Limits(tokens=spent)
    with pytest.raises(openai.PermissionDeniedError, match="tokens have been sampled"):
        await agent(stage, other)
    assert replayed(await stage.calls(other)) == [calls[0].id, calls[1].id]
    stage.gateway.sessions._sessions.clear()
    stage.gateway.sessions._limits = Limits(calls=3)
    assert "calls are used" in (await ask(stage, attempt)).text


async def test_rewards_and_spans_that_name_a_recorded_answer_are_for_the_branch(stage: Stage) -> None:
    trunk, calls = await recorded(stage)
    attempt = await branch_of(stage, trunk, calls[2].id)
    stage.says("pink")
    await agent(stage, attempt)
    own = await stage.calls(attempt)
    gateway = create_app(
        store=stage.store, chat=stage.template, engines={"policy": stage.engine}, max_length=2000, may_reward=True
    )
    headers = {"x-api-key": attempt.token}
    async with serving(gateway) as url, httpx2.AsyncClient(base_url=url, headers=headers) as client:
        for named, call in ((calls[1].id, own[1]), (own[2].id, own[2])):
            given = await client.post("/v1/rewards", json={"value": 0.5, "call": named})
            assert given.json()["call"] == call.id
        spans = [span("1" * 16, calls[0].id), span("2" * 16, own[2].id), span("3" * 16, "chatcmpl-other.1-0")]
        told = await client.post("/v1/traces", json={"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
        assert told.status_code == 200
    found = {span.id: span.call_id for span in await stage.store.spans([attempt.id])}
    assert found == {"1" * 16: own[0].id, "2" * 16: own[2].id, "3" * 16: None}
    assert await stage.store.spans([trunk.id]) == []


async def test_a_late_span_of_a_trunk_stays_with_it_while_its_branch_runs(stage: Stage) -> None:
    trunk, calls = await recorded(stage)
    attempt = await branch_of(stage, trunk, None)
    gateway = create_app(
        store=stage.store, chat=stage.template, engines={"policy": stage.engine}, max_length=2000, shared_processes=True
    )
    async with serving(gateway) as url, httpx2.AsyncClient(base_url=url) as client:
        played = Stage(store=stage.store, template=stage.template, engine=stage.engine, gateway=gateway, url=url)
        await agent(played, attempt)
        for number, token in enumerate(("", trunk.token, attempt.token)):
            spans = [span(str(number) * 16, calls[0].id)]
            headers = {"x-api-key": token} if token else {}
            body = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
            told = await client.post("/v1/traces", json=body, headers=headers)
            assert ("name no call of a running attempt" in told.text) == (token == "")
    own = await stage.calls(attempt)
    found = await stage.store.spans([trunk.id, attempt.id])
    told_apart = {(span.id, span.attempt_id, span.call_id) for span in found}
    assert told_apart == {("1" * 16, trunk.id, calls[0].id), ("2" * 16, attempt.id, own[0].id)}


def span(span_id: str, answer: str) -> dict[str, Any]:
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.response.id": answer}
    return {
        "traceId": "a" * 32,
        "spanId": span_id,
        "name": "chat m",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
    }


async def test_one_cassette_answers_the_attempts_of_a_server_together(stage: Stage) -> None:
    _, calls = await recorded(stage)
    stage.says("never")
    gateway = create_app(
        store=stage.store,
        chat=stage.template,
        engines={"policy": stage.engine},
        routes=[Route()],
        max_length=2000,
        cassette=calls,
    )
    async with serving(gateway) as url:
        played = Stage(store=stage.store, template=stage.template, engine=stage.engine, gateway=gateway, url=url)
        one, two = await played.begin("one"), await played.begin("two")
        assert await agent(played, one) == ANSWERS
        with pytest.raises(openai.ConflictError, match="once more"):
            await agent(played, two)
    assert replayed(await stage.calls(one)) == [call.id for call in calls]
    assert stage.engine.asked == []
