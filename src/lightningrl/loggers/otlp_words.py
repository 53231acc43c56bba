"""The attributes of spans: what the conventions name, and `lightningrl.*` for the rest. None: left out."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lightningrl.loggers.base import Ended
from lightningrl.messages import Message
from lightningrl.tracing.derived import TOOL_CALL_ID
from lightningrl.types import Attempt, Call, Reward, Span, SpanKind

PROVIDER = "lightningrl"
"""`gen_ai.provider.name`: the gateway answers, whichever engine or upstream is behind it."""
OPERATIONS: Mapping[SpanKind, str] = {
    "agent": "invoke_agent",
    "llm": "chat",
    "tool": "execute_tool",
    "retrieval": "retrieval",
}
"""`gen_ai.operation.name`"""
OF_DIALECT = {"openai.completions": "text_completion", "google.gemini": "generate_content"}
FINISHED = {"tool_calls": "tool_call", "cancelled": "error"}
"""Finish reasons that the conventions name differently, in messages."""
HARMLESS = re.compile(
    r"gen_ai\.(operation\.name|provider\.name|system|request\.|response\.|usage\.|agent\.(id|name)|conversation\.id"
    r"|tool\.(name|type|call\.id)|data_source\.id|output\.type)|error\.type|exception\.type|openinference\.span\.kind"
)
"""Attributes of telemetry with words of the program, not of the conversation. Numbers are harmless, too."""


def name_of(kind: SpanKind, name: str) -> str:
    return f"{OPERATIONS[kind]} {name}".strip() if kind in OPERATIONS else name


def attempt_words(ended: Ended, attempt: Attempt, *, run: str, texts: bool) -> dict[str, Any]:
    """Of the span `invoke_agent`."""
    rollout = ended.rollout
    accepted = rollout.accepted_attempt_id == attempt.id
    words: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.conversation.id": f"{run}/{rollout.id}",
        "lightningrl.rollout.id": rollout.id,
        "lightningrl.rollout.status": rollout.status,
        "lightningrl.group.id": rollout.group_id,
        "lightningrl.task.id": rollout.task.id,
        "lightningrl.task.split": rollout.task.split,
        "lightningrl.branch.attempt": None if rollout.branch is None else rollout.branch.attempt_id,
        "lightningrl.branch.call": None if rollout.branch is None else rollout.branch.call_id,
        "lightningrl.attempt.id": attempt.id,
        "lightningrl.attempt.number": attempt.number,
        "lightningrl.attempt.status": attempt.status,
        "lightningrl.attempt.accepted": accepted,
        "lightningrl.reward": ended.reward if accepted else None,
    }
    if texts:
        words["gen_ai.input.messages"] = _json([_turn("user", _text(rollout.task.input))])
        answer = None if attempt.output is None else _turn("assistant", _text(attempt.output))
        words["gen_ai.output.messages"] = _json([answer | {"finish_reason": "stop"}]) if answer else None
    return words


def call_words(call: Call) -> dict[str, Any]:
    """Of the span `chat`. A played-back call used no tokens: the trunk's call has them."""
    sampling, asked = call.sampling, call.request.get("model")
    return {
        "gen_ai.operation.name": OF_DIALECT.get(call.dialect, "chat"),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": call.agent or None,
        "gen_ai.request.model": asked if isinstance(asked, str) else call.policy,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k else None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.response.id": call.id,
        "gen_ai.response.model": f"{call.policy}@{call.policy_version}",
        "gen_ai.response.finish_reasons": [call.finish_reason],
        "gen_ai.usage.input_tokens": len(call.prompt_ids) if call.replays is None else 0,
        "gen_ai.usage.output_tokens": len(call.completion_ids) if call.replays is None else 0,
        "lightningrl.call.index": call.index,
        "lightningrl.call.parent": call.parent_call_id,
        "lightningrl.policy": call.policy,
        "lightningrl.policy.version": call.policy_version,
        "lightningrl.capture": call.capture,
        "lightningrl.capture.reason": call.capture_reason,
        "lightningrl.dialect": call.dialect,
        "lightningrl.replays": call.replays,
    }


def call_texts(call: Call, messages: Sequence[Message], answer: Message | None) -> dict[str, Any]:
    """What the call said, as JSON strings after the schemas of the conventions."""
    finished = {"finish_reason": FINISHED.get(call.finish_reason, call.finish_reason)}
    return {
        "gen_ai.input.messages": _json([_message(message) for message in messages]) if messages else None,
        "gen_ai.output.messages": None if answer is None else _json([_message(answer) | finished]),
    }


def span_words(span: Span, *, texts: bool) -> dict[str, Any]:
    """Of a tool, or of another span that the agent reported."""
    kept = span.attributes if texts else {key: x for key, x in span.attributes.items() if _harmless(key, x)}
    words: dict[str, Any] = dict(kept)
    if span.kind in OPERATIONS:
        words.setdefault("gen_ai.operation.name", OPERATIONS[span.kind])
    if span.kind == "tool":
        words |= {"gen_ai.tool.name": span.name, "gen_ai.tool.call.id": span.attributes.get(TOOL_CALL_ID) or None}
    if span.kind == "agent":
        words.setdefault("gen_ai.agent.name", span.name)
    words["lightningrl.call.id"] = span.call_id
    if texts:
        of_tool = span.kind == "tool"
        words["gen_ai.tool.call.arguments" if of_tool else "input.value"] = span.input
        words["gen_ai.tool.call.result" if of_tool else "output.value"] = span.output
    return words


def reward_words(reward: Reward) -> dict[str, Any]:
    """Of the event `gen_ai.evaluation.result`."""
    return {
        "gen_ai.evaluation.name": reward.name,
        "gen_ai.evaluation.score.value": float(reward.value),
        "gen_ai.response.id": reward.call_id,
        "lightningrl.reward.source": reward.source,
    }


def _harmless(key: str, value: Any) -> bool:
    return isinstance(value, int | float) or bool(HARMLESS.match(key))


def _message(message: Message) -> dict[str, Any]:
    """A message as parts."""
    if message.role == "tool":
        result = {"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}
        return {"role": "tool", "parts": [result]}
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.content:
        parts.append({"type": "text", "content": message.content})
    for call in message.tool_calls:
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": _arguments(call.arguments)})
    return {"role": message.role, "parts": parts}


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _arguments(text: str) -> Any:
    """The object that the model wrote; if it is none, the text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
