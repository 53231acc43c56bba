"""Runs an agent of the matrix again on recorded answers: does it go the same way?

The agent is a program, as in `conftest.py`. Its gateway, with the script that answers, is in this process.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightningrl.branches import VOID
from lightningrl.chat import ChatTemplate
from lightningrl.config import Config
from lightningrl.engines import make_engines, model_paths
from lightningrl.gateway.assembly import make_gateway, opened
from lightningrl.gateway.scripted import MAX_LENGTH, PLAIN
from lightningrl.gateway.server import bound
from lightningrl.leases import Outcome, StoreLeases
from lightningrl.recipe import make_config
from lightningrl.runner.environment import EVERYTHING, make_codex_home, process_environment
from lightningrl.store import Store, open_store
from lightningrl.types import Attempt, Branch, Call, Rollout, Task
from tests.branched import assert_same_calls
from tests.matrix.conftest import HERE, LONGEST_S, Program, after

CODE = "code-5eed"
"""The secret of the tool: the same in all runs, as a task's input is."""


@dataclass(frozen=True, kw_only=True)
class Went:
    """One run of the agent."""

    attempt_id: str
    exit_code: int
    printed: dict[str, list[Any]]
    """`TOOL` and `ANSWER` → the JSON values printed after that word, in order."""
    calls: Sequence[Call]
    error: str
    """The attempt's error, "" if it succeeded. It begins with `branches.VOID` if the branch is void."""
    log: str
    seconds: float

    @property
    def void(self) -> bool:
        return self.error.startswith(VOID)


@dataclass(kw_only=True)
class Stage:
    """A program with its gateway and records."""

    program: Program
    store: Store
    url: str
    folder: Path
    visitors: "Latest"
    runs: int = 0

    async def run(
        self, branch: Branch | None = None, *, home: str = "home", environment: Mapping[str, str] | None = None
    ) -> Went:
        """Run the program in an empty folder, always the same one unless `home` says otherwise."""
        self.runs += 1
        task = Task(id=self.program.name, input={}, split="run")
        name = f"{self.program.name}-{self.runs}"
        rollout = Rollout(id=name, group_id=name, task=task, sampling={"seed": 1}, branch=branch)
        await self.store.enqueue([rollout])
        leases = StoreLeases(self.store).of("matrix")
        [(_, attempt)] = await leases.claim(limit=1, holding=())
        self.visitors.attempt = attempt
        began = time.monotonic()
        code, log = await self._run(attempt, self.folder / home, environment or {})
        seconds = time.monotonic() - began
        error = None if code == 0 else f"AgentError: it exited with code {code}"
        await leases.finish(attempt.id, Outcome(status="failed" if code else "succeeded", error=error))
        [ended] = await self.store.attempts([rollout.id])
        return Went(
            attempt_id=attempt.id,
            exit_code=code,
            printed={word: after(f"{word} ", log.splitlines()) for word in ("TOOL", "ANSWER")},
            calls=await self.store.calls([attempt.id]),
            error=ended.error or "",
            log=log,
            seconds=seconds,
        )

    async def _run(self, attempt: Attempt, home: Path, more: Mapping[str, str]) -> tuple[int, str]:
        codex = self.folder / "codex"
        for place in (home, codex):
            shutil.rmtree(place, ignore_errors=True)
        home.mkdir()
        make_codex_home(codex, gateway=self.url)
        own = {"MATRIX_CODE": CODE, "PYTHONPATH": str(HERE), "HOME": str(home), "PYTHONUTF8": "1", **more}
        environment = process_environment(self.url, key=attempt.token, inherit=EVERYTHING, codex_home=codex) | own
        path = self.folder / "log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self.program.command, cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = await asyncio.wait_for(process.wait(), LONGEST_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return code, path.read_text(encoding="utf-8", errors="replace")


@dataclass
class Latest:
    """Admits agents without a token to the attempt that runs. See `gateway.visitors.Visitors`."""

    attempt: Attempt | None = field(default=None)

    async def token(self, session: str | None) -> str:
        assert self.attempt is not None
        return self.attempt.token


@asynccontextmanager
async def staged(program: Program, folder: Path) -> AsyncIterator[Stage]:
    """`folder` must be absolute and exist."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))  # where the scripts are
    os.environ.setdefault("MATRIX_SAID", os.devnull)
    config = _config(program)
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(config.gateway))
        template = ChatTemplate.load(PLAIN)
        folders = dict.fromkeys(model_paths(config).values(), PLAIN)
        engines = make_engines(config, folders, template=template, root=HERE)
        for engine in engines.values():
            stack.push_async_callback(engine.close)
        store = await open_store(f"sqlite://{folder / 'store.sqlite'}")
        stack.push_async_callback(store.close)
        visitors = Latest()
        gateway = make_gateway(config, store=store, template=template, engines=engines, visitors=visitors)
        url = await stack.enter_async_context(opened(gateway, sock))
        yield Stage(program=program, store=store, url=url, folder=folder, visitors=visitors)


def _config(program: Program) -> Config:
    """The settings of `lightningrl run` for this program."""
    tree: dict[str, Any] = {
        "name": "run",
        "agent": {"command": list(program.command)},
        "model": {"path": str(PLAIN)},
        "engine": {"name": program.engine, "max_length": MAX_LENGTH},
        "gateway": {"strict": True},
    }
    config = make_config(tree, [], folder=HERE, where="the matrix")
    flags = zip(program.flags[::2], program.flags[1::2], strict=True)
    routes = [dict(pair.split("=") for pair in route.split(",")) for flag, route in flags if flag == "--route"]
    default = [route.model_dump() for route in config.routes]
    return Config.model_validate({**config.model_dump(), "routes": [*routes, *default]})


def difference(trunk: Went, again: Went) -> str:
    """How a run that is not void differs from its trunk all the same; "": not at all. Ids and times do not count."""
    if again.exit_code != trunk.exit_code:
        return f"exit code {again.exit_code}, not {trunk.exit_code}"
    for word, values in trunk.printed.items():
        if sorted(map(json.dumps, again.printed[word])) != sorted(map(json.dumps, values)):
            return f"it printed other values after {word}"
    try:
        assert_same_calls(trunk.calls, again.calls, where="again")
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""
