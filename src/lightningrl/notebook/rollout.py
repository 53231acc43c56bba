"""One rollout and its calls, as a notebook shows them: what was said, what it earned, what it taught."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from lightningrl.look.branches import branched_words
from lightningrl.look.call import CallView
from lightningrl.look.rollout import RolloutView
from lightningrl.look.teaching import Teaching
from lightningrl.messages import Message
from lightningrl.notebook.colours import legend
from lightningrl.notebook.html import boxed, folded, frame, heading, joined, line, said, turn
from lightningrl.notebook.tokens import Tokens, tokens_of
from lightningrl.types import Attempt, Reward, Span, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """One call of an agent: what it sent, what the model answered, what it taught."""

    view: CallView = field(repr=False)
    """Everything that is known of it."""
    number: int
    """From 1, in order of arrival."""
    messages: tuple[Message, ...] = field(repr=False)
    """The messages that are new in this call; those before it repeat an earlier call."""
    answer: Message | None
    """None if the answer broke off."""
    tools: tuple[Span, ...] = field(repr=False)
    """The tools that the answer called, if they were traced."""
    advantage: float | None
    """Of each sampled token. Positive: training makes it more likely. None: not known."""
    left_out: str | None
    """Why the call is not trained; None: it is, or that is not known."""
    tokens: Tokens = field(repr=False)
    """The sampled tokens."""

    def _repr_html_(self) -> str:
        return str(frame(self.markup(), legend(self.tokens.known("advantage"))))

    def markup(self) -> Markup:
        call = self.view.call
        played = self.view.played
        facts = [call.capture, f"{len(self.tokens)} tokens"] if played is None else [played.words]
        facts += [f"{call.ended_at - call.started_at:.2f} s"]
        if self.advantage is not None and played is None:
            facts.append(f"advantage {self.advantage:+.3f}")
        if self.left_out is not None and played is None:
            facts.append(f"not trained: {self.left_out}")
        title = f"call {self.number}" + (f" · {call.agent}" if call.agent else "")
        parts = [turn(message.role, _spoken(message)) for message in self.messages]
        parts.append(turn("model", self.tokens.markup(self.tokens.known("advantage"))))
        parts += [
            turn(f"tool {tool.name}", said(tool.error or "failed")) for tool in self.tools if tool.status == "error"
        ]
        parts += [_earned(reward) for reward in self.view.rewards]
        return boxed(heading(title, *facts), *parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """One run of an agent on one task, with the calls of its accepted attempt, or else of its latest one."""

    view: RolloutView = field(repr=False)
    """Everything that is known of it."""
    id: str
    task: Task = field(repr=False)
    status: str
    """`queued`, `running`, `succeeded` or `failed`."""
    reward: float | None
    """Final reward; None: it has none (yet)."""
    output: Any
    """What the agent returned, as JSON."""
    error: str | None
    """Of the attempt; None: it has none."""
    calls: tuple[ShownCall, ...] = field(repr=False)
    """In order of arrival."""

    def _repr_html_(self) -> str:
        return str(frame(*self._parts()))

    def _parts(self) -> Iterator[Markup]:
        yield heading(self.id, self.status, *self._facts())
        yield from (turn(f"task · {name}", said(_plain(value))) for name, value in self.task.input.items())
        yield from (call.markup() for call in self.calls)
        yield from dict.fromkeys(legend(call.tokens.known("advantage")) for call in self.calls)
        if not self.calls:
            yield line("The agent did not call the model.", dim=True)
        yield turn("output", said(_plain(self.output)))
        if self.error:
            yield turn("error", said(self.error))
        yield from (_earned(reward) for reward in self.view.rewards)
        yield turn("group", said(self._group()))

    def _facts(self) -> Iterator[str]:
        if self.view.teaching.step is not None:
            yield f"step {self.view.teaching.step}"
        yield f"task {self.task.id}"
        yield "no reward" if self.reward is None else f"reward {self.reward:.3g}"
        if self.view.branch is not None:
            yield self.view.branch.words
        yield from branched_words(self.view.branches)
        if self.view.teaching.why_not:
            yield f"teaches nothing: {self.view.teaching.why_not}"

    def _group(self) -> str:
        """`▸0◂ 1 1 0 · mean 0.5`: the rewards of all rollouts of the same task and step."""
        rewards = [
            ("–" if reward is None else f"{reward:.3g}", name == self.id) for name, reward in self.view.group.items()
        ]
        mean = self.view.group_mean
        marked = " ".join(f"▸{reward}◂" if own else reward for reward, own in rewards)
        return marked if mean is None else f"{marked} · mean {mean:.3g}"


def shown(view: RolloutView) -> ShownRollout:
    attempt: Attempt | None = view.attempt
    return ShownRollout(
        view=view,
        id=view.rollout.id,
        task=view.rollout.task,
        status=view.rollout.status,
        reward=view.reward,
        output=attempt.output if attempt else None,
        error=attempt.error if attempt else None,
        calls=tuple(_shown_call(call, view.teaching) for call in view.calls),
    )


def _shown_call(view: CallView, teaching: Teaching) -> ShownCall:
    return ShownCall(
        view=view,
        number=view.call.index + 1,
        messages=view.said.messages,
        answer=view.said.answer,
        tools=view.tools,
        advantage=view.advantage,
        left_out=view.left_out,
        tokens=tokens_of(view, teaching),
    )


def _spoken(message: Message) -> Markup:
    parts = [said(message.content)] if message.content else []
    if message.reasoning:
        parts.insert(0, folded("reasoning", said(message.reasoning)))
    parts += [said(f"{call.name}({call.arguments})") for call in message.tool_calls]
    return joined(parts)


def _earned(reward: Reward) -> Markup:
    return turn("reward", said(f"{reward.name} {reward.value:.3g} by the {reward.source}"))


def _plain(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
