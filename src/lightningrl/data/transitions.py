"""Records → trajectories: the input, output and reward of each call of an accepted attempt.

A call that must not be trained stays in its trajectory and is marked with `left_out`, because a group's baseline is
computed over all of its members. A report counts the tokens that are left out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.errors import GraderError
from lightningrl.types import FINAL, Call, Reward, Rollout, Trajectory, Transition, by_attempt

REPLAYED = "replayed"
"""The reason for leaving out a call of a branch whose answer was played back: the engine sampled nothing for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What happened to the sampled tokens of a batch. `trained_tokens` and `left_out_tokens` add up to all of them.

    The tokens of a played-back call count nowhere here: they were sampled, and perhaps trained, in the trunk.
    """

    succeeded: int
    """Number of rollouts with a trajectory."""
    excluded: int
    """Rollouts without an accepted attempt. They are left out of their group: a failure is not a reward of 0."""
    trained_calls: int
    trained_tokens: int
    left_out_calls: Mapping[str, int]
    """Reason → number of calls that are not trained, played-back calls among them."""
    left_out_tokens: Mapping[str, int]
    """Reason → number of their sampled tokens. `replayed` is not among the reasons."""

    def metrics(self) -> dict[str, float]:
        """`area/name` → value."""
        tokens = {f"tokens/left_out_{reason}": float(n) for reason, n in self.left_out_tokens.items()}
        return {
            "rollouts/succeeded": float(self.succeeded),
            "rollouts/excluded": float(self.excluded),
            "tokens/selected": float(self.trained_tokens),
            **tokens,
        }


def trajectories_of(
    rollouts: Sequence[Rollout],
    calls: Iterable[Call],
    rewards: Iterable[Reward],
    *,
    policy: str,
    trains: Callable[[str], bool] = lambda agent: True,
    reward: str = FINAL,
    oldest_version: int = 0,
) -> tuple[list[Trajectory], Report]:
    """One trajectory for each rollout that succeeded, in the order given. Records of other attempts are ignored.

    `trains`: whether calls of an agent are trained. `reward`: name of the attempt's reward to train on. Calls of
    weights older than `oldest_version` are left out as `stale`. Raises `GraderError` if a rollout has no such reward,
    or several and not exactly one from the grader.
    """
    calls_of, rewards_of = by_attempt(calls), by_attempt(rewards)
    made: list[Trajectory] = []
    for rollout in rollouts:
        attempt_id = rollout.accepted_attempt_id
        if rollout.status != "succeeded" or attempt_id is None:
            continue
        given = rewards_of.get(attempt_id, [])
        steps = step_rewards(given)
        ordered = sorted(calls_of.get(attempt_id, []), key=lambda call: call.index)
        reasons = [why_left_out(call, policy=policy, trains=trains, oldest_version=oldest_version) for call in ordered]
        made.append(
            Trajectory(
                rollout_id=rollout.id,
                group_id=rollout.group_id,
                task_id=rollout.task.id,
                transitions=tuple(
                    _transition(c, reward=steps.get(c.id), left_out=why)
                    for c, why in zip(ordered, reasons, strict=True)
                ),
                reward=attempt_reward(given, name=reward, rollout_id=rollout.id),
                branch=rollout.branch,
            )
        )
    return made, _report(made, excluded=len(rollouts) - len(made))


def why_left_out(call: Call, *, policy: str, trains: Callable[[str], bool], oldest_version: int = 0) -> str | None:
    """The first reason why a call must not be trained; None if it is trained.

    The trainer divides the policy's logits by the recorded temperature. Importance ratios are correct only if the
    recorded log-probabilities are of that distribution:

        temperature > 0          trained: the trainer scales its logits in the same way
        temperature 0            `sampling`: greedy decoding does not sample
        top_p < 1 or top_k > 0   `sampling`: log-probabilities are normalised over a subset of the tokens
        grammar                  `grammar`: log-probabilities are normalised over the tokens that the grammar allowed
    """
    reasons = {
        REPLAYED: call.replays is not None,
        "incomplete": call.capture == "incomplete" or len(call.prompt_ids) == 0,
        call.finish_reason: call.finish_reason in ("cancelled", "error"),
        "logprobs": len(call.logprobs) != len(call.completion_ids) or not np.isfinite(call.logprobs).all(),
        "policy": call.policy != policy,
        "agent": not trains(call.agent),
        "stale": call.policy_version < oldest_version,
        "grammar": call.sampling.grammar is not None,
        "sampling": call.sampling.temperature <= 0 or call.sampling.top_p < 1 or call.sampling.top_k > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def attempt_reward(rewards: Sequence[Reward], *, name: str = FINAL, rollout_id: str) -> float:
    """The reward of an attempt with this name. Rewards of single calls do not count."""
    named = [r for r in rewards if r.name == name and r.call_id is None]
    graded = [r for r in named if r.source == "grader"]
    chosen = named if len(named) == 1 else graded
    if len(chosen) != 1:
        sources = ", ".join(f"`{r.source}`" for r in named) or "no source"
        given = ", ".join(sorted({f"`{r.name}`" for r in rewards})) or "none"
        raise GraderError(
            f"rollout `{rollout_id}` needs one `{name}` reward; it was given by {sources}",
            hint=f"let the reward function give `{name}`, once; rewards given: {given}",
        )
    return chosen[0].value


def step_rewards(rewards: Sequence[Reward]) -> dict[str, float]:
    """Call id → sum of the rewards whose target is this call."""
    sums: dict[str, float] = {}
    for reward in rewards:
        if reward.call_id is not None:
            sums[reward.call_id] = sums.get(reward.call_id, 0.0) + reward.value
    return sums


def _transition(call: Call, *, reward: float | None, left_out: str | None) -> Transition:
    return Transition(
        call_id=call.id,
        parent_call_id=call.parent_call_id,
        agent=call.agent,
        policy_version=call.policy_version,
        prompt_ids=call.prompt_ids,
        completion_ids=call.completion_ids,
        logprobs=call.logprobs,
        reward=reward,
        temperature=call.sampling.temperature,
        truncated=call.finish_reason == "length",
        started_at=call.started_at,
        ended_at=call.ended_at,
        replays=call.replays,
        left_out=left_out,
    )


def _report(made: Sequence[Trajectory], *, excluded: int) -> Report:
    calls: Counter[str | None] = Counter()
    tokens: Counter[str | None] = Counter()
    for transition in (t for trajectory in made for t in trajectory.transitions):
        calls[transition.left_out] += 1
        tokens[transition.left_out] += len(transition.completion_ids)
    tokens.pop(REPLAYED, None)
    return Report(
        succeeded=len(made),
        excluded=excluded,
        trained_calls=calls.pop(None, 0),
        trained_tokens=tokens.pop(None, 0),
        left_out_calls={str(reason): n for reason, n in sorted(calls.items(), key=str)},
        left_out_tokens={str(reason): n for reason, n in sorted(tokens.items(), key=str)},
    )
