"""The golden vectors, and our functions' results on the same inputs. Legend: M sampled tokens, rollout by rollout."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from lightningrl import plugins
from lightningrl.algorithms import lessons_of
from lightningrl.config import AlgorithmConfig, LossConfig
from lightningrl.data.forest import Forest, Lesson, build_forest
from lightningrl.trainer.forward import Outputs
from lightningrl.trainer.importance import importance_weights
from lightningrl.trainer.kl import kl
from lightningrl.trainer.objective import objective
from lightningrl.types import Doubles, Trajectory, Transition

GOLDEN: Mapping[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())
BATCH: Mapping[str, Any] = GOLDEN["batch"]
OF_TRL: int = GOLDEN["trl"]["rollouts"]
"""Number of rollouts in TRL's results: its groups all have the same size."""
Answer: TypeAlias = dict[str, Doubles]


def theirs(path: str) -> Answer:
    """`trl/losses/grpo` → TRL's results."""
    found: Any = GOLDEN
    for name in path.split("/"):
        found = found[name]
    return {name: np.array(value) for name, value in (found if isinstance(found, dict) else {"values": found}).items()}


def gap(ours: Answer, theirs: Answer) -> float:
    """Largest difference between numbers of the same name. Ours may lack some names."""
    return max(float(np.max(np.abs(value - theirs[name]))) for name, value in ours.items())


def lengths(*, rollouts: int | None = None) -> Doubles:
    """[R] number of sampled tokens."""
    return np.array([sum(calls) for calls in BATCH["calls"][:rollouts]], np.float64)


def of_tokens(per_rollout: Sequence[float] | Doubles) -> Doubles:
    """[R] → [M]: repeats a rollout's value for each of its tokens."""
    return np.repeat(np.asarray(per_rollout, np.float64), lengths(rollouts=len(per_rollout)).astype(int))


def trajectories(
    *, rollouts: int | None = None, recorded: str = "old", one_call_per_token: bool = False
) -> list[Trajectory]:
    """The batch. `recorded`: which log-probabilities are those of the weights that sampled."""
    made, at = [], 0
    for r, sizes in enumerate(BATCH["calls"][:rollouts]):
        calls = []
        for c, n in enumerate([1] * sum(sizes) if one_call_per_token else sizes):
            calls.append(
                Transition(
                    call_id=f"r{r}c{c}",
                    parent_call_id=f"r{r}c{c - 1}" if c else None,
                    agent="",
                    policy_version=0,
                    prompt_ids=np.array([r, *range(at)], np.int32),
                    completion_ids=np.arange(n, dtype=np.int32),
                    logprobs=np.array(BATCH[recorded][at : at + n], np.float32),
                    reward=BATCH["step_rewards"][at] if one_call_per_token else None,
                    value=BATCH["values"][at] if one_call_per_token else None,
                )
            )
            at += n
        group = BATCH["groups"][r]
        reward = 0.0 if one_call_per_token else BATCH["rewards"][r]
        made.append(
            Trajectory(rollout_id=f"r{r}", group_id=group, task_id=group, transitions=tuple(calls), reward=reward)
        )
    return made


def advantages(name: str, *, rollouts: int | None = None) -> Answer:
    """[M] advantages from the rewards of the batch."""
    lessons, _ = lessons_of(trajectories(rollouts=rollouts), AlgorithmConfig(advantage=name))
    return {"values": np.concatenate([lesson.advantages for lesson in lessons]).astype(np.float64)}


def gae() -> Answer:
    """[M] advantages before scaling, where every token is a call. `returns`: targets of the critic."""
    asked = GOLDEN["verl"]["gae"]
    credit = plugins.load("gae_calls", kind="credit")
    credits = credit(trajectories(one_call_per_token=True), discount=asked["gamma"], trace_decay=asked["lam"])
    return {
        "advantages": np.concatenate([c.values - c.baselines for c in credits]),
        "returns": np.concatenate([c.values for c in credits]),
    }


def loss(
    aggregation: Any, *, rollouts: int | None = None, recorded: str = "old", of_calls: bool = False, **settings: Any
) -> Answer:
    """The loss with the batch's own advantages, and its gradient [M] by each log-probability."""
    config = LossConfig(**settings)
    forest = _forest(aggregation, rollouts=rollouts, recorded=recorded, of_calls=of_calls)
    M = len(forest.targets)
    new, reference, entropies = (
        torch.tensor(BATCH[name][:M], dtype=torch.float64) for name in ("new", "reference", "entropies")
    )
    outputs = Outputs(logprobs=new.requires_grad_(), entropies=entropies, values=None)
    value, _ = objective(forest, outputs, config, reference=reference if config.kl_coef else None)
    (gradient,) = torch.autograd.grad(value, new)
    return {"loss": value.detach().numpy(), "gradient": gradient.numpy()}


def correction(target: str, **settings: Any) -> Answer:
    """[M] importance weights from the sampling weights to `target`."""
    forest = _forest("token-mean", rollouts=None, recorded="behaviour")
    to = torch.tensor(BATCH[target], dtype=torch.float64)
    config = LossConfig(proximal=True, **settings)
    weights, _ = importance_weights(to, torch.tensor(BATCH["behaviour"], dtype=torch.float64), forest, config)
    return {"weights": weights.numpy()}


def divergence(estimator: Any) -> Answer:
    """[M] estimates of the KL divergence, and the gradient of their sum."""
    new, reference = (torch.tensor(BATCH[name], dtype=torch.float64) for name in ("new", "reference"))
    values = kl(new.requires_grad_(), reference, estimator)
    (gradient,) = torch.autograd.grad(values.sum(), new)
    return {"values": values.detach().numpy(), "gradient": gradient.numpy()}


def critic(value_coef: float) -> Answer:
    """The critic's loss where every token is a call, and its gradient [M] by each value."""
    lessons, _ = lessons_of(
        trajectories(one_call_per_token=True), AlgorithmConfig(credit="gae_calls", aggregation="token-mean")
    )
    returns = GOLDEN["verl"]["value_loss"]["returns"]
    still = [
        replace(lesson, advantages=lesson.advantages * 0, returns=R) for lesson, R in zip(lessons, returns, strict=True)
    ]
    values = torch.tensor(BATCH["values"], dtype=torch.float64, requires_grad=True)
    new = torch.tensor(BATCH["new"], dtype=torch.float64)
    outputs = Outputs(logprobs=new, entropies=new, values=values)
    value, _ = objective(build_forest(still), outputs, LossConfig(value_coef=value_coef), reference=None)
    (gradient,) = torch.autograd.grad(value, values)
    return {"loss": value.detach().numpy(), "gradient": gradient.numpy()}


def _forest(aggregation: Any, *, rollouts: int | None, recorded: str, of_calls: bool = False) -> Forest:
    """With the batch's own advantages; `old` are the weights before the first update."""
    lessons, _ = lessons_of(
        trajectories(rollouts=rollouts, recorded=recorded), AlgorithmConfig(aggregation=aggregation)
    )
    A = np.array(BATCH["advantages_of_calls"]) if of_calls else of_tokens(BATCH["advantages"][:rollouts])
    old = np.array(BATCH["old"])
    given: list[Lesson] = []
    at = 0
    for lesson in lessons:
        here = slice(at, at := at + len(lesson.weights))
        given.append(replace(lesson, advantages=A[here].astype(np.float32), proximal=old[here]))
    return build_forest(given)
