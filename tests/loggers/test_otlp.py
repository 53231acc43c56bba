"""Rollouts at a collector: the tree of spans, what is left out, retries, and each span once."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from lightningrl.errors import UserError
from lightningrl.loggers import make_loggers, shown_by
from lightningrl.loggers.conformance import CHECKS
from lightningrl.loggers.content import VARIABLE
from lightningrl.loggers.examples import attempt_of, ended, failed, reported, run_in
from lightningrl.loggers.otlp import OTLP
from lightningrl.loggers.otlp_send import Unsent, collector, send
from lightningrl.loggers.otlp_spans import spans_of_rollout
from lightningrl.tracing.otlp import decode
from lightningrl.types import Branch
from tests.loggers.collector import Collector, collecting
from tests.loggers.recorded import config, recorded


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


def words(span: Sent | Sent.Event) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in span.attributes:
        value = pair.value
        which = value.WhichOneof("value")
        assert which is not None
        found[pair.key] = (
            [x.string_value for x in value.array_value.values] if which == "array_value" else getattr(value, which)
        )
    return found


def tree(spans: list[Sent]) -> dict[str, str]:
    """Name → name of the span above; "" for a root."""
    names = {span.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent_span_id, "") for span in spans}


def sent(records: Any, *, texts: bool = False) -> list[Sent]:
    return spans_of_rollout(records, run="run", salt="salt", texts=texts)


def follow(folder: Path) -> list[str]:
    said: list[str] = []
    (folder / "result.json").write_text("{}")
    with shown_by(make_loggers(config("otlp")), config("otlp"), folder, say=said.append):
        pass
    return said


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_a_loggers_promises(check: Any, tmp_path: Path, server: Collector) -> None:
    check(OTLP, tmp_path)


def test_an_attempt_is_a_trace_of_calls_and_tools_with_rewards_as_evaluations() -> None:
    spans = sent(ended("train-00000-000-00"))
    assert tree(spans) == {"invoke_agent": "", "chat small": "invoke_agent", "execute_tool weather": "invoke_agent"}
    assert len({span.trace_id for span in spans}) == 1 and len(spans) == 4
    [whole, first, second, tool] = spans
    assert words(whole)["gen_ai.operation.name"] == "invoke_agent"
    assert words(whole)["lightningrl.reward"] == 0.75
    assert [words(event)["gen_ai.evaluation.score.value"] for event in whole.events] == [0.75]
    assert words(first) | {"gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 3} == words(first)
    assert words(first)["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert words(first)["gen_ai.agent.name"] == "writer"
    assert words(second)["lightningrl.call.parent"] == "train-00000-000-00.1/0"
    [polite] = second.events
    assert (polite.name, words(polite)["gen_ai.evaluation.name"]) == ("gen_ai.evaluation.result", "polite")
    assert words(tool)["gen_ai.tool.call.id"] == "call_1"
    assert whole.start_time_unix_nano < first.start_time_unix_nano < tool.start_time_unix_nano
    assert second.end_time_unix_nano < whole.end_time_unix_nano


def test_a_played_back_call_is_marked_and_used_no_tokens() -> None:
    """Tokens are summed over spans, and the trunk's span has these."""
    records = ended("train-00000-000-00-at02-1")
    first, second = records.calls
    branch = Branch(attempt_id="train-00000-000-00.1", call_id="train-00000-000-00.1/1")
    played = replace(first, replays="train-00000-000-00.1/0")
    branched = replace(records, calls=(played, second), rollout=replace(records.rollout, branch=branch))
    [whole, one, other, _] = sent(branched)
    assert words(whole)["lightningrl.branch.attempt"] == "train-00000-000-00.1"
    assert words(whole)["lightningrl.branch.call"] == "train-00000-000-00.1/1"
    assert words(one)["lightningrl.replays"] == "train-00000-000-00.1/0"
    usage = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
    assert [words(one)[name] for name in usage] == [0, 0]
    assert "lightningrl.replays" not in words(other) and all(words(other)[name] for name in usage)
    agents = sent(replace(branched, spans=reported(records.attempts[0])))
    [llm] = [words(span) for span in agents if words(span).get("lightningrl.replays")]
    assert [llm[name] for name in usage] == [0, 0], "whatever the agent's own telemetry says"
    plain = sent(ended("train-00000-000-00"))
    assert not any(name.startswith(("lightningrl.branch", "lightningrl.replays")) for s in plain for name in words(s))


