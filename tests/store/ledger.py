"""What a store must hold, as plain dictionaries: the model that `test_lease_machine.py` compares stores with.

An `Op` is one verb with its arguments. `Ledger.apply` says what the verb returns, and changes the dictionaries.
Leases do not last: one of 0 seconds has passed by the next claim, and one of `LONG_S` does not pass within a test.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

LONG_S = 1000.0
FORGIVEN = 10
"""Lost attempts of one rollout that do not count against its limit (store/sqlite.py)."""
REFUSED = "refused"
"""The result of a verb that raises `StoreError`."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One verb of the store: a method of `Ledger`, and its arguments."""

    verb: str
    arguments: dict[str, Any]


@dataclass
class Try:
    """An attempt."""

    id: str
    worker: str
    gateway: str
    passed: bool
    """Whether its lease has passed. It is lost at the next claim."""
    status: str = "running"
    calls: list[tuple[str, list[int]]] = field(default_factory=list[tuple[str, list[int]]])
    """(id, prompt) of each."""
    rewards: list[float] = field(default_factory=list[float])


@dataclass
class Request:
    """A rollout."""

    max_attempts: int
    labels: tuple[str, ...]
    status: str = "queued"
    accepted: str | None = None
    tries: list[Try] = field(default_factory=list[Try])


@dataclass
class Ledger:
    """All rollouts, in the order of their first `enqueue`."""

    rollouts: dict[str, Request] = field(default_factory=dict[str, Request])

    def apply(self, op: Op) -> Any:
        """What the store must answer."""
        return getattr(self, op.verb)(**op.arguments)

    def attempts(self) -> list[Try]:
        return [attempt for rollout in self.rollouts.values() for attempt in rollout.tries]

    def find(self, attempt_id: str) -> Try | None:
        return next((attempt for attempt in self.attempts() if attempt.id == attempt_id), None)

    def contents(self) -> list[Any]:
        """What `hosts.contents` reads from a store."""
        return [
            (
                *(rollout_id, rollout.status, rollout.max_attempts, rollout.labels, rollout.accepted),
                [(a.id, a.status, a.worker, a.gateway, a.calls, a.rewards) for a in rollout.tries],
            )
            for rollout_id, rollout in self.rollouts.items()
        ]

    def enqueue(self, *, ids: Sequence[str], max_attempts: int, labels: tuple[str, ...]) -> None:
        for rollout_id in ids:
            known = self.rollouts.setdefault(rollout_id, Request(max_attempts=max_attempts, labels=labels))
            if known.status == "failed":
                known.status = "queued"
                known.max_attempts += max_attempts

    def claim(
        self,
        *,
        worker: str,
        limit: int,
        lease_s: float,
        labels: Collection[str],
        holding: Collection[str] | None,
        gateway: str,
    ) -> list[str]:
        for attempt in self.attempts():
            mine = holding is not None and (attempt.worker, attempt.gateway) == (worker, gateway)
            if attempt.status == "running" and (attempt.passed or (mine and attempt.id not in (holding or ()))):
                self._end(attempt, "lost")
        claimed: list[str] = []
        for rollout_id, rollout in self.rollouts.items():
            if len(claimed) < limit and rollout.status == "queued" and set(rollout.labels) <= set(labels):
                claimed.append(f"{rollout_id}.{len(rollout.tries) + 1}")
                rollout.tries.append(Try(claimed[-1], worker, gateway, lease_s == 0.0))
                rollout.status = "running"
        return claimed

    def heartbeat(self, *, ids: Sequence[str], lease_s: float, worker: str | None) -> set[str]:
        kept = {a.id: a for a in self.attempts() if a.id in ids and a.status == "running"}
        mine = {attempt.id: attempt for attempt in kept.values() if worker in (None, attempt.worker)}
        for attempt in mine.values():
            attempt.passed = lease_s == 0.0
        return set(mine)

    def finish(self, *, attempt_id: str, status: str, worker: str | None, rewards: Sequence[float]) -> str | None:
        attempt = self.find(attempt_id)
        if attempt is None:
            return REFUSED
        if attempt.status != "running" or worker not in (None, attempt.worker):
            return None
        if not all(map(math.isfinite, rewards)):
            return REFUSED
        attempt.rewards += rewards
        self._end(attempt, status)
        return None

    def call(self, *, attempt_id: str, index: int, parent: tuple[str, list[int]] | None) -> str | None:
        attempt = self.find(attempt_id)
        call_id = f"{attempt_id}/{index}"
        if attempt is None or attempt.status != "running" or call_id in dict(attempt.calls):
            return REFUSED
        attempt.calls.append((call_id, prompt_of(index, parent)))
        return None

    def reward(self, *, attempt_id: str, value: float) -> str | None:
        attempt = self.find(attempt_id)
        if attempt is None or attempt.status != "running" or not math.isfinite(value):
            return REFUSED
        attempt.rewards.append(value)
        return None

    def _end(self, attempt: Try, status: str) -> None:
        rollout = self.rollouts[attempt.id.rpartition(".")[0]]
        attempt.status = status
        if status == "succeeded":
            rollout.status, rollout.accepted = "succeeded", attempt.id
            return
        lost = sum(a.status == "lost" for a in rollout.tries)
        spent = len(rollout.tries) - min(lost, FORGIVEN)
        rollout.status = "queued" if spent < rollout.max_attempts else "failed"


def prompt_of(index: int, parent: tuple[str, list[int]] | None) -> list[int]:
    """The prompt of a call: its parent's prompt, the two tokens that the parent sampled, and a token of its own."""
    return [index] if parent is None else [*parent[1], 7, 8, index]
