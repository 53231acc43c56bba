"""verl's results on the batch: advantages, losses with gradients, KL estimates and rollout corrections.

Legend: R rollouts (rows) · T positions of a row · M sampled tokens, row by row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from batch import row_mask, rows
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig

AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def answers(batch: dict[str, Any]) -> dict[str, Any]:
    asked = ("old", "new", "behaviour", "reference", "values", "old_values", "step_rewards", "advantages_of_calls")
    table = {name: torch.tensor(rows(batch[name])) for name in asked}
    table["mask"] = torch.tensor(row_mask())
    table["advantages"] = torch.tensor(batch["advantages"], dtype=torch.float64)[:, None] * table["mask"]
    return {
        "advantages": _advantages(batch, table, rollouts=12),
        "advantages with a group of one": _advantages(batch, table, rollouts=13),
        "gae": _gae(table, gamma=0.9, lam=0.8),
        "losses": _losses(table),
        "kl": {name: _kl(table, name) for name in ("k1", "k2", "k3", "k1+", "k3+")},
        "correction": {**_corrections(table), **_rejections(table)},
        "value_loss": _value_losses(table),
    }


def _advantages(batch: dict[str, Any], table: dict[str, Tensor], *, rollouts: int) -> dict[str, list[float]]:
    """[M of the first rollouts] As in verl, the reward is at the last sampled token of each row."""
    mask = table["mask"][:rollouts]
    last = (mask * torch.arange(mask.shape[1])).argmax(1)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(last)), last] = torch.tensor(batch["rewards"][:rollouts], dtype=torch.float64)
    index = np.array(batch["groups"][:rollouts])
    config = AlgoConfig(gamma=1.0)
    asked: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "grpo": lambda: verl.compute_grpo_outcome_advantage(rewards, mask, index),
        "grpo-without-std": lambda: verl.compute_grpo_outcome_advantage(
            rewards, mask, index, norm_adv_by_std_in_grpo=False
        ),
        "grpo-vectorized": lambda: verl.compute_grpo_vectorized_outcome_advantage(rewards, mask, index),
        "rloo": lambda: verl.compute_rloo_outcome_advantage(rewards, mask, index),
        "rloo-vectorized": lambda: verl.compute_rloo_vectorized_outcome_advantage(rewards, mask, index),
        "reinforce++": lambda: verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config),
        "reinforce++-baseline": lambda: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards, mask, index
        ),
        "opo": lambda: verl.compute_opo_outcome_advantage(rewards, mask, index),
        "gpg": lambda: verl.compute_gpg_outcome_advantage(rewards, mask, index),
    }
    return {name: _flat(ask()[0], mask) for name, ask in asked.items()}


def _gae(table: dict[str, Tensor], *, gamma: float, lam: float) -> dict[str, Any]:
    advantages, returns = verl.compute_gae_advantage_return(
        table["step_rewards"], table["values"], table["mask"], *torch.tensor([gamma, lam], dtype=torch.float64)
    )
    mask = table["mask"]
    return {"gamma": gamma, "lam": lam, "advantages": _flat(advantages, mask), "returns": _flat(returns, mask)}


def _losses(table: dict[str, Tensor]) -> dict[str, Any]:
    clipped: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    sequence: dict[str, Any] = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
    asked: dict[str, tuple[Any, str, dict[str, Any], str]] = {
        **{
            f"vanilla, {mode}": (verl.compute_policy_loss_vanilla, mode, clipped, "advantages") for mode in AGGREGATIONS
        },
        "vanilla, dual clip far away": (
            verl.compute_policy_loss_vanilla,
            "token-mean",
            {**clipped, "clip_ratio_c": 1e9},
            "advantages",
        ),
        "gspo": (verl.compute_policy_loss_gspo, "seq-mean-token-mean", sequence, "advantages"),
        "gspo, advantages of calls": (
            verl.compute_policy_loss_gspo,
            "seq-mean-token-mean",
            sequence,
            "advantages_of_calls",
        ),
        "cispo": (verl.compute_policy_loss_cispo, "token-mean", clipped, "advantages"),
        "gpg": (verl.compute_policy_loss_gpg, "token-mean", {}, "advantages"),
    }
    return {name: _loss(table, *how) for name, how in asked.items()}


def _loss(
    table: dict[str, Tensor], function: Any, mode: str, settings: dict[str, Any], advantages: str
) -> dict[str, Any]:
    config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, **settings)
    return _with_gradient(
        table,
        lambda new: function(table["old"], new, table[advantages], table["mask"], loss_agg_mode=mode, config=config)[0],
    )


def _kl(table: dict[str, Tensor], name: str) -> dict[str, Any]:
    """Each token's value, and the gradient of their sum."""
    mask = table["mask"]
    values = verl.kl_penalty(table["new"], table["reference"], name)
    summed = _with_gradient(table, lambda new: (verl.kl_penalty(new, table["reference"], name) * mask).sum())
    return {"values": _flat(values, mask), "gradient": summed["gradient"]}


