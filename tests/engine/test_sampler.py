"""Tokens are sampled from the distribution whose log-probabilities are reported."""

import numpy as np
import torch

from lightningrl.engine.sampler import prepare, sample, uniform
from lightningrl.types import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -torch.inf])


def sample_many(sampling: Sampling, *, count: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    uniforms = uniform(np.full(count, 7, dtype=np.uint64), np.arange(count, dtype=np.uint64))
    sampled = sample(LOGITS.repeat(count, 1), prepare([sampling] * count), uniforms)
    return np.array(sampled.token_ids), np.array(sampled.logprobs)


def check(sampling: Sampling, expected: torch.Tensor) -> None:
    """Check token frequencies (within 4 standard errors) and log-probabilities against this distribution."""
    tokens, logprobs = sample_many(sampling, count=4_000)
    shares = np.bincount(tokens, minlength=6) / len(tokens)
    p = expected.double().numpy()
    assert (np.abs(shares - p) <= 4 * np.sqrt(p * (1 - p) / len(tokens))).all()
    np.testing.assert_allclose(np.exp(logprobs), p[tokens], rtol=1e-5)


def test_temperature_scales_the_logits() -> None:
    check(Sampling(), LOGITS.softmax(0))
    check(Sampling(temperature=0.5), (LOGITS * 2).softmax(0))
    check(Sampling(temperature=3.0), (LOGITS / 3).softmax(0))


def test_top_k_renormalises() -> None:
    p = LOGITS.softmax(0)
    p[2:] = 0
    check(Sampling(top_k=2), p / p.sum())


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    p = LOGITS.softmax(0)  # 0.55, 0.20, 0.12 ...: two make 0.76, three 0.88
    kept = p.clone()
    kept[3:] = 0
    check(Sampling(top_p=0.8), kept / kept.sum())
    kept[2:] = 0
    check(Sampling(top_p=0.7), kept / kept.sum())
    check(Sampling(top_p=1e-9), torch.tensor([1.0, 0, 0, 0, 0, 0]))


def test_top_p_applies_after_temperature_and_top_k() -> None:
    p = (LOGITS / 2).softmax(0)
    p[3:] = 0
    p = p / p.sum()  # 0.50, 0.30, 0.19
    p[2:] = 0
    check(Sampling(temperature=2.0, top_k=3, top_p=0.7), p / p.sum())


def test_greedy_takes_the_likeliest_and_reports_the_unscaled_distribution() -> None:
    tokens, logprobs = sample_many(Sampling(temperature=0.0), count=16)
    assert (tokens == 0).all()
    np.testing.assert_allclose(logprobs, LOGITS.log_softmax(0)[0], rtol=1e-6)


def test_the_likeliest_tokens_are_those_of_the_distribution_that_is_sampled_from() -> None:
    plain, shaped, greedy = (
        Sampling(top_logprobs=9),
        Sampling(temperature=0.5, top_k=2, top_logprobs=9),
        Sampling(temperature=0.0, top_logprobs=2),
    )
    allowed = torch.tensor([False, True, False, True, False, True])
    some = [plain, Sampling(), shaped, greedy, Sampling(grammar="…", top_logprobs=9)]
    sampled = sample(LOGITS.repeat(5, 1), prepare(some), np.full(5, 0.5), allowed={4: allowed})
    p, sharp = LOGITS.softmax(0), torch.tensor([4.0, 2.0]).softmax(0)
    expected = {
        0: {0: p[0], 1: p[1], 2: p[2], 3: p[3], 4: p[4]},  # the sixth has probability 0
        2: {0: sharp[0], 1: sharp[1]},
        3: {0: p[0], 1: p[1]},
        4: {1: p[1] / (p[1] + p[3]), 3: p[3] / (p[1] + p[3])},
    }
    assert sampled.top.keys() == expected.keys()
    for row, places in expected.items():
        assert [t for t, _ in sampled.top[row]] == list(places)
        np.testing.assert_allclose(
            [np.exp(q) for _, q in sampled.top[row]], [float(q) for q in places.values()], rtol=1e-5
        )
        assert dict(sampled.top[row])[sampled.token_ids[row]] == sampled.logprobs[row]


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    sampled = sample(logits, prepare([Sampling()] * 3), np.array([0.0, 0.5, np.nextafter(1.0, 0.0)]))
    assert sampled.token_ids == [1, 3, 3]


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 257)
    samplings = [
        Sampling(temperature=t, top_p=p, top_k=k)
        for t in (0.0, 0.7, 1.0, 1.3)
        for p in (1.0, 0.9)
        for k in (0, 5, 20, 0, 0)
    ]
    uniforms = uniform(np.arange(40, dtype=np.uint64), np.arange(40, dtype=np.uint64))
    sampled = sample(logits, prepare(samplings), uniforms)
    for start, stop in [(0, 1), (3, 20), (39, 40), (7, 33), (5, 21)]:
        some = sample(logits[start:stop].clone(), prepare(samplings[start:stop]), uniforms[start:stop])
        assert (some.token_ids, some.logprobs) == (sampled.token_ids[start:stop], sampled.logprobs[start:stop])


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_index() -> None:
    seeds, indices = np.meshgrid(np.arange(100, dtype=np.uint64), np.arange(100, dtype=np.uint64))
    numbers = uniform(seeds.ravel(), indices.ravel())
    assert len(np.unique(numbers)) == 10_000
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 50  # chi² of 19 degrees of freedom exceeds 50 once in 7,000
    assert uniform(np.array([2**64 - 1], dtype=np.uint64), np.array([2**31], dtype=np.uint64))[0] < 1
