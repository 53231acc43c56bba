"""One answer while it is being sampled: the tokens that have come from the engine so far, and how it ended."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from lightningrl.chat import Answer, AnswerStream, ChatTemplate, Piece, Prompt
from lightningrl.dialects.base import Choice, Reply, TokenLogprob
from lightningrl.engine.base import Delta, Top
from lightningrl.errors import EngineError, LightningError
from lightningrl.gateway.refusals import ENDED, GONE
from lightningrl.gateway.sessions import Randomness
from lightningrl.messages import Message
from lightningrl.types import Call, FinishReason, Sampling

NO_VERSION = -1
"""`policy_version` of a call that broke before its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded answer that is played back."""

    call: Call
    reply: Reply
    """What the recorded response says."""

    async def deltas(self, *, stream: bool) -> AsyncIterator[Delta]:
        """What an engine would yield that samples these tokens; one at a time for a stream."""
        call = self.call
        ids, logprobs = call.completion_ids.tolist(), call.logprobs.tolist()
        size = 1 if stream else max(1, len(ids))
        reason: FinishReason = "stop" if call.finish_reason == "tool_calls" else call.finish_reason
        for start in range(0, max(1, len(ids)), size):
            await asyncio.sleep(0)  # several answers to one request take turns
            yield Delta(
                token_ids=tuple(ids[start : start + size]),
                logprobs=tuple(logprobs[start : start + size]),
                policy_version=call.policy_version,
                finish_reason=reason if start + size >= len(ids) else None,
            )


@dataclass(slots=True, kw_only=True)
class Generation:
    """One answer while it is being sampled."""

    choice: int
    """Index among the answers to the request."""
    call_id: str
    index: int
    """Order of arrival among the calls of the attempt."""
    prompt: Prompt
    randomness: Randomness
    sampling: Sampling
    stream: AnswerStream
    """Turns token ids into text, reasoning and tool calls."""
    single_call: bool
    """The agent gets only the first tool call; tokens sampled after it stay in the record."""
    started_at: float
    """Unix seconds."""
    recording: Recording | None = None
    """Its tokens come from the record; None: from the engine."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)
    """The likeliest tokens at each place; empty unless `sampling` requests them."""
    policy_version: int = NO_VERSION
    finish_reason: FinishReason | None = None
    answer: Answer | None = None
    """None until sampling is over."""
    broken: str | None = GONE
    """Why the answer is incomplete. It counts as incomplete until the engine has ended it properly."""
    error: LightningError | None = None
    """The error that broke it; None: the client went away, or the engine has a bug."""

    def take(self, delta: Delta) -> Piece:
        """Add newly sampled tokens. Returns the text that may be shown now."""
        if len(delta.token_ids) != len(delta.logprobs):
            raise EngineError(f"the engine gave `{len(delta.token_ids)}` tokens and `{len(delta.logprobs)}` logprobs")
        if self.policy_version not in (NO_VERSION, delta.policy_version):
            change = f"from `{self.policy_version}` to `{delta.policy_version}`"
            raise EngineError(f"the weights changed {change} in the middle of an answer")
        self.policy_version = delta.policy_version
        self.finish_reason = delta.finish_reason
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.top is not None:
            self.top.extend(delta.top)
        return self.stream.feed(delta.token_ids)

    def settle(self) -> None:
        """The engine has ended without raising. Raises `EngineError` if the answer is not complete."""
        if self.finish_reason is None:
            raise EngineError("the engine ended without saying why")
        if self.finish_reason in ("cancelled", "error"):
            raise EngineError(f"the engine ended with `{self.finish_reason}`")
        if not all(map(math.isfinite, self.logprobs)):
            raise EngineError("the engine gave a logprob that is not finite", hint="have the weights diverged?")
        self.broken = None

    def finished(self) -> Answer:
        if self.answer is None:
            answer = self.stream.finish()
            if self.single_call and len(answer.message.tool_calls) > 1:
                answer = replace(answer, message=replace(answer.message, tool_calls=answer.message.tool_calls[:1]))
            self.answer = answer
        return self.answer

    def message(self) -> Message:
        """The finished answer. Arguments of recorded tool calls are the sampled text: a response may hold its value."""
        own = self.finished().message
        if self.recording is None:
            return own
        reply = self.recording.reply
        message = replace(reply.choices[0].message, reply_id=reply.id)  # its client knows it by the id that it had
        if len(own.tool_calls) != len(message.tool_calls):  # this request forbids tools, the recorded one did not
            return message
        pairs = zip(message.tool_calls, own.tool_calls, strict=True)
        calls = tuple(replace(call, arguments=sampled.arguments) for call, sampled in pairs)
        return replace(message, tool_calls=calls)

    def reason(self) -> FinishReason:
        if self.broken is not None or self.finish_reason is None:
            return "cancelled" if self.broken in (GONE, ENDED) else "error"
        if self.recording is not None:
            return self.recording.call.finish_reason
        if self.finish_reason == "stop" and self.finished().message.tool_calls:
            return "tool_calls"
        return self.finish_reason

    def as_choice(self, index: int, *, tokens: tuple[TokenLogprob, ...] | None) -> Choice:
        if self.recording is not None and self.broken is None:
            return replace(self.recording.reply.choices[0], index=index, message=self.message())
        answer = self.finished()
        return Choice(
            index=index,
            message=replace(answer.message, reply_id=self.call_id),
            finish_reason=self.reason(),
            stopped_by=answer.stopped_by,
            completion_tokens=len(self.token_ids),
            reasoning_tokens=answer.reasoning_tokens,
            tokens=tokens,
        )

    def shown(self, template: ChatTemplate, *, start: int = 0) -> tuple[TokenLogprob, ...]:
        """The sampled tokens from `start` on, with log-probabilities, as an agent may see them."""
        if self.recording is not None:
            return (self.recording.reply.choices[0].tokens or ())[start : len(self.token_ids)]
        text = template.token_text
        tops = self.top or [()] * len(self.token_ids)
        return tuple(
            TokenLogprob(text=text(token_id), logprob=logprob, top=tuple((text(other), p) for other, p in top))
            for token_id, logprob, top in zip(self.token_ids[start:], self.logprobs[start:], tops[start:], strict=True)
        )
