"""Automatic Intermediate Rewarding (arXiv 2508.03680, section 3.3): what happened in an attempt rewards the calls that
caused it.

spans → rules, each with a cap for one attempt → `Reward(source="air")` of the call behind the span. `shaped` makes
potential-based rewards of them.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lightningrl import plugins
from lightningrl.algorithms.causal import consequences, distances
from lightningrl.arguments import arguments_key
from lightningrl.config import AirConfig
from lightningrl.errors import GraderError
from lightningrl.types import Doubles, Ints, Reward, Span, Trajectory

Rule: TypeAlias = Callable[[Span], float | None]
"""None: the rule has nothing to say of this span."""

NOTHING = frozenset({"", "[]", "{}", "()", "null", "none", '""', "''", '{"documents":[]}', '{"results":[]}'})
"""What a retrieval says that has found nothing, white space aside."""


def air_rewards(spans: Sequence[Span], rules: Sequence[AirConfig], *, root: Path | None) -> list[Reward]:
    """By attempt, then by rule, each in order of time. A span that no call is known to have caused gives a reward
    without a call: it is shown, and nothing is learnt from it. Raises `GraderError` for a rule of the recipe's own that
    raises, or returns something that is not a finite number.
    """
    attempts: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.started_at):
        attempts.setdefault(span.attempt_id, []).append(span)
    makers = [_maker(rule, root=root) for rule in rules]
    return [
        reward
        for happened in attempts.values()
        for rule, make in zip(rules, makers, strict=True)
        for reward in _capped(happened, rule, make(rule))
    ]


def shaped(trajectory: Trajectory, air: Mapping[str, float], *, discount: float = 1.0) -> Trajectory:
    """The same with potential-based rewards (Ng, Harada and Russell 1999) made of `air` (call id → sum of its AIR
    rewards), beside its others.

    Φ(before c) is the sum of the AIR rewards of all calls that c is a consequence of, and Φ = 0 when all is over. On a
    chain of calls F_c = γ Φ(after c) - Φ(before c), so that with γ = 1

        AIR reward   1    0   -2    5
        Φ before     0    1    1   -1
        F            1    0   -2    1        sum 0

    and where calls ran in parallel F is what makes the discounted sum of F over c and its consequences the same as on a
    chain, -Φ(before c). What a call is worth is thereby moved by an amount that was fixed before it: no policy gains on
    another. `discount` must be that of the credit.
    """
    calls = trajectory.transitions
    F = potential(
        np.array([air.get(call.call_id, 0.0) for call in calls], np.float64),
        distances(consequences(calls)),
        discount=discount,
    )
    given = [
        call if f == 0 else replace(call, reward=(call.reward or 0.0) + float(f))
        for call, f in zip(calls, F, strict=True)
    ]
    return replace(trajectory, transitions=tuple(given))


def potential(r: Doubles, D: Ints, *, discount: float) -> Doubles:
    """F [calls], from rewards r [calls] and D [calls, calls]: how far call d is from c if it is a consequence of c, 0
    for c itself, -1 if it is not.

    G F = -Φ, where G[c, d] = γ^D[c, d] sums what follows c, and Φ[c] = Σ r[d] over all d that c is a consequence of.
    """
    G = np.where(D >= 0, float(discount) ** np.maximum(D, 0), 0.0)
    before = D.T > 0
    return np.asarray(-np.linalg.solve(G, before @ r), np.float64)


def tool_ok(rule: AirConfig) -> Rule:
    """A tool came back, and nothing says that it failed."""
    return _where(lambda span: span.kind == "tool" and span.status != "error")


def tool_failed(rule: AirConfig) -> Rule:
    """A tool failed in any way: it raised, reported an error, or its call could not be read."""
    return _where(lambda span: span.kind == "tool" and span.status == "error")


def tool_raised(rule: AirConfig) -> Rule:
    """A tool failed with an exception."""
    return _where(lambda span: span.kind == "tool" and span.status == "error" and "exception.type" in span.attributes)


def repeated_call(rule: AirConfig) -> Rule:
    """The same tool was asked for with the same arguments before, in this attempt."""
    seen: Counter[tuple[str, str]] = Counter()

    def repeated(span: Span) -> bool:
        if span.kind != "tool" or span.input is None:
            return False
        key = (span.name, arguments_key(span.input))
        seen[key] += 1
        return seen[key] > 1

    return _where(repeated)


def malformed_arguments(rule: AirConfig) -> Rule:
    """A tool was asked for with something that is no JSON object."""
    return _where(lambda span: span.kind == "tool" and span.attributes.get("lightningrl.malformed") is True)


def slow(rule: AirConfig) -> Rule:
    """A tool, a retrieval or a call took more than `over` seconds; of a call of the model, only where no `tool` is
    named.
    """
    return _where(
        lambda span: span.kind in ("tool", "retrieval", "llm") and span.ended_at - span.started_at > rule.over
    )


def costly(rule: AirConfig) -> Rule:
    """A call sampled more than `over` tokens."""

    def tokens(span: Span) -> float:
        sampled = span.attributes.get("gen_ai.usage.output_tokens")
        return float(sampled) if isinstance(sampled, int | float) else 0.0

    return _where(lambda span: span.kind == "llm" and tokens(span) > rule.over)


def empty_retrieval(rule: AirConfig) -> Rule:
    """A retrieval found nothing. Of tools only those count that `tool` names: many have nothing to say."""
    kinds = ("retrieval",) if rule.tool == "*" else ("retrieval", "tool")
    return _where(lambda span: span.kind in kinds and span.status != "error" and _nothing(span))


def guardrail(rule: AirConfig) -> Rule:
    """A guard-rail fired: its span says that it was triggered, or is an error."""
    return _where(
        lambda span: (
            span.kind == "guardrail"
            and (span.status == "error" or span.attributes.get("lightningrl.triggered") is True)
        )
    )


def _maker(rule: AirConfig, *, root: Path | None) -> Callable[[AirConfig], Rule]:
    """Makes the rule anew for each attempt, so that it may look back on what it has seen. A recipe's own function is
    the rule itself.
    """
    found = plugins.load(rule.rule, kind="air", root=root)
    return found if rule.rule in plugins.BUILTIN["air"] else lambda _: _own(rule.rule, found)


def _where(holds: Callable[[Span], bool]) -> Rule:
    return lambda span: 1.0 if holds(span) else None


def _own(name: str, function: Callable[[Span], object]) -> Rule:
    def rule(span: Span) -> float | None:
        try:
            value = function(span)
        except Exception as error:
            raise GraderError(
                f"air rule `{name}` raised `{type(error).__name__}: {error}` for span `{span.name}`"
            ) from error
        if value is None:
            return None
        if not isinstance(value, int | float | np.integer | np.floating) or not abs(value) <= sys.float_info.max:
            raise GraderError(
                f"air rule `{name}` returned `{value!r:.80}` for span `{span.name}`",
                hint="return a finite number, or None",
            )
        return float(value)

    return rule


def _capped(spans: Sequence[Span], rule: AirConfig, holds: Rule) -> list[Reward]:
    rewards: list[Reward] = []
    left = rule.cap
    for span in spans:
        if not fnmatchcase(span.name if span.kind in ("tool", "retrieval") else "", rule.tool):
            continue
        found = holds(span)
        value = 0.0 if found is None else found * rule.value
        if not math.isfinite(value):
            raise GraderError(
                f"air rule `{rule.rule}` gave `{found:g}` for span `{span.name}`: too much to be multiplied by `value`"
            )
        value = math.copysign(min(abs(value), left), value)
        if value:
            left -= abs(value)
            rewards.append(
                Reward(attempt_id=span.attempt_id, call_id=span.call_id, name=rule.rule, value=value, source="air")
            )
    return rewards


def _nothing(span: Span) -> bool:
    documents = span.attributes.get("lightningrl.documents")
    if isinstance(documents, int):
        return documents == 0
    return span.output is not None and "".join(span.output.split()).lower() in NOTHING
