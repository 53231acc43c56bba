"""An engine over a service that speaks the Tinker API: token ids in; sampled token ids and log-probabilities out.

The service reports log-probabilities at temperature 1 over the whole vocabulary. Rollouts that are trained are sampled
like that. It does not constrain what it samples, and streams nothing: each answer comes whole.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightningrl.engine.base import Delta, EngineSetup, Unanswerable, check_policy, check_prompt
from lightningrl.engine.http_gate import Gate
from lightningrl.engine.stop import StopFinder
from lightningrl.errors import EngineError
from lightningrl.hosted import RemoteModel, RemotePolicy, ServiceError, read_saved
from lightningrl.types import FinishReason, Sampling, Weights

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


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
            version, room = self.version, self._max_length - len(prompt_ids)
            limit = min(sampling.max_tokens, room)
            asked = min(_bucket(limit), room) if self._remote.service.own else limit
            sequence = await self._sample(self._sampler, prompt_ids, sampling, max_tokens=asked)
            token_ids, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
            if len(token_ids) != len(logprobs):
                said = f"`{len(token_ids)}` tokens and `{len(logprobs)}` log-probabilities"
                raise ServiceError(f"{self._remote.service.name} returned {said}")
            self._remote.service.spent.add(prefill=len(prompt_ids), sample=len(token_ids))
            kept, stopped = self._cut(token_ids[:limit], sampling.stop)
            ended = "length" if len(token_ids) > limit else FINISH.get(str(sequence.stop_reason), "error")
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

    async def _sample(self, sampler: Any, prompt_ids: Sequence[int], sampling: Sampling, *, max_tokens: int) -> Any:
        service = self._remote.service
        types = service.sdk.types
        params = types.SamplingParams(
            max_tokens=max_tokens,
            seed=None if sampling.seed is None else sampling.seed % 2**31,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            stop=list(sampling.stop_token_ids) or None,
        )
        prompt = types.ModelInput.from_ints(list(map(int, prompt_ids)))
        try:
            async with asyncio.timeout(service.config.timeout_s):
                asked = sampler.sample(prompt, num_samples=1, sampling_params=params)
                answer = await (asyncio.wrap_future(asked) if isinstance(asked, Future) else asked)  # as old SDKs do
        except TimeoutError as error:
            raise service.late("answer") from error
        except Exception as error:
            raise service.failed("answer", error) from error
        return answer.sequences[0]

    def _cut(self, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[int, bool]:
        """(number of tokens up to the first stop string, whether there is one). The service only knows stop tokens."""
        for count in range(1, len(token_ids) + 1 if stops else 0):
            if self._stop.found(token_ids[:count], stops):
                return count, True
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


def _bucket(limit: int) -> int:
    """The limit that is sent to a server of one's own: at least `limit`, and one of few numbers, two for each power of
    two. It may compile a program for each limit. What it samples beyond `limit` is cut off.
    """
    unit = 1 << max(limit.bit_length() - 2, 4)
    return -(-limit // unit) * unit


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
