"""The objective: the sum of all terms that `[loss]` configures, with weights computed once over the whole batch.

    Σ_m w_m (u_m · ℓ_m + kl_coef · kl_m - entropy_coef · H_m) + value_coef · Σ_k W_k (V_k - R_k)²

ℓ: `losses`, u: `importance`, kl: `kl`, V: `critic`; H: entropy of the distribution that a token was sampled from, with
its true gradient. Every term is a sum over tokens or calls, so packing them into forests changes nothing.

Legend: M sampled tokens · K calls.
"""

import numpy as np
import torch
from torch import Tensor

from lightningrl.config import LossConfig
from lightningrl.data.forest import Forest
from lightningrl.trainer.critic import critic_metrics, value_loss
from lightningrl.trainer.forward import Outputs
from lightningrl.trainer.importance import importance_weights
from lightningrl.trainer.kl import kl
from lightningrl.trainer.losses import LOSSES, Clips, Terms, ratios
from lightningrl.trainer.sequences import sequences_of


def objective(
    forest: Forest, outputs: Outputs, config: LossConfig, *, reference: Tensor | None
) -> tuple[Tensor, dict[str, float]]:
    """The loss (a scalar) and its metrics. `reference`: [M] log-probabilities under the weights at the start of
    training;
    None without KL.
    """
    logprobs = outputs.logprobs
    behaviour, proximal, A, w = (
        _tensor(x, logprobs) for x in (forest.logprobs, forest.proximal, forest.advantages, forest.weights)
    )
    old = proximal if config.proximal else behaviour
    terms = Terms(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=A,
        sequences=sequences_of(forest, config.ratio, device=logprobs.device),
    )
    losses, clips = LOSSES[config.name](terms, config)
    metrics = _ratio_metrics(terms, clips)
    if config.importance != "none":  # the ratio corrects from `old` to the current weights
        target = logprobs.detach() if config.name == "pg" else old
        u, exceeds = importance_weights(target, behaviour, forest, config)
        losses = losses * u
        metrics |= {"loss/importance_mean": float(u.mean()), "loss/importance_capped": _share(exceeds)}
    if reference is not None:
        divergence = kl(logprobs, reference, config.kl_estimator)
        losses = losses + config.kl_coef * divergence
        metrics |= {"loss/kl": float(divergence.detach().mean())}
    if config.entropy_coef:
        losses = losses - config.entropy_coef * outputs.entropies
    loss = (losses * w).sum()
    if outputs.values is not None and forest.returns is not None:
        returns = _tensor(forest.returns, outputs.values)
        loss = loss + config.value_coef * value_loss(outputs.values, returns, forest)
        metrics |= critic_metrics(outputs.values, returns)
    return loss, {"loss/value": float(loss.detach())} | metrics


def look_metrics(forest: Forest, outputs: Outputs) -> dict[str, float]:
    """Metrics that need no loss. `policy/kl_engine`: k3 estimate (joschu.net/blog/kl-approx.html) of the KL divergence
    from the recorded logprobs, in nats; before the first update it is rounding noise.
    """
    delta = outputs.logprobs.detach() - _tensor(forest.logprobs, outputs.logprobs)
    return {
        "policy/entropy": float(outputs.entropies.detach().mean()),
        "policy/kl_engine": float((torch.expm1(delta) - delta).mean()),
        "policy/logprob_gap_max": float(delta.abs().max()),
        "tokens/computed": float(len(forest.token_ids)),
        "tokens/terms": float(len(forest.targets)),
    }


@torch.no_grad()
def _ratio_metrics(terms: Terms, clips: Clips) -> dict[str, float]:
    r = ratios(terms)
    clipped = torch.stack(list(clips.values())).any(0)
    return {
        "loss/clip_fraction": _share(clipped),
        **{f"loss/clip_fraction_{why}": _share(which) for why, which in clips.items()},
        "loss/ratio_max": float(r.max()),
        "loss/ratio_mean": float(r.mean()),
    }


def _share(which: Tensor) -> float:
    return float(which.to(torch.float64).mean())


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like)
