"""How does a request become recorded calls? prompt → engine → store → answer, in this order: what was answered is durable.

An answer that breaks (engine, NaN, a client that goes away) is recorded as `incomplete` with what was sampled until then.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from lightningrl.chat import Answer, AnswerStream, ChatTemplate
from lightningrl.engine.base import Delta, Engine
from lightningrl.errors import EngineError, LightningError, StoreError
from lightningrl.gateway.dialects.base import ChatRequest, Choice, Dialect, Refused, Reply, TokenLogprob
from lightningrl.gateway.routing import Route
from lightningrl.gateway.sessions import Session, ended
from lightningrl.store import Store
from lightningrl.types import Call, FinishReason, Sampling

log = logging.getLogger(__name__)

NO_VERSION = -1
"""`policy_version` of a call that broke before its first token."""

GONE = "the client went away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backstage:
    """What every request needs."""

    store: Store
    template: ChatTemplate
    engines: Mapping[str, Engine]
    """By policy."""
    seed: int
    """The run's."""
    max_length: int
    """Tokens of prompt and completion that the engines can hold."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """One answer while it is being sampled."""

    choice: int
    call_id: str
    index: int
    sampling: Sampling
    stream: AnswerStream
    started_at: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_version: int = NO_VERSION
    finish_reason: FinishReason | None = None
    answer: Answer | None = None
    """None until sampling is over."""
    broken: str | None = GONE
    """Why it is incomplete; assumed until the end has been seen."""
    hint: str | None = None

    def take(self, delta: Delta) -> str:
        """The text that may be shown now."""
        if len(delta.token_ids) != len(delta.logprobs):
            raise EngineError(f"the engine gave `{len(delta.token_ids)}` tokens and `{len(delta.logprobs)}` logprobs")
        if self.policy_version not in (NO_VERSION, delta.policy_version):
            raise EngineError(f"the weights changed from `{self.policy_version}` to `{delta.policy_version}` in the middle of an answer")
        self.policy_version = delta.policy_version
        self.finish_reason = delta.finish_reason
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
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
            self.answer = self.stream.finish()
        return self.answer

    def reason(self) -> FinishReason:
        if self.broken is not None or self.finish_reason is None:
            return "cancelled" if self.broken == GONE else "error"
        return "tool_calls" if self.finish_reason == "stop" and self.finished().message.tool_calls else self.finish_reason


Show = Callable[[Generation, str, Delta], Awaitable[None]]


class Exchange:
    """One request and its answers."""

    def __init__(
        self, backstage: Backstage, *, session: Session, dialect: Dialect, route: Route, request: ChatRequest, body: Mapping[str, Any]
    ) -> None:
        self._backstage = backstage
        self._session = session
        self._dialect = dialect
        self._route = route
        self._request = request
        self._body = body
        self._prompt = session.tree.prompt(request.messages, tools=request.tools)
        self._prompt_ids: list[int] = self._prompt.ids.tolist()
        self._created = int(time.time())
        room = backstage.max_length - len(self._prompt_ids)
        if room < 1:
            message = f"the prompt has `{len(self._prompt_ids)}` tokens, at most `{backstage.max_length - 1}` fit"
            raise Refused(400, message, code="context_length_exceeded", param="messages", hint="shorten it, or raise `engine.max_length`")
        self._generations = [self._plan(choice, room=room) for choice in range(request.n)]

    async def answer(self) -> dict[str, Any]:
        """Sample, record, and return the whole body."""
        await self._sample_all(None)
        await self._record()
        return self._dialect.respond(self._reply(self._generations))

    async def stream(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """The same, piece by piece; the terminal event follows the record. Raises `Refused` only while nothing has been sent."""
        events = self._dialect.stream(self._request, reply_id=self._generations[0].call_id, created=self._created)
        began = False

        async def show(generation: Generation, text: str, delta: Delta) -> None:
            nonlocal began
            began = True
            await send(events.text(generation.choice, text, self._shown(delta.token_ids, delta.logprobs)))

        try:
            await self._sample_all(show)
            await self._record()
        except Refused as refused:
            if not began:
                raise
            await send(events.error(refused))
            return
        reply = self._reply(self._generations)
        ends = [events.finish(choice, g.finished().rest) for choice, g in zip(reply.choices, self._generations, strict=True)]
        await send(b"".join([*ends, events.close(reply)]))

    def _plan(self, choice: int, *, room: int) -> Generation:
        index = self._session.next_index()
        chance = self._session.draw(self._prompt.ids, run_seed=self._backstage.seed)
        sampling = self._sampling(choice, room=room, chance=chance)
        stream = AnswerStream(self._backstage.template, stop=sampling.stop, parse_tools=bool(self._request.tools), seed=chance)
        call_id = f"chatcmpl-{self._session.attempt.id}-{index}"
        return Generation(choice=choice, call_id=call_id, index=index, sampling=sampling, stream=stream, started_at=time.time())

    def _sampling(self, choice: int, *, room: int, chance: bytes) -> Sampling:
        """What the agent asks for, else the policy as it is; what the rollout lays down goes over both."""
        asked, plain = self._request, Sampling()
        asked_seed = asked.seed if self._session.seed is None else None
        seed = int.from_bytes(chance[:8], "little") if asked_seed is None else asked_seed + choice
        sampling = Sampling(
            temperature=plain.temperature if asked.temperature is None else asked.temperature,
            top_p=plain.top_p if asked.top_p is None else asked.top_p,
            top_k=plain.top_k if asked.top_k is None else asked.top_k,
            max_tokens=room if asked.max_tokens is None else asked.max_tokens,
            stop=asked.stop,
            stop_token_ids=self._backstage.template.stop_token_ids,
            seed=seed % 2**63,  # what every random generator takes
        )
        sampling = replace(sampling, **self._session.laid_down)
        return replace(sampling, max_tokens=min(sampling.max_tokens, room))

    async def _sample_all(self, show: Show | None) -> None:
        try:
            if len(self._generations) == 1:
                await self._sample(self._generations[0], show)
            else:
                await asyncio.gather(*(self._sample(generation, show) for generation in self._generations))
        except asyncio.CancelledError:
            await self._record_incomplete(GONE)
            raise

    async def _sample(self, generation: Generation, show: Show | None) -> None:
        """One answer, start to end. What the engine raises is written down in `broken`; only cancellation gets out."""
        engine, policy = self._backstage.engines[self._route.policy], self._route.policy
        deltas = engine.generate(self._prompt_ids, sampling=generation.sampling, policy=policy, stream=show is not None)
        try:
            # `aclose`, which frees the engine's slot, is part of the engine's contract
            async with contextlib.aclosing(cast("AsyncGenerator[Delta, None]", deltas)) as closing:
                async for delta in closing:
                    text = generation.take(delta)
                    if show is not None:
                        await show(generation, text, delta)
            generation.settle()
        except LightningError as error:
            generation.broken, generation.hint = error.message, error.hint
        except Exception as error:  # noqa: BLE001 - the boundary to an engine that anybody may have written
            generation.broken = f"the engine raised `{type(error).__name__}`: {error}"

    async def _record(self) -> None:
        """Store the calls, then let the conversation know. Raises `Refused` if there is nothing that may be answered."""
        broken = next((generation for generation in self._generations if generation.broken is not None), None)
        if broken is not None:
            await self._record_incomplete("another answer to the same request broke")
            raise Refused(503, str(broken.broken), code="engine_error", hint=broken.hint)
        calls = [self._call(generation) for generation in self._generations]
        try:
            await self._backstage.store.append(*calls)
        except StoreError as error:
            raise await self._unrecorded(error) from error
        for call, generation in zip(calls, self._generations, strict=True):
            self._session.tree.add(
                call.id,
                key=self._prompt.key,
                tools=self._request.tools,
                prompt_ids=call.prompt_ids,
                completion_ids=call.completion_ids,
                answer=generation.finished().message,
            )

    async def _record_incomplete(self, why: str) -> None:
        """Nobody gets an answer: also what was sampled to its end is not what an agent acted on."""
        for generation in self._generations:
            generation.broken = generation.broken or why
        try:
            await self._backstage.store.append(*(self._call(generation) for generation in self._generations))
        except StoreError as error:  # the attempt has ended meanwhile: nothing of it is trained, and nobody waits for an answer
            log.warning("incomplete call of attempt %s was not recorded: %s", self._session.attempt.id, error.message)

    async def _unrecorded(self, error: StoreError) -> Refused:
        """Why could the answer not be stored? Most likely the attempt ended in the middle of it."""
        found = await self._backstage.store.attempt_by_token(self._session.attempt.token)
        if found is not None and found[1].status != "running":
            return ended()
        return Refused(500, error.message, code="store_error", hint=error.hint)

    def _call(self, generation: Generation) -> Call:
        broken = generation.broken
        return Call(
            id=generation.call_id,
            attempt_id=self._session.attempt.id,
            index=generation.index,
            parent_call_id=self._prompt.parent_call_id,
            agent=self._route.agent or self._request.model,
            policy=self._route.policy,
            policy_version=generation.policy_version,
            dialect=self._dialect.name,
            request=self._body,
            response=self._dialect.respond(self._reply([generation])),
            prompt_ids=self._prompt.ids,
            completion_ids=np.array(generation.token_ids, np.int32),
            logprobs=np.array(generation.logprobs, np.float32),
            sampling=generation.sampling,
            finish_reason=generation.reason(),
            capture="incomplete" if broken is not None else self._prompt.capture,
            capture_reason=self._prompt.reason if broken is None else broken,
            started_at=generation.started_at,
            ended_at=time.time(),
        )

    def _reply(self, generations: Sequence[Generation]) -> Reply:
        choices = [
            Choice(
                index=generation.choice if len(generations) > 1 else 0,
                message=generation.finished().message,
                finish_reason=generation.reason(),
                completion_tokens=len(generation.token_ids),
                tokens=self._shown(generation.token_ids, generation.logprobs),
            )
            for generation in generations
        ]
        head = generations[0].call_id
        return Reply(id=head, model=self._request.model, created=self._created, prompt_tokens=len(self._prompt_ids), choices=tuple(choices))

    def _shown(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...] | None:
        if not self._request.logprobs:
            return None
        text = self._backstage.template.token_text
        return tuple(TokenLogprob(text=text(token_id), logprob=logprob) for token_id, logprob in zip(token_ids, logprobs, strict=True))
