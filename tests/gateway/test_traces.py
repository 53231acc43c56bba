"""Telemetry of agents: from real exporters through a real socket into the store."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode, Tracer

from lightningrl.chat import ChatTemplate
from lightningrl.gateway import create_app, traces
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.tracing import spans_of, united
from lightningrl.types import Attempt, Span

from .conftest import ScriptedEngine, Stage, serving

PROTOBUF = {"content-type": "application/x-protobuf"}
ASKS = '<tool_call>\n{"name": "search", "arguments": {"q": "oslo"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]


@contextmanager
def tracing(url: str, **headers: str) -> Iterator[Tracer]:
    """The SDK in its usual setup; queued spans are sent at the end."""
    provider = TracerProvider()
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=url, headers=headers, compression=Compression.Gzip))
    )
    try:
        yield provider.get_tracer("agent")
    finally:
        provider.shutdown()


@pytest.fixture
async def shared(template: ChatTemplate) -> AsyncIterator[Stage]:
    """A gateway of function agents: attempts share processes."""
    store, engine = await SQLiteStore.open(":memory:"), ScriptedEngine(lambda prompt_ids, sampling: ())
    gateway = create_app(store=store, chat=template, engines={"policy": engine}, max_length=2000, shared_processes=True)
    async with serving(gateway) as url:
        stage = Stage(store=store, template=template, engine=engine, gateway=gateway, url=url)
        stage.says("hello")
        yield stage
    await store.close()


def agent(url: str, token: str, tracer: Tracer, *, trace_all: bool = True, tool_id: bool = True) -> None:
    """One search, traced by the semantic conventions."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token)
    messages: list[Any] = [{"role": "user", "content": "say a word"}]

    def ask() -> Any:
        with tracer.start_as_current_span(
            "chat m", attributes={"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
        ) as span:
            answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            span.set_attribute("gen_ai.response.id", answer.id)
            span.set_attribute("gen_ai.input.messages", json.dumps(messages, default=str))
            return answer.choices[0].message

    def act() -> None:
        said = ask()
        [asked] = said.tool_calls
        operation = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}
        with tracer.start_as_current_span("execute_tool search") as span:
            span.set_attributes(
                {
                    **operation,
                    **({"gen_ai.tool.call.id": asked.id} if tool_id else {"input.value": asked.function.arguments}),
                }
            )
            span.record_exception(KeyError("oslo"))
            span.set_status(Status(StatusCode.ERROR, "it broke"))
        messages.extend([said, {"role": "tool", "tool_call_id": asked.id, "content": "nothing found"}])
        ask()

    if trace_all:
        with tracer.start_as_current_span(
            "invoke_agent helper", attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "helper"}
        ):
            act()
    else:
        act()
    client.close()


@pytest.mark.parametrize("path", [False, True], ids=["header", "path"])
async def test_spans_come_in_by_the_token_and_are_joined_to_their_calls(stage: Stage, path: bool) -> None:
    attempt = await stage.begin()
    stage.says(ASKS, "red")

    def run() -> None:
        url = f"{stage.url}/r/{attempt.token}/v1/traces" if path else f"{stage.url}/v1/traces"
        with tracing(url, **({} if path else {"x-api-key": attempt.token})) as tracer:
            agent(stage.url, attempt.token, tracer)

    await asyncio.to_thread(run)
    found, calls = await stage.store.spans([attempt.id]), await stage.calls(attempt)
    assert [(s.kind, s.name, s.status, s.call_id) for s in found] == [
        ("agent", "helper", "unset", None),
        ("llm", "m", "unset", calls[0].id),
        ("tool", "search", "error", None),
        ("llm", "m", "unset", calls[1].id),
    ]
    helper, _, tool, last = found
    assert tool.error == "KeyError: 'oslo'" and tool.attributes["exception.type"] == "KeyError"
    assert {s.trace_id for s in found} == {helper.trace_id} and tool.parent_id == helper.id and len(helper.id) == 16
    assert "gen_ai.input.messages" not in last.attributes, "the call says that already"
    assert calls[0].ended_at <= tool.started_at <= tool.ended_at <= calls[1].started_at

    both = united(found, spans_of(calls))
    assert [(s.kind, s.id, s.call_id) for s in both if s.kind == "tool"] == [("tool", tool.id, calls[0].id)]
    [joined] = [s for s in both if s.kind == "tool"]
    assert (joined.error, joined.output, joined.input) == (tool.error, "nothing found", '{"q": "oslo"}')
    assert [s.call_id for s in both if s.kind == "llm"] == [call.id for call in calls]


