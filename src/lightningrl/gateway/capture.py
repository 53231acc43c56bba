"""How does a request become recorded calls? prompt → engine → store → answer, in this order: what was answered is
durable.

An answer that breaks (engine, NaN, a client that goes away) is recorded as `incomplete` with what was sampled until
then.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from lightningrl.chat import AnswerStream, ChatTemplate, Prompt
from lightningrl.chat.grammar import grammar_of
from lightningrl.dialects.base import ChatRequest, Dialect, Refused, Reply, TokenLogprob
from lightningrl.engine.base import Delta, Engine, EngineBusy, Unanswerable, affinity
from lightningrl.errors import LightningError, StoreError, StoreFailed, UserError
from lightningrl.gateway.delivery import Answered, Delivery, Show
from lightningrl.gateway.generation import ENDED, GONE, Generation, sampling_of
from lightningrl.gateway.prompts import too_long
from lightningrl.gateway.scripted import ScriptError, asked
from lightningrl.gateway.sessions import Session, ended
from lightningrl.store import Store
from lightningrl.types import Call

log = logging.getLogger(__name__)


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
    strict: bool
    """Whether the arguments of strict tools are held to their schema."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server ends and requests that are still open are cut off."""

    def left(self) -> str:
        """Why an answer that was begun has no reader any more."""
        return ENDED if self.ending.is_set() else GONE

    async def record(self, session: Session, *calls: Call) -> None:
        """Raises `Refused` if they cannot be stored: most likely the attempt ended in the middle of them."""
        try:
            await self.store.append(*calls)
        except StoreFailed:
            raise
        except StoreError as error:
            found = await self.store.attempt_by_token(session.attempt.token)
            if found is not None and found[1].status != "running":
                raise ended() from error
            raise Refused(500, error.message, code="store_error", hint=error.hint) from error


