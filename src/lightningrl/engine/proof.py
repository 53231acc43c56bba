"""Proof that an engine serves what was trained: its answers before and after each update, next to the trainer's.

    before an update   the engine answers the probes; the trainer evaluates them
    after it           the trainer evaluates them again
    once published     the engine answers again; `evidence` compares the changes

Probes end where the batch trains a token: there an update has its largest effect. If a change is too small to tell, the
probes stay, and the next version is compared with the last one that was confirmed: changes add up, noise does not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightningrl.data.forest import Lesson, read_ids
from lightningrl.engine.base import Engine, Top, affinity, fresh
from lightningrl.engine.evidence import ALARM, Answers, Evidence, Verdict, judge, tail, weigh
from lightningrl.engine.probe import TIMEOUT_S, check_distribution, check_gap
from lightningrl.errors import EngineError
from lightningrl.types import Doubles, Ints, Sampling

PROBES = 64
"""Number of contexts. With 64, binomial tests see old weights as soon as the change is as large as the noise."""
LENGTH = 192
"""Most tokens of a context: more than a cache block of vLLM (16 tokens on GPUs, 128 on CPUs), and cheap."""
TOP, KEPT = 20, 12
"""Number of likeliest tokens that the engine reports, vLLM's default limit; and of those compared: after an update they
are still among the first 20.
"""
CACHED = 16
"""Number of probes that are also answered from the prefix cache."""
BLOCK = 16
"""Tokens of the smallest block of a prefix cache. Contexts that differ there share no keys and values."""
Evaluate: TypeAlias = Callable[[Sequence[Ints], Ints], Awaitable[Doubles]]
"""Contexts [P] of token ids, tokens [P K] → [P K] the trainer's log-probability of each token after its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one comparison."""

    verdict: Verdict
    evidence: Evidence

    def metrics(self) -> dict[str, float]:
        evidence = self.evidence
        confirmed = {"engine/confirmed": float(self.verdict == "new")}
        if not evidence.probes:
            return confirmed
        return confirmed | {"engine/slope": evidence.slope, "engine/nearer": evidence.nearer / evidence.probes}


@dataclass(slots=True, kw_only=True)
class _Probes:
    contexts: list[Ints]
    token_ids: Ints
    """[P K]"""
    answered: Doubles
    """[P K] the engine's latest log-probabilities."""
    first: Answers | None = None
    """Under the version that was confirmed last; None until the trainer has evaluated the probes."""
    last: Answers | None = None
    """Under the version before the update."""
    trained: tuple[Doubles, Doubles] | None = None
    """The trainer's two views after the update."""


