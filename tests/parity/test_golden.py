"""Do our algorithms and losses give the numbers of TRL and verl? `benchmarks/parity` computes their vectors;
docs/parity.md shows these tables. `AGREES` lists what is equal, `DIFFERS` what is equal after one named difference is
corrected. Values and gradients are compared.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightningrl.algorithms.advantage import EPS
from tests.parity.vectors import (
    BATCH,
    GOLDEN,
    OF_TRL,
    Answer,
    advantages,
    correction,
    critic,
    divergence,
    gae,
    gap,
    lengths,
    loss,
    of_tokens,
    theirs,
)

SAME = 1e-6
VERL: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0}
TRL: dict[str, Any] = {"rollouts": OF_TRL, "clip_low": 0.2, "clip_high": 0.28}
SEQUENCE: dict[str, Any] = {"ratio": "rollout", "clip_low": 0.05, "clip_high": 0.08}
CORRECTED: dict[str, Any] = {"recorded": "behaviour", "proximal": True, "importance_cap": 2.0}

AGREES: dict[str, Callable[[], Answer]] = {
    "verl/advantages/grpo": lambda: advantages("grpo", rollouts=12),
    "verl/advantages/grpo-vectorized": lambda: advantages("grpo", rollouts=12),
    "verl/advantages/grpo-without-std": lambda: advantages("dr_grpo", rollouts=12),
    "verl/advantages/rloo": lambda: advantages("rloo", rollouts=12),
    "verl/advantages/rloo-vectorized": lambda: advantages("rloo", rollouts=12),
    "verl/advantages/opo": lambda: advantages("opo", rollouts=12),
    "verl/advantages with a group of one/rloo-vectorized": lambda: advantages("rloo"),
    "verl/losses/vanilla, token-mean": lambda: loss("token-mean", **VERL),
    "verl/losses/vanilla, seq-mean-token-mean": lambda: loss("rollout-mean", **VERL),
    "verl/losses/vanilla, dual clip far away": lambda: loss("token-mean", clip_low=0.2, clip_high=0.28),
    "verl/losses/gspo": lambda: loss("rollout-mean", **SEQUENCE),
    "verl/losses/cispo": lambda: loss("token-mean", name="cispo", clip_low=0.2, clip_high=0.28),
    "verl/losses/gpg": lambda: loss("token-mean", name="pg"),
    "verl/kl/k1+": lambda: divergence("k1"),
    "verl/kl/k2": lambda: divergence("k2"),
    "verl/kl/k3": lambda: divergence("k3"),
    "verl/correction/vanilla, token": lambda: (
        loss("token-mean", **VERL, **CORRECTED, importance="token") | correction("old", importance="token")
    ),
    "verl/correction/vanilla, sequence": lambda: (
        loss("token-mean", **VERL, **CORRECTED, importance="rollout") | correction("old", importance="rollout")
    ),
    "verl/correction/reinforce, token": lambda: (
        loss("token-mean", name="pg", recorded="behaviour", importance="token") | correction("new", importance="token")
    ),
    "verl/correction/reinforce, sequence": lambda: (
        loss("token-mean", name="pg", recorded="behaviour", importance="rollout")
        | correction("new", importance="rollout")
    ),
    "verl/correction/icepop, token": lambda: correction("old", importance="token-mask"),
    "verl/correction/icepop, sequence": lambda: correction("old", importance="rollout-mask"),
    "verl/value_loss/clip far away": lambda: critic(0.5),
    "trl/advantages/grpo, none": lambda: advantages("dr_grpo", rollouts=OF_TRL),
    "trl/advantages/rloo": lambda: advantages("rloo", rollouts=OF_TRL),
    "trl/losses/grpo": lambda: loss("rollout-mean", **TRL),
    "trl/losses/bnpo": lambda: loss("token-mean", **TRL),
    "trl/losses/dapo": lambda: loss("token-mean", **TRL),
    "trl/losses/dapo, delta": lambda: loss("token-mean", **TRL, clip_dual=3.0),
    "trl/losses/dapo, kl": lambda: loss("token-mean", **TRL, kl_coef=0.1, kl_estimator="k3"),
    "trl/losses/dapo, entropy": lambda: loss("token-mean", **TRL, entropy_coef=0.05),
    "trl/losses/gspo": lambda: loss("rollout-mean", rollouts=OF_TRL, **SEQUENCE),
    "trl/losses/gspo, advantages of calls": lambda: loss("rollout-mean", rollouts=OF_TRL, of_calls=True, **SEQUENCE),
    "trl/correction/token_truncate": lambda: loss("token-mean", **TRL, **CORRECTED, importance="token"),
    "trl/correction/token_mask": lambda: loss("token-mean", **TRL, **CORRECTED, importance="token-mask"),
    "trl/correction/sequence_truncate": lambda: loss("token-mean", **TRL, **CORRECTED, importance="rollout"),
    "trl/correction/sequence_mask": lambda: loss("token-mean", **TRL, **CORRECTED, importance="rollout-mask"),
}
"""Their vector → what we say to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    why: str
    """Named in docs/parity.md."""
    ours: Callable[[], Answer]
    made_up: Callable[[Answer], Answer]
    """Ours, after making up for that difference and no other."""


