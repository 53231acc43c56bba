"""One call of an attempt: its place in the tree of calls, what was said, its tools, rewards, and what it taught."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightningrl.data.forest import Lesson
from lightningrl.look.branches import PLAYED_BACK, Played
from lightningrl.look.census import UNEXPLAINED
from lightningrl.look.conversation import Said, conversation
from lightningrl.look.credit import CallCredit
from lightningrl.look.teaching import Teaching
from lightningrl.look.texts import Texts
from lightningrl.look.timeline import Event, lanes
from lightningrl.tracing import spans_of, united
from lightningrl.tracing.united import around
from lightningrl.types import Call, Capture, Reward, Span

SHOWN = ("tool", "retrieval", "agent", "guardrail")
"""Kinds of spans that are shown beside the calls."""
UNKNOWN = Played(rollout=None, call=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """One call of the attempt that is shown."""

    call: Call
    said: Said
    pieces: tuple[str, ...] | None
    """[C] text of each sampled token; None without a tokenizer, or if it was not asked for."""
    tools: tuple[Span, ...]
    """Spans of the tools that its answer called, if they were traced."""
    rewards: tuple[Reward, ...]
    """Rewards of this call alone."""
    lesson: Lesson | None
    """None: the call teaches nothing, or that is not known."""
    credit: CallCredit | None = None
    """How its advantage came about; None: as above."""
    parent: int | None = None
    """Number of the call that it continues, or from which it was forked; None: it begins a conversation."""
    lane: int = 0
    """Its lane in the timeline: parallel calls and spans lie in different ones."""
    played: Played | None = None
    """The recorded call whose answer was played back; None: the answer is this call's own."""

    @property
    def number(self) -> int:
        """Its place in order of arrival, from 1."""
        return self.call.index + 1

    @property
    def origin(self) -> str:
        """How its prompt was made, or where its answer is from, in words."""
        if self.played is not None:
            return self.played.words
        return origin(self.call, parent=self.parent)

    @property
    def advantage(self) -> float | None:
        """The same for all of its tokens; None if not known."""
        return float(self.lesson.advantages[0]) if self.lesson is not None and len(self.lesson.advantages) else None

    @property
    def left_out(self) -> str | None:
        """Why the call is not trained; None: it is trained, or that is not known."""
        if self.played is not None:
            return PLAYED_BACK
        return None if self.lesson is None else self.lesson.transition.left_out

    @property
    def sampled_tokens(self) -> int:
        """0 for an answer that was played back."""
        return len(self.call.completion_ids) if self.played is None else 0

    def with_pieces(self, texts: Texts) -> "CallView":
        """The same with the text of each sampled token."""
        return replace(self, pieces=texts.of(self.call.completion_ids))

    def as_json(self, *, tokens: bool = True) -> dict[str, Any]:
        """`tokens`: also the sampled ones, which are most of the answer."""
        call, lesson = self.call, self.lesson
        plain = ("id", "index", "parent_call_id", "agent", "policy", "policy_version", "dialect")
        capture = ("capture", "capture_reason", "finish_reason", "started_at", "ended_at")
        found = {
            **{name: getattr(call, name) for name in (*plain, *capture)},
            "number": self.number,
            "parent": self.parent,
            "origin": self.origin,
            "lane": self.lane,
            "seconds": round(call.ended_at - call.started_at, 3),
            "prompt_tokens": len(call.prompt_ids),
            "sampled_tokens": self.sampled_tokens,
            "replays": None if self.played is None else asdict(self.played),
            "grammar": call.sampling.grammar is not None,
            **self.said.as_json(),
            "tools": [
                {name: getattr(tool, name) for name in ("name", "status", "error", "input", "output")}
                for tool in self.tools
            ],
            "rewards": [reward_json(reward) for reward in self.rewards],
            "advantage": self.advantage,
            "credit": None if self.credit is None else self.credit.as_json(),
            "weight": float(lesson.weights.sum()) if lesson is not None else None,
            "left_out": self.left_out,
        }
        return found | {"tokens": self._tokens()} if tokens else found

    def _tokens(self) -> dict[str, Any]:
        call = self.call
        logprobs = [round(x, 6) for x in call.logprobs.tolist()]
        return {"ids": call.completion_ids.tolist(), "logprobs": logprobs, "texts": self.pieces}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanView:
    """One tool, retrieval, agent or guardrail of the attempt that is shown."""

    span: Span
    number: int | None
    """Number of the call that caused it; None: unknown."""
    parent: str | None
    """Id of the span that encloses it, among those that are shown; None: there is none."""
    lane: int
    """Its lane in the timeline."""

    def as_json(self) -> dict[str, Any]:
        names = ("id", "kind", "name", "status", "error", "input", "output", "started_at", "ended_at")
        found = {name: getattr(self.span, name) for name in names}
        return {**found, "call": self.number, "parent": self.parent, "lane": self.lane}


