"""Workers on other machines: a real gateway on a real port, and workers that reach it over HTTP."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

import lightningrl
from lightningrl.config import AgentConfig, GatewayConfig
from lightningrl.errors import StoreFailed, UserError
from lightningrl.gateway.server import Certificate, certificate_of
from lightningrl.gateway.workers import worker_key
from lightningrl.leases import Outcome, StoreLeases
from lightningrl.remote.digest import copy_of, differences, served_copy
from lightningrl.remote.wire import Copy, Hello, Welcome
from lightningrl.runner import remote
from lightningrl.runner.dispatch import Dispatcher
from lightningrl.runner.remote import Place, RemoteLeases, remote_leases
from lightningrl.types import Attempt, Branch, Reward, Rollout, Task
from tests.workers import COPY, KEY, Server, ended

AGENT = AgentConfig(entry="agent:run", reward="agent:reward")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(path=tmp_path / "store.sqlite", port=0)


@dataclass
class Heard:
    """A watcher that keeps what it hears."""

    events: list[str] = field(default_factory=list)

    def connected(self, welcome: Welcome) -> None:
        self.events.append("connected")

    def away(self, why: str) -> None:
        self.events.append("away")

    def gone(self) -> None:
        self.events.append("gone")

    def back(self, seconds: float) -> None:
        self.events.append("back")

    def began(self, rollout: Rollout, attempt: Attempt) -> None:
        self.events.append(f"began {rollout.id}")

    def ended(self, attempt_id: str, outcome: Outcome) -> None:
        self.events.append(f"ended {attempt_id} {outcome.status}")

    def over(self) -> None:
        self.events.append("over")

    def taken(self, attempt_ids: Collection[str]) -> None:
        self.events += [f"taken {attempt_id}" for attempt_id in sorted(attempt_ids)]


class Gated:
    """A runner whose attempts end when the gate opens."""

    def __init__(self, *, open: bool = True) -> None:
        self.gate = asyncio.Event()
        self.cancelled: list[str] = []
        if open:
            self.gate.set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> Outcome:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(attempt.id)
            raise
        return Outcome(status="succeeded", output="done", rewards=(Reward(attempt_id=attempt.id, value=1.0),))


def hello(name: str = "w", **changes: Any) -> Hello:
    given = {"copy": COPY, "concurrency": 8, **changes}
    return Hello(worker=f"{name}-000001", name=name, **{"version": lightningrl.__version__, **given})


@asynccontextmanager
async def connected(
    server: Server, *, key: str = KEY, heard: Heard | None = None, said: Hello | None = None, most: float = 1e9
) -> AsyncIterator[RemoteLeases]:
    place = Place(url=server.url, key=key)
    async with remote_leases(place, said or hello(), watcher=heard or Heard(), max_attempts=most) as leases:
        await leases.hello()
        yield leases


@asynccontextmanager
async def working(leases: RemoteLeases, runner: Gated) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(leases=leases, runner=runner, base_url=server_url(leases), concurrency=8)
    task = asyncio.create_task(dispatcher.run())
    try:
        yield dispatcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def server_url(leases: RemoteLeases) -> str:
    return "http://127.0.0.1:1"


async def until(happened: Any, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_a_rollout_goes_from_enqueued_to_finished_through_a_worker_in_milliseconds(server: Server) -> None:
    async with server.up(), connected(server) as leases, working(leases, Gated()):
        took: list[float] = []
        for number in range(20):
            began = time.monotonic()
            await server.enqueue(f"r{number}")
            assert await ended(server, f"r{number}") == ["succeeded"]
            took.append(time.monotonic() - began)
        assert sorted(took)[10] < 0.25  # the bar is 50 ms; this machine may have other work
        [reward] = await server.store.rewards(["r0.1"])
        assert reward.value == 1.0


async def test_a_worker_with_a_wrong_key_is_told_so_at_once(server: Server) -> None:
    async with server.up():
        with pytest.raises(UserError, match="not the worker key"):
            async with connected(server, key="lrl-worker-other"):
                pass


@pytest.mark.parametrize("header", [None, "Bearer ", "Basic bHJs", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY])
async def test_no_path_of_workers_opens_without_the_key(server: Server, header: str | None) -> None:
    async with server.up(), aiohttp.ClientSession() as session:
        await server.enqueue("r")
        headers = {} if header is None else {"authorization": header}
        for path in ("", "/hello", "/claim", "/heartbeat", "/finish", "/bye", "/other"):
            method = session.get if path == "" else session.post
            async with method(f"{server.url}/workers{path}", headers=headers, json={}) as response:
                assert response.status == 401
        [rollout] = await server.store.rollouts(ids=["r"])
        assert rollout.status == "queued"


async def test_the_token_of_an_attempt_is_no_worker_key(server: Server) -> None:
    async with server.up(), aiohttp.ClientSession() as session, connected(server) as leases:
        await server.enqueue("r")
        [(_, attempt)] = await leases.claim(limit=1, holding=())
        headers = {"authorization": f"Bearer {attempt.token}", "x-api-key": KEY}
        async with session.get(f"{server.url}/r/{KEY}/workers", headers=headers) as response:
            assert response.status == 401


async def test_a_worker_of_another_version_is_told_what_to_install(server: Server) -> None:
    async with server.up():
        with pytest.raises(UserError, match=r"0\.0\.1") as refused:
            async with connected(server, said=hello(version="0.0.1")):
                pass
        assert f'pip install "lightningrl=={lightningrl.__version__}"' in (refused.value.hint or "")


async def test_a_worker_with_another_recipe_is_told_each_difference(server: Server) -> None:
    other = Copy(files={"agent.py": "b", "extra.py": "c"}, agent={"entry": "agent:main"})
    async with server.up():
        with pytest.raises(UserError) as refused:
            async with connected(server, said=hello(copy=other)):
                pass
        assert "`agent.entry` is `agent:main` on the worker and `agent:run` on the server" in refused.value.message
        assert "`agent.py` is another" in refused.value.message
        assert "`extra.py` is missing on the server" in refused.value.message
        assert server.workers.roster.present() == []
        async with connected(server, said=hello(copy=other, accept_differences=True)):
            assert len(server.workers.roster.present()) == 1


@pytest.mark.parametrize("id", ["local", "w-1", "w-00000g", "w-000001\n", "-000001"])
async def test_no_worker_can_call_itself_local_and_finish_the_attempts_of_the_server(server: Server, id: str) -> None:
    said = {"worker": id, "name": "w", "concurrency": 1, "version": lightningrl.__version__, "copy": COPY}
    outcome = Outcome(status="succeeded", rewards=(Reward(attempt_id="r.1", value=1.0),))
    messages = {"hello": said, "finish": {"worker": id, "attempt": "r.1", "outcome": outcome}}
    headers = {"authorization": f"Bearer {KEY}"}
    async with server.up(), aiohttp.ClientSession(headers=headers) as session:
        await server.enqueue("r")
        await server.store.claim(id, limit=1, lease_s=60)
        for path, message in messages.items():
            async with session.post(f"{server.url}/workers/{path}", data=msgspec.json.encode(message)) as response:
                assert response.status == 400
        [attempt] = await server.store.attempts(["r"])
        assert attempt.status == "running"


async def test_a_worker_gets_the_rollouts_whose_labels_it_has(server: Server) -> None:
    async with server.up():
        await server.enqueue("plain")
        await server.enqueue("browser", labels=("browser",))
        async with connected(server) as leases, connected(server, said=hello("b", labels=("browser",))) as browser:
            assert [rollout.id for rollout, _ in await leases.claim(limit=9, holding=())] == ["plain"]
            assert [rollout.id for rollout, _ in await browser.claim(limit=9, holding=())] == ["browser"]


async def test_a_worker_is_told_what_a_branch_repeats(server: Server) -> None:
    async with server.up(), connected(server) as leases:
        task = Task(id="t", input={}, split="train")
        branch = Branch(attempt_id="a.1", call_id="a.1/0")
        made = [Rollout(id="b", group_id="g", task=task, branch=branch), Rollout(id="r", group_id="g", task=task)]
        await server.store.enqueue(made)
        assert [rollout.branch for rollout, _ in await leases.claim(limit=9, holding=())] == [branch, None]
        await leases.finish("b.1", Outcome(status="succeeded", rewards=(Reward(attempt_id="b.1", value=1.0),)))
        [ended] = await server.store.attempts(["b"])
        assert (ended.status, ended.error) == ("failed", "void: its trunk, attempt `a.1`, does not exist")
        assert await server.store.rewards(["b.1"]) == []


async def test_a_server_that_restarts_finds_its_worker_and_its_attempt_again(server: Server) -> None:
    heard, runner = Heard(), Gated(open=False)
    async with server.up():
        await server.enqueue("r")
        place = Place(url=server.url, key=KEY)
    # the server is down when the worker starts, too
    async with remote_leases(place, hello(), watcher=heard) as leases:
        greeting = asyncio.create_task(leases.hello())
        await until(lambda: "away" in heard.events)
        async with server.up():
            await greeting
            task = asyncio.create_task(Dispatcher(leases=leases, runner=runner, base_url="", concurrency=8).run())
            await until(lambda: "began r" in heard.events)
        runner.gate.set()  # it ends while the server is away
        await asyncio.sleep(0.1)
        assert not any(event.startswith("ended") for event in heard.events)
        async with server.up():
            assert await ended(server, "r") == ["succeeded"]
            await until(lambda: heard.events[-1] == "ended r.1 succeeded")
            assert [attempt.status for attempt in await server.store.attempts(["r"])] == ["succeeded"]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert heard.events.count("connected") == 2


async def test_attempts_of_a_worker_that_came_back_too_late_are_cancelled(server: Server) -> None:
    server.lease_s = 1.0
    heard, runner = Heard(), Gated(open=False)
    async with server.up(), connected(server, heard=heard) as leases, working(leases, runner):
        await server.enqueue("r")
        await until(lambda: "began r" in heard.events)
        await server.store.finish("r.1", "lost")  # as if its lease had passed
        await until(lambda: runner.cancelled == ["r.1"])
        assert "taken r.1" in heard.events
        runner.gate.set()
        assert await ended(server, "r") == ["succeeded"]


async def test_what_a_stopped_server_had_not_graded_is_graded_by_the_next_one(server: Server) -> None:
    grading = asyncio.Event()

    async def waits(rollout: Rollout, attempt: Attempt, outcome: Outcome) -> Outcome:
        grading.set()
        return await asyncio.Event().wait() and outcome

    async def grades(rollout: Rollout, attempt: Attempt, outcome: Outcome) -> Outcome:
        return replace(outcome, rewards=(Reward(attempt_id=attempt.id, value=0.5),))

    server.grade = waits
    async with AsyncExitStack() as stack:
        async with server.up():
            leases = await stack.enter_async_context(connected(server))
            await server.enqueue("r")
            await leases.claim(limit=1, holding=())
            finishing = asyncio.create_task(leases.finish("r.1", Outcome(status="succeeded")))
            await grading.wait()
        assert not finishing.done()
        server.grade = grades
        async with server.up():
            await finishing
            assert await ended(server, "r") == ["succeeded"]
            assert [reward.value for reward in await server.store.rewards(["r.1"])] == [0.5]


async def test_an_attempt_that_the_server_does_not_know_is_forgotten(server: Server) -> None:
    heard = Heard()
    async with server.up(), connected(server, heard=heard) as leases:
        await leases.finish("nobody.1", Outcome(status="failed", error="AgentError: x"))
        assert heard.events[-1] == "ended nobody.1 failed"


class Failing(StoreLeases):
    """Leases that take no outcome until they are mended, and no heartbeat in time."""

    failing = True

    async def finish(self, worker: str, attempt_id: str, outcome: Outcome) -> None:
        if self.failing:
            raise StoreFailed("the disk is full")
        await super().finish(worker, attempt_id, outcome)

    async def heartbeat(self, worker: str, holding: Collection[str]) -> set[str]:
        if self.failing:
            await asyncio.sleep(0.3)
        return await super().heartbeat(worker, holding)


async def test_a_server_that_answers_with_errors_is_not_gone(server: Server) -> None:
    heard = Heard()
    async with server.up(), connected(server, heard=heard) as leases:
        server.workers.leases = failing = Failing(server.store)
        await server.enqueue("r")
        await leases.claim(limit=1, holding=())
        finishing = asyncio.create_task(leases.finish("r.1", Outcome(status="succeeded")))
        await until(lambda: heard.events.count("away") > 1)
        failing.failing = False
        await finishing
    assert "gone" not in heard.events and "back" in heard.events


async def test_one_late_heartbeat_breaks_nothing_and_two_are_a_dead_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BEAT_S", 0.1)
    heard = Heard()
    async with server.up(), connected(server, heard=heard) as leases:
        server.workers.leases = failing = Failing(server.store)
        assert await leases.heartbeat(["r.1"]) == {"r.1"}
        assert heard.events[-1] == "away" and "gone" not in heard.events
        await leases.heartbeat(["r.1"])
        assert heard.events[-1] == "gone"
        failing.failing = False
        await leases.heartbeat(["r.1"])
        assert heard.events[-2:] == ["back", "taken r.1"]


async def test_a_server_that_ends_is_gone(server: Server) -> None:
    heard = Heard()
    async with AsyncExitStack() as stack:
        async with server.up():
            leases = await stack.enter_async_context(connected(server, heard=heard))
        await leases.heartbeat(["r.1"])  # its connection was closed, maybe
        await leases.heartbeat(["r.1"])
        assert "gone" in heard.events


class LateBeats(StoreLeases):
    """Leases whose heartbeats take a while."""

    async def heartbeat(self, worker: str, holding: Collection[str]) -> set[str]:
        await asyncio.sleep(0.2)
        return await super().heartbeat(worker, holding)


async def test_an_attempt_that_ends_during_a_heartbeat_was_not_taken_away(server: Server) -> None:
    heard = Heard()
    async with server.up(), connected(server, heard=heard) as leases:
        server.workers.leases = LateBeats(server.store)
        await server.enqueue("r")
        await leases.claim(limit=1, holding=())
        beat = asyncio.create_task(leases.heartbeat(["r.1"]))
        await asyncio.sleep(0.05)
        await leases.finish("r.1", Outcome(status="succeeded"))
        assert await beat == {"r.1"}
        assert "taken r.1" not in heard.events
        assert await leases.heartbeat(["r.1"]) == set()  # it has ended long since


async def test_an_answer_that_did_not_arrive_costs_its_attempt_but_no_waiting(server: Server) -> None:
    async with server.up(), connected(server) as leases:
        await server.enqueue("r")
        [(_, first)] = await leases.claim(limit=1, holding=())
        [(rollout, second)] = await leases.claim(limit=1, holding=())  # it does not hold the first
        assert (rollout.id, first.id, second.id) == ("r", "r.1", "r.2")


async def test_a_worker_that_died_while_it_waited_gets_no_work(server: Server) -> None:
    async with server.up(), connected(server) as leases, connected(server, said=hello("other")) as other:
        claim = asyncio.create_task(leases.claim(limit=1, holding=()))
        [waiting, _] = server.workers.roster.present()
        await until(lambda: waiting.waiting)
        claim.cancel()
        await until(lambda: not waiting.waiting)
        await server.enqueue("r")
        assert [attempt.id for _, attempt in await other.claim(limit=1, holding=())] == ["r.1"]


async def test_a_worker_that_leaves_gives_its_attempts_back(server: Server) -> None:
    async with server.up(), connected(server) as leases, connected(server, said=hello("other")) as other:
        await server.enqueue("r")
        await leases.claim(limit=1, holding=())
        await leases.bye()
        assert [attempt.id for _, attempt in await other.claim(limit=1, holding=())] == ["r.2"]
        assert [worker.hello.name for worker in server.workers.roster.present()] == ["other"]


async def test_a_worker_takes_no_more_attempts_than_it_may(server: Server) -> None:
    async with server.up(), connected(server, most=3) as leases, working(leases, Gated()):
        await server.enqueue(*(f"r{number}" for number in range(5)))
        assert await ended(server, "r0", "r1", "r2") == ["succeeded"] * 3
        await leases.ending.wait()
        assert (await server.store.count()).get("queued") == 2


async def test_workers_leave_when_the_run_is_complete(server: Server) -> None:
    heard = Heard()
    async with server.up(), connected(server, heard=heard) as leases:
        claim = asyncio.create_task(leases.claim(limit=1, holding=()))
        await until(lambda: server.workers.roster.present()[0].waiting)
        server.workers.dismiss()
        assert await claim == []
        assert heard.events[-1] == "over" and leases.ending.is_set()


async def test_the_server_says_who_is_connected_and_what_they_have_done(server: Server) -> None:
    async with server.up(), connected(server, said=hello(labels=("gpu",))) as leases, working(leases, Gated()):
        await server.enqueue("r")
        await ended(server, "r")
        headers = {"authorization": f"Bearer {KEY}"}
        async with aiohttp.request("GET", f"{server.url}/workers", headers=headers) as response:
            [worker] = (await response.json())["workers"]
    assert (worker["name"], worker["labels"], worker["succeeded"], worker["away"]) == ("w", ["gpu"], 1, False)
    assert hello().worker not in str(worker)  # with the id, another worker could finish its attempts


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"worker":"w/-000001","limit":1,"holding":[]}', b'{"worker": 1}', b"\xff", b"[" * 9999]
)
async def test_requests_that_are_no_messages_are_refused(server: Server, body: bytes) -> None:
    async with server.up(), aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session:
        for path in ("hello", "claim", "heartbeat", "finish", "bye"):
            async with session.post(f"{server.url}/workers/{path}", data=body) as response:
                assert response.status == 400


def test_the_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    key = worker_key(tmp_path)
    assert key.startswith("lrl-worker-") and worker_key(tmp_path) == key
    assert (tmp_path / "worker.key").stat().st_mode & 0o777 == 0o600


def test_copies_of_a_recipe_differ_by_code_and_not_by_what_lies_around(tmp_path: Path) -> None:
    def laid_out(name: str, files: Mapping[str, str]) -> Copy:
        for path, text in files.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return copy_of(AGENT, root=tmp_path / name)

    around = [
        "runs/1/metrics.jsonl",
        ".git/config",
        "venv/x.py",
        "env/pyvenv.cfg",
        "env/lib/y.py",
        "m/tokenizer.json",
        "worker.key",
        "ca.pem",
    ]
    code = {"agent.py": "a", "tools/search.py": "b"}
    server = laid_out("server", {**code, **dict.fromkeys(around, "x"), "m/config.json": "{}", "big": "x" * 2**21})
    assert sorted(server.files) == sorted(code)
    assert laid_out("worker", code) == server


def test_a_worker_without_the_sandbox_or_the_variables_of_the_server_differs(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"command": ["a"], "reward": "agent:reward"}
    here = AgentConfig(**shared, isolation="bwrap", env={"MODE": "hard-secret", "SAME": "1", "HERE": "1"})
    there = AgentConfig(**shared, env={"MODE": "easy-secret", "SAME": "1", "THERE": "1"})
    server, worker = copy_of(here, root=tmp_path), copy_of(there, root=tmp_path)
    assert differences(worker=worker, server=server) == [
        "`agent.isolation` is `none` on the worker and `bwrap` on the server",
        "`agent.env.HERE` is missing on the worker",
        "`agent.env.MODE` is another on the worker than on the server",
        "`agent.env.THERE` is missing on the server",
    ]
    assert "secret" not in str(worker)
    assert differences(worker=server, server=server) == []


def test_files_that_appear_during_a_run_turn_no_worker_away_when_the_server_starts_again(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe", tmp_path / "run"
    for folder in (recipe, run):
        folder.mkdir()
    (recipe / "agent.py").write_text("a")
    worker = copy_of(AGENT, root=recipe)
    assert differences(worker=worker, server=served_copy(AGENT, root=recipe, folder=run)) == []
    (recipe / "cache.json").write_text("{}")  # by an agent or a grader
    again = served_copy(AGENT, root=recipe, folder=run)
    assert differences(worker=worker, server=again) == []
    assert differences(worker=copy_of(AGENT, root=recipe), server=again) == []  # a new copy of the folder
    (recipe / "agent.py").write_text("b")
    changed = served_copy(AGENT, root=recipe, folder=run)
    assert differences(worker=worker, server=changed) == ["`agent.py` is another on the worker than on the server"]


def test_a_long_list_of_differences_is_cut_short() -> None:
    many: Sequence[str] = differences(
        worker=Copy(files={}, agent={}), server=Copy(files={f"{n}.py": "x" for n in range(50)}, agent={})
    )
    assert len(many) == 21 and many[-1] == "and 30 more"


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    found = Certificate(file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(found.key_file), "-out", str(found.file), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return found


async def test_a_worker_reaches_a_server_with_a_certificate_of_its_own(
    server: Server, certificate: Certificate
) -> None:
    server.certificate = certificate
    async with server.up():
        with pytest.raises(UserError, match="is not trusted") as refused:
            async with connected(server):
                pass
        assert "--ca-file" in (refused.value.hint or "")
        place = Place(url=server.url, key=KEY, ca_file=certificate.file)
        async with remote_leases(place, hello(), watcher=Heard()) as leases:
            await leases.hello()
            await server.enqueue("r")
            assert len(await leases.claim(limit=1, holding=())) == 1


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path, certificate: Certificate) -> None:
    settings = GatewayConfig(certificate=Path("cert.pem"), certificate_key=Path("key.pem"))
    assert certificate_of(GatewayConfig(), root=tmp_path) is None
    assert certificate_of(settings, root=tmp_path) == certificate
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(UserError, match=r"cannot use the certificate `.*cert\.pem`"):
        certificate_of(settings, root=tmp_path)


@pytest.mark.parametrize("url", ["server:8100", "ftp://server", "http://", "http://server:99999"])
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(UserError, match="is not the address of a server"):
        Place(url=url, key=KEY)
