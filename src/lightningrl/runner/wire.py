"""What pool and worker say to each other: one JSON object a line, over a socket pair that user code never sees.

parent → worker: `Setup` once, then `Job` and `Cancel`. worker → parent: `Ready` or `Refused` once, then `Started` and
`Done`.
"""

from typing import Literal, TypeAlias

import msgspec

from lightningrl.types import AttemptStatus

MAX_OUTPUT = 16 * 2**20
"""Bytes of JSON that an agent may answer with; what is larger belongs into a file."""
MAX_LINE = 4 * MAX_OUTPUT
"""Bytes of one message; above any line that can come up, so that a reader never chokes on one."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a worker is for."""

    entry: str | None
    command: list[str] | None
    reward: str
    reward_range: tuple[float, float] | None = None
    root: str


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run one attempt."""

    id: str
    token: str
    input: msgspec.Raw
    """The task's input as JSON; decoded afresh for the agent and for the grader, so that neither sees what the other
    did to it.
    """
    env: dict[str, str]
    timeout_s: float


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits for this attempt any more."""

    id: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agent and reward function are loaded."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agent or reward function cannot be loaded."""

    owner: Literal["agent", "grader"]
    message: str
    hint: str | None


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process group of an attempt's command, so that the parent can end it should the worker die."""

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
    """This worker is to be replaced: an agent goes on in it that cannot be stopped, or it runs out of files or memory.
    """
    suspect: bool = False
    """The attempt is lost, and may itself have done the harm: its rollout is to be tried again in a worker of its own.
    """


ToWorker: TypeAlias = Setup | Job | Cancel
FromWorker: TypeAlias = Ready | Refused | Started | Done

to_worker = msgspec.json.Decoder(ToWorker)
from_worker = msgspec.json.Decoder(FromWorker)


def speakable(text: str) -> str:
    """With half surrogates, which agents read from broken JSON, spelled out: UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode()


def line(message: ToWorker | FromWorker) -> bytes:
    return msgspec.json.encode(message) + b"\n"
