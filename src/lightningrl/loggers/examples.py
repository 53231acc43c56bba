"""A small run for the checks and tests of loggers."""

from dataclasses import replace
from pathlib import Path

from lightningrl.loggers.base import Ended, Outcome, Row, Run
from lightningrl.loggers.notes import Notes
from lightningrl.store.examples import call, rollout
from lightningrl.types import Attempt, Call, Reward, Span

SETTINGS = {"name": "checked", "seed": 0, "agent": {"env": {"KEY": "•••"}}, "routes": [{"model": "*"}], "loggers": []}
COMPLETE = Outcome(ending="complete", result={"heldout_after": 0.75, "steps": 2, "run_dir": "runs/checked"}, error="")
STOPPED = Outcome(ending="stopped", result={}, error="")
AT = 1_800_000_000.0
TOOL_ID = "call_1"


def run_in(folder: Path) -> Run:
    name = folder.resolve().name
    return Run(name=name, project="checked", folder=folder, settings=SETTINGS, notes=Notes(folder, "checked"))


def row(step: int) -> Row:
    return Row(step=step, at=AT + step, metrics={"reward/mean": step / 10, "loss/value": -0.5, "tokens/count": 12})


def ended(rollout_id: str) -> Ended:
    """An attempt of two calls. The first one asks for the weather; the second request brings the result."""
    whole = replace(rollout(rollout_id), status="succeeded", accepted_attempt_id=f"{rollout_id}.1")
    attempt = attempt_of(rollout_id)
    rewards = (
        Reward(attempt_id=attempt.id, value=0.75),
        Reward(attempt_id=attempt.id, value=0.1, name="polite", source="agent", call_id=f"{attempt.id}/1"),
    )
    return Ended(rollout=whole, attempts=(attempt,), calls=calls_of(attempt), spans=(), rewards=rewards)


def failed(rollout_id: str) -> Ended:
    attempt = replace(attempt_of(rollout_id), status="failed", error="ValueError: a secret\nTraceback …", output=None)
    return Ended(
        rollout=replace(rollout(rollout_id), status="failed"), attempts=(attempt,), calls=(), spans=(), rewards=()
    )


def attempt_of(rollout_id: str) -> Attempt:
    return Attempt(
        id=f"{rollout_id}.1",
        rollout_id=rollout_id,
        number=1,
        token="",
        status="succeeded",
        worker="w",
        output="It is warm.",
        started_at=AT,
        ended_at=AT + 5,
    )


def calls_of(attempt: Attempt) -> tuple[Call, Call]:
    asked = {"role": "user", "content": "How warm is it?"}
    wants = {"id": TOOL_ID, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [wants]}
    result = {"role": "tool", "tool_call_id": TOOL_ID, "content": "21 °C"}
    last = {"role": "assistant", "content": "It is warm."}
    first = replace(
        call(attempt, 0, [1, 2, 3], [7, 8, 9]),
        request={"model": "small", "messages": [asked]},
        response=_response(f"{attempt.id}/0", answer, "tool_calls"),
        finish_reason="tool_calls",
        started_at=AT + 1,
        ended_at=AT + 2,
    )
    second = replace(
        call(attempt, 1, [1, 2, 3, 7, 8, 9, 4], [6], parent=first.id, capture="bridged"),
        request={"model": "small", "messages": [asked, answer, result]},
        response=_response(f"{attempt.id}/1", last, "stop"),
        started_at=AT + 3,
        ended_at=AT + 4,
    )
    return first, second


def reported(attempt: Attempt) -> tuple[Span, ...]:
    """What the agent's own telemetry reports of the same calls: a step of its own, with a call and the tool in it."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    step = Span(
        id="b7ad6b7169203331",
        attempt_id=attempt.id,
        trace_id=trace,
        call_id=None,
        kind="other",
        name="plan",
        started_at=AT + 0.5,
        ended_at=AT + 3,
    )
    llm = replace(
        step,
        id="00f067aa0ba902b7",
        call_id=f"{attempt.id}/0",
        kind="llm",
        name="small",
        started_at=AT + 0.9,
        ended_at=AT + 2.1,
        parent_id=step.id,
        attributes={"my.prompt": "How warm is it?", "my.number": 3},
    )
    tool = replace(
        step,
        id="53995c3f42cd8ad8",
        kind="tool",
        name="weather",
        input='{"city": "Ulm"}',
        output="21 °C",
        started_at=AT + 2.2,
        ended_at=AT + 2.8,
        parent_id=step.id,
        attributes={"gen_ai.tool.call.id": TOOL_ID},
    )
    return step, llm, tool


def _response(call_id: str, message: object, finish_reason: str) -> dict[str, object]:
    return {
        "id": call_id,
        "object": "chat.completion",
        "model": "small",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
