"""One answer while it is being sampled: what has come from the engine so far, and how it ended."""

import math
from dataclasses import dataclass, field, replace

from lightningrl.chat import Answer, AnswerStream, ChatTemplate, Piece, Prompt
from lightningrl.dialects.base import ChatRequest, Choice, TokenLogprob
from lightningrl.engine.base import Delta, Top
from lightningrl.errors import EngineError, LightningError
from lightningrl.gateway.sessions import Draw, Session
from lightningrl.types import FinishReason, Sampling

NO_VERSION = -1
"""`policy_version` of a call that broke before its first token."""

GONE = "the client went away"
ENDED = "the run has ended"

LEAST_TEMPERATURE = 0.01
"""But for 0. vLLM raises lower ones to it without a word (`SamplingParams.__post_init__`), and a record says what was
sampled under.
"""


@dataclass(slots=True, kw_only=True)
class Generation:
    """One answer while it is being sampled."""

    choice: int
    call_id: str
    index: int
    prompt: Prompt
    draw: Draw
    sampling: Sampling
    stream: AnswerStream
    single_call: bool
    """Only the first tool call is handed to the agent; what was sampled after it stays recorded."""
    started_at: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)
    """Empty unless `sampling` asks for them."""
    policy_version: int = NO_VERSION
    finish_reason: FinishReason | None = None
    answer: Answer | None = None
    """None until sampling is over."""
    broken: str | None = GONE
    """Why it is incomplete; assumed until the end has been seen."""
    error: LightningError | None = None
    """The one that broke it; None: the client went away, or the engine has a bug."""

    def take(self, delta: Delta) -> Piece:
        """What may be shown now."""
        if len(delta.token_ids) != len(delta.logprobs):
            raise EngineError(f"the engine gave `{len(delta.token_ids)}` tokens and `{len(delta.logprobs)}` logprobs")
        if self.policy_version not in (NO_VERSION, delta.policy_version):
            raise EngineError(
                f"the weights changed from `{self.policy_version}` to `{delta.policy_version}` in the middle of an answer"
            )
        self.policy_version = delta.policy_version
        self.finish_reason = delta.finish_reason
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.top is not None:
            self.top.extend(delta.top)
        return self.stream.feed(delta.token_ids)

    def settle(self) -> None:
        """The engine has ended without raising: is the answer whole?"""
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

    def reason(self) -> FinishReason:
        if self.broken is not None or self.finish_reason is None:
            return "cancelled" if self.broken in (GONE, ENDED) else "error"
        return (
            "tool_calls" if self.finish_reason == "stop" and self.finished().message.tool_calls else self.finish_reason
        )

    def as_choice(self, index: int, *, tokens: tuple[TokenLogprob, ...] | None) -> Choice:
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
        """The sampled tokens from `start` on, as an agent may see them."""
        text = template.token_text
        tops = self.top or [()] * len(self.token_ids)
        return tuple(
            TokenLogprob(text=text(token_id), logprob=logprob, top=tuple((text(other), p) for other, p in top))
            for token_id, logprob, top in zip(self.token_ids[start:], self.logprobs[start:], tops[start:], strict=True)
        )


def sampling_of(
    request: ChatRequest,
    session: Session,
    *,
    choice: int,
    room: int,
    chance: bytes,
    ends: tuple[int, ...],
    grammar: str | None,
) -> Sampling:
    """What the agent asks for, else the policy as it is; what the rollout lays down goes over both."""
    plain = Sampling()
    asked_seed = request.seed if session.seed is None else None
    seed = int.from_bytes(chance[:8], "little") if asked_seed is None else asked_seed + choice
    sampling = Sampling(
        temperature=plain.temperature if request.temperature is None else request.temperature,
        top_p=plain.top_p if request.top_p is None else request.top_p,
        top_k=plain.top_k if request.top_k is None else request.top_k,
        max_tokens=room if request.max_tokens is None else request.max_tokens,
        stop=request.stop,
        stop_token_ids=ends,
        seed=seed % 2**63,  # what every random generator takes
        grammar=grammar,
        top_logprobs=request.top_logprobs,
    )
    sampling = replace(sampling, **session.laid_down) if session.laid_down else sampling
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        sampling = replace(sampling, temperature=LEAST_TEMPERATURE)
    return replace(sampling, max_tokens=room) if sampling.max_tokens > room else sampling
