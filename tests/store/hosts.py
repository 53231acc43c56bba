"""A store in a process of its own, that can be killed at any instant.

A `Host` sends verbs through a pipe and reads the results. `SIGKILL` ends it as a crash would: nothing is flushed or
closed. Processes are forked from a server that has imported the store already, which takes milliseconds.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from lightningrl import plugins
from lightningrl.errors import StoreError
from lightningrl.store import Store, examples, open_store
from lightningrl.types import Attempt, Reward, Rollout
from tests.store.ledger import REFUSED, Op, prompt_of

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.store.hosts"])
for _scheme in ("sqlite", "postgresql"):
    plugins.load(_scheme, kind="store")  # once in the server, not in every process
ANSWER_S = 60.0
"""Timeout of one verb."""


class Host:
    """A process with one open store."""

    def __init__(self, url: str, *, exclusive: bool) -> None:
        self._pipe, theirs = FORKING.Pipe()
        self._process = FORKING.Process(target=_serve, args=(theirs, url, exclusive), daemon=True)
        self._process.start()
        theirs.close()
        self._sent = 0
        self._results: dict[int, Any] = {}
        assert self._receive() == "open"

    def ask(self, what: str, *arguments: Any) -> Any:
        return self.answer(self.send(what, *arguments))

    def send(self, what: str, *arguments: Any) -> int:
        """Begin a verb: "do" an `Op`, or read. Returns the number to ask the answer for."""
        self._sent += 1
        self._pipe.send((self._sent, what, arguments))
        return self._sent

    def answer(self, number: int) -> Any:
        while number not in self._results:
            answered, result = self._receive()
            self._results[answered] = result
        return self._results.pop(number)

    def kill(self, *, after_s: float = 0.0) -> None:
        """End the process without warning. Answers that it has not given are lost."""
        time.sleep(after_s)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def close(self) -> None:
        """Close the store, and end the process."""
        self.ask("close")
        self._process.join()
        self._pipe.close()

    def _receive(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "the store does not answer"
        return self._pipe.recv()


def _serve(pipe: Connection, url: str, exclusive: bool) -> None:
    asyncio.run(_answer(pipe, url, exclusive=exclusive))


async def _answer(pipe: Connection, url: str, *, exclusive: bool) -> None:
    store = await open_store(url, exclusive=exclusive)
    pipe.send("open")
    working = set[asyncio.Task[None]]()
    while True:
        number, what, arguments = await asyncio.to_thread(pipe.recv)
        if what == "close":
            await store.close()
            return pipe.send((number, None))
        working.add(task := asyncio.create_task(_work(store, pipe, number, what, arguments)))
        task.add_done_callback(working.discard)


async def _work(store: Store, pipe: Connection, number: int, what: str, arguments: Sequence[Any]) -> None:
    try:
        result = await VERBS[what](store, *arguments)
    except StoreError:
        result = REFUSED
    except Exception as error:  # noqa: BLE001 - the test fails with it
        result = f"{type(error).__name__}: {error}"
    pipe.send((number, result))


async def do(store: Store, op: Op) -> Any:
    """Run a verb. The result is comparable with that of `Ledger.apply`, but for tokens."""
    given = op.arguments
    match op.verb:
        case "enqueue":
            made = [_rollout(name, given["max_attempts"], given["labels"]) for name in given["ids"]]
            return await store.enqueue(made)
        case "claim":
            return await store.claim(**given)
        case "heartbeat":
            return await store.heartbeat(given["ids"], lease_s=given["lease_s"], worker=given["worker"])
        case "finish":
            rewards = [Reward(attempt_id=given["attempt_id"], value=value) for value in given["rewards"]]
            return await store.finish(
                given["attempt_id"], given["status"], rewards=rewards, worker=given["worker"], output={"said": "so"}
            )
        case "call":
            parent = given["parent"]
            attempt = Attempt(id=given["attempt_id"], rollout_id="", number=1, token="")
            prompt = prompt_of(given["index"], parent)
            return await store.append(
                examples.call(attempt, given["index"], prompt, [7, 8], parent=parent and parent[0])
            )
        case _:
            return await store.append(Reward(attempt_id=given["attempt_id"], value=given["value"]))


async def contents(store: Store) -> list[Any]:
    """Everything that the store holds, as `Ledger.contents` has it."""
    rollouts = await store.rollouts()
    attempts = await store.attempts([rollout.id for rollout in rollouts])
    ids = [attempt.id for attempt in attempts]
    calls, rewards = await store.calls(ids), await store.rewards(ids)
    held: list[Any] = []
    for rollout in rollouts:
        own = [
            (
                *(a.id, a.status, a.worker, a.gateway),
                [(c.id, c.prompt_ids.tolist()) for c in calls if c.attempt_id == a.id],
                [r.value for r in rewards if r.attempt_id == a.id],
            )
            for a in attempts
            if a.rollout_id == rollout.id
        ]
        accepted = rollout.accepted_attempt_id
        held.append((rollout.id, rollout.status, rollout.max_attempts, rollout.labels, accepted, own))
    return held


async def changed(store: Store, after: int | None) -> tuple[int, dict[str, str]]:
    """The cursor, and id → status of the rollouts that have changed since the cursor `after`."""
    news = await store.changes(after)
    return news.cursor, {rollout.id: rollout.status for rollout in news.rollouts}


async def status(store: Store, token: str) -> str:
    """The status of the attempt that this token belongs to."""
    found = await store.attempt_by_token(token)
    return "unknown" if found is None else found[1].status


VERBS = {"do": do, "contents": contents, "changed": changed, "status": status}


def _rollout(rollout_id: str, max_attempts: int, labels: tuple[str, ...]) -> Rollout:
    plain = examples.rollout(rollout_id, max_attempts=max_attempts)
    return Rollout(id=plain.id, group_id=plain.group_id, task=plain.task, max_attempts=max_attempts, labels=labels)