def views(
    calls: Sequence[Call],
    *,
    recorded: Sequence[Span],
    rewards: Sequence[Reward],
    teaching: Teaching,
    texts: Mapping[str, Texts | None],
    played: Mapping[str, Played],
) -> tuple[tuple[CallView, ...], tuple[SpanView, ...]]:
    """The calls and spans of an attempt. `recorded`: spans of its telemetry. `texts`: by policy; other calls have no
    `pieces`. `played`: id of a recorded call → what is told of it.
    """
    shown = [span for span in united(recorded, spans_of(calls)) if span.kind in SHOWN]
    numbers = {call.id: call.index + 1 for call in calls}
    lane = _lanes(calls, shown)
    by_call: dict[str | None, list[Span]] = {}
    for span in shown:
        by_call.setdefault(span.call_id if span.kind in ("tool", "retrieval") else None, []).append(span)
    of_call = tuple(
        CallView(
            call=call,
            said=said,
            pieces=_pieces(call, texts.get(call.policy)),
            tools=tuple(by_call.get(call.id, ())),
            rewards=tuple(reward for reward in rewards if reward.call_id == call.id),
            lesson=teaching.lessons.get(call.id),
            credit=teaching.credits.get(call.id) if call.replays is None else None,
            parent=numbers.get(call.parent_call_id or ""),
            lane=lane[f"call {call.id}"],
            played=None if call.replays is None else played.get(call.replays, UNKNOWN),
        )
        for call, said in zip(calls, conversation(calls), strict=True)
    )
    enclosing = _enclosing(recorded, shown)
    of_span = tuple(
        SpanView(
            span=span,
            number=numbers.get(span.call_id or ""),
            parent=enclosing.get((span.trace_id, span.id)),
            lane=lane[f"span {span.trace_id} {span.id}"],
        )
        for span in shown
    )
    return of_call, of_span


def origin(call: Call, *, parent: int | None) -> str:
    """How the prompt of a call was made, in words. `parent`: the number of its parent call."""
    continued = "another call" if parent is None else f"call {parent}"
    why = call.capture_reason or UNEXPLAINED
    told: dict[Capture, str] = {
        "bridged": f"continues {continued} token for token",
        "partly": f"continues {continued} token for token, later answers rendered again: {why}",
        "rendered": "begins a conversation",
        "forked": f"forked: rendered again, because {why}",
        "upstream": "answered by another server",
        "incomplete": f"incomplete: {why}",
    }
    return told[call.capture]


def reward_json(reward: Reward) -> dict[str, Any]:
    return {"name": reward.name, "value": reward.value, "source": reward.source, "call_id": reward.call_id}


def _pieces(call: Call, texts: Texts | None) -> tuple[str, ...] | None:
    return None if texts is None else texts.of(call.completion_ids)


def _lanes(calls: Sequence[Call], spans: Sequence[Span]) -> dict[str, int]:
    """A call takes the lane of the call that it continues, and a tool that of the call that caused it, if free."""
    events = [
        Event(
            id=f"call {call.id}",
            started_at=call.started_at,
            ended_at=call.ended_at,
            after=f"call {call.parent_call_id}",
        )
        for call in calls
    ]
    events += [
        Event(
            id=f"span {span.trace_id} {span.id}",
            started_at=span.started_at,
            ended_at=span.ended_at,
            after=f"call {span.call_id}",
        )
        for span in spans
    ]
    return lanes(events)


def _enclosing(recorded: Sequence[Span], shown: Sequence[Span]) -> dict[tuple[str, str], str]:
    """(trace, id) of each shown span → id of the nearest shown span around it."""
    by_id = {(span.trace_id, span.id): span for span in recorded}
    visible = {(span.trace_id, span.id) for span in shown}
    found: dict[tuple[str, str], str] = {}
    for span in shown:
        near = next((outer.id for outer in around(span, by_id) if (outer.trace_id, outer.id) in visible), None)
        if near is not None:
            found[span.trace_id, span.id] = near
    return found