def test_spans_of_the_agent_keep_their_ids_and_parents_and_are_not_told_twice() -> None:
    records = ended("r")
    spans = sent(replace(records, spans=reported(records.attempts[0])))
    by_id = {span.span_id.hex(): span for span in spans}
    plan, llm, tool = (by_id[span.id] for span in reported(attempt_of("r")))
    [whole] = [span for span in spans if span.name == "invoke_agent"]
    assert {span.trace_id.hex() for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert (plan.parent_span_id, llm.parent_span_id, tool.parent_span_id) == (whole.span_id, plan.span_id, plan.span_id)
    assert words(llm)["gen_ai.response.id"] == "r.1/0" and words(llm)["gen_ai.usage.output_tokens"] == 3
    assert sorted(span.name for span in spans) == [
        "chat small", "chat small", "execute_tool weather", "invoke_agent", "plan",
    ]  # fmt: skip


def test_further_traces_of_the_agent_are_linked() -> None:
    records = ended("r")
    far = replace(reported(records.attempts[0])[0], trace_id="1" * 32, id="2" * 16)
    spans = sent(replace(records, spans=(*reported(records.attempts[0]), far)))
    [whole] = [span for span in spans if span.name == "invoke_agent"]
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in whole.links] == [("1" * 32, "2" * 16)]
    [alone] = [span for span in spans if span.span_id.hex() == "2" * 16]
    assert (alone.trace_id.hex(), alone.parent_span_id) == ("1" * 32, b"")


def test_no_text_of_tasks_prompts_answers_tools_or_errors_is_sent_unless_it_is_allowed() -> None:
    records = ended("r")
    told = replace(records, spans=reported(records.attempts[0]))
    secrets = ("How warm", "It is warm", "21 °C", "Ulm", "groß", "a secret")
    quiet = b"".join(span.SerializeToString() for span in [*sent(told), *sent(failed("f"))])
    assert not [secret for secret in secrets if secret.encode() in quiet]
    loud = b"".join(span.SerializeToString() for span in [*sent(told, texts=True), *sent(failed("f"), texts=True)])
    assert [secret for secret in secrets if secret.encode() in loud] == list(secrets)
    [kept] = [span for span in sent(told) if span.span_id.hex() == "00f067aa0ba902b7"]
    assert words(kept)["my.number"] == 3 and "my.prompt" not in words(kept)


def test_messages_follow_the_schema_of_the_conventions() -> None:
    [_, first, second, tool] = sent(ended("r"), texts=True)
    assert msgspec.json.decode(words(first)["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": "call_1", "name": "weather", "arguments": {"city": "Ulm"}}],
            "finish_reason": "tool_call",
        }
    ]
    asked = msgspec.json.decode(words(second)["gen_ai.input.messages"])
    assert [message["role"] for message in asked] == ["user", "assistant", "tool"]
    assert asked[2]["parts"] == [{"type": "tool_call_response", "id": "call_1", "response": "21 °C"}]
    assert words(tool)["gen_ai.tool.call.result"] == "21 °C"


def test_a_failure_is_an_error_of_a_type() -> None:
    [span] = sent(failed("r"))
    assert span.status.code == Status.STATUS_CODE_ERROR and words(span)["error.type"] == "ValueError"
    [loud] = sent(failed("r"), texts=True)
    assert loud.status.message == "ValueError: a secret"


def test_what_is_sent_can_be_read_as_telemetry_again(server: Collector, tmp_path: Path) -> None:
    logger = OTLP()
    logger.begin(run_in(tmp_path))
    logger.rollouts([ended("r")])
    kinds = [span.kind for span in decode(server.requests[0].SerializeToString(), "protobuf")]
    assert kinds == ["agent", "llm", "llm", "tool"]


async def test_each_span_is_sent_once_also_across_restarts(tmp_path: Path, server: Collector) -> None:
    run = await recorded(tmp_path)
    for number in range(20):
        await run.end(f"r{number:02d}")
    assert follow(tmp_path)[-1] == f"otlp: 80 spans are at {server.url}/v1/traces"
    for number in range(20, 25):
        await run.end(f"r{number:02d}", status="failed")
    follow(tmp_path)
    follow(tmp_path)
    ids = [span.trace_id + span.span_id for span in server.spans]
    assert len(ids) == len(set(ids)) == 25 * 4
    await run.store.close()


