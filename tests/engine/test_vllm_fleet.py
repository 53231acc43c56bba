"""A run that owns its vLLM ends right, or with one clear error, whatever its servers do; never with stale weights."""

import asyncio
import itertools
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightningrl.config import EngineConfig
from lightningrl.engine import http, vllm_fleet, vllm_server
from lightningrl.engine.base import EngineSetup
from lightningrl.engine.vllm_flags import Launch
from lightningrl.engine.vllm_fleet import Fleet
from lightningrl.engine.vllm_owned import OwnedVLLM
from lightningrl.engine.vllm_server import OwnedServer
from lightningrl.errors import EngineError
from lightningrl.types import Sampling, Weights
from tests.engine.owned import CACHE_BYTES, TEXTS, FakeVLLM, Fault, Machine, Plan, sampled, weights_in

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets of killed servers
STEPS = 3
AT_ONCE = 8
"""Runs at a time: mostly, they wait."""
EXAMPLES = int(os.environ.get("LIGHTNINGRL_FUZZ", "64")) // AT_ONCE
"""Number of examples, of so many random runs each."""
Kind: TypeAlias = Literal["full", "lora"]
KINDS: tuple[Kind, ...] = ("full", "lora")
FAULTS: tuple[Fault, ...] = (
    "slow",
    "error",
    "error after",
    "half",
    "half, said done",
    "not done, said done",
    "hang",
    "die before",
    "die after",
)


LIARS = ("/collective_rpc", "/v1/load_lora_adapter", "/reset_prefix_cache")
"""Where a lie leaves other weights or keys than the server says: only probes find that (`engine/proof.py`)."""
told: ContextVar[list[str]] = ContextVar("told")
"""The lines that the user of this run has seen."""


@pytest.fixture(autouse=True, scope="module")
def impatient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_server, "STEP_S", 2.0)
        patch.setattr(vllm_server, "EXITING_S", 0.03)
        patch.setattr(vllm_fleet, "DYING_S", 0.02)
        patch.setattr(http, "IDLE_S", 2.0)
        logger, lines = logging.getLogger("lightningrl"), Lines(logging.WARNING)
        logger.addHandler(lines)
        yield
        logger.removeHandler(lines)


def launch(*, lora_room: int | None, sleeps: bool = True) -> Launch:
    return Launch(
        folder=Path("model"),
        dtype="float32",
        max_length=64,
        lora_rank=8 if lora_room else 0,
        adapters=lora_room or 0,
        cache_bytes=CACHE_BYTES,
        utilization=0.9,
        sleeps=sleeps,
        gpu=None,
        python="",
        flags=(),
    )