async def test_attempts_that_share_an_exporter_are_told_apart_by_their_spans(shared: Stage) -> None:
    attempts = [await shared.begin(f"r{n}") for n in range(3)]

    def script(prompt_ids: list[int], sampling: object) -> list[int]:
        text = "red" if "nothing found" in shared.template.decode(prompt_ids) else ASKS
        return [*shared.template.encode(text), shared.template.turn_end_id or 0]

    shared.engine.script = script

    def run() -> None:
        with tracing(f"{shared.url}/v1/traces") as tracer:
            for n, attempt in enumerate(attempts):
                agent(shared.url, attempt.token, tracer, trace_all=n != 2)

    await asyncio.to_thread(run)
    for n, attempt in enumerate(attempts):
        found = await shared.store.spans([attempt.id])
        assert [s.kind for s in found] == [*(["agent"] if n != 2 else []), "llm", "tool", "llm"]
        assert {s.call_id for s in found if s.call_id} == {call.id for call in await shared.calls(attempt)}


async def test_a_token_opens_its_own_attempt_and_nothing_else(stage: Stage) -> None:
    mine, theirs = await stage.begin("a"), await stage.begin("b")
    client = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=theirs.token)
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "say a word"}])
    await client.close()
    body = json.dumps(
        sent(attribute("gen_ai.operation.name", "chat"), attribute("gen_ai.response.id", answer.id))
    ).encode()
    async with httpx.AsyncClient(base_url=stage.url) as http:
        headers = {"content-type": "application/json"}
        assert (await http.post("/v1/traces", content=body, headers=headers)).status_code == 401
        assert (
            await http.post("/v1/traces", content=body, headers={**headers, "authorization": "Bearer x"})
        ).status_code == 401
        taken = await http.post(
            "/v1/traces", content=body, headers={**headers, "authorization": f"Bearer {mine.token}"}
        )
    assert (taken.status_code, taken.json()) == (200, {})
    assert await stage.store.spans([theirs.id]) == []
    [span] = await stage.store.spans([mine.id])
    assert span.call_id is None


