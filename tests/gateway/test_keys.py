"""Which key opens which route? Every route of the server, with every kind of key; whatever has no row is denied."""

import ast
import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

import lightningrl
from docs_site import reference
from lightningrl import dialects, gateway
from lightningrl.dialects.gemini import PATH as GEMINI
from lightningrl.gateway import create_app
from lightningrl.gateway.upstream import Upstream
from lightningrl.gateway.workers import PATH as WORKERS
from lightningrl.gateway.workers import Workers
from lightningrl.leases import Outcome, StoreLeases
from lightningrl.remote.wire import Beat, Bye, Claim, Copy, Finish, Hello
from lightningrl.types import Attempt

from .conftest import Stage, serving

WORKER_KEY = "lrl-worker-test"
KEYS: tuple[str, ...] = ("none", "unknown", "own", "another", "ended", "lost", "worker")
"""`own`: that of the attempt whose call, response and request the bodies name. `another`: of another running one."""
ANYBODY: dict[str, int] = dict.fromkeys(KEYS, 200)
NOBODY: dict[str, int] = dict.fromkeys(KEYS, 401)
RUNNING = {**NOBODY, "own": 200, "another": 200}
OWN = {**NOBODY, "own": 200}
TELEMETRY = {**RUNNING, "ended": 200, "lost": 200}
"""Late spans are taken."""
A_WORKER = {**NOBODY, "worker": 200}

USER = {"role": "user", "content": "say a word"}
TURNS = {"model": "m", "messages": [USER]}
CONTENTS = {"contents": [{"parts": [{"text": "hi"}]}]}
COPY = Copy(files={}, agent={})
HELLO = Hello(worker="w-000001", name="w", concurrency=1, version=lightningrl.__version__, copy=COPY)
LATE = Outcome(status="succeeded")


@dataclass
class House:
    """A server with everything switched on, and an attempt of each kind."""

    url: str
    stage: Stage
    attempts: dict[str, Attempt]
    call: str = ""
    """The id of an answer of the own attempt."""
    response: str = ""
    """The same, of a response that a later one may continue."""
    thread: str = ""
    """The same, of a message that begins a thread."""

    def headers(self, key: str) -> dict[str, str]:
        secrets = {name: attempt.token for name, attempt in self.attempts.items()}
        secret = {"unknown": "lrl-nobody", "worker": WORKER_KEY, **secrets}.get(key)
        return {} if secret is None else {"authorization": f"Bearer {secret}"}

    async def ask(self, method: str, path: str, key: str, body: Any = None) -> httpx2.Response:
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json", **self.headers(key)}
        async with httpx2.AsyncClient(verify=False) as client:
            return await client.request(method, f"{self.url}{path}", content=content, headers=headers)

    def rows(self) -> dict[tuple[str, str], tuple[Any, dict[str, int]]]:
        """(method, path) → (body, status for each key). The rows are asked in this order."""
        follow = {"model": "m", "input": "hi", "previous_response_id": self.response}
        thread = {**TURNS, "max_tokens": 5, "thread": {"type": "continue", "previous_message_id": self.thread}}
        return {
            ("GET", "/"): (None, ANYBODY),
            ("GET", "/health"): (None, ANYBODY),
            ("GET", "/models"): (None, ANYBODY),
            ("GET", "/models/m"): (None, ANYBODY),
            ("POST", "/chat/completions"): (TURNS, RUNNING),
            ("POST", "/completions"): ({"model": "m", "prompt": "x"}, RUNNING),
            ("POST", "/responses"): (follow, {**OWN, "another": 400}),
            ("POST", "/responses/input_tokens"): (follow, {**OWN, "another": 400}),
            ("POST", "/messages"): (thread, {**OWN, "another": 404}),
            ("POST", "/messages/count_tokens"): (TURNS, RUNNING),
            ("POST", "/models/m:generateContent"): (CONTENTS, RUNNING),
            ("POST", "/models/m:streamGenerateContent"): (CONTENTS, RUNNING),
            ("POST", "/models/m:countTokens"): (CONTENTS, RUNNING),
            ("POST", "/embeddings"): ({"model": "e", "input": "x"}, RUNNING),
            ("POST", "/traces"): ({"resourceSpans": []}, TELEMETRY),
            ("POST", "/rewards"): ({"value": 1.0, "call": self.call}, {**OWN, "another": 400}),
            ("GET", "/replay/tools"): (None, RUNNING),
            ("POST", "/abandon"): ({"request": "a"}, RUNNING),  # each attempt has its own names
            ("GET", WORKERS): (None, A_WORKER),
            ("POST", f"{WORKERS}/hello"): (HELLO, A_WORKER),
            ("POST", f"{WORKERS}/claim"): (Claim(worker="w-000001", limit=0, holding=[]), A_WORKER),
            ("POST", f"{WORKERS}/heartbeat"): (Beat(worker="w-000001", holding=[self.attempts["own"].id]), A_WORKER),
            ("POST", f"{WORKERS}/finish"): (
                Finish(worker="w-000001", attempt=self.attempts["own"].id, outcome=LATE),
                A_WORKER,
            ),
            ("POST", f"{WORKERS}/bye"): (Bye(worker="w-000001"), A_WORKER),
        }


