"""An engine over `/v1/completions` of other servers: the part that `vllm` and `relay` share.

prompt ids → `Kind.encode` → `http.Pool` → choices → `Kind.tokens` → deltas. Events that arrive in one read are decoded
as one JSON array and become one delta: at 2,000 tokens per completion, the cost per token dominates.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from lightningrl.engine.base import Delta, EngineSetup, Top, affinity, check_policy, check_prompt, on_server
from lightningrl.engine.http import BROKEN, Pool, Problem, Server, decoded, split
from lightningrl.engine.http_gate import Gate
from lightningrl.errors import EngineError
from lightningrl.types import FinishReason, Sampling

FIRST_IDS = 256
"""Without `affinity`, prompts that share this many leading tokens go to one server. About two of vLLM's cache blocks on
a CPU, 16 on a GPU.
"""
EVENT_LIMIT = 2**24
"""Most bytes of one event. A token with 20 alternatives takes about 2 KB; the first event also has the prompt's ids."""
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}
"""A server's `finish_reason` → ours; any other value becomes `error`."""

LogprobsT = TypeVar("LogprobsT", covariant=True)


class Choice(msgspec.Struct, Generic[LogprobsT]):
    """A choice of a whole completion, or of one event."""

    token_ids: tuple[int, ...] | None = None
    """Only vLLM reports them."""
    logprobs: LogprobsT | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, Generic[LogprobsT]):
    """A completion, or one event of it; other fields are ignored."""

    choices: tuple[Choice[LogprobsT], ...] = ()
    error: Problem | None = None
    """An error in the middle of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Consecutive sampled tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Top, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a server."""

    model: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The differences between kinds of servers."""

    name: str
    encode: Callable[[Request], bytes]
    decoder: Callable[[Sampling], "msgspec.json.Decoder[list[Completion[Any]]]"]
    tokens: Callable[[list[Choice[Any]], Request], Tokens]
    """The tokens of consecutive choices. Raises `EngineError` if ids or log-probabilities are missing."""
    check: Callable[[Pool, Server], Awaitable[str]]
    """Checks a server before its first generation and returns its model's name. Raises `EngineError` if unfit."""
    refused: Callable[[Sampling], str | None]
    """The hint of the error if a server refuses a request with this sampling."""


