"""Continuous batching: prompts enter free rows in order of arrival; running sequences get one token per step.

A prompt starts from the longest prefix that any row holds. If another prompt is about to compute more of its prefix
(eight rollouts of one task arrive together), it waits one step and reuses that.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from lightningrl.engine.cache import PrefixCache
from lightningrl.engine.sequence import Sequence
from lightningrl.prefix import common_prefix
from lightningrl.types import Ints

WORTH_WAITING = 16
"""Tokens that a prompt must save by waiting a step for another prompt's prefix. Not tuned: groups share whole prompts,
which are much longer.
"""
PROMPT_TOKENS = 4096
"""Most new prompt tokens in one step, or one longer prompt. It limits stalls of running sequences. Not tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Positions `[start, stop)` of a row that are to be computed."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tokens of one step, in row order: one for each row in `[0, singles)`, several for each row of `spans`."""

    token_ids: Ints
    """[N]"""
    positions: Ints
    """[N]"""
    singles: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    sequence: Sequence
    source: int
    shared: int

    @property
    def missing(self) -> int:
        return len(self.sequence.prompt_ids) - self.shared


class Scheduler:
    """Decides which sequences run. `running[r]` is in row `r` of the cache."""

    def __init__(self, cache: PrefixCache, *, slots: int) -> None:
        self.cache = cache
        self.slots = slots
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prompt_tokens_computed = 0
        self.prompt_tokens_reused = 0

    def admit(self) -> bool:
        """Move waiting sequences into free rows. True if any was moved."""
        chosen = self._choose() if self.waiting and len(self.running) < self.slots else []
        for choice in sorted(chosen, key=lambda c: c.missing > 1):  # one missing token: with the decoded rows
            self._enter(choice)
        return bool(chosen)

    def batch(self) -> Batch:
        """The tokens to compute so that the next token of each running sequence can be sampled."""
        cache, count = self.cache, len(self.running)
        known = cache.known[:count]
        missing = [len(s.prompt_ids) + len(s.token_ids) - k for s, k in zip(self.running, known.tolist(), strict=True)]
        singles = next((row for row, m in enumerate(missing) if m > 1), count)
        spans = tuple(
            Span(row=row, start=int(known[row]), stop=self.running[row].length) for row in range(singles, count)
        )
        tokens = [
            cache.tokens[np.arange(singles), known[:singles]],
            *(cache.tokens[s.row, s.start : s.stop] for s in spans),
        ]
        positions = [known[:singles], *(np.arange(s.start, s.stop, dtype=np.int32) for s in spans)]
        return Batch(
            token_ids=np.concatenate(tokens), positions=np.concatenate(positions), singles=singles, spans=spans
        )

    def computed(self, batch: Batch) -> None:
        """Record that the keys and values of `batch` are in the cache."""
        self.cache.known[: batch.singles] += 1
        for span in batch.spans:
            self.cache.known[span.row] = span.stop

    def release(self, sequence: Sequence) -> None:
        """Remove a running sequence; the sequence of the last row moves into its row."""
        row = sequence.row
        moved = self.cache.release(row)
        self.running[row] = self.running[moved]
        self.running[row].row = row
        self.running.pop()
        sequence.row = -1

    def _choose(self) -> list[_Choice]:
        """Waiting sequences for the free rows, oldest first.

        A sequence that waits a step for a prefix keeps its place in the queue and its free row. None overtakes it, so
        the rollouts of one task run side by side.
        """
        chosen: list[_Choice] = []
        stay: list[Sequence] = []
        budget = PROMPT_TOKENS
        while self.waiting and len(self.running) + len(chosen) + len(stay) < self.slots:
            sequence = self.waiting.popleft()
            choice = self._longest_prefix(sequence)
            if self._shared_with_chosen(sequence, chosen) >= choice.shared + WORTH_WAITING:
                stay.append(sequence)
            elif chosen and choice.missing > budget:
                stay.append(sequence)
                break
            else:
                chosen.append(choice)
                budget -= choice.missing
        self.waiting.extendleft(reversed(stay))
        return chosen

    def _longest_prefix(self, sequence: Sequence) -> _Choice:
        """The row that shares most with a prompt. The last token of a prompt is always computed: it has the logits."""
        if sequence.fresh:
            return _Choice(sequence=sequence, source=0, shared=0)
        shared = np.minimum(self.cache.shared_with(sequence.prompt_ids), self.cache.known)
        source = int(shared.argmax())
        return _Choice(sequence=sequence, source=source, shared=min(int(shared[source]), len(sequence.prompt_ids) - 1))

    def _shared_with_chosen(self, sequence: Sequence, chosen: list[_Choice]) -> int:
        return max(
            (common_prefix(sequence.prompt_ids, c.sequence.prompt_ids) for c in chosen if c.missing > 1), default=0
        )

    def _enter(self, choice: _Choice) -> None:
        sequence = choice.sequence
        shared = self._longest_prefix(sequence)  # rows may have moved since the choice was made
        sequence.row = self.cache.admit(sequence.prompt_ids, source=shared.source, shared=shared.shared)
        self.running.append(sequence)
        self.prompt_tokens_reused += shared.shared
        self.prompt_tokens_computed += shared.missing
