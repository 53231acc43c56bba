"""What an engine over owned servers does if something happens to them in the middle of its work."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from aiohttp import web

from lightningrl.engine import http, vllm_fleet
from lightningrl.engine.base import Unanswerable
from lightningrl.engine.vllm_owned import OwnedVLLM
from lightningrl.errors import EngineError
from lightningrl.types import Sampling
from tests.engine.owned import FakeProcess, FakeVLLM, Plan
from tests.engine.test_vllm_fleet import impatient as impatient
from tests.engine.test_vllm_fleet import owned, setup_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets of killed servers


class Checked(FakeVLLM):
    """It has a `/weight_checker`."""

    norm = "first"
    """A tensor beside the other weights."""

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/weight_checker", self._checker)
        return app

    async def _rpc(self, request: web.Request) -> web.Response:
        self.norm = "first"
        return await super()._rpc(request)

    async def _checker(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["action"] == "reset":
            self.weights = self.norm = "zeros"
        hashes = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in tensors_of(self).items()}
        wrong = [name for name, digest in hashes.items() if asked.get("baseline", {}).get(name) != digest]
        return web.json_response({"checksums": hashes, "match": not wrong, "mismatches": wrong})


class Unwritten(Checked):
    """It does not load one of its tensors."""

    async def _rpc(self, request: web.Request) -> web.Response:
        kept = self.norm
        response = await super()._rpc(request)
        self.norm = kept
        return response


class Waiting(FakeVLLM):
    """It loads adapters when it may."""

    def __init__(self, plan: Plan, *, lora_room: int | None) -> None:
        super().__init__(plan, lora_room=lora_room)
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def _load_lora(self, request: web.Request) -> web.Response:
        await self.may_load.wait()
        return await super()._load_lora(request)


def tensors_of(fake: Checked) -> dict[str, str]:
    return {"model.embed_tokens.weight": fake.weights, "model.norm.weight": fake.norm}


async def test_a_tensor_that_is_not_loaded_ends_the_run_and_no_restart_hides_it(tmp_path: Path) -> None:
    plan = Plan()
    async with owned(tmp_path, plan, kind="full", fake=Unwritten) as run:
        with pytest.raises(Unanswerable, match=r"does not load all tensors: zeros stay in `model\.norm\.weight`"):
            await run.begin()
    assert plan.met["start"] == 1


async def test_a_server_that_was_started_again_is_checked_again(tmp_path: Path) -> None:
    plan = Plan()
    async with owned(tmp_path, plan, kind="full", fake=Checked) as run:
        await run.begin()
        asked = plan.met["/weight_checker"]
        run.machine.alive[0].dead.set()
        await run.ask("policy", stream=False)
        assert asked == 3 and plan.met["/weight_checker"] == 2 * asked and not run.refused


async def test_a_server_that_restarts_while_another_loads_has_the_new_weights(tmp_path: Path) -> None:
    """A request of another policy finds it dead, after its part of the load was done."""
    plan = Plan()
    async with owned(tmp_path, plan, kind="lora", servers=2, fake=Waiting) as run:
        await run.begin()
        solver = run.engines["solver"]
        await solver.pause()
        first, second = run.machine.processes
        assert isinstance(second.fake, Waiting)
        second.fake.may_load.clear()
        asked = plan.met["/v1/models"]
        loading = asyncio.create_task(solver.load(run.weights("solver", 1, write=True)))
        while plan.met["/v1/models"] < asked + 3:  # the first server is asked before and after it loads
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        first.fake.dead.set()
        assert await run.fleet.mend(run.fleet.losses)  # as after a request that has failed
        second.fake.may_load.set()
        await loading
        adapters = [name for fake in run.machine.alive for name in fake.adapters if name.startswith("solver")]
        assert len(adapters) == 2 and all(name.startswith("solver@1") for name in adapters)


async def test_a_restart_asks_no_server_that_sleeps_for_a_policy_that_was_never_used(tmp_path: Path) -> None:
    plan = Plan()
    async with owned(tmp_path, plan, kind="lora", servers=2) as run:
        frozen = OwnedVLLM(setup_of("frozen"), fleet=run.fleet, learns=False)
        await run.begin()
        for engine in run.engines.values():
            await engine.pause()
        run.machine.alive[0].dead.set()
        async with asyncio.timeout(http.IDLE_S * 0.9):  # a request to a server that sleeps fails after this time
            await run.publish(1)
        assert plan.met["start"] == 3
        await frozen.close()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("nobody expects it")])
async def test_an_error_of_this_machine_during_a_restart_ends_the_run_for_all_who_wait(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with owned(tmp_path, Plan(), kind="full") as run:
        await run.begin()

        async def start(*_: object, **__: object) -> FakeProcess:
            raise error

        monkeypatch.setattr(run.fleet.servers[0], "_starter", start)
        run.machine.alive[0].dead.set()
        asking = [asyncio.create_task(run.ask("policy", stream=False)) for _ in range(3)]
        async with asyncio.timeout(http.IDLE_S):
            await asyncio.gather(*asking, return_exceptions=True)
            await run.ask("policy", stream=False)
        assert f"{type(error).__name__}: {error}" in run.fleet.failed.result().message
        assert run.refused[-1] is run.fleet.failed.result()


async def test_a_stream_that_meets_new_weights_after_a_restart_says_so(tmp_path: Path) -> None:
    async with owned(tmp_path, Plan(), kind="full") as run:
        await run.begin()
        (engine,), (fake,) = run.engines.values(), run.machine.alive
        fake.step_s = 0.1
        sampling = Sampling(max_tokens=8, seed=0)
        stream = engine.generate([1, 2, 3], sampling=sampling, policy="policy", stream=True)
        await anext(stream)  # pyright: ignore[reportArgumentType]  generators are coroutines
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0.01)
        fake.dead.set()

        async def publish() -> None:
            await pausing
            await engine.load(run.weights("policy", 1, write=True))
            await engine.resume()

        publishing = asyncio.create_task(publish())
        with pytest.raises(EngineError, match="has new weights since then"):
            async for _ in stream:
                pass
        await publishing


@pytest.mark.parametrize("forgiven_s", [600.0, 0.0])
async def test_deaths_of_long_ago_do_not_count(
    forgiven_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_fleet, "FORGIVEN_S", forgiven_s)
    async with owned(tmp_path, Plan(), kind="full") as run:
        await run.begin()
        for _ in range(vllm_fleet.DEATHS + 1):
            run.machine.alive[0].dead.set()
            await run.ask("policy", stream=False)
            if run.refused:
                break
        assert len(run.refused) == (1 if forgiven_s else 0)
