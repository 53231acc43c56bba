"""An engine whose completions come from a script, for real runs: `engine.name=tests.recipes.forced:Forced`.

The recipe's folder has a `script.py` with a function `script(prompt, messages, tools)` (see
`lightningrl.gateway.scripted`). Its completions are recorded with the logprobs of the policy's own weights, so they are
trained like sampled ones.
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
from lightningrl.gateway.scripted import ScriptedEngine, current_request
from lightningrl.types import Sampling, Weights


class Forced:
    """See `Engine`. Calls that are no agent's, such as the probe after a publication, are sampled."""

    def __init__(self, setup: EngineSetup) -> None:
        self._embedded = embedded(setup)
        script = plugins.load("script:script", kind="engine", root=Path.cwd())
        self._scripted = ScriptedEngine(script, ChatTemplate.load(setup.folder), policy=setup.policy)
        self._model: Any = setup.model

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        if current_request.get() is None:
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
    """Send SIGKILL to every descendant that runs `program`; there must be one."""
    found = [pid for pid in _below(os.getpid()) if program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert found, f"no process runs {program}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(pid for child in children for pid in _below(child))]