class Proof:
    """Compares one policy's engine with its trainer, from publication to publication."""

    def __init__(
        self,
        engine: Engine,
        *,
        policy: str,
        dtype: str,
        evaluate: Evaluate,
        logprobs: Callable[[Ints, Ints], Awaitable[Doubles]],
        shares_weights: bool,
    ) -> None:
        """`logprobs`: prompt [P], completion [C] → [C] the trainer's. `shares_weights`: the engine reads the trainer's
        own tensors, so it needs no proof that it loads them.
        """
        self._engine, self._policy, self._dtype = engine, policy, dtype
        self._evaluate, self._logprobs, self._shares_weights = evaluate, logprobs, shares_weights
        self._probes: _Probes | None = None
        self._checked = False

    async def before_update(self, lessons: Sequence[Lesson]) -> None:
        """Ask the engine while it serves the old weights. It serves none, and is paused, if a run that resumes has to
        compute a damaged version again.
        """
        if self._shares_weights or not self._checked:
            return
        if self._probes is None:
            contexts = contexts_of(lessons)
            if not contexts:
                return
            tops = await self._ask(contexts)
            token_ids = np.array([[token_id for token_id, _ in top[:KEPT]] for top in tops], np.int32)
            self._probes = _Probes(contexts=contexts, token_ids=token_ids, answered=_at(tops, token_ids))
        await self._ask(self._probes.contexts[:CACHED], cached=True)  # their keys and values are in the cache now

    async def trainer_before(self) -> None:
        """Evaluate the probes under the weights that are about to change."""
        probes = self._probes
        if probes is not None and probes.last is None:
            trainer, second = await self._views(probes)
            probes.first = probes.last = Answers(engine=probes.answered, trainer=trainer, second=second)

    async def trainer_after(self) -> None:
        """Evaluate the probes under the new weights."""
        if self._probes is not None:
            self._probes.trained = await self._views(self._probes)

    async def check(self, version: int) -> dict[str, float]:
        """Ask the engine after the publication of `version`. Returns metrics. Raises `EngineError`, with the fault's
        name, if it serves other weights, or reports other log-probabilities than those it samples by.
        """
        found: dict[str, float] = {}
        if not self._shares_weights:
            await check_distribution(self._engine, policy=self._policy)
            found = await self._compare(version)
        gap = await check_gap(
            self._engine, policy=self._policy, version=version, dtype=self._dtype, logprobs=self._logprobs
        )
        self._checked = True
        return found | {"engine/gap": gap}

    async def _compare(self, version: int) -> dict[str, float]:
        """Compare the changes of engine and trainer. {} if nothing was asked before the update."""
        probes = self._probes
        if probes is None or probes.first is None or probes.last is None or probes.trained is None:
            return {}
        few = probes.contexts[:CACHED]  # first: computing a prompt again would renew its keys and values
        cached = _at(await self._ask(few, cached=True), probes.token_ids[:CACHED])
        answered = _at(await self._ask(probes.contexts), probes.token_ids)
        trainer, second = probes.trained
        now = Answers(engine=answered, trainer=trainer, second=second)
        finding = find(probes.first, probes.last, now)
        if finding.verdict not in ("new", "unclear"):
            raise _fault(finding, version=version, policy=self._policy)
        await self._check_cache(probes, cached, answered, version=version)
        if finding.verdict == "new":
            self._probes = None
        else:
            probes.last, probes.trained = now, None
        return finding.metrics()

    async def _check_cache(self, probes: _Probes, cached: Doubles, answered: Doubles, *, version: int) -> None:
        """Answers from the cache must equal, bit for bit, those computed without it. This is asked only of engines that
        repeat an answer bit for bit.
        """
        few, token_ids = probes.contexts[:CACHED], probes.token_ids[:CACHED]
        wrong = _differing(cached, answered[:CACHED])
        # The chance that noise changes so many answers, and then none of the same answers: at most `ALARM`.
        if not wrong or repeated_by_chance(wrong, len(few)) >= ALARM:
            return
        again = _at(await self._ask(few), token_ids)
        if not _differing(again, answered[:CACHED]):
            raise EngineError(
                f"the engine answers from keys and values of other weights than version `{version}` of "
                f"`{self._policy}`: `{wrong}` of `{len(few)}` answers change if the prompt is computed again",
                hint="empty the engine's prefix cache after weights are loaded; see docs/engines.md",
            )

    async def _ask(self, contexts: Sequence[Ints], *, cached: bool = False) -> list[Top]:
        """The likeliest next tokens, one context after the other: equal requests alone on a server get equal bits."""
        recompute = fresh.set(not cached)
        try:
            return [await self._next(context, key=f"probe-{i}") for i, context in enumerate(contexts)]
        finally:
            fresh.reset(recompute)

    async def _next(self, context: Ints, *, key: str) -> Top:
        related = affinity.set(key)  # spreads the probes over all servers
        try:
            sampling = Sampling(max_tokens=1, seed=0, top_logprobs=TOP)
            async with asyncio.timeout(TIMEOUT_S):
                answer = self._engine.generate(context.tolist(), sampling=sampling, policy=self._policy)
                tops = [top async for delta in answer for top in delta.top or ()]
        finally:
            affinity.reset(related)
        if not tops:
            raise EngineError("the engine reports no likeliest tokens", hint="`Sampling.top_logprobs` asks for them")
        return tops[0]

    async def _views(self, probes: _Probes) -> tuple[Doubles, Doubles]:
        trainer = await self._evaluate(probes.contexts, probes.token_ids)
        return trainer, await self._evaluate([context[1:] for context in probes.contexts], probes.token_ids)