def attribute(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def sent(*attributes: dict[str, Any], span_id: str = "eee19b7ec3c1b174", **fields: Any) -> dict[str, Any]:
    """An export in JSON: https://github.com/open-telemetry/opentelemetry-proto/blob/main/examples/trace.json."""
    span = {
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": span_id,
        "parentSpanId": "EEE19B7EC3C1B173",
        "name": "I'm a server span",
        "startTimeUnixNano": "1544712660000000000",
        "endTimeUnixNano": "1544712661500000000",
        "kind": 2,
        "attributes": list(attributes),
        **fields,
    }
    return {
        "resourceSpans": [
            {"resource": {}, "scopeSpans": [{"scope": {"name": "my.library"}, "spans": [span], "unknown": 1}]}
        ]
    }


async def post(stage: Stage, attempt: Attempt, body: bytes, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stage.url) as http:
        return await http.post("/v1/traces", content=body, headers={"x-api-key": attempt.token, **headers})


JSON = {"content-type": "application/json; charset=utf-8"}


async def test_json_means_the_same_as_protobuf_with_ids_in_hexadecimal(stage: Stage) -> None:
    attempt = await stage.begin()
    answer = await post(
        stage, attempt, json.dumps(sent(attribute("openinference.span.kind", "RETRIEVER"))).encode(), **JSON
    )
    assert (answer.status_code, answer.json(), answer.headers["content-type"]) == (200, {}, "application/json")
    [span] = await stage.store.spans([attempt.id])
    assert (span.id, span.parent_id) == ("eee19b7ec3c1b174", "eee19b7ec3c1b173")
    assert span.trace_id == "5b8efff798038103d269b633813fc60c"
    assert (span.kind, span.started_at, span.ended_at) == ("retrieval", 1544712660.0, 1544712661.5)


async def test_a_span_that_is_sent_twice_is_stored_once(stage: Stage) -> None:
    attempt = await stage.begin()
    for _ in range(2):
        assert (
            await post(
                stage, attempt, gzip.compress(json.dumps(sent()).encode()), **JSON, **{"content-encoding": "gzip"}
            )
        ).status_code == 200
    assert len(await stage.store.spans([attempt.id])) == 1


async def test_spans_may_be_late_but_not_for_ever(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = await stage.begin()
    await stage.store.finish(attempt.id, "succeeded")
    assert (await post(stage, attempt, json.dumps(sent()).encode(), **JSON)).json() == {}
    monkeypatch.setattr("lightningrl.store.spans.LATE_S", 0.0)
    answer = await post(stage, attempt, ExportTraceServiceRequest().SerializeToString(), **PROTOBUF)
    assert (answer.status_code, answer.content) == (200, b"")
    said = (await post(stage, attempt, json.dumps(sent(span_id="eee19b7ec3c1b175")).encode(), **JSON)).json()[
        "partialSuccess"
    ]
    assert said["rejectedSpans"] == "1" and "it takes no more spans" in said["errorMessage"]
    assert len(await stage.store.spans([attempt.id])) == 1


async def test_spans_without_an_attempt_are_counted_and_explained(shared: Stage) -> None:
    async with httpx.AsyncClient(base_url=shared.url) as http:
        request = ExportTraceServiceRequest()
        request.resource_spans.add().scope_spans.add().spans.add(name="x", trace_id=b"1" * 16, span_id=b"2" * 8)
        answer = await http.post("/v1/traces", content=request.SerializeToString(), headers=PROTOBUF)
    told = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert (answer.status_code, told.rejected_spans) == (200, 1) and "hint:" in told.error_message


async def test_a_slow_sender_without_a_token_does_not_block_the_others(
    shared: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "UNSIGNED_S", 0.2)

    half = b"POST /v1/traces HTTP/1.1\r\nhost: h\r\ncontent-type: application/x-protobuf\r\ncontent-length: 9\r\n\r\nx"
    async with asyncio.timeout(60):
        stalled = [await asyncio.open_connection("127.0.0.1", httpx.URL(shared.url).port) for _ in range(4)]
        for _, writer in stalled:
            writer.write(half)
        assert {await reader.readline() for reader, _ in stalled} == {b"HTTP/1.1 408 Request Timeout\r\n"}
        async with httpx.AsyncClient(base_url=shared.url) as http:
            assert (await http.post("/v1/traces", content=b"", headers=PROTOBUF)).status_code == 200
        for _, writer in stalled:
            writer.close()


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xff garbage", PROTOBUF, 400),
        (b"{not json", JSON, 400),
        (b"[]", JSON, 400),
        (b'{"resourceSpans": 3}', JSON, 400),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}', JSON, 400),
        (b'{"resourceSpans": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", JSON, 400),
        (b"nothing packed", {**PROTOBUF, "content-encoding": "gzip"}, 400),
        (b"a: b", {"content-type": "application/yaml"}, 415),
    ],
    ids=["protobuf", "json", "list", "type", "id", "deep", "gzip", "yaml"],
)
async def test_garbage_is_refused_with_the_error_of_the_protocol(
    stage: Stage, body: bytes, headers: dict[str, str], status: int
) -> None:
    attempt = await stage.begin()
    answer = await post(stage, attempt, body, **headers)
    assert answer.status_code == status
    if headers["content-type"].startswith("application/json"):
        assert answer.json()["code"] == 3 and answer.json()["message"]
    else:
        assert answer.content.startswith(b"\x08\x03\x12") and answer.headers["content-type"] == "application/x-protobuf"
    assert await stage.store.spans([attempt.id]) == []


async def test_a_bad_span_does_not_spoil_the_others(shared: Stage) -> None:
    attempt = await shared.begin()
    forged = sent(
        attribute("gen_ai.operation.name", "chat"), attribute("gen_ai.response.id", f"chatcmpl-{attempt.id}-99")
    )
    body = sent(span_id="eee19b7ec3c1b177")
    body["resourceSpans"] += forged["resourceSpans"]
    said = (await post(shared, attempt, json.dumps(body).encode(), **JSON)).json()["partialSuccess"]
    assert said["rejectedSpans"] == "1" and "no call" in said["errorMessage"]
    assert [s.id for s in await shared.store.spans([attempt.id])] == ["eee19b7ec3c1b177"]


