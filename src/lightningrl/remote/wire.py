"""The messages between a worker on another machine and its server: one JSON object in each request and each answer.

    POST /workers/hello       `Hello`  → `Welcome`
    POST /workers/claim       `Claim`  → `Given`    waits for work, up to `POLL_S`
    POST /workers/heartbeat   `Beat`   → `Held`
    POST /workers/finish      `Finish` → `Finished`
    POST /workers/bye         `Bye`    → `Finished`

Every request carries the run's worker key as a bearer token. A server that does not know the worker, because it has
been restarted, answers with status 409 and the code `unknown_worker`; the worker then says hello again.
"""

from typing import Annotated, Any

import msgspec

from lightningrl.leases import Outcome
from lightningrl.types import Attempt, Rollout

POLL_S = 30.0
"""Longest time that a claim waits for work."""
LARGEST = 64 * 2**20
"""Bytes of a `Finish`. An agent's output has up to 16 MiB of JSON."""
UNKNOWN_WORKER = "unknown_worker"
"""Code of the answer to a worker that has not said hello to this server."""
RUN_OVER = "run_over"
"""Code of the answer when the run is complete: the worker leaves."""

WorkerId = Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,113}-[0-9a-f]{6}\Z")]
"""`<name>-<6 hex digits>`: one for each process. The server's own processes, `local`, are none of these."""
Text = Annotated[str, msgspec.Meta(max_length=200)]
AttemptIds = Annotated[list[str], msgspec.Meta(max_length=16_384)]


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe's copy on one machine: what workers and server must agree on."""

    files: dict[str, str]
    """Path within the recipe's folder → SHA-256 of the content, as hex digits."""
    agent: dict[str, Any]
    """Settings of `[agent]` by name, as JSON."""
    env: dict[str, str] = {}
    """Variable in `agent.env` → SHA-256 of its value, which may be a secret."""
    added: list[str] = []
    """On a server: paths in `files` that have appeared since the run began. They are not compared."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A worker introduces itself."""

    worker: WorkerId
    name: Text
    labels: Annotated[tuple[Text, ...], msgspec.Meta(max_length=100)] = ()
    concurrency: Annotated[int, msgspec.Meta(ge=1)]
    version: Text
    """Of the package. It must be the server's."""
    copy: Copy
    accept_differences: bool = False
    """Work although the copies of the recipe differ."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The server's answer. A worker with differences that it does not accept is not admitted."""

    recipe: str
    lease_s: float
    differences: list[str] = []
    """What differs between the two copies of the recipe, a line each."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    limit: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    holding: AttemptIds
    """The attempts that the worker has. The server loses its others at once."""


class Given(msgspec.Struct, frozen=True, kw_only=True):
    attempts: list[tuple[Rollout, Attempt]]
    """Empty if there was no work; the worker asks again."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    holding: AttemptIds


class Held(msgspec.Struct, frozen=True, kw_only=True):
    attempts: list[str]
    """Those of `Beat.holding` that are still the worker's."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    attempt: str
    outcome: Outcome


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledged."""


class Bye(msgspec.Struct, frozen=True, kw_only=True):
    """The worker has ended its attempts and leaves."""

    worker: WorkerId


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    message: str = ""
    code: str | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer with another status than 200."""

    error: Problem = Problem()
