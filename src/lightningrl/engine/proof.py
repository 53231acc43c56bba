"""Proof that an engine serves what was trained: its answers before and after each update, next to the trainer's.

    before an update   the engine answers the probes; the trainer evaluates them
    after it           the trainer evaluates them again
    once published     the engine answers again; `evidence` compares the changes

Probes end where the batch trains a token: there an update has its largest effect. If a change is too small to tell, the
probes stay, and the next version is compared with the last one that was confirmed: changes add up, noise does not.

Each server of an engine answers all probes, and is judged by its own answers.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightningrl.data.forest import Lesson, read_ids
from lightningrl.engine.base import Engine, Top, fresh, on_server
from lightningrl.engine.evidence import ALARM, Answers, Evidence, Verdict, judge, tail, weigh
from lightningrl.engine.probe import Evaluate, check_distribution, check_gap, in_time
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
    answered: list[Doubles]
    """For each server [P K] its first log-probabilities."""
    first: list[Answers] = field(default_factory=list[Answers])
    """For each server, under the version that was confirmed last; empty until the trainer has evaluated the probes."""
    last: list[Answers] = field(default_factory=list[Answers])
    """The same under the version before the update."""
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
        shares_weights: bool,
        servers: Sequence[str] = (),
    ) -> None:
        """`shares_weights`: the engine reads the trainer's own tensors, so it needs no proof that it loads them.
        `servers`: the URLs of the engine's servers.
        """
        self._engine, self._policy, self._dtype = engine, policy, dtype
        self._evaluate, self._shares_weights = evaluate, shares_weights
        self._names = [f"server `{url}`" for url in servers] if len(servers) > 1 else ["the engine"]
        self._alarm = ALARM / len(self._names)
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
            asked = await self._ask(contexts)
            kept = min(KEPT, *(len(top) for top in asked[0]))  # an engine may report fewer than it is asked for
            token_ids = np.array([[token_id for token_id, _ in top[:kept]] for top in asked[0]], np.int32)
            answered = [_at(tops, token_ids) for tops in asked]
            self._probes = _Probes(contexts=contexts, token_ids=token_ids, answered=answered)
        await self._ask(self._probes.contexts[:CACHED], cached=True)  # their keys and values are in the cache now

    async def trainer_before(self) -> None:
        """Evaluate the probes under the weights that are about to change."""
        probes = self._probes
        if probes is not None and not probes.last:
            probes.first = probes.last = _next_to(probes.answered, await self._views(probes))

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
            self._engine, policy=self._policy, version=version, dtype=self._dtype, evaluate=self._evaluate
        )
        self._checked = True
        return found | {"engine/gap": gap}

    async def _compare(self, version: int) -> dict[str, float]:
        """Compare the changes of engine and trainer. {} if nothing was asked before the update."""
        probes = self._probes
        if probes is None or probes.trained is None:
            return {}
        few = probes.contexts[:CACHED]  # first: computing a prompt again would renew its keys and values
        cached = [_at(tops, probes.token_ids[:CACHED]) for tops in await self._ask(few, cached=True)]
        answered = [_at(tops, probes.token_ids) for tops in await self._ask(probes.contexts)]
        now = _next_to(answered, probes.trained)
        each = zip(probes.first, probes.last, now, strict=True)
        findings = [find(*answers, alarm=self._alarm) for answers in each]
        for name, finding in zip(self._names, findings, strict=True):
            if finding.verdict not in ("new", "unclear"):
                raise _fault(finding, name=name, version=version, policy=self._policy)
        for number in range(len(self._names)):
            await self._check_cache(probes, number, cached[number], answered[number], version=version)
        unclear = [finding for finding in findings if finding.verdict == "unclear"]
        if unclear:
            probes.last, probes.trained = now, None
        else:
            self._probes = None
        return (unclear or findings)[0].metrics()

    async def _check_cache(
        self, probes: _Probes, number: int, cached: Doubles, answered: Doubles, *, version: int
    ) -> None:
        """Answers from the cache must equal, bit for bit, those computed without it. This is asked only of engines that
        repeat an answer bit for bit.
        """
        few, token_ids = probes.contexts[:CACHED], probes.token_ids[:CACHED]
        wrong = _differing(cached, answered[:CACHED])
        # The chance that noise changes so many answers, and then none of the same answers: at most `alarm`.
        if not wrong or repeated_by_chance(wrong, len(few)) >= self._alarm:
            return
        again = _at(await self._ask_server(number, few), token_ids)
        if not _differing(again, answered[:CACHED]):
            raise EngineError(
                f"{self._names[number]} answers from keys and values of other weights than version `{version}` of "
                f"`{self._policy}`: `{wrong}` of `{len(few)}` answers change if the prompt is computed again",
                hint="empty the engine's prefix cache after weights are loaded, and heed `engine.base.fresh`; "
                "see docs/engines.md",
            )

    async def _ask(self, contexts: Sequence[Ints], *, cached: bool = False) -> list[list[Top]]:
        """For each server, its likeliest next tokens. The servers are asked at the same time."""
        numbers = range(len(self._names))
        return await asyncio.gather(*(self._ask_server(number, contexts, cached=cached) for number in numbers))

    async def _ask_server(self, number: int, contexts: Sequence[Ints], *, cached: bool = False) -> list[Top]:
        """The likeliest next tokens, one context after the other: equal requests alone on a server get equal bits."""
        recompute, place = fresh.set(not cached), on_server.set(number)
        try:
            return [await in_time(self._next(context)) for context in contexts]
        finally:
            fresh.reset(recompute)
            on_server.reset(place)

    async def _next(self, context: Ints) -> Top:
        sampling = Sampling(max_tokens=1, seed=0, top_logprobs=TOP)
        answer = self._engine.generate(context.tolist(), sampling=sampling, policy=self._policy)
        tops = [top async for delta in answer for top in delta.top or ()]
        if not (tops and tops[0]):
            raise EngineError("the engine reports no likeliest tokens", hint="`Sampling.top_logprobs` asks for them")
        return tops[0]

    async def _views(self, probes: _Probes) -> tuple[Doubles, Doubles]:
        """Of the whole contexts, and of those without their first token."""
        whole = await self._view(probes.contexts, probes.token_ids)
        return whole, await self._view([context[1:] for context in probes.contexts], probes.token_ids)

    async def _view(self, contexts: Sequence[Ints], token_ids: Ints) -> Doubles:
        """[P K] the trainer's log-probability of each of the tokens [P K] after its context [P]."""
        every = zip(contexts, token_ids, strict=True)
        asked = [(context, row[k : k + 1]) for context, row in every for k in range(len(row))]
        return np.concatenate(await self._evaluate(asked)).reshape(token_ids.shape)


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