def scaled(by: Any) -> Callable[[Answer], Answer]:
    """Every number times `by`; an array `by` has one factor per token and is used for gradients."""
    return lambda answer: {name: value * by for name, value in answer.items()}


def deviation_in_groups(*, rollouts: int) -> np.ndarray:
    """[M] unbiased standard deviation."""
    groups, rewards = np.array(BATCH["groups"][:rollouts]), np.array(BATCH["rewards"][:rollouts])
    return of_tokens([float(rewards[groups == group].std(ddof=1)) for group in groups])


def distances(*, rollouts: int) -> np.ndarray:
    """[M] rewards minus the mean of their group."""
    groups, rewards = np.array(BATCH["groups"][:rollouts]), np.array(BATCH["rewards"][:rollouts])
    return of_tokens(rewards - np.array([rewards[groups == group].mean() for group in groups]))


def whitened(values: np.ndarray, *, inside: float = 0.0, outside: float = 0.0) -> np.ndarray:
    """(x - mean) / (√(s² + inside) + outside), with the unbiased s."""
    return (values - values.mean()) / (np.sqrt(values.var(ddof=1) + inside) + outside)


def raw_for_singles(divided_by: float = 1.0) -> Callable[[Answer], Answer]:
    """For a group of one, verl uses mean 0 and deviation 1."""
    single = of_tokens([group == "d" for group in BATCH["groups"]])
    return lambda answer: {"values": answer["values"] + single * of_tokens(BATCH["rewards"]) / divided_by}


def with_epsilon_inside(values: np.ndarray) -> Callable[[Answer], Answer]:
    """Changes (s + EPS) to √(s² + 1e-8)."""
    s = values.std(ddof=1)
    return lambda answer: answer | {"values": answer["values"] * (s + EPS) / np.sqrt(s**2 + 1e-8)}


def equal_groups_whitened(*, rollouts: int) -> Callable[[Answer], Answer]:
    """The result of whitening distances of 0."""
    d = distances(rollouts=rollouts)
    return lambda answer: {"values": np.where(d == 0, whitened(d, inside=1e-8), answer["values"])}


def single_unwhitened_and_back(answer: Answer) -> Answer:
    """Undoes the whitening, uses the reward of the group of one as its distance, and whitens again."""
    d = distances(rollouts=13)
    before = answer["values"] * np.sqrt(d.var(ddof=1) + 1e-8) + d.mean()
    return {"values": whitened(raw_for_singles()({"values": before})["values"], inside=1e-8)}


