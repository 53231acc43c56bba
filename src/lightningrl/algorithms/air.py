"""Automatic Intermediate Rewarding (arXiv 2508.03680, section 3.3): events reward the calls that caused them.

spans → rules, each with a cap per attempt → `Reward(source="air")` of the call that caused the span. `shaped` turns
them into potential-based rewards.
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
from lightningrl.arguments import arguments_key
from lightningrl.causal import consequences, distances
from lightningrl.config import AirConfig
from lightningrl.errors import GraderError
from lightningrl.types import Doubles, Ints, Reward, Span, Trajectory, by_attempt

Rule: TypeAlias = Callable[[Span], float | None]
"""Returns None if the rule does not apply to the span."""

NOTHING = frozenset({"", "[]", "{}", "()", "null", "none", '""', "''", '{"documents":[]}', '{"results":[]}'})
"""Outputs of a retrieval without a result, in lower case and without white space."""


def air_rewards(spans: Sequence[Span], rules: Sequence[AirConfig], *, root: Path | None) -> list[Reward]:
    """The rewards of all spans, ordered by attempt, rule and time. A span without a known cause gives a reward without
    a call, which is shown but not trained on. Raises `GraderError` if a recipe's own rule raises or returns something
    other than a finite number or None.
    """
    attempts = by_attempt(sorted(spans, key=lambda span: span.started_at))
    makers = [_maker(rule, root=root) for rule in rules]
    return [
        reward
        for happened in attempts.values()
        for rule, make in zip(rules, makers, strict=True)
        for reward in _capped(happened, rule, make(rule))
    ]


def shaped(trajectory: Trajectory, air: Mapping[str, float], *, discount: float = 1.0) -> Trajectory:
    """Adds potential-based rewards (Ng, Harada and Russell 1999). `air`: call id → sum of its AIR rewards.

    The potential Φ(before c) is the sum of the AIR rewards of all calls that c is a consequence of; Φ = 0 at the end.
    On a chain of calls, F_c = γ Φ(after c) - Φ(before c). With γ = 1:

        AIR reward   1    0   -2    5
        Φ before     0    1    1   -1
        F            1    0   -2    1        sum 0

    For parallel calls, F is such that the discounted sum of F over c and its consequences is -Φ(before c), as on a
    chain. The value of a call thus changes by an amount that was fixed before it, so the order of policies does not
    change. `discount` must be the credit's.
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
    """F [calls] from rewards r [calls] and distances D [calls, calls]: D[c, d] is the distance from c to its
    consequence d, 0 for d = c, and -1 if d is not a consequence of c.

    Solves G F = -Φ, where G[c, d] = γ^D[c, d] sums over consequences, and Φ[c] = Σ r[d] over all d of which c is a
    consequence.
    """
    G = np.where(D >= 0, float(discount) ** np.maximum(D, 0), 0.0)
    before = D.T > 0
    return np.asarray(-np.linalg.solve(G, before @ r), np.float64)


def tool_ok(rule: AirConfig) -> Rule:
    """A tool returned without an error."""
    return _where(lambda span: span.kind == "tool" and span.status != "error")


def tool_failed(rule: AirConfig) -> Rule:
    """A tool failed: it raised, reported an error, or its arguments could not be parsed."""
    return _where(lambda span: span.kind == "tool" and span.status == "error")


def tool_raised(rule: AirConfig) -> Rule:
    """A tool raised an exception."""
    return _where(lambda span: span.kind == "tool" and span.status == "error" and "exception.type" in span.attributes)


def repeated_call(rule: AirConfig) -> Rule:
    """A tool was called with arguments with which it had been called before in this attempt."""
    seen: Counter[tuple[str, str]] = Counter()

    def repeated(span: Span) -> bool:
        if span.kind != "tool" or span.input is None:
            return False
        key = (span.name, arguments_key(span.input))
        seen[key] += 1
        return seen[key] > 1

    return _where(repeated)


def malformed_arguments(rule: AirConfig) -> Rule:
    """The arguments of a tool call are not a JSON object."""
    return _where(lambda span: span.kind == "tool" and span.attributes.get("lightningrl.malformed") is True)


def slow(rule: AirConfig) -> Rule:
    """A tool, a retrieval or a call took more than `over` seconds. Calls count only if no `tool` is named."""
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
    """A retrieval returned nothing. Tools count only if `tool` names them."""
    kinds = ("retrieval",) if rule.tool == "*" else ("retrieval", "tool")
    return _where(lambda span: span.kind in kinds and span.status != "error" and _nothing(span))


def guardrail(rule: AirConfig) -> Rule:
    """A guardrail was triggered: its span says so, or is an error."""
    return _where(
        lambda span: (
            span.kind == "guardrail"
            and (span.status == "error" or span.attributes.get("lightningrl.triggered") is True)
        )
    )


def _maker(rule: AirConfig, *, root: Path | None) -> Callable[[AirConfig], Rule]:
    """A function that makes the rule for one attempt. A new one for each attempt, because a rule may remember spans. A
    recipe's own function is the rule itself.
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
                f"air rule `{rule.rule}` gave `{found:g}` for span `{span.name}`: times `value` is not finite"
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
