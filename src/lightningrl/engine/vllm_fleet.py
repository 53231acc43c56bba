"""The vLLM servers that a run owns: started and ended with it, started again when they die, asleep while it trains.

                 start                    sleep
      STOPPED ───────────────▶ SERVING ────────────▶ ASLEEP
         ▲       restore          ▲                     │
         │                        │ empty prefix cache  │ wake weights
         │ died, or a step failed │ wake cache          ▼
         └────── from any ────────┴────────────── WEIGHTS_AWAKE      here an engine loads new weights

Each engine says what it wants: SERVING, ASLEEP while it is paused, WEIGHTS_AWAKE while it loads. The fleet brings all
servers to what the most demanding engine wants. A stopped server is started when it is needed next. Before it serves,
every engine loads into it what it has loaded before.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from lightningrl.engine.vllm_process import Say
from lightningrl.engine.vllm_server import OwnedServer, State
from lightningrl.errors import EngineError

DEATHS = 3
"""How often servers are started again between two updates. Then the run gives up."""
FORGIVEN_S = 600.0
"""Deaths before so many seconds without one are forgiven, too: some runs never update."""
DYING_S = 1.0
"""A server whose engine was killed is healthy for up to this time, and answers requests with errors (vLLM 0.32: 0.5 s).
"""

Restore: TypeAlias = Callable[[Set[str]], Awaitable[None]]
"""Loads the weights of one engine into the servers at these URLs, which were started again."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class _Member:
    """An engine of the fleet."""

    restore: Restore
    wants: State
    served: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while all servers serve, with the weights of all engines."""


class Fleet:
    """All owned servers of a run, and the engines that use them. Belongs to one event loop."""

    def __init__(self, servers: Sequence[OwnedServer], *, say: Say) -> None:
        self.servers = tuple(servers)
        self.say = say
        """Receives a line about what is being waited for; an empty one: nothing any more."""
        self.failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        """The error with which the fleet has given up."""
        self._members: dict[str, _Member] = {}
        self._deaths = 0
        self._up_since = -math.inf
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    @property
    def losses(self) -> int:
        """How often servers were lost. If it changes during a request, the request may be asked again."""
        return sum(server.losses for server in self.servers)

    async def start(self) -> None:
        await _together(server.start(self.say) for server in self.servers)
        for server in self.servers:
            server.state = State.SERVING
        self.say("")

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self.servers))

    def join(self, policy: str, *, restore: Restore, learns: bool = True) -> None:
        """Add the engine of a policy, which has loaded nothing yet. One that does not `learn` is never paused: the
        others decide whether servers sleep, and its generations wait meanwhile.
        """
        wants = State.SERVING if learns else State.STOPPED
        self._members[policy] = _Member(restore=restore, wants=wants)
        self._members[policy].served.set()

    def leave(self, policy: str) -> None:
        """The engine was closed: its generations wait no more."""
        if policy in self._members:
            self._members.pop(policy).served.set()

    async def want(self, policy: str, state: State) -> None:
        """Bring the servers to what the engines want now, of which this is one. Raises `EngineError` if they keep
        dying.
        """
        if policy in self._members:  # else it is closed
            self._members[policy].wants = state
            await self._carry_on(self._settle())

    async def served(self, policy: str) -> None:
        """Wait until the servers serve. Raises `EngineError` if they never will."""
        if policy in self._members:
            await self._members[policy].served.wait()
        self._refuse_if_failed()

    async def mend(self, losses: int) -> bool:
        """After a failed request: whether a server was lost since there were `losses`, or is lost now. If it is needed,
        it is started again. Raises `EngineError` if they keep dying.
        """
        if self.losses == losses:
            await asyncio.sleep(DYING_S)
        if self.losses == losses:
            await self._carry_on(self._settle())
        return self.losses != losses

    async def replace(self, losses: int, why: str) -> None:
        """After an update that failed when there were `losses`: no server may keep a part of it. Starts dead servers
        again; if there is none, all.
        """
        if not await self.mend(losses):
            await self._carry_on(self._lose_all(why))
            await self._carry_on(self._settle())

    def was_down(self, began: float) -> bool:
        """Whether a server was being started again at any time since `began` (of `time.monotonic`)."""
        return self._up_since > began

    def updated(self) -> None:
        """New weights were loaded: earlier deaths are forgiven."""
        self._deaths = 0

    async def _carry_on(self, change: Coroutine[Any, Any, None]) -> None:
        """Change servers, to the end even if the caller is cancelled: the client of its request may have gone."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Its caller may be gone: after an error that nobody expects, whoever waits gets one."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not self.failed.done():
            self.failed.set_result(EngineError(f"vLLM cannot be kept: {type(error).__name__}: {error}"))
        self._tell_members(served=True)

    async def _lose_all(self, why: str) -> None:
        async with self._changing:
            await asyncio.gather(*(server.lose(why) for server in self.servers))

    async def _settle(self) -> None:
        async with self._changing:
            self._refuse_if_failed()
            wanted = max((member.wants for member in self._members.values()), default=State.STOPPED)
            goal = State.SERVING if wanted is State.STOPPED else wanted  # no engine is ever paused
            if goal is not State.SERVING:
                self._tell_members(served=False)
            while True:
                await asyncio.gather(*(self._bring(server, goal) for server in self.servers))
                lost = [server for server in self.servers if server.state is State.STOPPED]
                if not lost or goal is State.ASLEEP:
                    break
                self._tell_members(served=False)
                await self._start_again(lost)
            if goal is State.SERVING:
                self._tell_members(served=True)
            self.say("")

    async def _bring(self, server: OwnedServer, goal: State) -> None:
        """The steps to `goal` from the server's state. If one fails, the server is stopped."""
        await server.check()
        if goal is State.ASLEEP:
            if server.sleeps:
                self.say("vLLM falls asleep")
                await server.wake_cache()  # only one that is fully awake can fall asleep
                await server.sleep()
            return
        if server.state in (State.ASLEEP, State.WEIGHTS_AWAKE):
            self.say("vLLM wakes up")
        await server.wake_weights()
        if goal is State.SERVING:
            await server.wake_cache()

    async def _start_again(self, lost: Sequence[OwnedServer]) -> None:
        """Start servers again, and load what they have served. They may die at that, too."""
        if time.monotonic() - self._up_since > FORGIVEN_S:
            self._deaths = 0
        self._deaths += 1
        if self._deaths > DEATHS:
            self._give_up(lost[0])
        why = ", ".join(dict.fromkeys(server.why.partition("\n")[0].rstrip(":") for server in lost))
        began = time.monotonic()
        self._up_since = math.inf
        self.say("vLLM is starting again")
        try:
            await _together(server.start(self.say) for server in lost)
            for member in tuple(self._members.values()):
                await member.restore({server.url for server in lost})
        except (EngineError, OSError) as error:  # a full disk, too many open files
            what = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            await asyncio.gather(*(server.lose(f"did not start again: {what}") for server in lost))
            return
        for server in lost:
            server.state = State.SERVING
        self._up_since = time.monotonic()
        log.warning("vLLM %s; it was started again in %.0f s", why, self._up_since - began)

    def _give_up(self, server: OwnedServer) -> NoReturn:
        message = f"vLLM failed {self._deaths} times since the last update. At last it {server.why}"
        error = EngineError(message, hint=f"its log: `{server.log}`")
        self.failed.set_result(error)
        self._tell_members(served=True)  # whoever waits gets the error
        raise error

    def _refuse_if_failed(self) -> None:
        if self.failed.done():
            raise self.failed.result()

    def _tell_members(self, *, served: bool) -> None:
        for member in self._members.values():
            member.served.set() if served else member.served.clear()


async def _together(starts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error cancels the others, and is raised when they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(start)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