@dataclass(kw_only=True)
class Run:
    """A run of a few steps: agents ask, the policies are paused and trained, new weights are published."""

    fleet: Fleet
    machine: Machine
    engines: dict[str, OwnedVLLM]
    folder: Path
    kind: Kind
    told: list[str]
    """Lines that the user sees."""
    version: int = 0
    asked: list["asyncio.Task[None]"] = field(default_factory=list["asyncio.Task[None]"])
    said: list[str] = field(default_factory=list[str])
    seeds: Iterator[int] = field(default_factory=itertools.count)
    stale: int = 0
    """Answers of other weights than they named."""
    refused: list[EngineError] = field(default_factory=list[EngineError])

    async def go(self) -> None:
        """Raises the first error that ends a run."""
        await self.begin()
        chatting = asyncio.create_task(self.chat())
        try:
            await self.train_steps()
        finally:
            chatting.cancel()
            (chatted,) = await asyncio.gather(chatting, return_exceptions=True)
            assert isinstance(chatted, asyncio.CancelledError), chatted

    async def begin(self) -> None:
        """What a run does first."""
        for engine in self.engines.values():
            await engine.pause()
        await self.publish(0)

    async def chat(self) -> None:
        """Ask at any time, also while servers sleep or start."""
        for name in itertools.cycle(self.engines):
            await asyncio.gather(asyncio.sleep(0.02), *(self.ask(name, stream=stream) for stream in (False, True)))

    async def train_steps(self) -> None:
        for version in range(1, STEPS):
            self.asked = [asyncio.create_task(self.ask(name, stream=i == 0)) for name in self.engines for i in range(3)]
            straggler = self.asked[-1]
            await asyncio.gather(*self.asked[:-1])
            await asyncio.gather(*(engine.pause() for engine in self.engines.values()))
            await self.train()
            await self.publish(version)
            await straggler

    def leave(self) -> None:
        """The clients of all generations under way hang up."""
        for task in self.asked:
            task.cancel()

    @property
    def lied_to(self) -> bool:
        """Whether a server has said that it serves what it does not: the next probe finds out."""
        return any(hit.startswith(LIARS) and "said done" in hit for hit in self.machine.plan.hit)

    async def train(self) -> None:
        """The trainer has the GPU to itself, unless the user was told."""
        for _ in range(3):
            await asyncio.sleep(0.002)
            awake = [fake for fake in self.machine.alive if "kv_cache" not in fake.asleep]
            assert not awake or any("it stays awake" in line for line in self.told), "the GPU is not free"

    async def publish(self, version: int) -> None:
        for name, engine in self.engines.items():
            await engine.pause()
            await engine.load(self.weights(name, version, write=True))
            await engine.resume()
            self.version = version if len(self.engines) == 1 else self.version
            await self.probe(name, version)
        self.version = version

    async def probe(self, name: str, version: int) -> None:
        """What the learner does after each publication: an engine with other weights ends the run."""
        prompt = [1, 2, 3, 5, 8, 13]
        deltas = [
            delta
            async for delta in self.engines[name].generate(prompt, sampling=Sampling(max_tokens=8, seed=0), policy=name)
        ]
        expected = await self.expected(name, version, prompt, seed=0)
        if [token for delta in deltas for token in delta.token_ids] != expected:
            assert self.lied_to, "stale or mixed weights"
            raise EngineError("the engine serves other weights than were published")

    async def ask(self, name: str, *, stream: bool) -> None:
        """A generation is answered by the weights that its deltas name, or it fails with an `EngineError`."""
        seed = next(self.seeds)
        prompt, version = [1, 2, 3, 5, 8, seed % 3 + 1], self.version
        asked = self.engines[name].generate(
            prompt, sampling=Sampling(max_tokens=8, seed=seed), policy=name, stream=stream
        )
        try:
            deltas = [delta async for delta in asked]
        except EngineError as error:
            self.refused.append(error)
            return
        except asyncio.CancelledError:
            if asyncio.current_task() in self.asked:  # by `leave`
                return
            raise
        (answered,) = {delta.policy_version for delta in deltas}
        assert version <= answered <= self.version + 1
        tokens = [token for delta in deltas for token in delta.token_ids]
        if tokens != await self.expected(name, answered, prompt, seed=seed):
            assert self.lied_to, "stale or mixed weights"
            self.stale += 1

    async def expected(self, name: str, version: int, prompt: list[int], *, seed: int) -> list[int]:
        weights = weights_in(Path(self.weights(name, version).uri))
        shape = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 8}
        return await sampled(weights, {"model": "served", "prompt": prompt, "seed": seed, **shape})

    def weights(self, name: str, version: int, *, write: bool = False) -> Weights:
        folder = self.folder / f"{name}-{version}"
        if write and not folder.exists():
            folder.mkdir()
            settings, tensors = (
                ("config.json", "model") if self.kind == "full" else ("adapter_config.json", "adapter_model")
            )
            (folder / settings).write_text("{}")
            (folder / f"{tensors}.safetensors").write_text(f"{name} {version}")
        return Weights(policy=name, version=version, uri=str(folder), kind=self.kind)


@asynccontextmanager
async def owned(
    folder: Path, plan: Plan, *, kind: Kind, servers: int = 1, fake: type[FakeVLLM] = FakeVLLM
) -> AsyncIterator[Run]:
    policies = ("planner", "solver") if kind == "lora" else ("policy",)
    room = len(policies) if kind == "lora" else None
    machine = Machine(plan=plan, lora_room=room, fake=fake)
    said, lines = list[str](), list[str]()
    told.set(lines)
    fleet = Fleet(
        [
            OwnedServer(launch(lora_room=room), env={}, log=folder / "vllm.log", starter=machine.start)
            for _ in range(servers)
        ],
        say=said.append,
    )
    try:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(fleet.stop)
            await fleet.start()
            engines = {policy: OwnedVLLM(setup_of(policy), fleet=fleet) for policy in policies}
            for engine in engines.values():
                stack.push_async_callback(engine.close)
            run = Run(fleet=fleet, machine=machine, engines=engines, folder=folder, kind=kind, said=said, told=lines)
            stack.callback(run.leave)
            yield run
    finally:
        assert not machine.alive, "a server was left running"
        awake = sum("it stays awake" in line for line in lines)
        assert awake <= servers and len(lines) - awake <= fleet.losses, "one event, one line"


class Lines(logging.Handler):
    """Collects what the log tells the user of each run. Several run at a time."""

    def emit(self, record: logging.LogRecord) -> None:
        told.get().append(record.getMessage())


def setup_of(policy: str) -> EngineSetup:
    return EngineSetup(
        policy=policy,
        config=EngineConfig(name="vllm", max_length=64),
        folder=Path("."),
        dtype="float32",
        decode=lambda ids: "".join(TEXTS[i] for i in ids),
        turn_end_id=2,
    )


