"""A real run in which it is known beforehand what the policy says: `engine.name=tests.recipes.forced:Forced` has a
script say it.

The recipe's folder holds `script.py` with a function `script(prompt, messages, tools)` (see
`lightningrl.gateway.scripted`). What it says is recorded token by token with the logprobs that the policy's own weights
give it, so that it is learnt from like anything that was sampled.
"""

import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightningrl import plugins
from lightningrl.chat import ChatTemplate
from lightningrl.engine.base import Delta, EngineSetup
from lightningrl.engine.embedded import embedded
from lightningrl.gateway.scripted import ScriptedEngine, asked
from lightningrl.types import Sampling, Weights


class Forced:
    """See `Engine`. What nobody has asked for, such as the probe after a publication, is sampled."""

    def __init__(self, setup: EngineSetup) -> None:
        self._embedded = embedded(setup)
        script = plugins.load("script:script", kind="engine", root=Path.cwd())
        self._scripted = ScriptedEngine(script, ChatTemplate.load(setup.folder), policy=setup.policy)
        self._model: Any = setup.model

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        if asked.get() is None:
            async for delta in self._embedded.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream):
                yield delta
            return
        async for delta in self._scripted.generate(prompt_ids, sampling=sampling, policy=policy):
            yield replace(delta, logprobs=self._logprobs(prompt_ids, delta.token_ids))

    @torch.no_grad()
    def _logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[float, ...]:
        logits = self._model.hf(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
        return tuple(torch.log_softmax(logits.double(), -1)[range(len(token_ids)), list(token_ids)].tolist())

    async def load(self, weights: Weights) -> None:
        await self._embedded.load(weights)
        await self._scripted.load(weights)

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        await self._embedded.pause(timeout_s=timeout_s)
        await self._scripted.pause(timeout_s=timeout_s)

    async def resume(self) -> None:
        await self._embedded.resume()
        await self._scripted.resume()

    async def close(self) -> None:
        await self._embedded.close()
        await self._scripted.close()


def kill(program: str) -> None:
    """SIGKILL to every process below this one that runs `program`; there must be one."""
    found = [pid for pid in _below(os.getpid()) if program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert found, f"nobody runs {program}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(pid for child in children for pid in _below(child))]
