"""An engine over vLLM servers that the run owns: it outlives them.

It wraps a `VLLMEngine`. If a server dies, the fleet starts it again and restores the weights, and generations that were
under way are asked again. With its seed, a generation gives the tokens again that were streamed before; if it does not,
it fails, as it would have without the restart.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence, Set
from contextlib import aclosing
from dataclasses import replace

from lightningrl.engine.base import Delta, EngineBusy, EngineSetup, Unanswerable
from lightningrl.engine.vllm import VLLMEngine
from lightningrl.engine.vllm_fleet import Fleet
from lightningrl.engine.vllm_server import State
from lightningrl.errors import EngineError
from lightningrl.types import Sampling, Weights


class OwnedVLLM:
    """An `Engine`. Its servers may sleep while it is paused."""

    def __init__(self, setup: EngineSetup, *, fleet: Fleet, learns: bool = True) -> None:
        self._policy, self._fleet = setup.policy, fleet
        config = setup.config.model_copy(update={"urls": fleet.urls})
        self._engine = VLLMEngine(replace(setup, config=config))
        self._weights: Weights | None = None
        fleet.join(setup.policy, restore=self._restore, learns=learns)

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        told: list[int] = []
        version: int | None = None
        while True:
            await self._fleet.served(self._policy)
            losses = self._fleet.losses
            asked = self._engine.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream)
            try:
                async with aclosing(_beyond(asked, told, version=version)) as deltas:
                    async for delta in deltas:
                        told += delta.token_ids
                        version = delta.policy_version
                        yield delta
                return
            except (EngineBusy, Unanswerable):
                raise
            except EngineError:
                if not await self._fleet.mend(losses):
                    raise

    async def load(self, weights: Weights) -> None:
        self._engine.check_load(weights)
        self._weights = weights  # a server that is started again meanwhile gets these
        while True:
            await self._fleet.want(self._policy, State.WEIGHTS_AWAKE)
            losses = self._fleet.losses
            try:
                await self._engine.load(weights)
            except EngineError as error:
                if isinstance(error, Unanswerable) and self._fleet.losses == losses:
                    raise
                await self._fleet.replace(losses, f"did not load version {weights.version}: {error.message}")
            else:
                if self._fleet.losses == losses:
                    break
        self._fleet.updated()

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        await self._engine.pause(timeout_s=timeout_s)
        await self._check()
        await self._fleet.want(self._policy, State.ASLEEP)

    async def resume(self) -> None:
        await self._fleet.want(self._policy, State.SERVING)
        await self._engine.resume()

    async def close(self) -> None:
        await self._engine.close()
        self._fleet.leave(self._policy)

    async def _check(self) -> None:
        """Check all servers, once: one that sleeps cannot be checked."""
        while True:
            losses = self._fleet.losses
            try:
                return await self._engine.check()
            except Unanswerable:
                raise
            except EngineError:
                if not await self._fleet.mend(losses):
                    raise

    async def _restore(self, urls: Set[str]) -> None:
        await self._engine.restore(self._weights, urls)


async def _beyond(
    asked: AsyncIterator[Delta], told: Sequence[int], *, version: int | None
) -> AsyncGenerator[Delta, None]:
    """The deltas of a generation without its first tokens, which an earlier try has `told` under `version`. Raises
    `EngineError` if they are other tokens now, or of other weights.
    """
    left = list(told)
    async with aclosing(asked) as deltas:  # pyright: ignore[reportArgumentType]  generators have it
        async for delta in deltas:
            again = delta.token_ids[: len(left)]
            shorter = delta.finish_reason is not None and len(again) < len(left)
            if left and delta.policy_version != version:
                raise EngineError("the server died in the middle of a stream, and has new weights since then")
            if left and (list(again) != left[: len(again)] or shorter):
                raise EngineError(
                    "the server died in the middle of a stream, and samples other tokens after its restart"
                )
            left = left[len(again) :]
            count = len(again)
            if count == len(delta.token_ids) and count and delta.finish_reason is None:
                continue
            yield delta if not count else _without(delta, count)


def _without(delta: Delta, count: int) -> Delta:
    """The delta without its first tokens."""
    top = None if delta.top is None else delta.top[count:]
    return replace(delta, token_ids=delta.token_ids[count:], logprobs=delta.logprobs[count:], top=top)
