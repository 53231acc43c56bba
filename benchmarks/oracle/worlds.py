"""Worlds in which every rollout can be enumerated, with its probability and the gradient of its logarithm.

A world is a small agent: a function that calls a policy, has random events, rewards calls, and returns the final
reward. It runs once for each sequence of choices. A policy is a softmax over scores that are linear in its parameters:
tabular if each state has its own features, a one-layer model if states share them.

A branch of a rollout is the same function again, whose first choices are those of the rollout.

Legend: A tokens to choose from · P parameters · K paths (all rollouts).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from lightningrl.causal import consequences
from lightningrl.types import Branch, Doubles, Trajectory, Transition

Features: TypeAlias = Callable[[tuple[int, ...]], Doubles]
"""The tokens read → [A, P]; the score of a token is its row times the parameters."""
Request: TypeAlias = tuple[tuple[int, ...], int]
"""A prompt, and how often the rollout had met it before."""


START: Request = ((), 0)


@dataclass(slots=True)
class Tape:
    """One run of a world: its free choices follow `script`, then always take the first option."""

    features: Features
    theta: Doubles
    script: tuple[int, ...]
    given: Mapping[Request, Sequence[int]]
    """Request → the choices from then until the next request: of the answer's tokens, then of random events."""
    choices: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(the choice, the number of options) where none was given"""
    probability: float = 1.0
    """Of the free choices."""
    requests: list[Request] = field(default_factory=lambda: [START])
    """The start of the rollout, and then one for each call."""
    made: dict[Request, list[int]] = field(default_factory=lambda: {START: []})
    """All choices, as in `given`."""
    calls: list[Transition] = field(default_factory=list[Transition])
    gradients: list[Doubles] = field(default_factory=list[Doubles])
    """[P] for each call: ∇ log π of all its tokens."""

    def call(
        self,
        prompt: Sequence[int],
        *,
        tokens: int = 1,
        agent: str = "agent",
        span: tuple[float, float] = (0.0, 0.0),
        parent: str | None = None,
    ) -> tuple[int, ...]:
        """Sample tokens from the policy, one after the other."""
        asked = Counter(of for of, _ in self.requests)[tuple(prompt)]
        self.requests.append((tuple(prompt), asked))
        self.made[self.requests[-1]] = []
        said: tuple[int, ...] = ()
        logprobs: list[float] = []
        gradient = np.zeros_like(self.theta)
        for _ in range(tokens):
            phi = self.features((*prompt, *said))
            scores = phi @ self.theta
            pi = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            a = self._choose(pi)
            said, gradient = (*said, a), gradient + phi[a] - pi @ phi
            logprobs.append(math.log(pi[a]))
        self.gradients.append(gradient)
        self.calls.append(
            Transition(
                call_id=f"c{len(self.calls)}",
                parent_call_id=parent,
                agent=agent,
                policy_version=0,
                prompt_ids=np.array(prompt, np.int32),
                completion_ids=np.array(said, np.int32),
                logprobs=np.array(logprobs, np.float32),
                reward=None,
                started_at=span[0],
                ended_at=span[1],
            )
        )
        return said

    def chance(self, *probabilities: float) -> int:
        """A random event of the world."""
        return self._choose(np.array(probabilities))

    def reward(self, value: float) -> None:
        """Reward the latest call."""
        self.calls[-1] = replace(self.calls[-1], reward=value)

    def _choose(self, pi: Doubles) -> int:
        made = self.made[self.requests[-1]]
        given = self.given.get(self.requests[-1])
        if given is not None:
            chosen = given[len(made)]
        else:
            at = len(self.choices)
            chosen = self.script[at] if at < len(self.script) else 0
            self.choices.append((chosen, len(pi)))
            self.probability *= float(pi[chosen])
        made.append(chosen)
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Path:
    """A possible rollout."""

    probability: float
    """Of a branch: given what it repeats."""
    trajectory: Trajectory
    gradients: Doubles
    """[calls, P]"""
    requests: tuple[Request, ...]
    """One for each call."""
    made: Mapping[Request, Sequence[int]]
    """See `Tape.made`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    name: str
    about: str
    play: Callable[[Tape], float]
    features: Features
    theta: Doubles
    """[P] the policy at which to take the gradient."""

    def paths(self, theta: Doubles | None = None) -> list[Path]:
        """All K rollouts; their probabilities sum to 1."""
        return self._runs(given={}, theta=self.theta if theta is None else theta)

    def branches(self, trunk: Path, *, place: int) -> list[Path]:
        """All branches at a call; their probabilities sum to 1. As in a run, all calls that are no consequence of it
        are played back, and take no time. A random event belongs to the call before it.
        """
        calls = trunk.trajectory.transitions
        fresh = consequences(calls)[place]
        fresh[place] = True
        recorded = {trunk.requests[c]: calls[c].call_id for c in range(len(calls)) if not fresh[c]}
        given = {request: trunk.made[request] for request in (START, *recorded)}
        at = Branch(attempt_id=trunk.trajectory.rollout_id, call_id=calls[place].call_id)
        return [_branch(path, at=at, recorded=recorded) for path in self._runs(given=given, theta=self.theta)]

    def _runs(self, *, given: Mapping[Request, Sequence[int]], theta: Doubles) -> list[Path]:
        found: list[Path] = []
        scripts: list[tuple[int, ...]] = [()]
        while scripts:
            script = scripts.pop()
            tape = Tape(features=self.features, theta=theta, script=script, given=given)
            final = self.play(tape)
            taken = tuple(chosen for chosen, _ in tape.choices)
            scripts += [
                (*taken[:i], other) for i in range(len(script), len(taken)) for other in range(1, tape.choices[i][1])
            ]
            found.append(
                Path(
                    probability=tape.probability,
                    trajectory=Trajectory(
                        rollout_id="r", group_id="g", task_id=self.name, transitions=tuple(tape.calls), reward=final
                    ),
                    gradients=np.array(tape.gradients),
                    requests=tuple(tape.requests[1:]),
                    made=tape.made,
                )
            )
        return found