async def outcome(folder: Path, plan: Plan, *, kind: Kind, servers: int = 1, leave_at: int = 0) -> str | None:
    """The error with which a run ended; None: it ended right. Raises if it went on with stale weights."""
    folder.mkdir()
    try:
        async with owned(folder, plan, kind=kind, servers=servers) as run:
            plan.at[leave_at] = run.leave
            await run.go()
            for name, engine in run.engines.items():
                assert engine.version == STEPS - 1
                await run.ask(name, stream=False)
            assert not run.stale
    except EngineError as error:
        return error.message
    return None


async def test_each_step_of_the_cycle_may_fail_once(tmp_path: Path) -> None:
    at_once = asyncio.Semaphore(AT_ONCE)
    number = itertools.count()

    async def judge(kind: Kind, operation: str, nth: int, fault: Fault) -> None:
        plan = Plan(faults={(operation, nth): fault})
        async with at_once:
            ended = await outcome(tmp_path / f"{next(number)}", plan, kind=kind)
        assert plan.hit
        case = f"{kind}, {operation}, {fault}: {ended}"
        expected = _clear_error(operation, fault)
        may_go_on = expected is None or operation == "/v1/completions"
        assert may_go_on if ended is None else expected is not None and expected in ended, case

    tried = set[str]()
    for kind in ("lora", "full"):
        whole = Plan()
        assert await outcome(tmp_path / kind, whole, kind=kind) is None
        assert not whole.hit and told.get() == []
        await asyncio.gather(
            *(
                judge(kind, operation, count // 2, fault)
                for operation, count in whole.met.items()
                if operation != "start" and count > 1 and operation not in tried
                for fault in FAULTS
            )
        )
        tried |= whole.met.keys() - {"/v1/completions", "/reset_prefix_cache"}


def _clear_error(operation: str, fault: Fault) -> str | None:
    """A part of the error that ends a run with this fault; None: it goes on."""
    match operation, fault:
        case "/v1/completions", "error" | "error after" | "half":
            return "answered 500"
        case "/v1/completions", "hang":
            return "broke off"
        case "/v1/completions", "not done, said done" | "half, said done":
            return "incomplete completion"
        case "/collective_rpc" | "/v1/load_lora_adapter", "half, said done":
            return "the engine serves other weights"
        case "/collective_rpc", "not done, said done":
            return "the engine serves other weights"
        case "/v1/load_lora_adapter", "not done, said done":
            return "answered 400"
        case "/v1/unload_lora_adapter", "not done, said done" | "half, said done":
            return "answered 400"
        case _:
            return None


async def test_a_server_that_does_not_start_is_one_clear_error(tmp_path: Path) -> None:
    plan = Plan(faults={("start", 0): "error"})
    ended = await outcome(tmp_path / "first", plan, kind="full")
    assert ended is not None and ended.startswith("vLLM ended before it was ready")
    plan = Plan(faults={("/collective_rpc", 1): "die before", **{("start", n): "error" for n in range(1, 9)}})
    ended = await outcome(tmp_path / "again", plan, kind="full")
    assert ended is not None and ended.startswith("vLLM failed 4 times since the last update. At last it did not start")
    assert plan.met["start"] == 1 + vllm_fleet.DEATHS


async def test_a_server_that_always_dies_is_one_clear_error(tmp_path: Path) -> None:
    plan = Plan(faults={("/collective_rpc", n): "die before" for n in range(1, 20)})
    ended = await outcome(tmp_path / "run", plan, kind="full")
    assert ended is not None
    assert ended.startswith("vLLM failed 4 times since the last update. At last it died (killed by SIGKILL):\nthe end")


async def test_a_server_that_lives_but_always_fails_is_one_clear_error_with_its_log(tmp_path: Path) -> None:
    plan = Plan(faults={("/collective_rpc", n): "error" for n in range(1, 40)})
    ended = await outcome(tmp_path / "run", plan, kind="full")
    assert ended is not None
    assert ended.startswith("vLLM failed 4 times since the last update. At last it did not") and "\nthe end of" in ended


async def test_sleep_that_frees_nothing_is_told_once_and_the_run_goes_on_awake(tmp_path: Path) -> None:
    plan = Plan(frees=False)
    folder = tmp_path / "run"
    folder.mkdir()
    async with owned(folder, plan, kind="full") as run:
        await run.go()
        assert run.told == ["vLLM fell asleep, but freed 0.0 of 0.0 GiB; from now on it stays awake"]
        assert plan.met["/sleep"] == 1


OPERATIONS = (
    "start",
    "/health",
    "/sleep",
    "/wake_up weights",
    "/collective_rpc",
    "/v1/models",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/wake_up kv_cache",
    "/is_sleeping",
    "/v1/completions",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What happens to one run."""

    faults: dict[tuple[str, int], Fault]
    kind: Kind
    servers: int
    frees: bool
    leave_at: int
    """Number of the request at which the clients of all generations hang up."""
    interrupt_at: int | None
    """Number of the request at which the run is cancelled, as by Ctrl-C."""

    def plan(self) -> Plan:
        lies = [key for key, fault in self.faults.items() if key[0] in LIARS and "said done" in fault]
        return Plan(faults={key: fault for key, fault in self.faults.items() if key not in lies}, frees=self.frees)


CASES = st.builds(
    Case,
    faults=st.dictionaries(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 20)), st.sampled_from(FAULTS), max_size=5
    ),
    kind=st.sampled_from(KINDS),
    servers=st.integers(1, 2),
    frees=st.booleans(),
    leave_at=st.integers(0, 250),
    interrupt_at=st.none() | st.integers(1, 250),
)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases=st.lists(CASES, min_size=AT_ONCE, max_size=AT_ONCE))
def test_whatever_happens_no_weights_are_stale_and_no_server_is_left(cases: list[Case]) -> None:
    """A run ends right, or with an `EngineError`, or because it was interrupted; anything else fails."""

    async def judge(case: Case, folder: Path) -> None:
        running = asyncio.current_task()
        assert running is not None
        plan = case.plan()
        if case.interrupt_at is not None:
            plan.at[case.interrupt_at] = running.cancel
        with suppress(asyncio.CancelledError):
            await outcome(folder, plan, kind=case.kind, servers=case.servers, leave_at=case.leave_at)

    async def judge_all(folder: Path) -> None:
        tasks = [asyncio.create_task(judge(case, folder / f"{i}")) for i, case in enumerate(cases)]
        await asyncio.wait(tasks)
        for task in tasks:
            await task

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(judge_all(Path(folder)))


async def test_the_time_of_a_restart_is_remembered(tmp_path: Path) -> None:
    """An agent that timed out meanwhile did nothing wrong."""
    folder = tmp_path / "run"
    folder.mkdir()
    plan = Plan(faults={("/v1/completions", 6): "die before"})
    before = time.monotonic()
    async with owned(folder, plan, kind="full") as run:
        await run.go()
        assert run.told == ["vLLM died (killed by SIGKILL); it was started again in 0 s"]
        assert run.fleet.was_down(before) and not run.fleet.was_down(time.monotonic())


async def test_a_policy_that_does_not_learn_lets_servers_sleep_and_waits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    async with owned(folder, Plan(), kind="lora") as run:
        frozen = OwnedVLLM(setup_of("frozen"), fleet=run.fleet, learns=False)
        await run.go()
        await asyncio.gather(*(engine.pause() for engine in run.engines.values()))
        await run.train()  # the GPU is free
        prompt = [1, 2, 3]
        answer = frozen.generate(prompt, sampling=Sampling(max_tokens=8, seed=0), policy="frozen")
        asked = asyncio.create_task(anext(answer))  # pyright: ignore[reportArgumentType]  generators are coroutines
        await asyncio.sleep(0.05)
        assert not asked.done()
        for engine in run.engines.values():
            await engine.resume()
        shape = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 8}
        base = await sampled("first", {"model": "served", "prompt": prompt, "seed": 0, **shape})
        assert list((await asked).token_ids) == base
        await frozen.close()


async def test_keys_and_values_from_before_a_sleep_are_never_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    async with owned(folder, Plan(), kind="lora") as run:
        await run.go()
        for engine in run.engines.values():
            await engine.pause()
        for engine in run.engines.values():  # with the same weights
            await engine.resume()
        for name in run.engines:
            await run.probe(name, STEPS - 1)


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_a_restart_is_complete_before_anything_is_answered(hangs_up: bool, tmp_path: Path) -> None:
    """Even if the client whose request has found the server dead goes away in the middle of it."""
    folder = tmp_path / "run"
    folder.mkdir()
    plan = Plan(faults={("/collective_rpc", 1): "slow"})
    async with owned(folder, plan, kind="full") as run:
        await run.begin()
        run.machine.alive[0].dead.set()
        first = asyncio.create_task(run.ask("policy", stream=False))
        run.asked.append(first)
        while plan.met["/collective_rpc"] == 1:
            await asyncio.sleep(0.001)
        if hangs_up:
            first.cancel()
        await asyncio.gather(first, *(run.ask("policy", stream=stream) for stream in (True, False)))
        assert not run.refused and plan.met["start"] == 2


async def test_a_run_that_ends_during_a_restart_leaves_no_server(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    plan = Plan()
    async with owned(folder, plan, kind="full") as run:
        await run.begin()
        run.machine.alive[0].dead.set()
        run.asked.append(asyncio.create_task(run.ask("policy", stream=False)))
        while plan.met["start"] == 1:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert not run.machine.alive