@pytest.fixture
async def house(stage: Stage) -> AsyncIterator[House]:
    async def embeds(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"data": []}'})

    async def copy() -> Copy:
        return COPY

    workers = Workers(key=WORKER_KEY, recipe="r", version=lightningrl.__version__, copy=copy())
    workers.leases = StoreLeases(stage.store)
    async with AsyncExitStack() as stack:
        upstream = Upstream("far", url=await stack.enter_async_context(serving(embeds)))
        app = create_app(
            store=stage.store,
            chat=stage.template,
            engines={"policy": stage.engine},
            upstreams=[upstream],
            embeddings="upstreams.far",
            max_length=2000,
            may_reward=True,
            workers=workers,
        )
        url = await stack.enter_async_context(serving(app))
        stack.push_async_callback(upstream.close)
        lost = await stage.begin("lost")
        await stage.store.claim("w", limit=0, lease_s=60, holding=())
        ended = await stage.begin("ended")
        await stage.store.finish(ended.id, "succeeded")
        await stage.store.finish((await stage.begin("lost")).id, "failed")  # its rollout was queued again
        running = {name: await stage.begin(name) for name in ("own", "another")}
        house = House(url=url, stage=stage, attempts={"ended": ended, "lost": lost, **running})
        house.call = (await house.ask("POST", "/chat/completions", "own", TURNS)).json()["id"]
        first = {"model": "m", "input": "hi"}
        house.response = (await house.ask("POST", "/responses", "own", first)).json()["id"]
        began = {**TURNS, "max_tokens": 5, "thread": {"type": "create"}}
        house.thread = (await house.ask("POST", "/messages", "own", began)).json()["id"]
        yield house
        workers.close()


async def test_every_route_with_every_key(house: House) -> None:
    store = house.stage.store
    wrong: list[str] = []
    for (method, path), (body, statuses) in house.rows().items():
        for key in KEYS:
            answer = await house.ask(method, path, key, body)
            if answer.status_code != statuses[key]:
                wrong.append(f"{method} {path} with {key}: {answer.status_code}, not {statuses[key]}: {answer.text}")
    assert wrong == []
    calls = {name: len(await store.calls([attempt.id])) for name, attempt in house.attempts.items()}
    assert calls == {"ended": 0, "lost": 0, "own": 3 + 6, "another": 4}
    rewards = {name: len(await store.rewards([attempt.id])) for name, attempt in house.attempts.items()}
    assert rewards == {"ended": 0, "lost": 0, "own": 1, "another": 0}
    for name in ("own", "another"):  # the worker that said `finish` does not hold them
        [attempt] = await store.attempts([name])
        assert attempt.status == "running"


async def test_what_has_no_row_is_denied(house: House) -> None:
    rows = house.rows()
    paths = {path for _, path in rows} | {"/nothing", "/workers/nothing", "/x/v2", "/r", "/admin", "/docs", "/metrics"}
    for path in paths:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            if (method, path) in rows or (method == "GET" and path.startswith("/models/")):
                continue  # a model may have any name
            for key in ("none", "own", "worker"):
                answer = await house.ask(method, path, key, {})
                assert answer.status_code in (401, 404, 405), (method, path, key)
                assert "access-control-allow-origin" not in answer.headers


async def test_the_name_of_another_attempts_request_abandons_nothing(house: House) -> None:
    house.stage.engine.delay_s = 0.3
    headers = {**house.headers("own"), "x-lightningrl-request": "a"}
    async with httpx2.AsyncClient(verify=False) as client:
        asking = asyncio.create_task(client.post(f"{house.url}/chat/completions", json=TURNS, headers=headers))
        await asyncio.sleep(0.1)
        assert (await house.ask("POST", "/abandon", "another", {"request": "a"})).status_code == 200
        assert (await asking).status_code == 200


def paths_in(folder: Path) -> set[str]:
    """All texts in the code of a folder that look like a path of the server."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in folder.glob("*.py")]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"/[a-z_/]*", text)}


def test_every_route_has_a_row_and_is_documented() -> None:
    attempts = dict.fromkeys(("own", "another"), Attempt(id="r.1", rollout_id="r", number=1, token="t"))
    rows = House(url="", stage=None, attempts=attempts).rows()  # type: ignore[arg-type]
    named = {path.removeprefix(WORKERS) if path != WORKERS else path for _, path in rows}
    prefixes = {"/r/", "/models/", "//"}
    written = paths_in(Path(str(gateway.__file__)).parent) | paths_in(Path(str(dialects.__file__)).parent)
    assert written - named - prefixes == set()
    verbs = re.search(r"\(\?P<verb>([\w|]+)\)", GEMINI.pattern)
    assert verbs is not None
    assert {f"/models/m:{verb}" for verb in verbs[1].split("|")} <= named
    documented = {path.replace("<model>", "m") for path in reference.DIALECT_PATHS}
    documented |= {path.replace("<model>", "m") for path in re.findall(r"`(/[^`]*)`", reference.OTHER_PATHS)}
    assert documented == {path for _, path in rows}
