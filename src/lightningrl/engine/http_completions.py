"""How does a server's `/v1/completions` become an engine? What `vllm` and `relay` share: gate, servers, and answers
turned into deltas.

prompt ids → `Kind.encode` → `http.Pool` → choices → `Kind.tokens` → deltas. Events that arrive in one read are decoded
as one JSON array and become one delta: with 2,000 tokens an answer, what is done for each of them is what counts.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from lightningrl.engine.base import Delta, EngineSetup, Top, affinity, check_policy, check_prompt
from lightningrl.engine.http import Pool, Problem, Server, split, unreadable
from lightningrl.engine.http_gate import Gate
from lightningrl.errors import EngineError
from lightningrl.types import FinishReason, Sampling

FIRST_IDS = 256
"""Of a prompt whose `affinity` nobody gave: prompts that start alike go to one server. About two of vLLM's cache blocks
on a CPU, 16 on a GPU.
"""
EVENT_LIMIT = 2**24
"""Bytes of one event: a token with 20 alternatives has about 2 KB, the first one brings the ids of the prompt."""
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}
"""What servers call it → what we do; anything else went wrong."""

LogprobsT = TypeVar("LogprobsT", covariant=True)


class Choice(msgspec.Struct, Generic[LogprobsT]):
    """Of a whole answer, or of one event."""

    token_ids: tuple[int, ...] | None = None
    """Only vLLM gives them."""
    logprobs: LogprobsT | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, Generic[LogprobsT]):
    """The few fields that are needed of an answer, or of an event; all others are passed over."""

    choices: tuple[Choice[LogprobsT], ...] = ()
    error: Problem | None = None
    """Something went wrong in the middle of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What was sampled, in one piece."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Top, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a server."""

    model: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """In what kinds of servers differ."""

    name: str
    encode: Callable[[Question], bytes]
    decoder: Callable[[Sampling], "msgspec.json.Decoder[list[Completion[Any]]]"]
    tokens: Callable[[list[Choice[Any]], Question], Tokens]
    """Those of choices that follow one another. Raises `EngineError` where ids or logprobs are missing."""
    greet: Callable[[Pool, Server], Awaitable[str]]
    """Looks at a server before the first generation, and returns the name of its model. Raises `EngineError` if it is
    not fit for use.
    """
    refused: Callable[[Sampling], str | None]
    """A hint, should a server refuse this."""