def rejected(level: str) -> Difference:
    """Where verl rejects a token, its divisor is smaller by one."""
    kept = np.array(GOLDEN["verl"]["correction"][f"rejection, {level}"]["kept"])
    ours = {"token": "token-mask", "sequence": "rollout-mask"}[level]
    return Difference(
        why="rejected tokens",
        ours=lambda: loss("token-mean", **VERL, **CORRECTED, importance=ours),
        made_up=scaled(len(kept) / kept.sum()),
    )


def ratio_of_each_token(answer: Answer) -> Answer:
    """verl's gradient of a sequence's ratio flows only through the token whose advantage it has (GSPO-token, arXiv
    2507.18071, section 4.3).
    """
    n = lengths()
    delta = np.array(BATCH["new"]) - np.array(BATCH["old"])
    s = of_tokens(np.exp(np.bincount(np.repeat(np.arange(len(n)), n.astype(int)), weights=delta) / n))
    A = np.array(BATCH["advantages_of_calls"])
    clipped = ((A > 0) & (s > 1.08)) | ((A < 0) & (s < 0.95))
    return answer | {"gradient": np.where(clipped, 0.0, -s * A) / (len(n) * of_tokens(n))}


def unclipped_values(answer: Answer) -> Answer:
    """verl uses the larger of two errors. The other one is of a clipped value, which has no gradient there."""
    V, V_old, R = (
        np.array(BATCH["values"]),
        np.array(BATCH["old_values"]),
        np.array(GOLDEN["verl"]["value_loss"]["returns"]),
    )
    held = np.clip(V, V_old - 0.2, V_old + 0.2)
    larger = (held - R) ** 2 > (V - R) ** 2
    more = np.where(larger, (held - R) ** 2 - (V - R) ** 2, 0.0)
    return {"loss": answer["loss"] + 0.5 * more.mean(), "gradient": np.where(larger, 0.0, answer["gradient"])}


def kl_with_ratio(answer: Answer) -> Answer:
    """Adds (r - 1) k3, as a mean over tokens, and its gradient: r k3 + (r - 1) k3'."""
    M = int(T_TRL)
    r = np.exp(np.array(BATCH["new"][:M]) - np.array(BATCH["old"][:M]))
    k3 = {name: value[:M] for name, value in divergence("k3").items()}
    more = {"loss": ((r - 1) * k3["values"]).sum(), "gradient": r * k3["values"] + (r - 1) * k3["gradient"]}
    return {name: value + 0.1 * more[name] / M for name, value in answer.items()}


def entropy_over_rollouts(answer: Answer) -> Answer:
    """Replaces our entropy bonus, which has the weights of the loss, by TRL's, which is always a mean over tokens."""
    n = lengths(rollouts=OF_TRL)
    H = np.array(BATCH["entropies"][: int(n.sum())])
    like_the_loss = (H / of_tokens(n)).sum() / OF_TRL
    return answer | {"loss": answer["loss"] + 0.05 * like_the_loss - 0.05 * H.mean()}


def products_clipped(answer: Answer) -> Answer:
    """TRL's RLOO: the ratio is over the whole completion, the loss sums over it, and it is clipped. Ours uses the same
    ratio as an unclipped weight.
    """
    n = lengths(rollouts=OF_TRL)
    M = int(n.sum())
    delta = np.array(BATCH["new"][:M]) - np.array(BATCH["old"][:M])
    s = np.exp(np.bincount(np.repeat(np.arange(OF_TRL), n.astype(int)), weights=delta))
    A = np.array(BATCH["advantages"][:OF_TRL])
    clipped = ((A > 0) & (s > 1.2)) | ((A < 0) & (s < 0.8))
    return {"gradient": np.where(of_tokens(clipped.astype(np.float64)) == 1, 0.0, answer["gradient"]) * M / OF_TRL}


T_VERL, T_TRL = lengths().sum(), lengths(rollouts=OF_TRL).sum()
TOKENS_PER_ROLLOUT = T_VERL / len(lengths())
GPG = len(BATCH["rewards"]) / np.count_nonzero(BATCH["rewards"])
S_TRL = deviation_in_groups(rollouts=OF_TRL)