async def test_a_span_of_an_ambiguous_attempt_is_rejected(shared: Stage) -> None:
    mine, theirs = await shared.begin("a", seed=1), await shared.begin("b", seed=1)
    shared.says(ASKS)
    answers: list[Any] = []
    for attempt in (mine, theirs):
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key=attempt.token) as client:
            messages: Any = [{"role": "user", "content": "say a word"}]
            answers.append(await client.chat.completions.create(model="m", messages=messages, tools=TOOLS))
    ids = {answer.choices[0].message.tool_calls[0].id for answer in answers}
    assert len(ids) == 1, "rollouts of the same seed"
    tool = sent(
        attribute("gen_ai.operation.name", "execute_tool"),
        attribute("gen_ai.tool.call.id", ids.pop()),
        traceId="1" * 32,
    )
    async with httpx.AsyncClient(base_url=shared.url) as http:
        said = (await http.post("/v1/traces", content=json.dumps(tool).encode(), headers=JSON)).json()["partialSuccess"]
    assert said["rejectedSpans"] == "1"

    mixed = sent(
        attribute("gen_ai.operation.name", "chat"),
        attribute("gen_ai.response.id", answers[1].id),
        span_id="1" * 16,
        traceId="2" * 32,
    )
    mixed["resourceSpans"] += sent(span_id="2" * 16, traceId="3" * 32)["resourceSpans"]
    said = (await post(shared, mine, json.dumps(mixed).encode(), **JSON)).json()["partialSuccess"]
    assert said["rejectedSpans"] == "1"
    assert await shared.store.spans([mine.id]) == []
    assert [s.id for s in await shared.store.spans([theirs.id])] == ["1" * 16]


def span(name: str, **fields: Any) -> Span:
    made = Span(
        id=name, attempt_id="a", call_id=None, kind="tool", name=name, started_at=1.0, ended_at=2.0, trace_id="t"
    )
    return replace(made, **fields)


def test_a_tool_call_that_is_both_traced_and_derived_counts_once() -> None:
    def derived(name: str, n: int) -> Span:
        return span(
            name,
            id=f"d{n}",
            call_id=f"c{n}",
            input='{"a": 1, "b": 2}',
            output="x",
            started_at=10.0 * n,
            ended_at=10.0 * n + 9,
        )

    by_time, by_arguments = (
        span("time", started_at=11.0, ended_at=12.0),
        span("arguments", input='{"b":2,"a":1}', started_at=0.5),
    )
    inner = span("time", id="inner", parent_id="time", started_at=11.5, ended_at=11.6)
    failed = replace(derived("failed", 3), status="error", error="no")
    told = [by_time, by_arguments, inner, span("failed", started_at=30.0, ended_at=31.0)]
    found = united(told, [derived("time", 1), derived("arguments", 2), failed])
    assert [(s.id, s.call_id) for s in found] == [("arguments", "c2"), ("time", "c1"), ("failed", "c3")]
    assert found[2].status == "error" and found[2].error == "no"


def test_a_tool_run_without_a_tool_call_is_credited_to_the_answer_before_it() -> None:
    first = span("m", id="l1", kind="llm", call_id="c1", started_at=1.0, ended_at=2.0, parent_id="A")
    second = span("m", id="l2", kind="llm", call_id="c2", started_at=2.5, ended_at=3.0, parent_id="B")
    early = span("docs", id="early", kind="retrieval", started_at=0.5, ended_at=0.6, parent_id="A")
    late = span("docs", id="late", kind="retrieval", started_at=3.5, ended_at=3.6, parent_id="A")
    guard = span("toxic", id="guard", kind="guardrail", started_at=3.5, ended_at=3.6, parent_id="C")
    found = {s.id: s.call_id for s in united([first, second, early, late, guard], [])}
    assert found == {"early": None, "late": "c1", "guard": "c2"}