class Completions:
    """The servers of one policy. Belongs to one event loop."""

    def __init__(self, setup: EngineSetup, *, kind: Kind) -> None:
        self.policy, self.version = setup.policy, 0
        self.gate = Gate()
        self.pool = Pool(setup.config.urls, engine=kind.name)
        self._kind, self._max_length = kind, setup.config.max_length
        self._models: dict[str, str] = {}
        self._greeting = asyncio.Lock()

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool
    ) -> AsyncGenerator[Delta, None]:
        """See `Engine.generate`."""
        self.gate.refuse_if_closed()
        check_policy(policy, served=self.policy)
        check_prompt(len(prompt_ids), max_length=self._max_length)
        await self.gate.enter()
        try:
            await self.greet()
            servers = self.pool.servers
            server = self.pool.choose(_key(prompt_ids)) if len(servers) > 1 else servers[0]
            question = Question(
                model=self._models[server.url],
                prompt=list(prompt_ids),
                max_tokens=min(sampling.max_tokens, self._max_length - len(prompt_ids)),
                sampling=sampling,
                stream=stream,
            )
            server.in_flight += 1
            try:
                if not stream:
                    yield await self._whole(server, question)
                    return
                async with aclosing(self._streamed(server, question)) as deltas:
                    async for delta in deltas:
                        yield delta
            finally:
                server.in_flight -= 1
        finally:
            self.gate.leave()

    async def greet(self) -> None:
        """Look at the servers, once."""
        if len(self._models) == len(self.pool.servers):
            return
        async with self._greeting:
            for server in self.pool.servers:
                if server.url not in self._models:
                    self._models[server.url] = await self._kind.greet(self.pool, server)

    def ask_for(self, server: Server, model: str) -> None:
        """From now on, in place of what `greet` has found."""
        self._models[server.url] = model

    async def close(self) -> None:
        """Generations that still run or wait end with an `EngineError`."""
        self.gate.close()
        await self.pool.close()

    async def _whole(self, server: Server, question: Question) -> Delta:
        kind, version, sampling = self._kind, self.version, question.sampling
        answer = await self.pool.complete(server, kind.encode(question), hint=kind.refused(sampling))
        delta = self._delta([answer], server, question, version=version)
        if delta is None or delta.finish_reason is None:
            raise EngineError(f"`{server.url}` gave no whole answer")
        return delta

    async def _streamed(self, server: Server, question: Question) -> AsyncGenerator[Delta, None]:
        kind, version, sampling = self._kind, self.version, question.sampling
        ended, rest = False, b""
        pieces = self.pool.stream(server, kind.encode(question), hint=kind.refused(sampling))
        async with aclosing(pieces):
            async for data in pieces:
                events, rest = split(rest + data)
                if len(rest) > EVENT_LIMIT:
                    raise EngineError(f"`{server.url}` sent an event of more than `{EVENT_LIMIT}` bytes")
                delta = self._delta(events, server, question, version=version) if events else None
                if delta is not None and not ended:
                    ended = delta.finish_reason is not None
                    yield delta
        if not ended:
            raise EngineError(f"`{server.url}` ended a stream without saying why", hint="the server's own log says why")

    def _delta(self, answers: list[bytes], server: Server, question: Question, *, version: int) -> Delta | None:
        try:
            decoded = self._kind.decoder(question.sampling).decode(b"[%b]" % b",".join(answers))
        except msgspec.MsgspecError as error:
            raise unreadable(server, error) from error
        return _delta(decoded, question, self._kind, version=version)


class Model(msgspec.Struct):
    """One entry of `/v1/models`."""

    id: str
    max_model_len: int | None = None
    """Tokens of prompt and completion together. Only vLLM reports it."""


class _Models(msgspec.Struct):
    data: tuple[Model, ...] = ()


def models_in(body: bytes) -> tuple[Model, ...]:
    """The models that a response to `/v1/models` lists."""
    return msgspec.json.decode(body, type=_Models).data


def likeliest(logprobs: Mapping[str, float], *, count: int, id_of: Callable[[str], int]) -> Top:
    """The `count` likeliest of one position's tokens, best first. `id_of`: what a server writes for a token → its id."""
    ranked = sorted(logprobs.items(), key=lambda item: -item[1])[:count]
    return tuple((id_of(token), logprob) for token, logprob in ranked)


def _delta(answers: list[Completion[Any]], question: Question, kind: Kind, *, version: int) -> Delta | None:
    """What has come, in one piece; None if it was nothing."""
    choices: list[Choice[Any]] = []
    for answer in answers:
        if answer.error is not None:
            raise EngineError(f"the server broke off: {answer.error.message}", hint="its own log says why")
        choices += answer.choices
    reason = choices[-1].finish_reason if choices else None
    spoken = [choice for choice in choices if choice.logprobs is not None or choice.token_ids]
    if not spoken and reason is None:
        return None
    tokens = kind.tokens(spoken, question)
    if len(tokens.token_ids) != len(tokens.logprobs):
        raise EngineError(f"the server gave `{len(tokens.token_ids)}` tokens and `{len(tokens.logprobs)}` logprobs")
    return Delta(
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        policy_version=version,
        finish_reason=None if reason is None else FINISH.get(reason, "error"),
        top=tokens.top,
    )


def _key(prompt_ids: Sequence[int]) -> bytes:
    """Generations with the same key go to the same server."""
    return affinity.get().encode() or np.asarray(prompt_ids[:FIRST_IDS], np.int32).tobytes()
