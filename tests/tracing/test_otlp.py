"""Spans of both vocabularies, made by the real SDK and encoded by the real exporter."""

import json
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode

from lightningrl.algorithms.air import air_rewards
from lightningrl.config import AirConfig
from lightningrl.tracing import otlp
from lightningrl.types import Span


def decoded(name: str, *, raised: Exception | None = None, status: Status | None = None, **attributes: Any) -> Span:
    """Attribute names have `__` in place of `.`."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with provider.get_tracer("agent").start_as_current_span(name, record_exception=False) as span:
        span.set_attributes({key.replace("__", "."): value for key, value in attributes.items()})
        if raised is not None:
            span.record_exception(raised)
        if status is not None:
            span.set_status(status)
    request = encode_spans(kept.get_finished_spans())
    provider.shutdown()
    [found] = otlp.decode(request.SerializeToString(), "protobuf")
    return found


@pytest.mark.parametrize(
    ("attributes", "kind", "name"),
    [
        ({"gen_ai__operation__name": "execute_tool", "gen_ai__tool__name": "search"}, "tool", "search"),
        ({"gen_ai__operation__name": "execute_tool"}, "tool", "spanned"),
        ({"gen_ai__tool__name": "search"}, "tool", "search"),
        ({"gen_ai__operation__name": "chat", "gen_ai__request__model": "m"}, "llm", "m"),
        ({"gen_ai__operation__name": "generate_content", "gen_ai__response__model": "n"}, "llm", "n"),
        ({"gen_ai__operation__name": "invoke_agent", "gen_ai__agent__name": "planner"}, "agent", "planner"),
        ({"gen_ai__operation__name": "embeddings"}, "other", "spanned"),
        ({"openinference__span__kind": "TOOL", "tool__name": "search"}, "tool", "search"),
        ({"openinference__span__kind": "LLM", "llm__model_name": "m"}, "llm", "m"),
        ({"openinference__span__kind": "RETRIEVER"}, "retrieval", "spanned"),
        ({"openinference__span__kind": "AGENT", "agent__name": "planner"}, "agent", "planner"),
        ({"openinference__span__kind": "GUARDRAIL"}, "guardrail", "spanned"),
        ({"openinference__span__kind": "CHAIN"}, "other", "spanned"),
        ({}, "other", "spanned"),
    ],
)
def test_both_vocabularies_have_the_kind_of_a_span(attributes: dict[str, Any], kind: str, name: str) -> None:
    span = decoded("execute_tool spanned", **attributes)
    assert (span.kind, span.name) == (kind, name)


def test_a_tool_has_input_and_output() -> None:
    one = decoded(
        "t",
        gen_ai__tool__name="f",
        gen_ai__tool__call__id="c",
        gen_ai__tool__call__arguments='{"a":  1}',
        gen_ai__tool__call__result="3",
    )
    other = decoded(
        "t",
        openinference__span__kind="TOOL",
        tool__name="f",
        tool_call__id="c",
        input__value='{"a":  1}',
        output__value="3",
    )
    for span in (one, other):
        assert (span.name, span.input, span.output, span.attributes["gen_ai.tool.call.id"], span.status) == (
            "f",
            '{"a":  1}',
            "3",
            "c",
            "unset",
        )
        assert span.ended_at >= span.started_at > 1.6e9


@pytest.mark.parametrize(
    ("told", "status", "error", "exception"),
    [
        ({"raised": KeyError("x"), "status": Status(StatusCode.ERROR)}, "error", "KeyError: 'x'", "KeyError"),
        ({"raised": KeyError("x")}, "error", "KeyError: 'x'", "KeyError"),
        ({"raised": KeyError("caught"), "status": Status(StatusCode.OK)}, "ok", None, None),
        ({"status": Status(StatusCode.ERROR, "no luck")}, "error", "no luck", None),
        ({"status": Status(StatusCode.ERROR, "ValueError: bad")}, "error", "ValueError: bad", "ValueError"),
        ({"error__type": "timeout"}, "error", "timeout", None),
        ({"output__value": '{"isError": true}'}, "error", '{"isError": true}', None),
        ({"output__value": "Error: no such table"}, "error", "Error: no such table", None),
        ({"output__value": "Error: no such table", "status": Status(StatusCode.OK)}, "ok", None, None),
        ({"output__value": "fine"}, "unset", None, None),
    ],
)
def test_a_tool_has_failed_only_if_its_span_says_so(
    told: dict[str, Any], status: str, error: str | None, exception: str | None
) -> None:
    span = decoded("t", gen_ai__tool__name="f", **told)
    assert (span.status, span.error, span.attributes.get("exception.type")) == (status, error, exception)
    assert [r.name for r in air_rewards([span], [AirConfig(rule="tool_raised")], root=None)] == (
        ["tool_raised"] if exception else []
    )


@pytest.mark.parametrize(
    ("attributes", "nothing"),
    [
        ({"retrieval__documents__0__document__content": "a", "retrieval__documents__1__document__content": "b"}, False),
        ({"output__value": "[]"}, True),
        ({"output__value": '{"documents": []}'}, True),
        ({"gen_ai__retrieval__documents": "[]"}, True),
        ({"gen_ai__retrieval__documents": '[{"id": 1}]'}, False),
        ({"output__value": "three documents"}, False),
        ({}, False),
    ],
    ids=["documents", "list", "object", "semconv", "semconv-found", "text", "unknown"],
)
def test_a_retrieval_is_empty_only_if_its_span_says_so(attributes: dict[str, Any], nothing: bool) -> None:
    span = decoded("r", openinference__span__kind="RETRIEVER", **attributes)
    assert bool(air_rewards([span], [AirConfig(rule="empty_retrieval")], root=None)) is nothing


@pytest.mark.parametrize(
    ("attributes", "fired"),
    [
        ({"guardrail__triggered": True}, True),
        ({"output__value": '{"tripwire_triggered": true}'}, True),
        ({"status": Status(StatusCode.ERROR)}, True),
        ({"guardrail__triggered": False}, False),
        ({}, False),
    ],
)
def test_a_guardrail_has_fired_only_if_its_span_says_so(attributes: dict[str, Any], fired: bool) -> None:
    span = decoded("g", openinference__span__kind="GUARDRAIL", **attributes)
    assert bool(air_rewards([span], [AirConfig(rule="guardrail")], root=None)) is fired


def test_both_vocabularies_have_the_id_of_the_answer() -> None:
    one = decoded(
        "c", gen_ai__operation__name="chat", gen_ai__response__id="chatcmpl-1", gen_ai__input__messages="[long]"
    )
    output = json.dumps({"id": "chatcmpl-1", "choices": []})
    other = decoded(
        "c", openinference__span__kind="LLM", output__value=output, llm__input_messages__0__message__content="long"
    )
    for span in (one, other):
        assert span.attributes["gen_ai.response.id"] == "chatcmpl-1"
        assert (span.input, span.output) == (None, None) and "long" not in str(span.attributes), (
            "calls are kept already, token by token"
        )


def test_attributes_of_every_type_are_kept() -> None:
    span = decoded("x", a=True, b=3, c=0.5, d=["u", "v"], e="text", f=b"\x00\xff")
    assert {key: span.attributes[key] for key in "abcdef"} == {
        "a": True,
        "b": 3,
        "c": 0.5,
        "d": ["u", "v"],
        "e": "text",
        "f": "AP8=",
    }
