"""SDK → gateway → the real engine → store: are the recorded numbers those of the model?"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch

from lightningrl.chat import ChatTemplate
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.gateway import create_app
from lightningrl.models.load import load_model
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Call, Rollout, Task

SEEDS = 3


@pytest.fixture
async def store() -> AsyncIterator[SQLiteStore]:
    store = await SQLiteStore.open(":memory:")
    task = Task(id="t", input={}, split="train")
    await store.enqueue([Rollout(id=f"r{n}", group_id="g", task=task) for n in range(SEEDS)])
    yield store
    await store.close()


async def talk(transport: httpx2.AsyncBaseTransport, attempt: Attempt) -> None:
    """Four turns, every other one streamed, one cut short and one with a stop string."""
    messages: list[Any] = [{"role": "user", "content": "say a word"}]
    asks: list[dict[str, Any]] = [{}, {"max_tokens": 3}, {"stop": ["e"]}, {"temperature": 0.7}]
    http = httpx2.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=attempt.token, http_client=http) as client:
        for turn, ask in enumerate(asks):
            ask = {"max_tokens": 12, **ask}
            if turn % 2:
                pieces = await client.chat.completions.create(model="m", messages=messages, stream=True, **ask)
                text = "".join([piece.choices[0].delta.content or "" async for piece in pieces])
            else:
                text = (await client.chat.completions.create(model="m", messages=messages, **ask)).choices[
                    0
                ].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]


def logprobs_of(model: Any, call: Call) -> np.ndarray[Any, Any]:
    """Log-probabilities of the sampled tokens, computed by `transformers` alone."""
    ids = torch.tensor([[*call.prompt_ids, *call.completion_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(call.prompt_ids) - 1 : -1].double() / call.sampling.temperature
    return torch.log_softmax(logits, -1)[range(len(call.completion_ids)), call.completion_ids.tolist()].numpy()


async def test_recorded_logprobs_are_the_models_and_randomness_does_not_depend_on_timing(
    model_folder: Path, store: SQLiteStore
) -> None:
    template, model = ChatTemplate.load(model_folder), load_model(str(model_folder))
    engine = EmbeddedEngine(model, slots=4, max_length=200, decode=template.decode)  # type: ignore[arg-type]
    runs: list[list[list[int]]] = []
    try:
        for concurrent in (True, False):
            app = create_app(store=store, chat=template, engines={"policy": engine}, seed=1, max_length=200)
            transport = httpx2.ASGITransport(app=app)  # type: ignore[arg-type]
            attempts = [
                attempt for _, attempt in await store.claim("w", limit=SEEDS, lease_s=0.0 if concurrent else 60.0)
            ]
            if concurrent:
                await asyncio.gather(*(talk(transport, attempt) for attempt in attempts))
            else:
                for attempt in attempts:
                    await talk(transport, attempt)
            calls = await store.calls([attempt.id for attempt in attempts])
            assert len(calls) == 4 * SEEDS
            assert {call.capture for call in calls} == {"rendered", "bridged"}
            for call in calls:
                assert np.abs(logprobs_of(model.hf, call) - call.logprobs).max() < 1e-4
            runs.append([call.completion_ids.tolist() for call in calls])
        assert runs[0] == runs[1]
        assert len({tuple(ids) for ids in runs[0]}) > SEEDS
    finally:
        await engine.close()
