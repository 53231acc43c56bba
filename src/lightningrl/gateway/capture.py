"""How does a request become recorded calls? prompt → engine → store → answer.

A call is durable before its answer is sent. An answer that breaks (a failing engine, a NaN, a client that goes away) is
recorded as `incomplete`, with the tokens that were sampled until then.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import cast

import numpy as np

from lightningrl.chat import AnswerStream, Prompt
from lightningrl.dialects.base import ChatRequest, Refused, Reply, TokenLogprob
from lightningrl.engine.base import Delta, EngineBusy, affinity
from lightningrl.errors import LightningError, StoreError, StoreFailed
from lightningrl.gateway.asked import Asked
from lightningrl.gateway.backend import Backend
from lightningrl.gateway.constraint import constraint
from lightningrl.gateway.delivery import Answered, Delivery, Show, delivery_of
from lightningrl.gateway.generation import Generation, Recording
from lightningrl.gateway.prompts import too_long
from lightningrl.gateway.refusals import ENDED, GONE, engine_refusal
from lightningrl.gateway.sampling import sampling_of
from lightningrl.gateway.scripted import current_request
from lightningrl.types import Call

log = logging.getLogger(__name__)


def bounds(backend: Backend, request: ChatRequest, prompts: Sequence[Prompt]) -> tuple[int, str | None]:
    """(tokens that fit behind each prompt, the grammar of the answers or None).

    Raises `Refused` for a request that no engine can answer, whatever came before it.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    room = backend.max_length - longest
    if room < 1:
        raise too_long(f"`{longest}` tokens", most=backend.max_length - 1)
    return room, constraint(request, backend.template, strict=backend.strict)


