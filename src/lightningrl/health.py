"""Health checks of a run: metrics of its steps → warnings, each with a figure and a hint.

Most checks look at several steps, as a single step is noisy. Errors that must never happen are reported at once.
A warning is raised when it becomes true; to be raised again, it must have been gone for `QUIET` steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

import numpy as np

from lightningrl.config import LearnerConfig
from lightningrl.types import Capture

Row: TypeAlias = Mapping[str, float]
"""`area/name` → value in one step, as in `metrics.jsonl`. With several policies, `NAME/area/name` belongs to one."""
Check: TypeAlias = Callable[[Sequence[Row], LearnerConfig], str | None]
"""Steps so far, as one policy sees them → a warning; None if all is well, or if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A warning or a note."""

    text: str
    """What is the case, with a figure, and after `; hint: ` what to do."""
    metric: str | None
    """The metric whose curve it is about; None: it is about no curve."""


RECENT = 5
"""Number of steps in a mean: the mean of five has less than half the noise of one."""
QUIET = 10
"""A warning is raised again if it was gone for this many steps."""
SILENT_GROUPS = 0.5
"""Share of groups: above it, more than half of all rollouts teach nothing."""
SOLVED = 0.9
"""Mean reward out of 1: above it, groups are silent because all of their rollouts succeed."""
TRUNCATED = 0.1
"""Share of calls: a policy that is cut off learns the limit, not the answer."""
EXCLUDED = 0.1
"""Share of rollouts: failed ones are seldom a fair sample of the tasks."""
VOID = 1 / 3
"""Share of branches: each cost an agent's run, and teaches nothing."""
FORKED = 0.2
"""Share of calls. Some forks are intended, such as a summary in place of a history; many forks waste compute."""
LOGS = 0.5
"""Share of attempts of a program that printed several lines and got 0."""
LEFT_OUT = 0.1
"""Share of the sampled tokens that the policy should learn from."""
RATIO_DRIFT = 0.1
"""|mean ratio - 1|: the expected ratio over sampled tokens is exactly 1; only heavy tails move the mean."""
RATIO_MAX = 100.0
"""Largest ratio: a token became a hundred times likelier within one batch."""
CLIPPED = 0.3
"""Share of tokens: twice that of GSPO, and hundreds of times that of GRPO (arXiv 2507.18071, figure 2)."""
CAPPED = 0.1
"""Share of tokens whose importance weight is capped: above it, importance sampling no longer corrects."""
ENTROPY_LEFT, ENTROPY_LOW = 0.1, 0.05
"""Share of the first entropy, and nats a token. Both must be undercut: low entropy or a drop alone may be normal."""
KL_ENGINE = 0.1
"""Nats a token; TRPO limits an update to 0.01 (arXiv 1502.05477, section 8)."""
LOGPROB_GAP = {"float32": 1e-3, "bfloat16": 1.0, "float16": 0.15}
"""Largest |Δ logprob| in nats between engine and trainer with the same weights. For float32 it is ten times the limit
in tests (1e-4). In bfloat16 the mean is 0.02, and one token in thousands is off by much more. Gaps in float16 are an
eighth of those in bfloat16 (benchmarks/precision.py).
"""
CRITIC_STEPS, CRITIC_EXPLAINS = 20, 0.05
"""Number of steps for a critic to learn, and the share of the returns' variance that it must then explain."""
TREND_STEPS, TREND_AT_LEAST = 40, 12
"""Largest and smallest number of steps in the test for a trend."""
TREND_Z = 3.0
"""One-sided p = 0.0013 for each of two trends (Mann-Kendall), so that noise raises no alarm in hundreds of steps."""

SELECTED: frozenset[str] = frozenset({"policy", "agent"})
"""Reasons for leaving a call out that follow from the recipe."""
REMEDIES = {
    "incomplete": "a stream broke off: see `lightningrl rollouts RUN_DIR --report`",
    "cancelled": "the agent closed the connection before the answer: give its client a longer timeout",
    "error": "the engine failed: see `lightningrl rollouts RUN_DIR --report`",
    "logprobs": "the engine returned no logprobs, or logprobs that are not finite: see docs/engines.md",
    "stale": "old weights answered: shorten rollouts, or raise `loop.max_off_policy_steps` and set `loss.importance`",
    "grammar": "sampled with constrained decoding: leave out `tool_choice`, `response_format` or `gateway.strict` "
    "(docs/constrained.md)",
    "sampling": "not sampled from the policy itself: set `top_p`, `top_k` and a temperature of 0 only for evaluation",
}
"""Reason for leaving a call out → hint."""
DISJOINT = "held-out reward measures learning only if held-out tasks are not trained on; use different inputs per split"


