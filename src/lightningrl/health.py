"""Is what a run learns from healthy? Rows of step metrics in; warnings in words, each with its figure and what can be
done, out.

Every check looks at several steps, as one noisy step says nothing; what may never happen at all is told at once. A
warning is raised when it becomes true, and again only after it had been gone for a while.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, get_args

import numpy as np

from lightningrl.config import LearnerConfig
from lightningrl.types import Capture

Row: TypeAlias = Mapping[str, float]
"""`area/name` → value of one step, as `metrics.jsonl` has it. Where several policies learn, what is of one of them
begins with its name.
"""
Check: TypeAlias = Callable[[Sequence[Row], LearnerConfig], str | None]
"""The steps so far, as one policy sees them → what is wrong; None if nothing is, or if it cannot be known."""

RECENT = 5
"""Steps that are looked at together: the mean of five is noisy by less than half of what one is."""
QUIET = 10
"""Steps for which a warning has to be gone before it is raised once more."""
SILENT_GROUPS = 0.5
"""Share of groups: more than half of all rollouts are then run for nothing."""
SOLVED = 0.9
"""Mean reward, where 1 is the best: groups are then silent because all of their rollouts are right."""
TRUNCATED = 0.1
"""Share of calls: a policy that is cut off learns where the limit is, not what the answer is."""
EXCLUDED = 0.1
"""Share of rollouts: those that fail are seldom a fair sample of the tasks."""
FORKED = 0.2
"""Share of calls. Some forks are meant (a summary in place of a history); a fifth of the prefixes is work done twice.
"""
LOGS = 0.5
"""Share of a program's attempts that printed several lines and got 0."""
LEFT_OUT = 0.1
"""Share of the sampled tokens that a policy should learn from."""
RATIO_DRIFT = 0.1
"""|mean ratio - 1|: over tokens of the weights that sampled them the mean is 1 exactly, whatever the new weights are;
only heavy tails move it.
"""
RATIO_MAX = 100.0
"""A token has become a hundred times likelier within one batch."""
CLIPPED = 0.3
"""Share of tokens: twice what GSPO clips on purpose, and hundreds of times what GRPO does (arXiv 2507.18071, figure 2).
"""
CAPPED = 0.1
"""Share of tokens whose importance weight was cut: the correction is then no longer one."""
ENTROPY_LEFT, ENTROPY_LOW = 0.1, 0.05
"""Of what the run began with; and in nats a token. Both: a policy may begin sure of itself, and need not stay as it
began.
"""
KL_ENGINE = 0.1
"""Nats a token; an update of a trust region is held to 0.01 (arXiv 1502.05477, section 8)."""
LOGPROB_GAP = {"float32": 1e-3, "bfloat16": 1.0}
"""Largest |Δ logprob| in nats between engine and trainer with the same weights. In float32 ten times what tests hold
(1e-4); bfloat16 is off by 0.02 on average, and a token in thousands by much more.
"""
CRITIC_STEPS, CRITIC_EXPLAINS = 20, 0.05
"""Steps that a critic gets to learn, and the share of the returns' variance that it must explain by then."""
TREND_STEPS, TREND_AT_LEAST = 40, 12
"""Window of the test for a trend, and what it takes to begin."""
TREND_Z = 3.0
"""One-sided p = 0.0013 of each of two trends (Mann-Kendall): noise alone is to raise no alarm in a run of hundreds of
steps.
"""

SELECTED: frozenset[str] = frozenset({"policy", "agent"})
"""Reasons to leave a call out that the recipe itself gives."""
MENDING = {
    "incomplete": "a stream broke or an answer had no end: see `lightningrl rollouts RUN_DIR --report`",
    "cancelled": "the agent hung up before the answer was there: give its client a longer timeout",
    "error": "the engine failed: see `lightningrl rollouts RUN_DIR --report`",
    "logprobs": "the engine gave no logprobs, or some that are not finite: see docs/engines.md",
    "stale": "old weights answered: shorten rollouts, or raise `loop.max_off_policy_steps` and set `loss.importance`",
    "grammar": "drawn under a grammar: leave out `tool_choice`, `response_format` or `gateway.strict` (docs/constrained.md)",
    "sampling": "not drawn from the policy itself: leave `top_p`, `top_k` and a temperature of 0 to exams",
}
"""Reason to leave a call out → what can be done."""


