"""An engine over a service that speaks the Tinker API: token ids in; sampled token ids and log-probabilities out.

The service reports log-probabilities at temperature 1 over the whole vocabulary. Rollouts that are trained are sampled
like that. It does not constrain what it samples, and streams nothing: each answer comes whole.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightningrl.engine.base import Delta, EngineSetup, Unanswerable, check_policy, check_prompt
from lightningrl.engine.http_gate import Gate
from lightningrl.engine.stop import StopFinder
from lightningrl.errors import EngineError
from lightningrl.hosted.adapters import RemoteModel, RemotePolicy
from lightningrl.hosted.kept import read_saved
from lightningrl.hosted.service import ServiceError
from lightningrl.types import FinishReason, Sampling, Weights

log = logging.getLogger(__name__)

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
FIRST_PIECE = 32
"""Tokens that a server of one's own is asked for at first. Most calls to tools are shorter."""
NEXT_SEED = 0x9E3779B1
"""Per token between the seeds of an answer's pieces: with equal seeds, all would be drawn with the same numbers."""


class TinkerEngine:
    """An `Engine` for one adapter of a service, or for a model that is not trained there."""

    def __init__(self, setup: EngineSetup) -> None:
        assert isinstance(setup.model, RemotePolicy | RemoteModel), "nothing at the service answers for this policy"
        self.version = 0
        self._remote, self._policy = setup.model, setup.policy
        self._max_length = setup.config.max_length
        self._stop = StopFinder(setup.decode)
        self._gate = Gate()
        self._sampler: Any = None
        self._opening = asyncio.Lock()
        self._failing = False
        """The last answer failed."""

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        """See `Engine.generate`. With `stream` as well, one delta holds all of the completion."""
        self._gate.refuse_if_closed()
        check_policy(policy, served=self._policy)
        check_prompt(len(prompt_ids), max_length=self._max_length)
        _check(sampling)
        await self._gate.enter()
        try:
            await self._open()
            version, limit = self.version, min(sampling.max_tokens, self._max_length - len(prompt_ids))
            token_ids, logprobs, ended = await self._complete(prompt_ids, sampling, limit=limit)
            kept, stopped = self._cut(token_ids, sampling.stop)
            yield Delta(
                token_ids=tuple(token_ids[:kept]),
                logprobs=tuple(logprobs[:kept]),
                policy_version=version,
                finish_reason="stop" if stopped else ended,
            )
        finally:
            self._gate.leave()

    async def _open(self) -> None:
        """Have a sampler: a model that is not trained is its own version 0; others are loaded."""
        async with self._opening:
            if self._sampler is None and isinstance(self._remote, RemoteModel):
                self._sampler = await asyncio.to_thread(self._remote.sampler)
        if self._sampler is None:
            raise EngineError("no weights are loaded", hint="`load` a version first")

    async def _complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, limit: int
    ) -> tuple[list[int], list[float], FinishReason]:
        """At most `limit` tokens, their log-probabilities, and why they end.

        A server of one's own is asked for one piece after another. SkyRL's JAX backend fills up each batch with rows
        that hardly ever stop, so that every batch takes as long as the largest limit in it, and it compiles a program
        for each limit.
        """
        own, name = self._remote.service.own, self._remote.service.name
        token_ids: list[int] = []
        logprobs: list[float] = []
        while True:
            done = len(token_ids)
            asked = min(_piece(limit, done=done), self._max_length - len(prompt_ids) - done) if own else limit
            seed = None if sampling.seed is None else (sampling.seed + done * NEXT_SEED) % 2**31
            sequence = await self._sample([*prompt_ids, *token_ids], sampling, max_tokens=asked, seed=seed)
            sampled, beside = list(sequence.tokens), list(sequence.logprobs or ())
            if len(sampled) != len(beside):
                raise ServiceError(f"{name} returned `{len(sampled)}` tokens and `{len(beside)}` log-probabilities")
            self._remote.service.spent.add(prefill=len(prompt_ids) + done, sample=len(sampled))
            token_ids += sampled
            logprobs += beside
            ended = FINISH.get(str(sequence.stop_reason), "error")
            complete = ended != "length" or len(sampled) < asked or len(token_ids) >= limit
            if complete or self._cut(token_ids, sampling.stop)[1]:
                return token_ids[:limit], logprobs[:limit], "length" if len(token_ids) > limit else ended

    async def _sample(self, prompt_ids: Sequence[int], sampling: Sampling, *, max_tokens: int, seed: int | None) -> Any:
        service = self._remote.service
        types = service.sdk.types
        params = types.SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            stop=list(sampling.stop_token_ids) or None,
        )
        prompt = types.ModelInput.from_ints(list(map(int, prompt_ids)))
        try:
            async with asyncio.timeout(service.config.timeout_s):
                asked = self._sampler.sample(prompt, num_samples=1, sampling_params=params)
                answer = await (asyncio.wrap_future(asked) if isinstance(asked, Future) else asked)  # as old SDKs do
        except TimeoutError as error:
            raise self._reported(service.late("answer")) from error
        except Exception as error:
            raise self._reported(service.failed("answer", error)) from error
        self._failing = False
        return answer.sequences[0]

    def _reported(self, failure: ServiceError) -> ServiceError:
        """Tell the user of the first failure until the service answers again: agents may try again for minutes."""
        if not self._failing:
            log.warning("%s; agents get an error, and may try again\nhint: %s", failure.message, failure.hint)
        self._failing = True
        return failure

    def _cut(self, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[int, bool]:
        """(number of tokens up to the first stop string, whether there is one). The service only knows stop tokens."""
        for length in range(1, len(token_ids) + 1 if stops else 0):
            if self._stop.found(token_ids[:length], stops):
                return length, True
        return len(token_ids), False

    async def load(self, weights: Weights) -> None:
        """Sample from the version that the service keeps for the folder `weights.uri`."""
        self._gate.refuse_if_closed()
        check_policy(weights.policy, served=self._policy)
        if not self._gate.drained:
            raise EngineError("weights cannot change while generations run", hint="`pause` the engine first")
        folder = Path(weights.uri)
        saved = await asyncio.to_thread(read_saved, folder)
        if saved is None:
            raise EngineError(f"`{folder}` does not say where a service keeps its weights")
        path = self._remote.samplers.get(folder.resolve(), saved.sampler)
        service = self._remote.service
        make = service.client.create_sampling_client
        self._sampler = await asyncio.to_thread(service.call, f"sample from `{path}`", lambda: make(model_path=path))
        self.version = weights.version
        if isinstance(self._remote, RemotePolicy):
            await asyncio.to_thread(self._remote.unload_retired)

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        await self._gate.pause(timeout_s=timeout_s)

    async def resume(self) -> None:
        self._gate.resume()

    async def close(self) -> None:
        self._gate.close()
        await asyncio.to_thread(self._remote.service.close)


def _piece(limit: int, *, done: int) -> int:
    """How many tokens to ask for after the first `done`: as many again, and one of few numbers. It may be more than
    are left of `limit`.
    """
    return max(FIRST_PIECE, min(done, 1 << (limit - done - 1).bit_length()))


def _check(sampling: Sampling) -> None:
    """Raises `Unanswerable` for what the API cannot do."""
    if sampling.grammar is not None:
        hint = "leave out required tools and `response_format`, or use a backend of your own (docs/hosted.md)"
        raise Unanswerable("the service cannot constrain what it samples", hint=hint)
    if sampling.top_logprobs:
        raise Unanswerable("the service does not report likeliest tokens", hint="leave out `top_logprobs`")
    if sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        hint = "max_tokens ≥ 1, temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0"
        raise Unanswerable(f"cannot sample with `{sampling}`", hint=hint)