class Health:
    """The warnings of one run, step by step."""

    def __init__(self, learners: Mapping[str, LearnerConfig]) -> None:
        self._learners = learners
        self._views: dict[str, list[Row]] = {name: [] for name in learners}
        self._steps = 0
        self._last: dict[str, int] = {}  # warning → the last step at which it was true

    def stepped(self, row: Row) -> list[str]:
        """Warnings that are new with this step."""
        for name, rows in self._views.items():
            rows.append(view(row, name))
        self._steps += 1
        true = _warnings(self._views, self._learners)
        fresh = [advice.text for key, advice in true.items() if self._steps - self._last.get(key, -QUIET) > QUIET]
        self._last |= dict.fromkeys(true, self._steps)
        return fresh


def warnings_of(rows: Sequence[Row], learners: Mapping[str, LearnerConfig]) -> list[Advice]:
    """All warnings that are true after the last step."""
    return list(_warnings({name: [view(row, name) for row in rows] for name in learners}, learners).values())


def notes_of(rows: Sequence[Row], learners: Mapping[str, LearnerConfig]) -> list[Advice]:
    """Notes after the last step that are not warnings."""
    notes: list[Advice] = []
    for name in learners:
        own = [view(row, name) for row in rows[-RECENT:]]
        if solved(own):
            whose = f"`{name}`: " if len(learners) > 1 else ""
            reward = mean_of(own, "reward/mean")
            text = f"{whose}nearly solved: mean reward on training tasks is `{reward:.3g}` of 1; "
            notes.append(Advice(text=text + "hint: use harder tasks, or stop here", metric="reward/mean"))
    return notes


def solved(rows: Sequence[Row]) -> bool:
    """Whether the last steps leave little to learn. False for rewards above 1, whose best value is not known."""
    rewards = [row["reward/mean"] for row in rows[-RECENT:] if "reward/mean" in row]
    return bool(rewards) and max(rewards) <= 1 and float(np.mean(rewards)) >= SOLVED


def view(row: Row, policy: str) -> Row:
    """The row as the policy sees it: its own metrics without the prefix of its name, and those of the whole run."""
    own = {
        name.removeprefix(f"{policy}/"): value
        for name, value in row.items()
        if name.startswith(f"{policy}/") and name.count("/") > 1
    }
    return {**row, **own}


def _warnings(views: Mapping[str, Sequence[Row]], learners: Mapping[str, LearnerConfig]) -> dict[str, Advice]:
    """`policy/check` → warning."""
    found: dict[str, Advice] = {}
    for index, (name, rows) in enumerate(views.items()):
        for check, metric in {**(OF_THE_RUN if index == 0 else {}), **OF_A_POLICY}.items():
            text = check(rows, learners[name]) if rows else None
            if text:
                whose = f"`{name}`: " if len(learners) > 1 and check in OF_A_POLICY else ""
                found[f"{name}/{check.__name__}"] = Advice(text=whose + text, metric=own_name(metric, rows, name))
    return found


def own_name(metric: str | None, rows: Sequence[Row], policy: str) -> str | None:
    """The name of a metric in `metrics.jsonl`: with several policies, that of this policy if it has its own."""
    own = f"{policy}/{metric}"
    return own if metric is not None and own in rows[-1] else metric


# checks of the whole run