def _corrections(table: dict[str, Tensor]) -> dict[str, Any]:
    """The clipped loss around `old`, with weights old / behaviour; and REINFORCE with weights new / behaviour."""
    mask = table["mask"]
    config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28)
    answered: dict[str, Any] = {}
    for level in ("token", "sequence"):
        weights = _weights(table["old"], table, rollout_is=level, rollout_is_threshold=2.0)
        answered[f"vanilla, {level}"] = {"weights": _flat(weights, mask)} | _with_gradient(
            table,
            lambda new, u=weights: verl.compute_policy_loss_vanilla(
                table["old"], new, table["advantages"], mask, "token-mean", config, rollout_is_weights=u
            )[0],
        )
        weights = _weights(table["new"], table, rollout_is=level, rollout_is_threshold=2.0)
        answered[f"reinforce, {level}"] = {"weights": _flat(weights, mask)} | _with_gradient(
            table,
            lambda new, u=weights: verl.compute_policy_loss_reinforce(
                table["behaviour"], new, table["advantages"], mask, "token-mean", config, rollout_is_weights=u
            )[0],
        )
    return answered


def _rejections(table: dict[str, Tensor]) -> dict[str, Any]:
    """Weights above the cap become 0. `icepop`: a weight. `rejection`: a mask, which also reduces the token count."""
    mask = table["mask"]
    config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28)
    answered: dict[str, Any] = {}
    for level in ("token", "sequence"):
        weights = _weights(table["old"], table, rollout_is=level, rollout_is_threshold="1e-9_2.0")
        answered[f"icepop, {level}"] = {"weights": _flat(weights, mask)}
    for level, rule in (("token", "token_k1"), ("sequence", "seq_sum_k1")):
        proto, kept, _ = compute_rollout_correction_and_rejection_mask(
            table["old"],
            table["behaviour"],
            mask,
            rollout_is=level,
            rollout_is_threshold=2.0,
            rollout_rs=rule,
            rollout_rs_threshold="0.5_1e8",
        )
        assert proto is not None
        weights = proto.batch["rollout_is_weights"]
        answered[f"rejection, {level}"] = {"kept": _flat(kept, mask)} | _with_gradient(
            table,
            lambda new, u=weights, kept=kept: verl.compute_policy_loss_vanilla(
                table["old"], new, table["advantages"], kept, "token-mean", config, rollout_is_weights=u
            )[0],
        )
    return answered


def _weights(target: Tensor, table: dict[str, Tensor], **settings: Any) -> Tensor:
    proto, _, _ = compute_rollout_correction_and_rejection_mask(target, table["behaviour"], table["mask"], **settings)
    assert proto is not None
    return proto.batch["rollout_is_weights"]


def _value_losses(table: dict[str, Tensor]) -> dict[str, Any]:
    """Losses of the critic. Its targets are arbitrary: old values plus step rewards."""
    returns = table["old_values"] + table["step_rewards"]
    answered: dict[str, Any] = {"returns": _flat(returns, table["mask"])}
    for name, clip in (("clipped", 0.2), ("clip far away", 1e9)):
        values = table["values"].clone().requires_grad_()
        loss, _ = verl.compute_value_loss(values, returns, table["old_values"], table["mask"], clip, "token-mean")
        (gradient,) = torch.autograd.grad(loss, values)
        answered[name] = {"loss": float(loss.detach()), "gradient": _flat(gradient, table["mask"])}
    return answered


def _with_gradient(table: dict[str, Tensor], loss_of: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    new = table["new"].clone().requires_grad_()
    loss = loss_of(new)
    (gradient,) = torch.autograd.grad(loss, new)
    return {"loss": float(loss.detach()), "gradient": _flat(gradient, table["mask"])}


def _flat(table: Tensor, mask: Tensor) -> list[float]:
    """[R T] → [M]"""
    return table.detach().to(torch.float64)[mask == 1].tolist()
