"""`/workers/…`: workers on other machines claim attempts here, keep them and finish them. `runner/remote.py` is the
client's side, `remote/wire.py` has the messages.

The run's worker key admits a worker, an attempt's token does not. The key is in `worker.key` in the run's folder. What
a worker may do with an attempt is decided by its lease (`leases.py`).
"""

import asyncio
import hmac
import os
import secrets
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import msgspec

from lightningrl.dialects.base import Refused
from lightningrl.errors import StoreError, StoreFailed
from lightningrl.gateway import http
from lightningrl.gateway.http import Incoming
from lightningrl.gateway.roster import Connected, Roster
from lightningrl.leases import Claimed, StoreLeases
from lightningrl.remote.digest import differences
from lightningrl.remote.wire import (
    LARGEST,
    RUN_OVER,
    UNKNOWN_WORKER,
    Beat,
    Bye,
    Claim,
    Copy,
    Finish,
    Finished,
    Given,
    Held,
    Hello,
    Welcome,
)

T = TypeVar("T")
PATH = "/workers"
KEY_FILE = "worker.key"
KEY_PREFIX = "lrl-worker-"
"""A worker key cannot be mistaken for an attempt's token."""
SMALL = 4 * 2**20
"""Bytes of a request without an agent's output."""


def worker_key(folder: Path) -> str:
    """The worker key of the run in `folder`, made at its first start. Only the owner of the run may read the file."""
    path = folder / KEY_FILE
    if not path.exists():
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{KEY_PREFIX}{secrets.token_urlsafe(24)}\n")
        draft.rename(path)
    return path.read_text(encoding="ascii").strip()


class Workers:
    """Answers the workers of one run."""

    def __init__(self, *, key: str, recipe: str, version: str, copy: Awaitable[Copy]) -> None:
        """`recipe`: its name. `version`: of this package. `copy`: the server's copy of the recipe, as it was loaded."""
        self.roster = Roster()
        self.leases: StoreLeases | None = None
        """None: the server starts or stops, and asks workers to come back."""
        self._claims: set[asyncio.Future[Claimed]] = set()
        """Those that wait for work."""
        self._over = False
        self._key = key.encode()
        self._recipe = recipe
        self._version = version
        self._copy = asyncio.ensure_future(copy)

    def dismiss(self) -> None:
        """The run is complete: workers shall leave."""
        self._over = True
        self.close()

    def close(self) -> None:
        """Answer all claims that wait."""
        self.leases = None
        for claim in self._claims:
            claim.cancel()

    async def serve(self, incoming: Incoming) -> None:
        """Raises `Refused`, and `http.Gone`."""
        self._check_key(incoming)
        leases = self.leases
        if leases is None:
            raise self._closed()
        match incoming.method, incoming.path.removeprefix(PATH):
            case "GET", "":
                await http.respond(incoming.send, 200, {"workers": [one.as_json() for one in self.roster.all()]})
            case "POST", "/hello":
                await self._answer(incoming, await self._hello(leases, await _read(incoming, Hello)))
            case "POST", "/claim":
                await self._claim(leases, incoming, await _read(incoming, Claim))
            case "POST", "/heartbeat":
                await self._answer(incoming, await self._beat(leases, await _read(incoming, Beat)))
            case "POST", "/finish":
                await self._answer(incoming, await self._finish(leases, await _read(incoming, Finish, limit=LARGEST)))
            case "POST", "/bye":
                await self._answer(incoming, await self._bye(leases, await _read(incoming, Bye)))
            case method, _:
                raise Refused(404, f"`{method} {incoming.path}` is not served here", code="not_found")

    def _check_key(self, incoming: Incoming) -> None:
        headers = dict(incoming.scope["headers"])
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
            hint = f"give the key in `{KEY_FILE}` of the run's folder"
            raise Refused(401, "this is not the worker key of this run", code="invalid_worker_key", hint=hint)

    async def _hello(self, leases: StoreLeases, hello: Hello) -> Welcome:
        if hello.version != self._version:
            message = f"the worker has version `{hello.version}` of lightningrl, the server `{self._version}`"
            hint = f'on the worker: pip install "lightningrl=={self._version}"'
            raise Refused(409, message, code="version", hint=hint)
        found = differences(worker=hello.copy, server=await asyncio.shield(self._copy))
        if not found or hello.accept_differences:
            self.roster.admit(hello)
        return Welcome(recipe=self._recipe, lease_s=leases.lease_s, differences=found)

    async def _claim(self, leases: StoreLeases, incoming: Incoming, claim: Claim) -> None:
        """Wait for work. Attempts in an answer that does not arrive are lost at the worker's next claim."""
        worker = self._known(claim.worker)
        worker.running = len(claim.holding)
        mine = leases.of(claim.worker, labels=worker.hello.labels)
        waiting = asyncio.ensure_future(mine.claim(limit=claim.limit, holding=claim.holding))
        self._claims.add(waiting)
        worker.waiting += 1
        try:
            attempts = await http.while_there(incoming.receive, _result(waiting))
        except asyncio.CancelledError:
            if self.leases is None:
                raise self._closed() from None
            raise
        finally:
            worker.waiting -= 1
            self._claims.discard(waiting)
        self.roster.heard(claim.worker)
        worker.running = len(claim.holding) + len(attempts)
        await self._answer(incoming, Given(attempts=attempts))

    async def _beat(self, leases: StoreLeases, beat: Beat) -> Held:
        worker = self._known(beat.worker)
        held = await leases.of(beat.worker).heartbeat(beat.holding)
        worker.running = len(held)
        return Held(attempts=sorted(held))

    async def _finish(self, leases: StoreLeases, finish: Finish) -> Finished:
        worker = self._known(finish.worker)
        try:
            await leases.of(finish.worker).finish(finish.attempt, finish.outcome)
        except StoreFailed:
            raise
        except StoreError as error:
            if not await leases.holds(finish.worker, finish.attempt):
                return Finished()  # e.g. an attempt of another run: the worker shall forget it
            raise Refused(400, error.message, code="invalid_outcome", hint=error.hint) from error
        worker.running = max(0, worker.running - 1)
        worker.ended(finish.outcome.status)
        return Finished()

    async def _bye(self, leases: StoreLeases, bye: Bye) -> Finished:
        self._known(bye.worker)
        await leases.of(bye.worker).claim(limit=0, holding=())
        self.roster.leave(bye.worker)
        return Finished()

    def _closed(self) -> Refused:
        if self._over:
            return Refused(410, "the run is complete", code=RUN_OVER)
        return Refused(503, "the server starts or stops", code="away", retry_after_s=1.0)

    def _known(self, name: str) -> Connected:
        worker = self.roster.heard(name)
        if worker is None:
            raise Refused(409, f"worker `{name}` is not known to this server", code=UNKNOWN_WORKER, hint="say hello")
        return worker

    async def _answer(self, incoming: Incoming, message: msgspec.Struct) -> None:
        await http.respond(incoming.send, 200, message)


async def _result(work: asyncio.Future[T]) -> T:
    return await work


async def _read(incoming: Incoming, kind: type[T], *, limit: int = SMALL) -> T:
    body = await incoming.read(limit=limit)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not a `{kind.__name__}`: {error}", code="invalid_json") from error