def excluded(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(
        [_without_void(row) for row in rows], ["rollouts/excluded"], ["rollouts/excluded", "rollouts/succeeded"]
    )
    if share is None or share <= EXCLUDED:
        return None
    return f"`{share:.0%}` of the rollouts failed; hint: see `lightningrl rollouts RUN_DIR` and `agents.log`"


def void(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["forks/void"], ["forks/branches"], at_least=1)
    if share is None or share <= VOID:
        return None
    return (
        f"`{share:.0%}` of the branches are void: their agents went another way than recorded, and they teach nothing; "
        "hint: let the agent ask the same in the same place, without clocks or random ids, or set `loop.fork_share=0`"
    )


def truncated(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["calls/truncated"], CALLS)
    if share is None or share <= TRUNCATED:
        return None
    return (
        f"`{share:.0%}` of the calls reached their token limit; "
        "hint: raise the agent's `max_tokens` or `engine.max_length`, or set `algorithm.truncation_penalty`"
    )


def forked(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["calls/forked", "calls/partly"], CALLS)
    if share is None or share <= FORKED:
        return None
    return (
        f"`{share:.0%}` of the calls do not continue their history: they are trained, at a higher cost; "
        "hint: `lightningrl rollouts RUN_DIR --report` shows where the agent rewrites it (docs/token-exact.md)"
    )


def heldout_trained(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["tasks/heldout"], ["tasks/count"], at_least=1)
    if not share:
        return None
    return f"`{share:.0%}` of the training tasks are also held-out tasks; hint: {DISJOINT}"


# checks of one policy


def silent_groups(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = _share(rows, ["groups/silent"], ["groups/count"], at_least=1)
    if share is None or share <= SILENT_GROUPS or solved(rows):
        return None
    if share < 1 and len(rows) < RECENT:  # in so few steps, only a share of 1 is significant
        return None
    reward = mean_of(rows[-RECENT:], "reward/mean")
    return (
        f"in `{share:.0%}` of the groups all rewards are equal, so they teach nothing (mean reward `{reward:.3g}`); "
        "hint: use tasks that are neither too hard nor too easy, a finer reward, a larger `loop.group_size`, "
        "or `algorithm.dynamic_sampling`"
    )


def left_out(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    shares = {reason: share for reason, share in left_out_shares(rows[-RECENT:]).items() if share > LEFT_OUT}
    if len(rows) < RECENT or not shares:
        return None
    reason, share = max(shares.items(), key=lambda item: item[1])
    others = "".join(f", `{share:.0%}` as `{other}`" for other, share in shares.items() if other != reason)
    remedy = REMEDIES.get(reason, "see `lightningrl rollouts RUN_DIR --report`")
    return f"`{share:.0%}` of the sampled tokens were left out as `{reason}`{others}; hint: {remedy}"


def skipped(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    share = rows[-1].get("optim/skipped", 0.0)
    if not share > 0:
        return None
    return (
        f"`{share:.0%}` of the updates of this step were skipped, because a loss or a gradient was not finite; "
        "hint: the batch is in `skipped/`; lower `trainer.learning_rate`, or look for an infinite reward"
    )


def engine_gap(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    gap, most = rows[-1].get("policy/logprob_gap"), LOGPROB_GAP[config.model.dtype]
    if gap is None or gap <= most:
        return None
    return (
        f"engine and trainer disagree by `{gap:.2g}` nats on a token (rounding explains at most `{most:g}`); "
        "hint: check first that the engine loads the published weights in the trainer's dtype (docs/engines.md)"
    )


def far_from_sampling(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    kl = _recent(rows, "policy/kl_engine")
    if kl is None or kl <= KL_ENGINE:
        return None
    return (
        f"the trained weights are `{kl:.2g}` nats a token away from the weights that sampled; "
        "hint: lower `trainer.minibatches` or `trainer.learning_rate`, or set `loss.importance`"
    )


def ratio_explodes(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    mean, most = _recent(rows, "loss/ratio_mean"), _recent(rows, "loss/ratio_max")
    if config.loss.ratio == "token" and mean is not None and not abs(mean - 1) <= RATIO_DRIFT:
        return f"the mean ratio is `{mean:.3g}` and should be 1: a few tokens dominate the update; {SMALLER_STEPS}"
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
        f"`{share:.0%}` of the tokens exceed `loss.importance_cap`: importance sampling no longer corrects them; "
        "hint: lower `loop.max_off_policy_steps`, or use a finer `loss.importance` (rollout → call → token)"
    )


def entropy_collapsed(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    first, now = _recent(rows[:RECENT], "policy/entropy"), _recent(rows, "policy/entropy")
    if first is None or now is None or now >= ENTROPY_LOW or now >= ENTROPY_LEFT * first:
        return None
    return (
        f"entropy has fallen from `{first:.2g}` to `{now:.2g}` nats a token: the policy hardly explores any more; "
        "hint: raise `loss.clip_high` or `loss.entropy_coef`, or set `loss.kl_coef`"
    )


def critic_explains_nothing(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    explained = _recent(rows, "critic/explained_variance")
    if explained is None or len(rows) < CRITIC_STEPS or explained >= CRITIC_EXPLAINS:
        return None
    return (
        f"after {len(rows)} steps the critic explains `{explained:.0%}` of the returns' variance; "
        "hint: raise `loss.value_coef`, or use a credit without a critic (docs/algorithms.md)"
    )


def reward_hacking(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    trained, audit = config.algorithm.reward, config.algorithm.audit
    window = rows[-TREND_STEPS:]
    names = (f"reward/{trained}", f"reward/{audit}")
    pairs = [tuple(row[name] for name in names) for row in window if row.keys() >= set(names)]
    if not audit or len(pairs) < TREND_AT_LEAST:
        return None
    rising, falling = (np.array(values, np.float64) for values in zip(*pairs, strict=True))
    if trend(rising) < TREND_Z or trend(falling) > -TREND_Z:
        return None
    ends = [f"from `{values[:RECENT].mean():.3g}` to `{values[-RECENT:].mean():.3g}`" for values in (rising, falling)]
    return (
        f"possible reward hacking: over {len(pairs)} steps `reward/{trained}` rose {ends[0]} while the audit "
        f"`reward/{audit}` fell {ends[1]}; hint: read the answers that earn it (`lightningrl rollouts RUN_DIR`), "
        "and go back to an earlier checkpoint"
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
    return f"`algorithm.audit` names the reward `{audit}`, which is never given; hint: rewards given: {given or 'none'}"


def air_unused(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    rules = [name.removeprefix("reward/") for name in rows[-1] if name.startswith("reward/air.")]
    if config.algorithm.credit != "uniform" or not rules:
        return None
    return (
        f'`{rules[0]}` rewards calls, but credit `uniform` ignores it; hint: `algorithm.credit = "air"` (docs/air.md)'
    )


def logs_graded(rows: Sequence[Row], config: LearnerConfig) -> str | None:
    row = rows[-1]
    if row.get("reward/mean") != 0 or row.get("answers/logs", 0.0) <= LOGS:
        return None
    return (
        "every reward is 0, and the program printed several lines, all of which were graded as its answer; "
        "hint: if it logs to stdout, let it write its answer to the file `LIGHTNINGRL_OUTPUT`, "
        "or print it last as a JSON object (docs/write-a-recipe.md)"
    )


SMALLER_STEPS = "hint: lower `trainer.learning_rate` or `trainer.minibatches`"
CALLS = [f"calls/{capture}" for capture in get_args(Capture)]
"""Metrics that together count all calls."""
NO_REWARDS = ("reward/mean", "reward/std_in_group")
"""Metrics `reward/…` that are not the mean of a named reward."""
OF_THE_RUN: Mapping[Check, str | None] = {
    logs_graded: "reward/mean",
    excluded: "rollouts/excluded",
    void: "forks/void",
    truncated: "calls/truncated",
    forked: "calls/forked",
    heldout_trained: "tasks/heldout",
}
OF_A_POLICY: Mapping[Check, str | None] = {
    skipped: "optim/skipped",
    engine_gap: "policy/logprob_gap",
    reward_hacking: "reward/mean",
    audit_missing: None,
    air_unused: None,
    silent_groups: "groups/silent",
    left_out: "tokens/selected",
    ratio_explodes: "loss/ratio_max",
    clipped: "loss/clip_fraction",
    capped: "loss/importance_capped",
    far_from_sampling: "policy/kl_engine",
    entropy_collapsed: "policy/entropy",
    critic_explains_nothing: "critic/explained_variance",
}
"""Check → the metric that it is about."""


def trend(values: np.ndarray) -> float:
    """z of the Mann-Kendall test for a monotonic trend: rising minus falling pairs, in standard deviations of noise.

    S = Σ_{i<j} sign(x_j - x_i),  Var S = n (n-1) (2n+5) / 18 without ties; ties make it smaller, so z errs towards 0.
    """
    n = len(values)
    S = float(np.triu(np.sign(values[None, :] - values[:, None])).sum())
    return math.copysign(max(abs(S) - 1, 0.0), S) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18) if n > 1 else 0.0


def left_out_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Reason → share of the tokens that the policy should learn from. Tokens of other policies, and of roles that do
    not teach, do not count.
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


def _without_void(row: Row) -> Row:
    """The row without void branches among the rollouts that failed: they have a warning of their own."""
    return {**row, "rollouts/excluded": row.get("rollouts/excluded", 0.0) - row.get("forks/void", 0.0)}


def _recent(rows: Sequence[Row], name: str) -> float | None:
    """Mean over the last steps; None unless all of them have the metric. NaN counts as missing."""
    values = [row[name] for row in rows[-RECENT:] if name in row and not math.isnan(row[name])]
    return float(np.mean(values)) if len(values) == RECENT else None


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Mean over the steps that have this metric; NaN if none has."""
    values = [row[name] for row in rows if name in row]
    return float(np.mean(values)) if values else math.nan


def share_of(rows: Sequence[Row], part: Sequence[str], whole: Sequence[str]) -> float:
    """Sum of the metrics `part` over the sum of `whole`, over all rows; NaN if there is nothing to count."""
    total = sum(row.get(name, 0.0) for row in rows for name in whole)
    return sum(row.get(name, 0.0) for row in rows for name in part) / total if total else math.nan


def _share(rows: Sequence[Row], part: Sequence[str], whole: Sequence[str], *, at_least: int = RECENT) -> float | None:
    """`share_of` the last steps; None if there are fewer than `at_least`, or nothing to count."""
    share = share_of(rows[-RECENT:], part, whole)
    return None if len(rows) < at_least or math.isnan(share) else share
