"""Attempts for callers without a token (`lightningrl run`). `Sessions` admits them only from this machine."""

import asyncio
import hashlib
from typing import Protocol

from lightningrl.store import Store
from lightningrl.types import Attempt, Rollout, Task

LEASE_S = 7 * 24 * 3600.0
"""Longer than any command runs: no other worker claims from this store."""


class Visitors(Protocol):
    """Gives callers of this machine an attempt if they have no token."""

    async def token(self, session: str | None) -> str:
        """The token of the attempt for a client's own session. None: the client names no session."""
        ...


class Guests:
    """One attempt for each session that clients name, and one for all clients that name none.

    The store must have nothing else in its queue.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self.attempts: dict[str | None, Attempt] = {}
        """By session name."""

    async def token(self, session: str | None) -> str:
        return (await self.attempt(session)).token

    async def attempt(self, session: str | None = None) -> Attempt:
        async with self._lock:
            found = self.attempts.get(session)
            if found is None:
                found = self.attempts[session] = await self._begin(session)
            return found

    async def _begin(self, session: str | None) -> Attempt:
        name = "run"
        if session is not None:
            name += f"-{hashlib.blake2b(session.encode(), digest_size=6).hexdigest()}"
        task = Task(id=name, input={} if session is None else {"session": session}, split="run")
        await self._store.enqueue([Rollout(id=name, group_id=name, task=task, timeout_s=LEASE_S)])
        mine = [attempt.id for attempt in self.attempts.values()]
        [(_, attempt)] = await self._store.claim("run", limit=1, lease_s=LEASE_S, holding=mine)
        return attempt
