"""The embedded engine serves any model of attention and per-token parts; its logprobs are the trainer's."""

import asyncio
import random

import numpy as np
import pytest
import torch

from lightningrl.data.forest import build_forest, unweighted
from lightningrl.engine.attention import attend_prompt, causal_mask, together
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.errors import UserError
from lightningrl.models.base import Style
from lightningrl.models.families import decoder_of
from lightningrl.trainer.forward import forward
from lightningrl.types import Sampling, Transition
from tests.models.tiny_families import build


async def answer(engine: EmbeddedEngine, prompt: list[int], seed: int) -> tuple[list[int], list[float]]:
    sampling = Sampling(max_tokens=20, seed=seed)
    (delta,) = [delta async for delta in engine.generate(prompt, sampling=sampling, policy="policy")]
    return list(delta.token_ids), list(delta.logprobs)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma2", "phi3", "mixtral", "gpt_oss"])
async def test_logprobs_are_those_of_the_trainer_and_depend_on_their_own_request_alone(family: str) -> None:
    model = decoder_of(build(family, dtype=torch.float32))
    rng = random.Random(0)
    root = [rng.randrange(48) for _ in range(40)]
    prompts = [root[: rng.randint(1, 40)] + [rng.randrange(48) for _ in range(rng.randint(0, 9))] for _ in range(9)]
    engine = EmbeddedEngine(model, slots=6, max_length=96)
    answers = await asyncio.gather(*(answer(engine, prompt, seed) for seed, prompt in enumerate(prompts)))
    again = [await answer(engine, prompts[seed], seed) for seed in (2, 5)]
    await engine.close()
    assert again == [answers[2], answers[5]]  # decoded alone, from a cached prefix
    calls = [
        Transition(
            call_id=f"{seed}",
            parent_call_id=None,
            agent="",
            policy_version=0,
            prompt_ids=np.array(prompt, np.int32),
            completion_ids=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            reward=None,
        )
        for seed, (prompt, (tokens, logprobs)) in enumerate(zip(prompts, answers, strict=True))
    ]
    forest = build_forest([unweighted(call) for call in calls], whole=True)
    with torch.no_grad():
        trained = forward(model, forest).logprobs
    assert np.abs(trained.numpy() - forest.logprobs).max() < 1e-4


def test_a_model_whose_layers_carry_state_is_refused() -> None:
    with pytest.raises(UserError, match=r"(?s)layers of type `linear_attention`.*hint:.*vLLM"):
        EmbeddedEngine(decoder_of(build("mamba2", dtype=torch.float32)), max_length=64)


def test_a_prompt_together_equals_token_by_token_in_every_style() -> None:
    torch.manual_seed(0)
    q, keys, values = torch.randn(37, 4, 8), torch.randn(2, 64, 8), torch.randn(2, 64, 8)
    style = Style(scale=0.3, softcap=2.0, window=5, sinks=torch.randn(4))
    mask = causal_mask(torch.arange(20, 57), 64, dtype=torch.float32, window=style.window)
    one, other = torch.empty_like(q), torch.empty_like(q)
    attend_prompt(q, keys, values, mask, one, style)
    together(q, keys, values, mask, other, style)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