def contexts_of(lessons: Sequence[Lesson]) -> list[Ints]:
    """At most `PROBES` contexts that end before a trained token, spread evenly over those of the batch.

    Each lacks the first tokens of its conversation, so that it shares no keys and values with agents' requests. The
    first `CACHED` also share none with each other.
    """
    places = [(k, i) for k, lesson in enumerate(lessons) for i in np.flatnonzero(lesson.weights * lesson.advantages)]
    spread = [places[n] for n in np.linspace(0, len(places) - 1, min(PROBES, len(places))).astype(int)]
    found: dict[bytes, Ints] = {}
    begun: set[bytes] = set()
    for k, i in spread:
        end = len(lessons[k].transition.prompt_ids) + int(i)
        start = min(max(end - LENGTH, 1) + len(found) % CACHED, end - 2)
        if start < 0:
            continue
        ids = read_ids(lessons[k].transition)[:end]
        while len(found) < CACHED and end - start >= BLOCK and ids[start : start + BLOCK].tobytes() in begun:
            start += 1
        begun.add(ids[start : start + BLOCK].tobytes())
        found.setdefault(ids[start:].tobytes(), ids[start:])
    return list(found.values())


def find(first: Answers, last: Answers, now: Answers) -> Finding:
    """Compare with the version before, and then with the last one that was confirmed."""
    finding = _compared(last, now)
    if finding.verdict == "unclear" and first is not last:
        return _compared(first, now)
    return finding


def repeated_by_chance(wrong: int, count: int) -> float:
    """Largest chance, over all chances q of a change by noise, that `wrong` or more of `count` answers change and that
    `count` more do not.
    """
    return max((1 - q) ** count * tail(wrong, count, chance=q) for q in np.linspace(0.01, 0.99, 99).tolist())


def _compared(before: Answers, after: Answers) -> Finding:
    evidence = weigh(before, after)
    return Finding(verdict=judge(evidence), evidence=evidence)


def _at(tops: Sequence[Top], token_ids: Ints) -> Doubles:
    """[P K] the log-probabilities of `token_ids`; NaN where `tops` lacks the token."""
    found = [dict(top) for top in tops]
    return np.array([[top.get(t, np.nan) for t in row] for top, row in zip(found, token_ids.tolist(), strict=True)])


def _differing(one: Doubles, other: Doubles) -> int:
    """Number of rows that are not equal bit for bit."""
    return int((~((one == other) | (np.isnan(one) & np.isnan(other))).all(1)).sum())


def _fault(finding: Finding, *, version: int, policy: str) -> EngineError:
    evidence = finding.evidence
    moved = f"its logprobs changed by `{evidence.slope:.2f}` of the trainer's change"
    message, hint = {
        "old": (
            f"still serves the old weights, not version `{version}` of `{policy}`: "
            f"`{evidence.still}` of `{evidence.answers // 2}` answers are equal bit for bit, and {moved}",
            "did every server load the folder?",
        ),
        "part": (
            f"serves a mixture of old and new weights, not version `{version}` of `{policy}`: {moved}",
            "does it load every tensor of the folder?",
        ),
        "other": (
            f"serves other weights than version `{version}` of `{policy}`: {moved}",
            "does it load the folder or adapter of this policy?",
        ),
    }[finding.verdict]
    return EngineError(f"the engine {message}", hint=f"{hint} see docs/engines.md")