def _branch(path: Path, *, at: Branch, recorded: Mapping[Request, str]) -> Path:
    """`recorded`: request → the call of the trunk that is played back."""
    calls = tuple(
        replace(call, replays=recorded[request], left_out="replayed", ended_at=call.started_at)
        if request in recorded
        else call
        for call, request in zip(path.trajectory.transitions, path.requests, strict=True)
    )
    return replace(path, trajectory=replace(path.trajectory, transitions=calls, branch=at))


def fork(tape: Tape) -> float:
    """Two calls. The prompt has the history, but the policy sees only the state (10 or 11) after the first call."""
    (a,) = tape.call([9])
    tape.reward(0.4 if a == 0 else 0.0)
    state = 10 + (tape.chance(0.8, 0.2) if a == 0 else tape.chance(0.3, 0.7))
    (b,) = tape.call([9, a, state])
    tape.reward(0.3 if (state, b) == (10, 1) else 0.0)
    return {(10, 0): 0.2, (10, 1): 0.0, (11, 0): 0.5, (11, 1): 1.0}[state, b]


def retry(tape: Tape) -> float:
    """One to three calls, the prompt only the state (9 or 10): look again, at a price, or answer. States recur."""
    state = 9
    for _ in range(3):
        (a,) = tape.call([state])
        if a == 1:
            return 0.3 if state == 9 else 1.0
        tape.reward(-0.2)
        state = 10 if state == 10 else 9 + tape.chance(0.4, 0.6)
    return 0.0


def team(tape: Tape) -> float:
    """A planner, then two parallel solvers, the second with two calls. Each role has its own prompts and rewards."""
    (plan,) = tape.call([9], agent="planner", span=(0, 1))
    (x,) = tape.call([10, plan], agent="solver", span=(2, 7))
    tape.reward(0.5 if x == plan else 0.0)
    (y,) = tape.call([11, plan], agent="solver", span=(3, 4), parent=None)
    tape.reward(0.2 if y == 0 else 0.0)
    (z,) = tape.call([11, plan, y, 12], agent="solver", span=(5, 6), parent="c2")
    return (1.0 if (x, z) == (plan, 1) else 0.0) + (0.4 if plan == y else 0.0)


def panel(tape: Tape) -> float:
    """Two parallel solvers, the second faster, and a judge that reads the answers of both."""
    (x,) = tape.call([10], agent="solver", span=(0, 3))
    tape.reward(0.3 if x == 0 else 0.0)
    (y,) = tape.call([11], agent="solver", span=(1, 2))
    (j,) = tape.call([12, x, y], agent="judge", span=(4, 5))
    tape.reward(-0.2 if j == 0 else 0.0)
    return (1.0 if x != y else 0.2) * (1.0 if j == x else 0.3)


def words(tape: Tape) -> float:
    """A completion of two tokens, then one of one token, by a model whose states share parameters."""
    s, t = tape.call([9, 10], tokens=2)
    tape.reward(0.5 if s != t else 0.0)
    (u,) = tape.call([9, 10, s, t, 11])
    tape.reward(-0.2 if u == 0 else 0.0)
    return {(0, 0): 0.1, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 0.6}[s, u] + 0.3 * t


def tabular(*states: tuple[int, ...], key: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Features:
    """[2, 2 · states] one parameter per token and state."""

    def features(read: tuple[int, ...]) -> Doubles:
        phi = np.zeros((2, 2 * len(states)))
        at = 2 * states.index(key(read))
        phi[0, at], phi[1, at + 1] = 1.0, 1.0
        return phi

    return features


def one_layer(size: int) -> Features:
    """[2, 2 · size] a layer over a fixed embedding of the tokens, each rotated by its distance from the end."""

    def features(read: tuple[int, ...]) -> Doubles:
        x = sum(
            np.sin((token + 1.0) * (1.0 + np.arange(size)) + 0.7 * back) for back, token in enumerate(reversed(read))
        )
        return np.asarray(np.kron(np.eye(2), x), np.float64)

    return features


def _theta(size: int) -> Doubles:
    return 0.6 * np.cos(1.7 * np.arange(size) + 0.4)


WORLDS = (
    World(
        name="fork",
        about="two calls, a random event between them, rewards on the way; tabular",
        play=fork,
        features=tabular((9,), (10,), (11,), key=lambda read: read[-1:]),
        theta=_theta(6),
    ),
    World(
        name="retry",
        about="one to three calls that meet the same prompt again; tabular",
        play=retry,
        features=tabular((9,), (10,), key=lambda read: read),
        theta=_theta(4),
    ),
    World(
        name="team",
        about="a planner and two solvers that work at the same time; tabular, two roles",
        play=team,
        features=tabular(
            (9,), (10, 0), (10, 1), (11, 0), (11, 1), (12,), key=lambda read: read[-1:] if read[-1] == 12 else read
        ),
        theta=_theta(12),
    ),
    World(
        name="words",
        about="a call of two tokens and one of one; a one-layer model with shared parameters",
        play=words,
        features=one_layer(3),
        theta=_theta(6),
    ),
)
PANEL = World(
    name="panel",
    about="two solvers that work at the same time, and a judge that reads both; tabular, two roles",
    play=panel,
    features=tabular((10,), (11,), *((12, x, y) for x in (0, 1) for y in (0, 1)), key=lambda read: read),
    theta=_theta(12),
)
"""For branches only: two of them can replace what the judge reads."""