class Completions:
    """Generations of one policy on its servers. Belongs to one event loop."""

    def __init__(self, setup: EngineSetup, *, kind: Kind) -> None:
        self.policy, self.version = setup.policy, 0
        self.gate = Gate()
        self.pool = Pool(setup.config.urls, engine=kind.name)
        self._kind, self._max_length = kind, setup.config.max_length
        self._models: dict[str, str] = {}
        self._checking = asyncio.Lock()

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool
    ) -> AsyncGenerator[Delta, None]:
        """See `Engine.generate`."""
        self.gate.refuse_if_closed()
        check_policy(policy, served=self.policy)
        check_prompt(len(prompt_ids), max_length=self._max_length)
        await self.gate.enter()
        try:
            await self.check()
            server = self._choose(prompt_ids)
            request = Request(
                model=self._models[server.url],
                prompt=list(prompt_ids),
                max_tokens=min(sampling.max_tokens, self._max_length - len(prompt_ids)),
                sampling=sampling,
                stream=stream,
            )
            server.in_flight += 1
            try:
                if not stream:
                    yield await self._whole(server, request)
                    return
                async with aclosing(self._streamed(server, request)) as deltas:
                    async for delta in deltas:
                        yield delta
            finally:
                server.in_flight -= 1
        finally:
            self.gate.leave()

    async def check(self) -> None:
        """Check each server, once."""
        if len(self._models) == len(self.pool.servers):
            return
        async with self._checking:
            for server in self.pool.servers:
                if server.url not in self._models:
                    self._models[server.url] = await self._kind.check(self.pool, server)

    def use_model(self, server: Server, model: str) -> None:
        """Request `model` from `server` from now on, instead of the model that `check` found."""
        self._models[server.url] = model

    async def check_again(self, urls: Set[str]) -> None:
        """Check the servers at `urls`, which were started again. The others may sleep, and answer nothing."""
        for server in self.pool.servers:
            if server.url in urls:
                self._models[server.url] = await self._kind.check(self.pool, server)

    async def close(self) -> None:
        """Running and waiting generations fail with an `EngineError`."""
        self.gate.close()
        await self.pool.close()

    def _choose(self, prompt_ids: Sequence[int]) -> Server:
        servers, number = self.pool.servers, on_server.get()
        if number is not None:
            return servers[number]
        return self.pool.choose(_key(prompt_ids)) if len(servers) > 1 else servers[0]

    async def _whole(self, server: Server, request: Request) -> Delta:
        kind, version, sampling = self._kind, self.version, request.sampling
        answer = await self.pool.complete(server, kind.encode(request), hint=kind.refused(sampling))
        delta = self._delta([answer], server, request, version=version)
        if delta is None or delta.finish_reason is None:
            raise EngineError(f"`{server.url}` returned an incomplete completion")
        return delta

    async def _streamed(self, server: Server, request: Request) -> AsyncGenerator[Delta, None]:
        kind, version, sampling = self._kind, self.version, request.sampling
        ended, rest = False, b""
        pieces = self.pool.stream(server, kind.encode(request), hint=kind.refused(sampling))
        async with aclosing(pieces):
            async for data in pieces:
                events, rest = split(rest + data)
                if len(rest) > EVENT_LIMIT:
                    raise EngineError(f"`{server.url}` sent an event of more than `{EVENT_LIMIT}` bytes")
                delta = self._delta(events, server, request, version=version) if events else None
                if delta is not None and not ended:
                    ended = delta.finish_reason is not None
                    yield delta
        if not ended:
            raise EngineError(f"`{server.url}` ended a stream without a finish reason", hint=BROKEN)

    def _delta(self, answers: list[bytes], server: Server, request: Request, *, version: int) -> Delta | None:
        completions = decoded(server, b"[%b]" % b",".join(answers), self._kind.decoder(request.sampling))
        return _delta(completions, request, self._kind, version=version)


class Model(msgspec.Struct):
    """One entry of `/v1/models`."""

    id: str
    max_model_len: int | None = None
    """Tokens of prompt and completion together. Only vLLM reports it."""
    root: str | None = None
    """Path that it was loaded from. Only vLLM reports it."""


class _Models(msgspec.Struct):
    data: tuple[Model, ...] = ()


_models = msgspec.json.Decoder(_Models)


def models_in(server: Server, body: bytes) -> tuple[Model, ...]:
    """The models that a response to `/v1/models` lists. Raises `EngineError` if the response is something else."""
    return decoded(server, body, _models).data


def likeliest(logprobs: Mapping[str, float], *, count: int, id_of: Callable[[str], int]) -> Top:
    """The `count` likeliest tokens of one position, best first. `id_of`: a server's text for a token → token id."""
    ranked = sorted(logprobs.items(), key=lambda item: -item[1])[:count]
    return tuple((id_of(token), logprob) for token, logprob in ranked)


def _delta(answers: list[Completion[Any]], request: Request, kind: Kind, *, version: int) -> Delta | None:
    """One delta for all of `answers`; None if they hold no token and no finish reason."""
    choices: list[Choice[Any]] = []
    for answer in answers:
        if answer.error is not None:
            raise EngineError(f"the server broke off: {answer.error.message}", hint=BROKEN)
        choices += answer.choices
    reason = choices[-1].finish_reason if choices else None
    spoken = [choice for choice in choices if choice.logprobs is not None or choice.token_ids]
    if not spoken and reason is None:
        return None
    tokens = kind.tokens(spoken, request)
    if len(tokens.token_ids) != len(tokens.logprobs):
        raise EngineError(f"the server returned `{len(tokens.token_ids)}` tokens and `{len(tokens.logprobs)}` logprobs")
    return Delta(
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        policy_version=version,
        finish_reason=None if reason is None else FINISH.get(reason, "error"),
        top=tokens.top,
    )


def _key(prompt_ids: Sequence[int]) -> bytes:
    """The key for `Pool.choose`: `affinity`, or the first tokens of the prompt."""
    return affinity.get().encode() or np.asarray(prompt_ids[:FIRST_IDS], np.int32).tobytes()
