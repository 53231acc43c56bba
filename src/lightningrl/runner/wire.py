"""The messages between pool and worker: one JSON object per line, over a socket pair that user code never sees.

parent → worker: `Setup` once, then `Job`, `Grading` and `Cancel`. worker → parent: `Ready` or `Refused` once, then
`Started` and `Done`.
"""

from typing import Literal, TypeAlias

import msgspec

from lightningrl.runner.isolation import Isolation
from lightningrl.types import AttemptStatus

MAX_OUTPUT = 16 * 2**20
"""Largest answer of an agent, in bytes of JSON. A larger one belongs in a file."""
MAX_LINE = 4 * MAX_OUTPUT
"""Largest message, in bytes; larger than any message can be, so that a reader never fails on one."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent and the reward function that a worker loads. Without `entry` and `command`, it only grades."""

    entry: str | None
    command: list[str] | None
    reward: str | None
    """None: attempts are graded elsewhere."""
    reward_range: tuple[float, float] | None = None
    root: str
    isolation: Isolation | None = None
    """The sandbox of each attempt of `command`; None: it runs without one."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run one attempt."""

    id: str
    token: str
    input: msgspec.Raw
    """The task's input as JSON. Agent and grader each get a copy, so the grader never sees the agent's changes."""
    env: dict[str, str]
    timeout_s: float
    branch: bool = False
    """It repeats a recorded attempt: the gateway knows whether tool results are played back."""


class Grading(Job, frozen=True, kw_only=True, tag=True):
    """Grade an attempt whose agent has run elsewhere."""

    output: msgspec.Raw
    """The agent's answer as JSON."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End this attempt; its result is no longer needed."""

    id: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agent and reward function are loaded."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agent or reward function cannot be loaded."""

    owner: Literal["agent", "grader"]
    message: str
    hint: str | None


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process group of an attempt's command. If the worker dies, the parent kills the group."""

    id: str
    group: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How an attempt ended."""

    id: str
    status: AttemptStatus
    output: msgspec.Raw = msgspec.Raw(b"null")
    rewards: dict[str, float] = {}
    error: str | None = None
    replace: bool = False
    """Replace this worker: it runs an agent that cannot be stopped, or it is short of files or memory."""
    suspect: bool = False
    """The attempt is lost and may have caused the failure itself. Retry its rollout in a worker of its own."""


ToWorker: TypeAlias = Setup | Job | Grading | Cancel
FromWorker: TypeAlias = Ready | Refused | Started | Done

to_worker = msgspec.json.Decoder(ToWorker)
from_worker = msgspec.json.Decoder(FromWorker)


def speakable(text: str) -> str:
    """Escape lone surrogates, which come from broken JSON and have no UTF-8 encoding."""
    return text.encode("utf-8", "backslashreplace").decode()


def line(message: ToWorker | FromWorker) -> bytes:
    return msgspec.json.encode(message) + b"\n"