def find(first: Answers, last: Answers, now: Answers, *, alarm: float) -> Finding:
    """Compare with the version before, and then with the last one that was confirmed. `alarm` as in `judge`."""
    finding = _compared(last, now, alarm=alarm)
    if finding.verdict == "unclear" and first is not last:
        return _compared(first, now, alarm=alarm)
    return finding


def repeated_by_chance(wrong: int, count: int) -> float:
    """Largest chance, over all chances q of a change by noise, that `wrong` or more of `count` answers change and that
    `count` more do not.
    """
    return max((1 - q) ** count * tail(wrong, count, chance=q) for q in np.linspace(0.01, 0.99, 99).tolist())


def _compared(before: Answers, after: Answers, *, alarm: float) -> Finding:
    evidence = weigh(before, after)
    return Finding(verdict=judge(evidence, alarm=alarm), evidence=evidence)


def _next_to(answered: Sequence[Doubles], views: tuple[Doubles, Doubles]) -> list[Answers]:
    """The answers of each server, next to the trainer's two views."""
    trainer, second = views
    return [Answers(engine=engine, trainer=trainer, second=second) for engine in answered]


def _at(tops: Sequence[Top], token_ids: Ints) -> Doubles:
    """[P K] the log-probabilities of `token_ids`; NaN where `tops` lacks the token."""
    found = [dict(top) for top in tops]
    return np.array([[top.get(t, np.nan) for t in row] for top, row in zip(found, token_ids.tolist(), strict=True)])


def _differing(one: Doubles, other: Doubles) -> int:
    """Number of rows that are not equal bit for bit."""
    return int((~((one == other) | (np.isnan(one) & np.isnan(other))).all(1)).sum())


def _fault(finding: Finding, *, name: str, version: int, policy: str) -> EngineError:
    """`name`: what does not serve the version, in words."""
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
    return EngineError(f"{name} {message}", hint=f"{hint} see docs/engines.md")
