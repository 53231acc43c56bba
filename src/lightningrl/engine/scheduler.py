"""Who is computed next? Waiting prompts enter free rows in order of arrival; everybody who is in gets one more token
per step.

A prompt starts from the longest prefix that any row holds. One whose prefix is just about to be computed for somebody
else (eight rollouts of one task arrive together) waits one step and then finds it there.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from lightningrl.engine.cache import PrefixCache
from lightningrl.engine.sequence import Sequence
from lightningrl.prefix import common_prefix
from lightningrl.types import Ints

WORTH_WAITING = 16
"""Tokens that a prompt must save to wait a step for another one's prefix. A guess, not tuned: groups share whole
prompts, far above it.
"""
PROMPT_TOKENS = 4096
"""New prompt tokens in one step, unless a single prompt is longer: running sequences do not stall for longer than that.
Not tuned.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of a row that is to be computed."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tokens of one step: one for each of the rows `[0, singles)`, then several for each row of `spans`, in order
    of rows.
    """

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
    """`running[r]` lives in row `r` of the cache."""

    def __init__(self, cache: PrefixCache, *, slots: int) -> None:
        self.cache = cache
        self.slots = slots
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prompt_tokens_computed = 0
        self.prompt_tokens_reused = 0

    def admit(self) -> bool:
        """Move waiting sequences into free rows. True if anybody came in."""
        chosen = self._choose() if self.waiting and len(self.running) < self.slots else []
        for choice in sorted(chosen, key=lambda c: c.missing > 1):  # those that lack one token go with the decoded rows
            self._enter(choice)
        return bool(chosen)

    def batch(self) -> Batch:
        """What to compute so that each running sequence can be sampled from."""
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
        """The keys and values of `batch` are in place."""
        self.cache.known[: batch.singles] += 1
        for span in batch.spans:
            self.cache.known[span.row] = span.stop

    def release(self, sequence: Sequence) -> None:
        """A running sequence has ended; the last row moves into its place."""
        row = sequence.row
        moved = self.cache.release(row)
        self.running[row] = self.running[moved]
        self.running[row].row = row
        self.running.pop()
        sequence.row = -1

    def _choose(self) -> list[_Choice]:
        """Waiting sequences for the free rows, oldest first. Those that had better wait a step stay in the queue, with
        their places
        kept: nobody overtakes them, so rollouts of one task run side by side."""
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
        """The last token of a prompt is always computed: its hidden state is what the first token is sampled from."""
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
