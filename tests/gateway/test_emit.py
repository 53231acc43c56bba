"""Agents that reward their own calls and send spans: functions, coroutines and programs, with real workers."""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

import lightningrl
from lightningrl.chat import ChatTemplate
from lightningrl.config import AgentConfig
from lightningrl.errors import UserError
from lightningrl.gateway import create_app
from lightningrl.runner import Outcome, flush
from lightningrl.runner.environment import addresses
from lightningrl.runner.pool import WorkerPool
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Reward

from .conftest import ScriptedEngine, Stage, serving

Opened: TypeAlias = Callable[..., AbstractAsyncContextManager[Stage]]

AGENT = '''
import asyncio, json, sys, threading
from openai import AsyncOpenAI, OpenAI
import lightningrl

ASK = {"model": "m", "messages": [{"role": "user", "content": "say a word"}]}

def reward(task, output):
    return 1.0

def in_thread(task):
    client = OpenAI()
    first = client.chat.completions.create(**ASK)
    client.chat.completions.create(**ASK)
    return [lightningrl.emit_reward(0.25, name="plan", call=first.id), lightningrl.emit_reward(-0.5)]

async def in_coroutine(task):
    client = AsyncOpenAI()
    first = await client.chat.completions.create(**ASK)
    await client.chat.completions.create(**ASK)
    of_a_thread = await asyncio.to_thread(lightningrl.emit_reward, 0.25, name="plan", call=first.id)
    done = [of_a_thread, lightningrl.emit_reward(-0.5)]
    await client.close()
    return done

def lost(task):
    """A new thread has no context, so it cannot tell which attempt it belongs to."""
    said = []
    def body():
        try:
            lightningrl.emit_reward(1.0)
        except lightningrl.UserError as error:
            said.append(error.message)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return said


def traced(task):
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    tracer = trace.get_tracer("agent")
    with tracer.start_as_current_span("look up", attributes={"openinference.span.kind": "TOOL", "tool.name": "look"}):
        pass
    trace.get_tracer_provider().force_flush()  # exporters may send at any time, even before the first call
    with tracer.start_as_current_span("invoke_agent"):
        with tracer.start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}) as span:
            span.set_attribute("gen_ai.response.id", OpenAI().chat.completions.create(**ASK).id)
        attributes = {"openinference.span.kind": "RETRIEVER", "output.value": "[]"}
        with tracer.start_as_current_span("search", attributes=attributes):
            pass
    if task.get("program"):
        trace.get_tracer_provider().shutdown()

if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](json.load(sys.stdin))))
'''


@pytest.fixture
def opened(template: ChatTemplate) -> Opened:
    @asynccontextmanager
    async def stage(*, may_reward: bool = True, shared: bool = True) -> AsyncIterator[Stage]:
        store, engine = await SQLiteStore.open(":memory:"), ScriptedEngine(lambda prompt_ids, sampling: ())
        gateway = create_app(
            store=store,
            chat=template,
            engines={"policy": engine},
            max_length=2000,
            may_reward=may_reward,
            shared_processes=shared,
        )
        async with serving(gateway) as url:
            made = Stage(store=store, template=template, engine=engine, gateway=gateway, url=url)
            made.says("red")
            yield made
        await store.close()

    return stage


async def run(
    stage: Stage, root: Path, name: str, *, program: bool = False, count: int = 1
) -> list[tuple[Attempt, Outcome]]:
    """`count` attempts at the same time, finished as the dispatcher would."""
    (root / "agent.py").write_text(AGENT)
    how: dict[str, Any] = (
        {"command": [sys.executable, str(root / "agent.py"), name]} if program else {"entry": f"agent:{name}"}
    )
    agent = AgentConfig(**how, reward="agent:reward", workers=1)
    pool = WorkerPool(agent, root=root, env={"OPENAI_BASE_URL": f"{stage.url}/v1"}, log_path=root / "agent.log")
    await pool.start()
    try:
        attempts = [await stage.begin(f"r{n}") for n in range(count)]
        rollouts = {rollout.id: rollout for rollout in await stage.store.rollouts()}
        outcomes = await asyncio.gather(
            *(pool.run(rollouts[a.rollout_id], a, addresses(stage.url, key=a.token)) for a in attempts)
        )
    finally:
        await pool.close()
    for attempt, outcome in zip(attempts, outcomes, strict=True):
        assert outcome.status == "succeeded", outcome.error
        await stage.store.finish(attempt.id, outcome.status, rewards=outcome.rewards)
    return list(zip(attempts, outcomes, strict=True))


@pytest.mark.parametrize(("name", "program"), [("in_thread", False), ("in_coroutine", False), ("in_thread", True)])
async def test_an_agent_rewards_its_own_calls_wherever_it_runs(
    opened: Opened, tmp_path: Path, name: str, program: bool
) -> None:
    async with opened(shared=not program) as stage:
        for attempt, outcome in await run(stage, tmp_path, name, program=program, count=1 if program else 3):
            first, second = await stage.calls(attempt)
            assert outcome.output == [True, True]
            assert await stage.store.rewards([attempt.id]) == [
                Reward(attempt_id=attempt.id, value=0.25, name="plan", source="agent", call_id=first.id),
                Reward(attempt_id=attempt.id, value=-0.5, name="step", source="agent", call_id=second.id),
                Reward(attempt_id=attempt.id, value=1.0),
            ]


