"""Which records does a policy learn from? Pure functions of records, used in training and to explain it afterwards."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from lightningrl.algorithms.air import shaped
from lightningrl.algorithms.options import discount_of
from lightningrl.config import AlgorithmConfig, RouteConfig
from lightningrl.data.transitions import Report, step_rewards, trajectories_of
from lightningrl.types import Call, Reward, Rollout, Trajectory


def learnable(
    batch: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    *,
    air: Sequence[Reward],
    policy: str,
    algorithm: AlgorithmConfig,
    routes: Sequence[RouteConfig],
    root: Path | None,
    oldest_version: int,
) -> tuple[list[Trajectory], Report]:
    """The trajectories of a batch for one policy, and a report. `air`: rewards that follow from spans."""
    potential = algorithm.shaping == "potential"
    trajectories, report = trajectories_of(
        batch,
        calls,
        rewards if potential else [*rewards, *air],
        policy=policy,
        trains=lambda agent: role_learns(agent, routes),
        reward=algorithm.reward,
        oldest_version=oldest_version,
    )
    if potential:
        earned, discount = step_rewards(air), discount_of(algorithm, root=root)
        trajectories = [shaped(trajectory, earned, discount=discount) for trajectory in trajectories]
    return trajectories, report


def role_learns(agent: str, routes: Sequence[RouteConfig]) -> bool:
    """Whether to train a role: its route decides, else the first route whose pattern matches, else the first."""
    named = [route for route in routes if route.agent == agent]
    unnamed = [route for route in routes if not route.agent]
    fitting = [route for route in unnamed if fnmatchcase(agent, route.model)]
    return any(route.train for route in (named or fitting or unnamed)[:1])


def silent_groups(batch: Sequence[Rollout], rewards: Sequence[Reward], *, names: set[str]) -> set[str]:
    """Ids of the groups in which all rollouts have the same reward, for each of the named rewards."""
    group_of = {rollout.accepted_attempt_id: rollout.group_id for rollout in batch if rollout.accepted_attempt_id}
    found: dict[tuple[str, str], set[float]] = {}
    for reward in rewards:
        if reward.call_id is None and reward.attempt_id in group_of:
            found.setdefault((group_of[reward.attempt_id], reward.name), set()).add(reward.value)
    return {
        rollout.group_id for rollout in batch if all(len(found.get((rollout.group_id, name), ())) < 2 for name in names)
    }