DIFFERS: dict[str, Difference] = {
    "trl/advantages/grpo, group": Difference(
        why="epsilon of GRPO",
        ours=lambda: advantages("grpo", rollouts=OF_TRL),
        made_up=scaled((S_TRL + EPS) / (S_TRL + 1e-4)),
    ),
    "trl/advantages/grpo, batch": Difference(
        why="deviation of the batch",
        ours=lambda: advantages("dr_grpo", rollouts=OF_TRL),
        made_up=scaled(1 / (np.std(BATCH["rewards"][:OF_TRL], ddof=1) + 1e-4)),
    ),
    "trl/advantages/rloo, normalized": Difference(
        why="normalised over rollouts",
        ours=lambda: advantages("rloo", rollouts=OF_TRL),
        made_up=lambda answer: {
            "values": of_tokens(
                whitened(answer["values"][np.cumsum(lengths(rollouts=OF_TRL)).astype(int) - 1], outside=1e-4)
            )
        },
    ),
    **{
        f"verl/advantages with a group of one/{name}": Difference(
            why="group of one", ours=lambda mine=mine: advantages(mine), made_up=raw_for_singles(by)
        )
        for name, mine, by in [
            ("grpo", "grpo", 1 + 1e-6),
            ("grpo-vectorized", "grpo", 1 + 1e-6),
            ("grpo-without-std", "dr_grpo", 1.0),
            ("rloo", "rloo", 1.0),
            ("opo", "opo", 1.0),
        ]
    },
    "verl/advantages/reinforce++": Difference(
        why="epsilon of whitening",
        ours=lambda: advantages("reinforce++", rollouts=12),
        made_up=with_epsilon_inside(of_tokens(BATCH["rewards"][:12])),
    ),
    "verl/advantages with a group of one/reinforce++": Difference(
        why="epsilon of whitening",
        ours=lambda: advantages("reinforce++"),
        made_up=with_epsilon_inside(of_tokens(BATCH["rewards"])),
    ),
    "verl/advantages/reinforce++-baseline": Difference(
        why="whitening of equal groups",
        ours=lambda: with_epsilon_inside(distances(rollouts=12))(advantages("reinforce++-baseline", rollouts=12)),
        made_up=equal_groups_whitened(rollouts=12),
    ),
    "verl/advantages with a group of one/reinforce++-baseline": Difference(
        why="group of one",
        ours=lambda: equal_groups_whitened(rollouts=13)(
            with_epsilon_inside(distances(rollouts=13))(advantages("reinforce++-baseline"))
        ),
        made_up=single_unwhitened_and_back,
    ),
    "verl/advantages/gpg": Difference(
        why="scale of GPG",
        ours=lambda: advantages("dr_grpo", rollouts=12),
        made_up=scaled(12 / np.count_nonzero(BATCH["rewards"][:12])),
    ),
    "verl/advantages with a group of one/gpg": Difference(
        why="group of one", ours=lambda: scaled(GPG)(advantages("dr_grpo")), made_up=raw_for_singles(1 / GPG)
    ),
    "verl/gae": Difference(
        why="whitening is an advantage's",
        ours=gae,
        made_up=lambda answer: answer | {"advantages": whitened(answer["advantages"], inside=1e-8)},
    ),
    "verl/losses/vanilla, seq-mean-token-sum": Difference(
        why="sums over a rollout", ours=lambda: loss("token-mean", **VERL), made_up=scaled(TOKENS_PER_ROLLOUT)
    ),
    "verl/losses/vanilla, seq-mean-token-sum-norm": Difference(
        why="sums over a rollout", ours=lambda: loss("token-mean", **VERL), made_up=scaled(TOKENS_PER_ROLLOUT / 10)
    ),
    "verl/losses/gspo, advantages of calls": Difference(
        why="gradient of a sequence's ratio",
        ours=lambda: loss("rollout-mean", of_calls=True, **SEQUENCE),
        made_up=ratio_of_each_token,
    ),
    "verl/kl/k1": Difference(
        why="gradient of k1",
        ours=lambda: divergence("k1"),
        made_up=lambda answer: answer | {"gradient": np.ones_like(answer["gradient"])},
    ),
    "verl/kl/k3+": Difference(
        why="gradient of k3",
        ours=lambda: divergence("k3"),
        made_up=lambda answer: answer | {"gradient": divergence("k2")["gradient"]},
    ),
    "verl/correction/rejection, token": rejected("token"),
    "verl/correction/rejection, sequence": rejected("sequence"),
    "verl/value_loss/clipped": Difference(why="clipped values", ours=lambda: critic(0.5), made_up=unclipped_values),
    "trl/losses/dr_grpo": Difference(
        why="sums over a rollout", ours=lambda: loss("token-mean", **TRL), made_up=scaled(T_TRL / (OF_TRL * 10))
    ),
    "trl/losses/luspo": Difference(
        why="sums over a rollout",
        ours=lambda: loss("token-mean", rollouts=OF_TRL, **SEQUENCE),
        made_up=scaled(T_TRL / OF_TRL),
    ),
    "trl/losses/cispo": Difference(
        why="CISPO's clip",
        ours=lambda: loss("token-mean", rollouts=OF_TRL, name="cispo", clip_low=0.2, clip_high=0.28),
        made_up=lambda _: loss("token-mean", rollouts=OF_TRL, name="cispo", clip_low=1.0, clip_high=1.28 - 1),
    ),
    "trl/losses/dapo, kl with ratio": Difference(
        why="ratio of KL",
        ours=lambda: loss("token-mean", **TRL, kl_coef=0.1, kl_estimator="k3"),
        made_up=kl_with_ratio,
    ),
    "trl/losses/grpo, entropy": Difference(
        why="mean of entropy",
        ours=lambda: loss("rollout-mean", **TRL, entropy_coef=0.05),
        made_up=entropy_over_rollouts,
    ),
    "trl/losses/rloo": Difference(
        why="RLOO's ratio",
        ours=lambda: {
            "gradient": loss("token-mean", rollouts=OF_TRL, name="pg", importance="rollout", importance_cap=1e9)[
                "gradient"
            ]
        },
        made_up=products_clipped,
    ),
}
"""Their vector → what we say to it, and how that becomes theirs."""