async def test_a_request_that_got_through_is_not_sent_again_with_the_rest_of_its_batch(
    tmp_path: Path, server: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightningrl.loggers.otlp.LIMIT", 2000)
    logger = OTLP()
    logger.begin(run_in(tmp_path))
    server.refusals = [(200, ""), (200, ""), (400, "")]
    batch = [ended(f"r{number}") for number in range(6)]
    with pytest.raises(Exception, match="400"):
        logger.rollouts(batch)
    logger.rollouts(batch)
    ids = [span.trace_id + span.span_id for span in server.spans]
    assert len(ids) == len(set(ids)) == 24
    assert all(request.ByteSize() < 4000 for request in server.requests)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_overloaded_collector_is_tried_again(status: int, server: Collector) -> None:
    server.refusals = [(status, ""), (status, "0")]
    assert send(b"", collector(), waits_s=(0.01, 0.01)) == (0, "")
    assert len(server.paths) == 3


def test_a_collector_says_how_long_to_wait(server: Collector) -> None:
    server.refusals = [(503, "1")]
    began = time.monotonic()
    send(b"", collector(), waits_s=(0.01,))
    assert time.monotonic() - began >= 1


def test_a_collector_that_stays_away_is_an_error(server: Collector) -> None:
    server.refusals = [(503, "")] * 3
    with pytest.raises(Unsent, match="answered 503"):
        send(b"", collector(), waits_s=(0.01, 0.01))


async def test_a_refusal_for_good_drops_the_logger_at_once(tmp_path: Path, server: Collector) -> None:
    run = await recorded(tmp_path)
    await run.end("a")
    server.refusals = [(401, "")] * 9
    assert "`otlp` was dropped after a failure" in follow(tmp_path)[-1]
    assert len(server.paths) == 1, "it is not tried again"
    server.refusals = []
    follow(tmp_path)
    assert len(server.spans) == 4, "the next start sends what was refused"
    await run.store.close()


async def test_rejected_spans_are_told_at_the_end_and_not_sent_again(tmp_path: Path, server: Collector) -> None:
    run = await recorded(tmp_path)
    await run.end("a")
    server.rejected = 1
    assert "otlp: 3 spans are at" in (last := follow(tmp_path)[-1]) and "rejected 1: too old" in last
    assert len(server.requests) == 1
    await run.store.close()


def test_the_standard_variables_say_where_and_how(server: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-team=rl")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2500")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{server.url}/own/path")
    send(b"", to := collector())
    headers = {name.lower(): value for name, value in server.headers[0].items()}
    assert server.paths == ["/own/path"] and to.timeout_s == 2.5
    assert (headers["authorization"], headers["x-team"]) == ("Bearer abc", "rl")
    assert (headers["content-encoding"], headers["content-type"]) == ("gzip", "application/x-protobuf")


def test_the_resource_names_the_service(server: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,deployment.environment.name=lab%201")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainer")
    logger = OTLP()
    logger.begin(run_in(tmp_path))
    logger.rollouts([ended("r")])
    [of_resource] = server.requests[0].resource_spans
    told = {pair.key: pair.value.string_value for pair in of_resource.resource.attributes}
    assert (told["service.name"], told["deployment.environment.name"]) == ("trainer", "lab 1")
    assert of_resource.schema_url == "https://opentelemetry.io/schemas/1.41.1"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PROTOCOL", "grpc", "does not speak `grpc`"),
        ("ENDPOINT", "localhost:4317", "is no endpoint"),
        ("TIMEOUT", "10s", "`10s` is no timeout"),
        ("HEADERS", "Bearer", "cannot be read"),
        ("CERTIFICATE", "/nowhere.pem", "certificates"),
    ],
)
def test_settings_that_cannot_work_are_told_at_the_start(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    with pytest.raises(UserError, match=said):
        make_loggers(config("otlp"))


def test_the_variable_for_content_is_off_unless_it_says_yes(
    server: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, texts in (("", False), ("no_content", False), ("false", False), ("true", True), ("SPAN_ONLY", True)):
        monkeypatch.setenv(VARIABLE, value)
        server.requests.clear()
        logger = OTLP()
        logger.begin(run_in(tmp_path))
        logger.rollouts([ended("r")])
        assert (b"How warm" in server.requests[0].SerializeToString()) is texts, value
