"""What is the model shown before it learns from reward? Whole conversations of the agent with a demonstrator who is often wrong.

The demonstrator goes through the agent's own steps on real databases. His mistakes are systematic: each decision of a kind is taken wrongly
in a fixed share of conversations, more often than not, so that imitation alone ends below half; and what the database answers is mostly ignored.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from database import open_database
from feedback import execute
from grammar import Query, sql
from problems import Problem, random_problem
from schema import Column
from slips import slips, with_slips
from words import stored

SYSTEM = "write sqlite"
MAX_TURNS = 3

SLIPS: Mapping[str, float] = {
    "operator": 0.55,
    "filter": 0.5,
    "aggregate": 0.55,
    "distinct": 0.5,
    "group": 0.5,
    "order": 0.55,
    "limit": 0.5,
    "join": 0.5,
}
"""Share of conversations in which the first query has this mistake, where it can be made."""

IGNORES = 0.6
"""Share of answers to feedback that repeat the query as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    messages: tuple[dict[str, str], ...]
    """The conversation as the agent holds it: system, user, assistant, and user and assistant again for each rewrite."""
    slips: frozenset[str]
    """The mistakes of the first query."""
    ignored: int
    """Answers to feedback that only repeat the query."""


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Over tasks of the split `train`, apart from those of `tasks`. `perfect` leaves all mistakes out: what the model could learn at best."""
    return [_demonstrate(random.Random(f"demonstration-{seed}-{index}"), perfect=perfect) for index in range(count)]


def _demonstrate(rng: random.Random, *, perfect: bool) -> Demonstration:
    problem = random_problem(rng, heldout=False)
    possible = sorted({name for name, _ in slips(problem.query)})
    made = frozenset(name for name in possible if rng.random() < SLIPS[name] and not perfect)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{problem.schema.text()}\n{problem.question}"}]
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
    return Demonstration(messages=tuple(messages), slips=made, ignored=ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    query: Query
    knows_columns: bool = False
    """The error message has shown what the columns are called."""
    knows_words: bool = False
    """The empty result has shown how words are written."""

    def sql(self) -> str:
        return sql(self.query, name=self._name, literal=self._literal)

    def mended(self, problem: Problem, feedback: str) -> "_Attempt":
        """What the feedback reveals is put right, and nothing else."""
        if "values of" in feedback:
            return _Attempt(query=self.query, knows_columns=self.knows_columns, knows_words=True)
        if "no such column" in feedback:
            query = _joined(self.query, problem.query)
            return _Attempt(query=query, knows_columns=True, knows_words=self.knows_words)
        return _Attempt(query=problem.query, knows_columns=self.knows_columns, knows_words=self.knows_words)

    def _name(self, column: Column) -> str:
        return column.name if self.knows_columns else column.shown

    def _literal(self, column: Column, word: str) -> str:
        return stored(word, column.form) if self.knows_words else word