class Exchange:
    """One request and its answers. There are several if it sets `n`, or has several raw prompts."""

    def __init__(
        self,
        backend: Backend,
        asked: Asked,
        *,
        prompts: Sequence[Prompt],
        records: Sequence[Call | None] = (),
    ) -> None:
        """`records`: of each answer, the recorded call that is played back; None: the engine
        answers. Empty: it gives all answers.

        Raises `Refused` for a request that cannot be answered; the session is unchanged then.
        """
        session, request, dialect = asked.session, asked.request, asked.dialect
        self._backend = backend
        self._asked = asked
        self._session = session
        self._dialect = dialect
        self._request = request
        self._prompts = prompts
        self._started_at = time.time()
        room, grammar = bounds(backend, request, prompts)
        prompt_of_choice = [prompt for prompt in prompts for _ in range(request.n)]
        session.spent.ask(len(prompt_of_choice))
        planned = enumerate(zip(prompt_of_choice, records or repeat(None), strict=bool(records)))
        self._generations = [
            self._plan(choice, prompt, room=room, grammar=grammar, record=record)
            for choice, (prompt, record) in planned
        ]
        self.delivery = partial(delivery_of, dialect, self._reply())
        """Makes the delivery of this answer to one client."""

    async def run(self, delivery: Delivery) -> Answered:
        """Sample, record, and return the answer. Raises `Refused` if something breaks."""
        current_request.set(self._request)
        affinity.set(self._session.rollout.id)
        await self._sample_all(delivery.begin())
        await self._refuse_broken()
        replies = [self._reply(generation) for generation in self._generations]
        calls = [self._call(generation, reply) for generation, reply in zip(self._generations, replies, strict=True)]
        try:
            await self._backend.record(self._session.attempt, *calls)
        except StoreFailed:  # a repetition of the request is not another answer
            self._take_back()
            raise
        for call, generation in zip(calls, self._generations, strict=True):
            self._remember(call, generation)
        if len(calls) == 1:
            return Answered(reply=replies[0], body=calls[0].response)
        return Answered(reply=self._reply(*self._generations), body=None)

    def sampled(self) -> bool:
        """Sampling is over, and only recording is left to do."""
        return all(generation.broken is None for generation in self._generations)

    def _plan(self, choice: int, prompt: Prompt, *, room: int, grammar: str | None, record: Call | None) -> Generation:
        template, request, session = self._backend.template, self._request, self._session
        index = session.next_index()
        randomness, ends = session.randomness(prompt.ids), template.stop_token_ids
        recording = None
        if record is None:
            sampling = sampling_of(
                request, session, choice=choice, room=room, randomness=randomness, ends=ends, grammar=grammar
            )
        else:
            sampling = record.sampling
            recording = Recording(call=record, reply=self._dialect.reply(request, record.response))
        tools = bool(request.tools) and request.tool_choice != "none"
        return Generation(
            choice=choice,
            call_id=self._asked.call_id(index),
            index=index,
            prompt=prompt,
            randomness=randomness,
            sampling=sampling,
            stream=AnswerStream(
                template, stop=sampling.stop, tools=tools, reasoning=prompt.reasoning, seed=randomness.bits
            ),
            single_call=not request.parallel_tool_calls,
            started_at=self._started_at,
            recording=recording,
        )

    async def _sample_all(self, show: Show | None) -> None:
        try:
            if len(self._generations) == 1:
                await self._sample(self._generations[0], show)
            else:
                await asyncio.gather(*(self._sample(generation, show) for generation in self._generations))
        except asyncio.CancelledError as cancelled:
            for generation in self._generations:
                self._session.give_back(generation.randomness)
            await self._record_incomplete(ENDED if ENDED in cancelled.args else GONE)
            raise

    async def _sample(self, generation: Generation, show: Show | None) -> None:
        """Sample one answer to its end. An engine's error is kept in `broken`; only cancellation is raised."""
        deltas = self._deltas(generation, stream=show is not None)
        try:
            # `aclose`, which frees the engine's slot, is part of the engine's contract
            async with contextlib.aclosing(cast("AsyncGenerator[Delta, None]", deltas)) as closing:
                async for delta in closing:
                    piece = generation.take(delta)
                    if show is not None:
                        start = len(generation.token_ids) - len(delta.token_ids)
                        await show(generation.choice, piece, self._tokens(generation, start))
            generation.settle()
            if show is not None:
                await show(generation.choice, generation.finished().rest, None)
        except LightningError as error:
            generation.broken, generation.error = error.message, error
        except Exception as error:  # noqa: BLE001 - an engine may raise anything
            generation.broken = f"the engine raised `{type(error).__name__}`: {error}"
        finally:
            self._session.spent.tokens += len(generation.token_ids)  # played back or not: as in the trunk

    def _deltas(self, generation: Generation, *, stream: bool) -> AsyncIterator[Delta]:
        if generation.recording is not None:
            return generation.recording.deltas(stream=stream)
        return self._backend.engines[self._asked.policy].generate(
            generation.prompt.ids.tolist(), sampling=generation.sampling, policy=self._asked.policy, stream=stream
        )

    async def _refuse_broken(self) -> None:
        """If an answer broke, record all as incomplete and raise `Refused`: the agent gets none of them."""
        broken = next((generation for generation in self._generations if generation.broken is not None), None)
        if broken is None:
            return
        error, message = broken.error, str(broken.broken)
        if isinstance(error, EngineBusy) and not any(generation.token_ids for generation in self._generations):
            self._take_back()
            raise Refused(429, message, code="engine_busy", hint=error.hint, retry_after_s=error.retry_after_s)
        await self._record_incomplete("another answer to the same request broke")
        raise engine_refusal(error, message)

    def _take_back(self) -> None:
        """Nothing is recorded: the calls do not count, and the next answer to the same prompt gets their randomness."""
        for generation in self._generations:
            self._session.give_back(generation.randomness)
        self._session.spent.calls -= len(self._generations)

    async def _record_incomplete(self, why: str) -> None:
        for generation in self._generations:
            if generation.broken in (None, GONE):
                generation.broken = why
        calls = [self._call(generation, self._reply(generation)) for generation in self._generations]
        try:
            await self._backend.store.append(*calls)
        except StoreError as error:  # the attempt has ended meanwhile: its tokens are not trained
            log.warning("incomplete call of attempt %s was not recorded: %s", self._session.attempt.id, error.message)

    def _remember(self, call: Call, generation: Generation) -> None:
        prompt, answer = generation.prompt, generation.message()
        self._session.tokens += len(prompt.ids) - prompt.shared
        self._session.remember(call, self._dialect, self._request, key=prompt.key, answer=answer)

    def _call(self, generation: Generation, reply: Reply) -> Call:
        broken, prompt = generation.broken, generation.prompt
        record = None if generation.recording is None else generation.recording.call
        response = self._dialect.respond(reply) if record is None or broken is not None else record.response
        return Call(
            id=generation.call_id,
            attempt_id=self._session.attempt.id,
            index=generation.index,
            parent_call_id=prompt.parent_call_id,
            agent=self._asked.agent,
            policy=self._asked.policy if record is None else record.policy,
            policy_version=generation.policy_version,
            dialect=self._dialect.name,
            request=self._request.body,
            response=response,
            prompt_ids=prompt.ids,
            completion_ids=np.array(generation.token_ids, np.int32),
            logprobs=np.array(generation.logprobs, np.float32),
            sampling=generation.sampling,
            finish_reason=generation.reason(),
            capture=prompt.capture if broken is None else "incomplete",
            capture_reason=prompt.reason if broken is None else broken,
            started_at=generation.started_at,
            ended_at=time.time(),
            request_id=self._asked.request_id,
            replays=None if record is None else record.id,
        )

    def _reply(self, *generations: Generation) -> Reply:
        """The answer with these generations; with none: all that is known before anything is sampled."""
        alone, first = len(generations) == 1, (generations or self._generations)[0]
        choices = tuple(g.as_choice(0 if alone else g.choice, tokens=self._tokens(g)) for g in generations)
        if first.recording is not None:
            return replace(first.recording.reply, choices=choices)
        return Reply(
            id=first.call_id,
            request=self._request,
            created=int(self._started_at),
            prompt_tokens=sum(len(prompt.ids) for prompt in self._prompts),
            reused_tokens=sum(prompt.shared for prompt in self._prompts),
            choices=choices,
        )

    def _tokens(self, generation: Generation, start: int = 0) -> tuple[TokenLogprob, ...] | None:
        return generation.shown(self._backend.template, start=start) if self._request.logprobs else None
