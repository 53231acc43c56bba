"""Sample the next token from logits. The result depends on logits, settings, seed and token index alone.

Randomness is counter-based: a token's random number is a hash of (seed, index of the token in its completion). So other
requests in the same step do not matter. A log-probability belongs to the distribution that was sampled from: after
grammar, temperature, top-k and top-p, renormalised. Temperature 0 has no such distribution. There it is the policy's
own at temperature 1, under a grammar renormalised over the allowed tokens.

Legend: A sequences · V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightningrl.engine.base import Top
from lightningrl.models.devices import CPU
from lightningrl.types import Sampling

GOLDEN = 0x9E3779B97F4A7C15
NOTHING: Mapping[int, Tensor] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sampling settings of the sequences of one step, in arrays."""

    temperatures: Tensor | None
    """[A 1] positive, 1 for greedy rows. None: all are 1."""
    greedy: Tensor | None
    """[A] bool. None: no row is greedy."""
    shaped: tuple[int, ...]
    """Rows with top-k or top-p."""
    constrained: tuple[int, ...]
    """Rows with a grammar."""
    with_top: tuple[int, ...]
    """Rows with `top_logprobs`."""
    samplings: tuple[Sampling, ...]
    """[A]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    token_ids: list[int]
    """[A]"""
    logprobs: list[float]
    """[A] in nats; -inf if the logits are NaN."""
    top: Mapping[int, Top]
    """Row → its likeliest tokens under the distribution that was sampled from, without those of probability 0."""


def prepare(samplings: Sequence[Sampling], *, device: torch.device = CPU) -> Settings:
    """The settings of [A] requests as arrays on `device`."""
    temperatures = [s.temperature or 1.0 for s in samplings]
    greedy = [s.temperature == 0 for s in samplings]
    return Settings(
        temperatures=torch.tensor(temperatures, device=device)[:, None] if any(t != 1 for t in temperatures) else None,
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        shaped=tuple(i for i, s in enumerate(samplings) if s.temperature and (s.top_p < 1 or s.top_k)),
        constrained=tuple(i for i, s in enumerate(samplings) if s.grammar is not None),
        with_top=tuple(i for i, s in enumerate(samplings) if s.top_logprobs),
        samplings=tuple(samplings),
    )


def sample(
    logits: Tensor, settings: Settings, uniforms: npt.NDArray[np.float64], *, allowed: Mapping[int, Tensor] = NOTHING
) -> Sampled:
    """Sample one token per row by inverting the cumulative distribution.

    logits [A V] float32, overwritten; uniforms [A] in [0, 1); `allowed`: constrained row → [V] bool, on the host. The
    host waits for the device once, for all results.
    """
    device = logits.device
    for row in settings.constrained:
        logits[row].masked_fill_(~allowed[row].to(device), -torch.inf)  # a temperature leaves -inf as it is
    if settings.temperatures is not None:
        logits = logits / settings.temperatures
    probabilities = torch.softmax(logits, dim=-1)
    for row in settings.shaped:
        kept = _kept(probabilities[row], settings.samplings[row])
        probabilities[row] = torch.softmax(logits[row].masked_fill(~kept, -torch.inf), dim=-1)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # the first token whose cumulative probability exceeds the target: never one of probability 0, never past the end
    drawn = torch.from_numpy(uniforms).to(device)[:, None]
    target = torch.minimum(drawn * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, logits.argmax(dim=-1), tokens)
    chosen = probabilities.gather(1, tokens[:, None])[:, 0]
    likeliest = {row: probabilities[row].topk(_count(settings.samplings[row], logits)) for row in settings.with_top}
    parts = [tokens, chosen, *(part for pair in likeliest.values() for part in pair)]
    found = torch.cat([x.double() for x in parts]).cpu()  # float64 holds token ids and float32 exactly
    ids, probable, *pairs = (x.tolist() for x in found.split([len(x) for x in parts]))
    # one logarithm at a time: vectorised kernels round the tail of a batch differently
    logprobs = [math.log(p) if p > 0 else -math.inf for p in probable]
    top = {row: _ranked(pairs[2 * i], pairs[2 * i + 1]) for i, row in enumerate(likeliest)}
    return Sampled(token_ids=[int(token) for token in ids], logprobs=logprobs, top=top)


def _count(sampling: Sampling, logits: Tensor) -> int:
    return min(sampling.top_logprobs, logits.shape[-1])


def _ranked(probabilities: Sequence[float], ids: Sequence[float]) -> Top:
    """Tokens with a probability above 0, best first; of equal ones the lower id first."""
    ranked = sorted((-p, int(token)) for p, token in zip(probabilities, ids, strict=True) if p > 0)
    return tuple((token, math.log(-p)) for p, token in ranked)


def _kept(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """[V] bool: of the `top_k` likeliest tokens, the fewest whose share of the total reaches `top_p` (arXiv
    1904.09751). Ties go to the lower id.
    """
    order = probabilities.argsort(descending=True, stable=True)
    order = order[: sampling.top_k] if sampling.top_k else order
    ranked = probabilities[order].double()
    before = ranked.cumsum(0) - ranked
    among = before < sampling.top_p * ranked.sum()
    among[:1] = True  # even if rounding excludes it
    return torch.zeros_like(probabilities, dtype=torch.bool).index_copy_(0, order, among)


def uniform(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """[A] uniform numbers in [0, 1), one per (seed, index): two rounds of splitmix64 (Steele et al., OOPSLA 2014)."""
    state = _mix(seeds + np.uint64(GOLDEN)) + indices * np.uint64(GOLDEN)
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
