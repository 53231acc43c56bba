"""Equal prompt, settings, seed and weights give equal tokens and logprobs, bit for bit, whatever else is served."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from lightningrl.engine.attention import SUM_BLOCK, attend_prompt, attend_rows, causal_mask
from lightningrl.engine.cache import BLOCK, rounded
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.engine.model_runner import PAD
from lightningrl.models.base import Decoder
from lightningrl.models.tiny import build_model
from lightningrl.types import Sampling

Job = tuple[list[int], Sampling]
Exact = tuple[list[int], list[float], str | None]
VOCAB = 307  # odd on purpose


async def answer(engine: EmbeddedEngine, job: Job, *, stream: bool = False, give_up_after: int | None = None) -> Exact:
    prompt, sampling = job
    tokens: list[int] = []
    logprobs: list[float] = []
    finish = None
    deltas = engine.generate(prompt, sampling=sampling, policy="policy", stream=stream)
    async for delta in deltas:
        tokens += delta.token_ids
        logprobs += delta.logprobs
        finish = delta.finish_reason
        if give_up_after is not None and len(tokens) >= give_up_after:
            break
    await deltas.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    return tokens, logprobs, finish


def conversations(rng: random.Random, *, count: int) -> list[Job]:
    """Prompts with shared prefixes of many lengths, in all mixes of settings; some fill two sum blocks."""
    roots = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 31, 32, 33, 100, 250, 300]))] for _ in range(6)]
    jobs: list[Job] = []
    for index in range(count):
        root = rng.choice(roots)
        prompt = root[: rng.randint(1, len(root))] + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 2, 17]))]
        shaping = rng.choice(
            [
                Sampling(),
                Sampling(),
                Sampling(temperature=0.7),
                Sampling(temperature=0.0),
                Sampling(top_p=0.9),
                Sampling(top_k=7),
            ]
        )
        jobs.append((prompt, replace(shaping, max_tokens=rng.randint(1, 24), seed=index)))
        if rng.random() < 0.5:
            jobs.append((prompt, replace(jobs[-1][1], seed=index + 1000)))
    return jobs


async def serve_in_chaos(engine: EmbeddedEngine, jobs: list[Job], rng: random.Random) -> dict[int, Exact]:
    """Run all jobs in random order with random delays. Some run twice, and some of those are cancelled."""
    answers: dict[int, Exact] = {}

    async def one(index: int, *, give_up_after: int | None) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        exact = await answer(
            engine, jobs[index], stream=give_up_after is not None or rng.random() < 0.3, give_up_after=give_up_after
        )
        if give_up_after is None:
            answers[index] = exact

    order = [
        *((i, None) for i in range(len(jobs))),
        *((rng.randrange(len(jobs)), rng.randint(1, 5)) for _ in range(len(jobs) // 2)),
    ]
    rng.shuffle(order)
    await asyncio.gather(*(one(index, give_up_after=after) for index, after in order))
    return answers


@pytest.mark.parametrize(
    "shape",
    [{}, {"heads": 4, "kv_heads": 4, "head_size": 16}, {"hidden": 64, "heads": 4, "kv_heads": 1, "head_size": 64}],
)
@pytest.mark.parametrize("seed", [0, 1])
async def test_a_completion_depends_on_its_own_request_alone(seed: int, shape: dict[str, int]) -> None:
    rng = random.Random(seed)
    model = build_model(VOCAB, seed=seed, layers=2, eos_token_id=3, **shape)
    jobs = conversations(rng, count=30)
    busy = EmbeddedEngine(model, slots=11, max_length=352)
    first = await serve_in_chaos(busy, jobs, rng)
    # multi-turn: a completion becomes part of the next prompt, and its keys and values are reused
    jobs += [
        (jobs[i][0] + first[i][0] + [7, 8], replace(jobs[i][1], seed=i + 5000, max_tokens=9))
        for i in range(0, len(jobs), 3)
    ]
    second = await serve_in_chaos(busy, jobs, rng)
    assert {i: second[i] for i in first} == first
    reused = busy.statistics.prompt_tokens_reused
    await busy.close()
    assert reused > 100
    for index in rng.sample(range(len(jobs)), 12):
        fresh = EmbeddedEngine(model, slots=1, max_length=352)
        assert await answer(fresh, jobs[index]) == second[index]
        assert fresh.statistics.prompt_tokens_reused == 0
        await fresh.close()


@pytest.mark.parametrize("hidden,width", [(96, 96), (96, 48), (96, 256), (256, 96), (64, 1300), (512, 640)])
def test_a_row_of_a_linear_layer_does_not_depend_on_the_other_rows(hidden: int, width: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(512, hidden), torch.randn(width, hidden)
    whole = F.linear(x, w)
    for count in range(PAD, 320, PAD):
        for start in (0, 37):
            assert torch.equal(F.linear(x[start : start + count].clone(), w), whole[start : start + count]), count


@pytest.mark.parametrize("heads,kv_heads,size", [(4, 2, 24), (4, 4, 16), (2, 1, 64), (8, 2, 128)])
def test_attention_of_a_token_is_the_same_decoded_or_prefilled_and_padded_to_any_length(
    heads: int, kv_heads: int, size: int
) -> None:
    torch.manual_seed(0)
    length = 6 * SUM_BLOCK - 10
    T = rounded(length)
    keys, values = torch.randn(2, 5, kv_heads, T + 4 * BLOCK, size)
    q = torch.randn(length, heads, size)
    whole = torch.empty_like(q)
    mask = causal_mask(torch.arange(length), T, dtype=torch.float32)
    attend_prompt(q, keys[2, :, :T], values[2, :, :T], mask, whole)
    for position in [0, 1, 30, 31, 32, 33, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, length - 1]:
        for reach in (rounded(position + 1), rounded(position + 1) + BLOCK, T + 4 * BLOCK):
            positions = torch.tensor([reach - 1, 5, position])
            row_mask = (
                causal_mask(positions, reach, dtype=torch.float32).expand(3, kv_heads, reach).reshape(-1, 1, reach)
            )
            out = torch.empty(3, heads, size)
            attend_rows(q[[0, 0, position]], keys[:3, :, :reach], values[:3, :, :reach], row_mask, out)
            assert torch.equal(out[2], whole[position]), (position, reach)


def test_a_model_with_an_even_mlp_has_no_odd_tails() -> None:
    """Elementwise kernels round the tail of a batch differently; `PAD` rows of an even width leave no tail."""
    torch.manual_seed(0)
    x = torch.randn(128, 86)
    whole = F.silu(x)
    for count in range(PAD, 128, PAD):
        assert torch.equal(F.silu(x[5 : 5 + count].clone()), whole[5 : 5 + count])


async def test_logprobs_are_those_of_a_plain_forward_pass() -> None:
    model = build_model(VOCAB, seed=3, eos_token_id=3)
    jobs = [(p, replace(s, temperature=1.0, top_p=1.0, top_k=0)) for p, s in conversations(random.Random(3), count=20)]
    engine = EmbeddedEngine(model, slots=8, max_length=352)
    answers = await asyncio.gather(*(answer(engine, job) for job in jobs))
    await engine.close()
    worst = max(
        _distance(model, prompt, tokens, logprobs)
        for (prompt, _), (tokens, logprobs, _) in zip(jobs, answers, strict=True)
    )
    assert worst < 1e-4


def _distance(model: Decoder, prompt: list[int], tokens: list[int], logprobs: list[float]) -> float:
    with torch.no_grad():
        logits = model.hf(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
    return (expected - torch.tensor(logprobs)).abs().max().item()