@pytest.mark.parametrize("path", AGREES)
def test_both_say_the_same(path: str) -> None:
    ours, expected = AGREES[path](), by_token(path)
    assert ours.keys() >= expected.keys()
    assert gap({name: ours[name] for name in expected}, expected) < SAME


@pytest.mark.parametrize("path", DIFFERS)
def test_both_say_the_same_but_for_the_difference_that_is_named(path: str) -> None:
    difference, expected = DIFFERS[path], by_token(path)
    ours = difference.ours()
    assert gap(ours, expected) > SAME
    assert gap(difference.made_up(ours), expected) < SAME


def test_a_token_that_teaches_is_in_every_loss() -> None:
    """No vector is empty."""
    for path in [*AGREES, *DIFFERS]:
        assert all(np.any(value != 0) for value in theirs(path).values())


def test_every_vector_is_compared() -> None:
    assert {*AGREES, *DIFFERS} == set(paths())


def test_every_difference_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()
    assert [path for path in paths() if f"`{path}`" not in page] == []
    assert [d.why for d in DIFFERS.values() if f"**{d.why}**" not in page] == []
    assert [
        f"{name} {version}" for name, version in GOLDEN["versions"].items() if f"{name} {version}" not in page
    ] == []


def by_token(path: str) -> Answer:
    """TRL has one advantage per rollout."""
    answer = theirs(path)
    return {"values": of_tokens(answer["values"])} if path.startswith("trl/advantages") else answer


def paths() -> Iterator[str]:
    for library in ("verl", "trl"):
        for part, vectors in GOLDEN[library].items():
            if part == "gae":
                yield f"{library}/{part}"
            elif isinstance(vectors, dict):
                yield from (f"{library}/{part}/{name}" for name in vectors if name != "returns")
