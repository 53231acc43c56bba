"""Attempts for callers without a token of their own. `Sessions` lets them in from this machine alone: see `Visitors`
there.
"""

import asyncio
import hashlib

from lightningrl.store import Store
from lightningrl.types import Attempt, Rollout, Task

LEASE_S = 7 * 24 * 3600.0
"""An attempt lasts as long as the command; nobody else claims from its store."""


class Guests:
    """An attempt for each session that a client names, and one for whoever names none. Needs a store with nothing else
    in its queue.
    """

    def __init__(self, store: Store, *, prefix: str = "run") -> None:
        """`prefix`: what the rollouts are called."""
        self._store = store
        self._prefix = prefix
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
        name = (
            self._prefix
            if session is None
            else f"{self._prefix}-{hashlib.blake2b(session.encode(), digest_size=6).hexdigest()}"
        )
        task = Task(id=name, input={} if session is None else {"session": session}, split="run")
        await self._store.enqueue([Rollout(id=name, group_id=name, task=task, timeout_s=LEASE_S)])
        [(_, attempt)] = await self._store.claim("run", limit=1, lease_s=LEASE_S)
        return attempt
