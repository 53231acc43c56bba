"""How far is the policy from where it started? Estimates of KL(π ‖ π_ref) from sampled tokens, and the gradient that
each one gives.

Of one token sampled from π, with Δ = log π - log π_ref (joschu.net/blog/kl-approx.html; gradients: arXiv 2506.09477):

          value            gradient              which is, on average, that of
    k1    Δ                Δ · ∇log π            KL(π ‖ π_ref)
    k2    Δ² / 2           Δ · ∇log π            KL(π ‖ π_ref)
    k3    e^-Δ - 1 + Δ     (1 - e^-Δ) · ∇log π   KL(π_ref ‖ π): GRPO's, arXiv 2402.03300, eq. 4

k1 has the unbiased value and k3 the unbiased one of least variance. k1's own derivative is ∇log π, which is 0 on
average and would only add noise; it therefore gets the gradient of k2. All are exact only for tokens that π itself has
sampled, and of each token by itself.

Legend: M sampled tokens.
"""

from typing import Literal

import torch
from torch import Tensor


def kl(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """[M], [M] → [M] with the gradient that the table says."""
    delta = logprobs - reference
    match estimator:
        case "k1":
            half_square = delta.square() / 2
            return half_square + (delta - half_square).detach()
        case "k2":
            return delta.square() / 2
        case "k3":
            return torch.expm1(-delta) + delta