async def test_a_thread_without_an_attempt_gets_an_error(opened: Opened, tmp_path: Path) -> None:
    async with opened() as stage:
        [(_, outcome)] = await run(stage, tmp_path, "lost")
    assert outcome.output == ["cannot tell which attempt this code belongs to"]


@pytest.mark.parametrize("program", [False, True], ids=["function", "program"])
async def test_spans_are_there_when_an_attempt_has_ended(opened: Opened, tmp_path: Path, program: bool) -> None:
    """Spans go to the endpoint in the environment: at the end of an attempt, or when a program exits."""
    async with opened(shared=not program) as stage:
        for attempt, _ in await run(stage, tmp_path, "traced", program=program, count=1 if program else 4):
            found = await stage.store.spans([attempt.id])
            kinds = [(s.kind, s.name) for s in found]
            assert kinds == [("tool", "look"), ("other", "invoke_agent"), ("llm", "chat"), ("retrieval", "search")]
            assert found[2].call_id == (await stage.calls(attempt))[0].id


async def ask(stage: Stage, attempt: Attempt) -> str:
    async with httpx.AsyncClient(base_url=stage.url, headers={"x-api-key": attempt.token}) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "say a word"}]}
        return (await http.post("/v1/chat/completions", json=body)).json()["id"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"value": 1.0, "name": "final"}', "`final` is not the agent's to give"),
        (b'{"value": 1.0, "name": ""}', "`name`"),
        (b'{"value": 1e999}', "Number out of range"),
        (b'{"value": 1' + b"0" * 400 + b"}", "`value` is `1000"),
        (b'{"value": NaN}', "not valid JSON"),
        (b'{"value": true}', "`value` is `True`"),
        (b'{"value": "1"}', "`value`"),
        (b"{}", "`value` is `None`"),
        (b'{"value": 1.0, "call": 3}', "`call` is `3`"),
        (b'{"value": 1.0, "call": "nobody"}', "no call `nobody`"),
        (b"[1]", "not a JSON object"),
    ],
)
async def test_an_invalid_reward_is_refused(opened: Opened, body: bytes, said: str) -> None:
    async with opened() as stage:
        attempt = await stage.begin()
        await ask(stage, attempt)
        async with httpx.AsyncClient(base_url=stage.url, headers={"x-api-key": attempt.token}) as http:
            answer = await http.post("/v1/rewards", content=body)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]
        assert await stage.store.rewards([attempt.id]) == []


async def test_an_agent_may_reward_only_its_own_calls_and_only_if_the_recipe_allows_it(opened: Opened) -> None:
    async with opened() as stage, opened(may_reward=False) as strict, httpx.AsyncClient() as http:
        mine, theirs = await stage.begin("a"), await stage.begin("b")
        headers = {"authorization": f"Bearer {mine.token}"}
        early = await http.post(f"{stage.url}/v1/rewards", json={"value": 1.0}, headers=headers)
        assert early.status_code == 400 and "no call yet" in early.json()["error"]["message"]
        body = {"value": 1.0, "call": await ask(stage, theirs)}
        assert (await http.post(f"{stage.url}/v1/rewards", json=body, headers=headers)).status_code == 400
        assert (await http.post(f"{stage.url}/v1/rewards", json=body)).status_code == 401
        assert (await http.post(f"{stage.url}/r/{theirs.token}/v1/rewards", json=body)).json()["call"] == body["call"]
        await stage.store.finish(theirs.id, "succeeded", rewards=[Reward(attempt_id=theirs.id, value=0.0)])
        assert (await http.post(f"{stage.url}/r/{theirs.token}/v1/rewards", json=body)).status_code == 401
        assert [(r.name, r.call_id) for r in await stage.store.rewards([mine.id, theirs.id])] == [
            ("step", body["call"]),
            ("final", None),
        ]
        forbidden = await strict.begin()
        refused = await http.post(
            f"{strict.url}/v1/rewards", json={"value": 1.0}, headers={"x-api-key": forbidden.token}
        )
        assert refused.status_code == 403 and "agent.may_reward" in refused.json()["error"]["message"]


def test_outside_of_an_attempt_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a-person's-own")
    assert lightningrl.emit_reward(1.0) is False
    monkeypatch.setenv("OPENAI_BASE_URL", "https://api.example.com/v1")
    assert lightningrl.emit_reward(1.0) is False
    for value in (float("nan"), float("-inf"), 10**400):
        with pytest.raises(UserError, match="finite"):
            lightningrl.emit_reward(value)


async def test_a_refusal_of_the_gateway_reaches_the_agent(opened: Opened) -> None:
    async with opened() as stage:
        attempt = await stage.begin()
        with lightningrl.attach(attempt.token, base_url=f"{stage.url}/v1"):
            with pytest.raises(UserError, match="no call yet"):
                await asyncio.to_thread(lightningrl.emit_reward, 1.0)
            with pytest.raises(UserError, match="not the agent's"):
                await asyncio.to_thread(lightningrl.emit_reward, 1.0, name="final")
    with (
        lightningrl.attach(attempt.token, base_url="http://127.0.0.1:9/v1"),
        pytest.raises(UserError, match="did not take"),
    ):
        lightningrl.emit_reward(1.0)


async def test_a_collector_that_hangs_does_not_keep_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()

    class Hangs(SpanProcessor):
        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return free.wait(10)

    provider = TracerProvider()
    provider.add_span_processor(Hangs())
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(flush, "FLUSH_S", 0.1)
    started = time.monotonic()
    await flush.flush_spans()
    assert time.monotonic() - started < 5.0
    free.set()
