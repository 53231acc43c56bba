"""Estimates of KL(π ‖ π_ref), the distance of the policy from its start, on sampled tokens, with their gradients.

For one token sampled from π, with Δ = log π - log π_ref (joschu.net/blog/kl-approx.html; gradients: arXiv 2506.09477):

          value            gradient              expected gradient is that of
    k1    Δ                Δ · ∇log π            KL(π ‖ π_ref)
    k2    Δ² / 2           Δ · ∇log π            KL(π ‖ π_ref)
    k3    e^-Δ - 1 + Δ     (1 - e^-Δ) · ∇log π   KL(π_ref ‖ π): GRPO's, arXiv 2402.03300, eq. 4

The values of k1 and k3 are unbiased; k3 has less variance. The derivative of k1 is ∇log π, whose expectation is 0, so
it would only add noise: k1 gets the gradient of k2. All of this holds only for tokens that π itself sampled, and per
token.

Legend: M sampled tokens.
"""

from typing import Literal

import torch
from torch import Tensor


def kl(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """[M] estimate per token in nats, from logprobs [M] under π and π_ref, with the gradient of the table above."""
    delta = logprobs - reference
    match estimator:
        case "k1":
            half_square = delta.square() / 2
            return half_square + (delta - half_square).detach()
        case "k2":
            return delta.square() / 2
        case "k3":
            return torch.expm1(-delta) + delta