class Health:
    """Watches one run. A step's metrics in, what has newly gone wrong out."""

    def __init__(self, learners: Mapping[str, LearnerConfig]) -> None:
        self._learners = learners
        self._views: dict[str, list[Row]] = {name: [] for name in learners}
        self._steps = 0
        self._last: dict[str, int] = {}  # warning → the last step at which it was true

    def stepped(self, row: Row) -> list[str]:
        """Warnings that have become true with this step."""
        for name, rows in self._views.items():
            rows.append(view(row, name))
        self._steps += 1
        true = _warnings(self._views, self._learners)
        fresh = [text for key, text in true.items() if self._steps - self._last.get(key, -QUIET) > QUIET]
        self._last |= dict.fromkeys(true, self._steps)
        return fresh


def warnings_of(rows: Sequence[Row], learners: Mapping[str, LearnerConfig]) -> list[str]:
    """All that is wrong after the last of these steps."""
    return list(_warnings({name: [view(row, name) for row in rows] for name in learners}, learners).values())


def notes_of(rows: Sequence[Row], learners: Mapping[str, LearnerConfig]) -> list[str]:
    """What is worth knowing after the last of these steps, and nothing wrong."""
    several = len(learners) > 1
    views = {name: [view(row, name) for row in rows[-RECENT:]] for name in learners}
    return [
        (f"`{name}`: " if several else "")
        + f"nearly solved: `{mean_of(own, 'reward/mean'):.3g}` of 1 is earned on training tasks; "
        "hint: take harder tasks, or end it here"
        for name, own in views.items()
        if solved(own)
    ]


def solved(rows: Sequence[Row]) -> bool:
    """Whether there is little left to learn from the tasks of the last steps. A reward above 1 is measured otherwise,
    and says nothing.
    """
    rewards = [row["reward/mean"] for row in rows[-RECENT:] if "reward/mean" in row]
    return bool(rewards) and max(rewards) <= 1 and float(np.mean(rewards)) >= SOLVED


def view(row: Row, policy: str) -> Row:
    """What is of the policy, under the names that it has in a run with no other, and what is of the whole run."""
    own = {
        name.removeprefix(f"{policy}/"): value
        for name, value in row.items()
        if name.startswith(f"{policy}/") and name.count("/") > 1
    }
    return {**row, **own}


def _warnings(views: Mapping[str, Sequence[Row]], learners: Mapping[str, LearnerConfig]) -> dict[str, str]:
    """Which check of which policy → what it says."""
    found: dict[str, str] = {}
    for index, (name, rows) in enumerate(views.items()):
        for check in (*(OF_THE_RUN if index == 0 else ()), *OF_A_POLICY):
            text = check(rows, learners[name]) if rows else None
            if text:
                whose = f"`{name}`: " if len(learners) > 1 and check in OF_A_POLICY else ""
                found[f"{name}/{check.__name__}"] = whose + text
    return found


# of the whole run


def excluded(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["rollouts/excluded"], ["rollouts/excluded", "rollouts/succeeded"])
    if share is None or share <= EXCLUDED:
        return None
    return f"`{share:.0%}` of the rollouts failed and teach nothing; hint: `lightningrl rollouts RUN_DIR` and `agents.log` say why"


def truncated(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["calls/truncated"], CALLS)
    if share is None or share <= TRUNCATED:
        return None
    return (
        f"`{share:.0%}` of the calls ran into their token limit; hint: raise the agent's `max_tokens` or `engine.max_length`, "
        "or make it cost something: `algorithm.truncation_penalty`"
    )


def forked(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["calls/forked", "calls/partly"], CALLS)
    if share is None or share <= FORKED:
        return None
    return (
        f"`{share:.0%}` of the calls do not continue the history they were given: they are trained, but share little of it; "
        "hint: `lightningrl rollouts RUN_DIR --report` says where the agent has rewritten it (docs/token-exact.md)"
    )


def heldout_trained(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["tasks/heldout"], ["tasks/count"], at_least=1)
    if not share:
        return None
    return (
        f"`{share:.0%}` of the tasks that are trained on are held-out tasks, too; "
        "hint: held-out reward tells what was learnt only if held-out tasks are not trained on: give the splits inputs of their own"
    )


# of one policy


def silent_groups(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["groups/silent"], ["groups/count"], at_least=1)
    if share is None or share <= SILENT_GROUPS or solved(rows):
        return None
    if share < 1 and len(rows) < RECENT:  # of few steps only this says something: all groups
        return None
    reward = mean_of(rows[-RECENT:], "reward/mean")
    return (
        f"in `{share:.0%}` of the groups all rollouts were worth the same, so that they teach nothing (`{reward:.3g}` on average over all groups); "
        "hint: take tasks that are neither too hard nor too easy, a finer reward, a larger `loop.group_size`, or `algorithm.dynamic_sampling`"
    )