class Exchange:
    """One request and its answers."""

    def __init__(
        self,
        backstage: Backstage,
        *,
        session: Session,
        dialect: Dialect,
        request: ChatRequest,
        prompts: Sequence[Prompt],
        policy: str,
        agent: str,
    ) -> None:
        """Raises `Refused` for what cannot be answered; nothing has been remembered then."""
        self._backstage = backstage
        self._session = session
        self._dialect = dialect
        self._request = request
        self._policy = policy
        self._agent = agent
        self._created = int(time.time())
        self._prompts = prompts
        longest = max(len(prompt.ids) for prompt in prompts)
        room = backstage.max_length - longest
        if room < 1:
            raise too_long(f"`{longest}` tokens", most=backstage.max_length - 1)
        grammar = _grammar(request, backstage.template, strict=backstage.strict)
        places = [prompt for prompt in self._prompts for _ in range(request.n)]
        self._generations = [
            self._plan(choice, prompt, room=room, grammar=grammar) for choice, prompt in enumerate(places)
        ]

    async def run(self, delivery: Delivery) -> Answered:
        """Sample, record, and return all that is to be answered. Raises `Refused` if something breaks."""
        asked.set(self._request)
        affinity.set(self._session.rollout.id)
        await self._sample_all(delivery.begin())
        return await self._record()

    def begun(self) -> Reply:
        """The answer as far as it is known before anything has been sampled."""
        return self._reply()

    def sampled(self) -> bool:
        """Whether all that is left to do is to record."""
        return all(generation.broken is None for generation in self._generations)

    def _tokens(self, generation: Generation, start: int = 0) -> tuple[TokenLogprob, ...] | None:
        return generation.shown(self._backstage.template, start=start) if self._request.logprobs else None

    def _plan(self, choice: int, prompt: Prompt, *, room: int, grammar: str | None) -> Generation:
        index = self._session.next_index()
        draw = self._session.draw(prompt.ids, run_seed=self._backstage.seed)
        template, request = self._backstage.template, self._request
        ends = template.stop_token_ids
        sampling = sampling_of(
            request, self._session, choice=choice, room=room, chance=draw.chance, ends=ends, grammar=grammar
        )
        parse_tools = bool(request.tools) and request.tool_choice != "none"
        return Generation(
            choice=choice,
            call_id=f"{self._dialect.id_prefix}{self._session.attempt.id}-{index}",
            index=index,
            prompt=prompt,
            draw=draw,
            sampling=sampling,
            stream=AnswerStream(
                template, stop=sampling.stop, tools=parse_tools, reasoning=prompt.reasoning, seed=draw.chance
            ),
            single_call=not request.parallel_tool_calls,
            started_at=time.time(),
        )

    async def _sample_all(self, show: Show | None) -> None:
        try:
            if len(self._generations) == 1:
                await self._sample(self._generations[0], show)
            else:
                await asyncio.gather(*(self._sample(generation, show) for generation in self._generations))
        except asyncio.CancelledError:
            why = self._backstage.left()
            for generation in self._generations:
                self._session.give_back(generation.draw)
                generation.broken = why if generation.broken == GONE else generation.broken
            await self._record_incomplete(why)
            raise

    async def _sample(self, generation: Generation, show: Show | None) -> None:
        """One answer, start to end. What the engine raises is written down in `broken`; only cancellation gets out."""
        engine, policy = self._backstage.engines[self._policy], self._policy
        deltas = engine.generate(
            generation.prompt.ids.tolist(), sampling=generation.sampling, policy=policy, stream=show is not None
        )
        try:
            # `aclose`, which frees the engine's slot, is part of the engine's contract
            async with contextlib.aclosing(cast("AsyncGenerator[Delta, None]", deltas)) as closing:
                async for delta in closing:
                    piece = generation.take(delta)
                    if show is not None:
                        await show(
                            generation.choice,
                            piece,
                            self._tokens(generation, len(generation.token_ids) - len(delta.token_ids)),
                        )
            generation.settle()
            if show is not None:
                await show(generation.choice, generation.finished().rest, None)
        except LightningError as error:
            generation.broken, generation.error = error.message, error
        except Exception as error:  # noqa: BLE001 - an engine may raise anything
            generation.broken = f"the engine raised `{type(error).__name__}`: {error}"

    async def _record(self) -> Answered:
        """Store the calls, then let the conversation know. Raises `Refused` if there is nothing that may be answered."""
        broken = next((generation for generation in self._generations if generation.broken is not None), None)
        if broken is not None:
            await self._refuse(broken)
        replies = [self._reply(generation) for generation in self._generations]
        calls = [self._call(generation, reply) for generation, reply in zip(self._generations, replies, strict=True)]
        await self._backstage.record(self._session, *calls)
        for call, generation in zip(calls, self._generations, strict=True):
            self._remember(call, generation)
        if len(calls) == 1:
            return Answered(reply=replies[0], body=calls[0].response)
        return Answered(reply=self._reply(*self._generations), body=None)

    async def _refuse(self, broken: Generation) -> None:
        error, message = broken.error, str(broken.broken)
        hint = error and error.hint
        if isinstance(error, EngineBusy) and all(not generation.token_ids for generation in self._generations):
            for generation in self._generations:
                self._session.give_back(generation.draw)
            raise Refused(429, message, code="engine_busy", hint=hint, retry_after_s=error.retry_after_s)
        await self._record_incomplete("another answer to the same request broke")
        if isinstance(error, Unanswerable | UserError):
            raise Refused(400, message, code="unanswerable", hint=hint)
        if isinstance(error, ScriptError):
            raise Refused(500, message, code="script_error", hint=hint, final=True)
        raise Refused(503, message, code="engine_error", hint=hint)

    def _remember(self, call: Call, generation: Generation) -> None:
        session, request = self._session, self._request
        session.tokens += len(generation.prompt.ids) - generation.prompt.shared + len(call.completion_ids)
        self._dialect.remember(session.past, request, call.response)
        if request.prompts:
            session.tree.add_raw(call.id, prompt_ids=call.prompt_ids, completion_ids=call.completion_ids)
            return
        session.tree.add(
            call.id,
            key=generation.prompt.key,
            prompt_ids=call.prompt_ids,
            completion_ids=call.completion_ids,
            answer=generation.finished().message,
        )

    async def _record_incomplete(self, why: str) -> None:
        """Nobody gets an answer: also what was sampled to its end is not what an agent acted on."""
        for generation in self._generations:
            generation.broken = generation.broken or why
        try:
            await self._backstage.store.append(
                *(self._call(generation, self._reply(generation)) for generation in self._generations)
            )
        except (
            StoreError
        ) as error:  # the attempt has ended meanwhile: nothing of it is trained, and nobody waits for an answer
            log.warning("incomplete call of attempt %s was not recorded: %s", self._session.attempt.id, error.message)

    def _call(self, generation: Generation, reply: Reply) -> Call:
        broken, prompt = generation.broken, generation.prompt
        return Call(
            id=generation.call_id,
            attempt_id=self._session.attempt.id,
            index=generation.index,
            parent_call_id=prompt.parent_call_id,
            agent=self._agent,
            policy=self._policy,
            policy_version=generation.policy_version,
            dialect=self._dialect.name,
            request=self._request.body,
            response=self._dialect.respond(reply),
            prompt_ids=prompt.ids,
            completion_ids=np.array(generation.token_ids, np.int32),
            logprobs=np.array(generation.logprobs, np.float32),
            sampling=generation.sampling,
            finish_reason=generation.reason(),
            capture="incomplete" if broken is not None else prompt.capture,
            capture_reason=prompt.reason if broken is None else broken,
            started_at=generation.started_at,
            ended_at=time.time(),
        )

    def _reply(self, *generations: Generation) -> Reply:
        """With these answers; without any, as far as it is known before."""
        alone = len(generations) == 1
        return Reply(
            id=(generations or self._generations)[0].call_id,
            request=self._request,
            created=self._created,
            prompt_tokens=sum(len(prompt.ids) for prompt in self._prompts),
            reused_tokens=sum(prompt.shared for prompt in self._prompts),
            choices=tuple(g.as_choice(0 if alone else g.choice, tokens=self._tokens(g)) for g in generations),
        )


def _grammar(request: ChatRequest, template: ChatTemplate, *, strict: bool) -> str | None:
    """The language that the answer must belong to, if the agent demands one. Forbidding parallel calls alone is no
    reason for one, and neither are strict tools where the policy is to learn them: such calls could not be trained.
    """
    exact = strict and request.tool_choice != "none" and any(tool["function"].get("strict") for tool in request.tools)
    if request.tool_choice != "required" and request.json_schema is None and not exact:
        return None
    tools = (
        request.tools
        if strict
        else tuple({**tool, "function": {**tool["function"], "strict": False}} for tool in request.tools)
    )
    try:
        return grammar_of(
            template,
            tools=tools,
            tool_choice=request.tool_choice,
            tool_name=request.tool_name,
            parallel_tool_calls=request.parallel_tool_calls,
            json_schema=request.json_schema,
        )
    except UserError as error:
        raise Refused(400, error.message, code="invalid_schema", hint=error.hint) from error
