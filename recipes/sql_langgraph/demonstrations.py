"""Demonstrations for the warm start: whole conversations of the agent with a demonstrator who is often wrong.

The demonstrator follows the agent's own steps on real databases. Each kind of mistake occurs in a fixed share of
conversations, about half of them, and feedback is mostly ignored. So imitation alone ends below half.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent import MAX_TURNS, SYSTEM
from database import open_database
from feedback import execute
from grammar import Query, sql
from problems import Problem, random_problem
from schema import Column
from slips import slips, with_slips
from words import stored

SLIPS: Mapping[str, float] = {
    "operator": 0.53,
    "filter": 0.48,
    "aggregate": 0.53,
    "distinct": 0.48,
    "group": 0.48,
    "order": 0.53,
    "limit": 0.48,
    "join": 0.48,
}
"""Share of conversations whose first query has this mistake, of those where it is possible."""

IGNORES = 0.55
"""Share of answers to feedback that repeat the query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    problem: Problem
    messages: tuple[dict[str, str], ...]
    """The conversation as the agent holds it: system, user, assistant; then user and assistant for each rewrite."""
    possible: frozenset[str]
    """The mistakes that are possible in it."""
    slips: frozenset[str]
    """The mistakes of the first query."""
    ignored: int
    """Number of answers to feedback that only repeat the query."""


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Conversations on tasks of the split `train`, none of them from `tasks`. `perfect`: without mistakes."""
    return [_demonstrate(random.Random(f"demonstration-{seed}-{index}"), perfect=perfect) for index in range(count)]


def _demonstrate(rng: random.Random, *, perfect: bool) -> Demonstration:
    problem = random_problem(rng, heldout=False)
    possible = frozenset(name for name, _ in slips(problem.query))
    made = frozenset(name for name in sorted(possible) if rng.random() < SLIPS[name] and not perfect)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{problem.schema.text()}\n{problem.question}"},
    ]
    database = open_database({"setup": problem.setups[0]})
    attempt, ignored = _Attempt(query=with_slips(problem.query, made)), 0
    for turn in range(MAX_TURNS):
        messages.append({"role": "assistant", "content": attempt.sql()})
        feedback = execute(database, attempt.sql())
        if feedback.good or turn == MAX_TURNS - 1:
            break
        messages.append({"role": "user", "content": feedback.text})
        if rng.random() < IGNORES and not perfect:
            ignored += 1
        else:
            attempt = attempt.mended(problem, feedback.text)
    database.close()
    return Demonstration(problem=problem, possible=possible, messages=tuple(messages), slips=made, ignored=ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    query: Query
    known_tables: frozenset[str] = frozenset()
    """Tables whose real columns an error message has listed."""
    knows_words: bool = False
    """Whether an empty result has shown how words are written."""

    def sql(self) -> str:
        return sql(self.query, name=self._name, literal=self._literal)

    def mended(self, problem: Problem, feedback: str) -> "_Attempt":
        """Correct what the feedback reveals, and nothing else. If it reveals nothing, use the right query."""
        if "no such column" in feedback:
            listed = frozenset(re.findall(r"columns of (\w+):", feedback))
            return replace(
                self, query=replace(self.query, parent=problem.query.parent), known_tables=self.known_tables | listed
            )
        if "values of" in feedback:
            return replace(self, knows_words=True)
        return replace(self, query=problem.query)

    def _name(self, column: Column) -> str:
        return column.name if column.table in self.known_tables else column.shown

    def _literal(self, column: Column, word: str) -> str:
        return stored(word, column.form) if self.knows_words else word