def left_out(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    shares = {reason: share for reason, share in left_out_shares(rows[-RECENT:]).items() if share > LEFT_OUT}
    if len(rows) < RECENT or not shares:
        return None
    reason, share = max(shares.items(), key=lambda item: item[1])
    others = "".join(f", `{share:.0%}` as `{other}`" for other, share in shares.items() if other != reason)
    mend = MENDING.get(reason, "see `lightningrl rollouts RUN_DIR --report`")
    return f"`{share:.0%}` of the sampled tokens were left out as `{reason}`{others}; hint: {mend}"


def skipped(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = rows[-1].get("optim/skipped", 0.0)
    if not share > 0:
        return None
    return (
        f"`{share:.0%}` of the updates of this step were not made, as a loss or a gradient was not finite; "
        "hint: the batch is in `skipped/`; lower `trainer.learning_rate`, or look for an infinite reward"
    )


def engine_gap(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    gap, most = rows[-1].get("policy/logprob_gap"), LOGPROB_GAP[config.model.dtype]
    if gap is None or gap <= most:
        return None
    return (
        f"engine and trainer disagree by `{gap:.2g}` nats about a token (at most `{most:g}` is rounding), and nothing else matters until they agree; "
        "hint: did the engine load the published weights, in the trainer's dtype (docs/engines.md)?"
    )


def far_from_sampling(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    kl = _recent(rows, "policy/kl_engine")
    if kl is None or kl <= KL_ENGINE:
        return None
    return (
        f"the weights that learn are `{kl:.2g}` nats a token away from those that sampled; "
        "hint: fewer `trainer.minibatches`, a lower `trainer.learning_rate`, or `loss.importance`"
    )


def ratio_explodes(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    mean, most = _recent(rows, "loss/ratio_mean"), _recent(rows, "loss/ratio_max")
    if config.loss.ratio == "token" and mean is not None and not abs(mean - 1) <= RATIO_DRIFT:
        return f"the mean ratio is `{mean:.3g}` where it should be 1: a few tokens decide the update; {SMALLER_STEPS}"
    if most is not None and not most <= RATIO_MAX:
        return f"tokens become up to `{most:.3g}` times likelier within one batch; {SMALLER_STEPS}"
    return None


def clipped(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _recent(rows, "loss/clip_fraction")
    if share is None or share <= CLIPPED:
        return None
    return f"`{share:.0%}` of the tokens are clipped; {SMALLER_STEPS}, or widen `loss.clip_low` and `loss.clip_high`"


def capped(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _recent(rows, "loss/importance_capped")
    if share is None or share <= CAPPED:
        return None
    return (
        f"`{share:.0%}` of the tokens exceed `loss.importance_cap`, so that what older weights sampled is no longer corrected for; "
        "hint: lower `loop.max_off_policy_steps`, or take a finer `loss.importance` (rollout → call → token)"
    )


def entropy_collapsed(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    first, now = _recent(rows[:RECENT], "policy/entropy"), _recent(rows, "policy/entropy")
    if first is None or now is None or now >= ENTROPY_LOW or now >= ENTROPY_LEFT * first:
        return None
    return (
        f"entropy has fallen from `{first:.2g}` to `{now:.2g}` nats a token: the policy tries nothing new any more; "
        "hint: raise `loss.clip_high` or `loss.entropy_coef`, or set `loss.kl_coef`"
    )


def critic_explains_nothing(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    explained = _recent(rows, "critic/explained_variance")
    if explained is None or len(rows) < CRITIC_STEPS or explained >= CRITIC_EXPLAINS:
        return None
    return (
        f"after {len(rows)} steps the critic explains `{explained:.0%}` of the returns' variance: its baselines are noise; "
        "hint: raise `loss.value_coef`, or take a credit without a critic (docs/algorithms.md)"
    )


def reward_hacking(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    trained, audit = config.algorithm.reward, config.algorithm.audit
    window = rows[-TREND_STEPS:]
    pairs = [
        (row[f"reward/{trained}"], row[f"reward/{audit}"])
        for row in window
        if {f"reward/{trained}", f"reward/{audit}"} <= row.keys()
    ]
    if not audit or len(pairs) < TREND_AT_LEAST:
        return None
    rising, falling = (np.array(values, np.float64) for values in zip(*pairs, strict=True))
    if trend(rising) < TREND_Z or trend(falling) > -TREND_Z:
        return None
    ends = [f"from `{values[:RECENT].mean():.3g}` to `{values[-RECENT:].mean():.3g}`" for values in (rising, falling)]
    return (
        f"suspicion of reward hacking: over {len(pairs)} steps `reward/{trained}` has risen {ends[0]} while `reward/{audit}`, "
        f"which nobody learns from, fell {ends[1]}; hint: read what earns it (`lightningrl rollouts RUN_DIR`), and go back to an earlier checkpoint"
    )


def audit_missing(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    audit = config.algorithm.audit
    if not audit or any(f"reward/{audit}" in row for row in rows[-RECENT:]):
        return None
    given = ", ".join(
        f"`{name.removeprefix('reward/')}`"
        for name in rows[-1]
        if name.startswith("reward/") and name not in NO_REWARDS
    )
    return f"nobody gives the reward `{audit}` that `algorithm.audit` names; hint: rewards given: {given or 'none'}"


def air_unused(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    rules = [name.removeprefix("reward/") for name in rows[-1] if name.startswith("reward/air.")]
    if config.algorithm.credit != "uniform" or not rules:
        return None
    return f'`{rules[0]}` rewards calls, and credit `uniform` does not learn from it; hint: `algorithm.credit = "air"` (docs/air.md)'


def logs_graded(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    row = rows[-1]
    if row.get("reward/mean") != 0 or row.get("answers/logs", 0.0) <= LOGS:
        return None
    return (
        "every reward is 0, and the program's answer was all that it printed, several lines of it; hint: are there logs on stdout? Let it write its"
        " answer to the file that `LIGHTNINGRL_OUTPUT` names, or print it last as a JSON object (docs/write-a-recipe.md)"
    )


SMALLER_STEPS = "hint: lower `trainer.learning_rate`, or make fewer `trainer.minibatches`"
CALLS = [f"calls/{capture}" for capture in get_args(Capture)]
"""Every call is captured in one of these ways."""
NO_REWARDS = ("reward/mean", "reward/std_in_group")
"""Figures about rewards that are not the mean of one."""
OF_THE_RUN: tuple[Check, ...] = (logs_graded, excluded, truncated, forked, heldout_trained)
OF_A_POLICY: tuple[Check, ...] = (
    skipped,
    engine_gap,
    reward_hacking,
    audit_missing,
    air_unused,
    silent_groups,
    left_out,
    ratio_explodes,
    clipped,
    capped,
    far_from_sampling,
    entropy_collapsed,
    critic_explains_nothing,
)


def trend(values: np.ndarray) -> float:
    """z of the Mann-Kendall test: how many more pairs rise than fall, in standard deviations of what noise would do. It
    asks for no straight line.

    S = Σ_{i<j} sign(x_j - x_i),  Var S = n (n-1) (2n+5) / 18 without ties; ties make it smaller, so z errs towards 0.
    """
    n = len(values)
    S = float(np.triu(np.sign(values[None, :] - values[:, None])).sum())
    return math.copysign(max(abs(S) - 1, 0.0), S) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18) if n > 1 else 0.0


def left_out_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Reason → share of the tokens that a policy should learn from. What other policies sampled, and roles that do not
    teach, are none of these.
    """
    prefix = "tokens/left_out_"
    sums = {
        name: sum(row.get(name, 0.0) for row in rows)
        for name in sorted({name for row in rows for name in row})
        if name.startswith(prefix)
    }
    wanted = {
        name.removeprefix(prefix): count for name, count in sums.items() if name.removeprefix(prefix) not in SELECTED
    }
    total = sum(wanted.values()) + sum(row.get("tokens/selected", 0.0) for row in rows)
    return {reason: count / total for reason, count in wanted.items() if total}


def _recent(rows: Sequence[Row], name: str) -> float | None:
    """Mean over the last steps; None where there are too few that say anything. A NaN is of an update that was not
    made, which is told elsewhere.
    """
    values = [row[name] for row in rows[-RECENT:] if name in row and not math.isnan(row[name])]
    return float(np.mean(values)) if len(values) == RECENT else None


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Over the steps that have this figure; NaN where none has."""
    values = [row[name] for row in rows if name in row]
    return float(np.mean(values)) if values else math.nan


def _share(rows: Sequence[Row], part: Sequence[str], whole: Sequence[str], *, at_least: int = RECENT) -> float | None:
    """Over the last steps together; None where there are fewer than `at_least`."""
    recent = rows[-RECENT:]
    total = sum(row.get(name, 0.0) for row in recent for name in whole)
    return (
        sum(row.get(name, 0.0) for row in recent for name in part) / total
        if total and len(recent) >= at_least
        else None
    )
