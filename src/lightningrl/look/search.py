"""Which rollouts said this? Newest first, a slice at a time, so that an answer comes soon and says how far it got.

A million calls take 20 s to search. Each question goes on where the last one with the same text stopped. A rollout is
searched again only if it has got new calls. What can be missed is said in `store/said.py`.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np
import numpy.typing as npt

from lightningrl.look.columns import Columns, Rows
from lightningrl.store import Records

SLICE_S = 0.2
"""Seconds for which one question searches."""
CALLS, TOKENS = 500, 40
"""Calls that are searched at once, at the most: short ones take 8 ms (benchmarks/ui.py). 40 sampled tokens count as one
more call.
"""
REMEMBERED = 8
"""Texts whose hits are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The hits so far. They may be of other rollouts, too, which an earlier question has asked about."""

    said: Mapping[int, str]
    """Place of a rollout → words around its first hit."""
    done: int
    """Number of rollouts that have been searched."""
    of: int
    """Number of rollouts that were asked about."""


@dataclass(slots=True)
class _Progress:
    """How far one text has been searched."""

    said: dict[int, str] = field(default_factory=dict[int, str])
    searched: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[R] the `_state` in which each rollout was searched; -1: not yet."""


@final
class Search:
    """Searches the calls of one run that is open for reading, which `columns` describe. All viewers share it."""

    def __init__(self, records: Records, columns: Columns) -> None:
        self._records = records
        self._columns = columns
        self._texts: OrderedDict[str, _Progress] = OrderedDict()
        self._turn = asyncio.Lock()

    async def look(self, text: str, *, among: npt.NDArray[np.intp], slice_s: float = SLICE_S) -> Found:
        """Search for about `slice_s` seconds. `among`: indices of rollouts in the columns, in the order of the search.
        Hits of earlier questions with this text are found at once.
        """
        async with self._turn:
            progress = self._progress(text)
            searched = progress.searched[among] == _state(self._columns.rows[among])
            left = among[~searched]
            done = await self._search_some(progress, text, left, deadline=time.monotonic() + slice_s)
        return Found(said=dict(progress.said), done=len(among) - len(left) + done, of=len(among))

    async def _search_some(self, progress: _Progress, text: str, left: npt.NDArray[np.intp], *, deadline: float) -> int:
        """Search as many of these rollouts as there is time for, and a few in any case. Returns how many."""
        rows = self._columns.rows[left]
        calls = np.cumsum(rows["calls"] + rows["tokens"] // TOKENS)
        done = 0
        while done < len(left) and (not done or time.monotonic() < deadline):
            before = calls[done - 1] if done else 0
            end = max(done + 1, int(np.searchsorted(calls, before + CALLS, side="right")))
            await self._search(progress, text, left[done:end])
            done = end
        return done

    async def _search(self, progress: _Progress, text: str, chunk: npt.NDArray[np.intp]) -> None:
        rows = self._columns.rows[chunk]
        places = rows["place"].tolist()
        found = await self._records.said(text, places=places)
        for place in places:
            progress.said.pop(place, None)
        progress.said |= found
        progress.searched[chunk] = _state(rows)

    def _progress(self, text: str) -> _Progress:
        """What is known of this text, with room for the rollouts that are new."""
        found = self._texts.setdefault(text, _Progress())
        self._texts.move_to_end(text)
        if len(self._texts) > REMEMBERED:
            self._texts.popitem(last=False)
        new = np.full(len(self._columns.ids) - len(found.searched), -1, np.int64)
        found.searched = np.concatenate((found.searched, new))
        return found


def _state(rows: Rows) -> npt.NDArray[np.int64]:
    """[R] a number that changes with each attempt and each call of a rollout."""
    return rows["attempts"].astype(np.int64) << 32 | rows["calls"]
