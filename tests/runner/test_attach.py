"""Attempts that share a process never share a token: real SDKs, a real HTTP server, 32 attempts at a time."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import httpx
import httpx2
import pytest
import requests
from requests.adapters import HTTPAdapter

import lightningrl
from lightningrl.config import AgentConfig
from lightningrl.runner.attach import belongs, identity
from lightningrl.runner.conformance import attempt
from lightningrl.runner.pool import WorkerPool

AGENTS = '''
import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from openai import AsyncOpenAI, OpenAI

client = OpenAI()  # shared by all attempts, made when the module is imported
async_client = AsyncOpenAI()

def reward(task, output):
    return 1

def ask(text):
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content

async def ask_async(text):
    answer = await async_client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content

def sync_sdk(task):
    return [ask(task["name"]), ask(task["name"])]

async def async_sdk(task):
    return await asyncio.gather(ask_async(task["name"]), ask_async(task["name"]))

async def streamed(task):
    messages = [{"role": "user", "content": task["name"]}]
    stream = await async_client.chat.completions.create(model="m", messages=messages, stream=True)
    return ["".join([chunk.choices[0].delta.content or "" async for chunk in stream])]

pool = ThreadPoolExecutor(8)  # shared by all attempts

def threads(task):
    return list(pool.map(ask, [task["name"]] * 3))

async def executor(task):
    loop = asyncio.get_running_loop()
    return [await loop.run_in_executor(None, ask, task["name"]), await asyncio.to_thread(ask, task["name"])]

def graph():
    builder = StateGraph(dict)
    builder.add_node("first", lambda s: {**s, "answers": [ChatOpenAI(model="m").invoke(s["name"]).content]})
    batched = RunnableLambda(lambda n: ChatOpenAI(model="m").invoke(n).content)
    builder.add_node("second", lambda s: {**s, "answers": s["answers"] + batched.batch([s["name"]] * 3)})
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", END)
    return builder.compile()

def langgraph(task):
    return graph().invoke({"name": task["name"]})["answers"]

async def langgraph_async(task):
    return (await graph().ainvoke({"name": task["name"]}))["answers"]

def elsewhere(task):
    """The same server under another name, and under a path beside the gateway's."""
    body = {"messages": [{"content": task["name"]}]}
    with httpx.Client(headers={"baggage": "mine=1"}) as http:
        answers = [http.post(url, json=body).json() for url in task["urls"]]
    return [answer["choices"][0]["message"]["content"] for answer in answers]
'''


@contextmanager
def gateway() -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """Its origin, and its requests: (path, baggage, key, text of the last message). It answers with that text."""
    seen: list[tuple[str, str, str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = body["messages"][-1]["content"]
            seen.append((self.path, self.headers.get("baggage", ""), self.headers.get("authorization", ""), text))
            if body.get("stream"):
                chunks = [{"delta": {"content": text}, "index": 0}, {"delta": {}, "index": 0, "finish_reason": "stop"}]
                events = [
                    json.dumps(
                        {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [c]}
                    )
                    for c in chunks
                ]
                self.answer("".join(f"data: {e}\n\n" for e in [*events, "[DONE]"]), kind="text/event-stream")
            else:
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
                self.answer(
                    json.dumps(
                        {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                    )
                )

        def answer(self, text: str, *, kind: str = "application/json") -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def outcomes(root: Path, entry: str, url: str, *tasks: dict[str, Any]) -> list[Any]:
    (root / "agents.py").write_text(AGENTS)
    agent = AgentConfig(entry=f"agents:{entry}", reward="agents:reward", workers=1, concurrency=len(tasks))
    runner = WorkerPool(agent, root=root, env={"OPENAI_BASE_URL": url}, log_path=root / "log")
    try:
        await runner.start()
        jobs = [attempt(task, name=task["name"], timeout_s=60) for task in tasks]
        results = await asyncio.gather(
            *(
                runner.run(rollout, a, {**env, "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url})
                for rollout, a, env in jobs
            )
        )
    finally:
        await runner.close()
    for result in results:
        assert result.status == "succeeded", result.error
    return [result.output for result in results]


@pytest.mark.parametrize(
    "entry", ["sync_sdk", "async_sdk", "streamed", "threads", "executor", "langgraph", "langgraph_async"]
)
async def test_every_call_carries_the_token_of_its_own_attempt(tmp_path: Path, entry: str) -> None:
    names = [f"n{i}" for i in range(32)]
    with gateway() as (origin, seen):
        outputs = await outcomes(tmp_path, entry, f"{origin}/v1", *({"name": name} for name in names))
    assert [set(output) for output in outputs] == [{name} for name in names]
    assert len(seen) == sum(map(len, outputs))
    for path, baggage, key, text in seen:
        assert (
            path == "/v1/chat/completions"
            and baggage == f"lightningrl.token=token-{text}"
            and key == "Bearer lightningrl"
        )


async def test_the_token_is_sent_to_the_gateway_only(tmp_path: Path) -> None:
    with gateway() as (origin, seen), gateway() as (other, overheard):
        paths = ["/g/v1/chat", "/g/v1beta/models/m:generateContent", "/gg/v1/chat", "/v1/chat"]
        urls = [
            *(f"{origin}{path}" for path in paths),
            f"{other}/g/v1/chat",
            f"{origin.replace('127.0.0.1', 'localhost')}/g/v1/chat",
        ]
        await outcomes(tmp_path, "elsewhere", f"{origin}/g/v1", {"name": "n", "urls": urls})
    assert sorted((path, baggage) for path, baggage, _, _ in seen) == [
        ("/g/v1/chat", "mine=1"),
        ("/g/v1/chat", "mine=1,lightningrl.token=token-n"),
        ("/g/v1beta/models/m:generateContent", "mine=1,lightningrl.token=token-n"),
        ("/gg/v1/chat", "mine=1"),
        ("/v1/chat", "mine=1"),
    ]
    assert [baggage for _, baggage, _, _ in overheard] == ["mine=1"]


@pytest.mark.parametrize(
    ("url", "base", "expected"),
    [
        ("http://h:80/v1/x", "http://h/v1", True),
        ("http://h/v1/x", "http://h:80/v1/", True),
        ("http://h/anything", "http://h", True),
        ("https://h/v1/x", "http://h/v1", False),
        ("http://h:8080/v1/x", "http://h:80/v1", False),
        ("http://h:80@evil/v1/x", "http://h:80/v1", False),
        ("http://h.evil/v1/x", "http://h/v1", False),
        ("http://h/gx", "http://h/g", False),
        ("http://h/v1/x", "", False),
    ],
)
def test_only_addresses_below_the_base_url_belong_to_the_gateway(url: str, base: str, expected: bool) -> None:
    assert belongs(url, urlsplit(base)) is expected


ATTEMPTS = 50
names = [f"n{number}" for number in range(ATTEMPTS)]
Ask: TypeAlias = Callable[[str, str], Awaitable[str]]


def body(name: str) -> dict[str, Any]:
    return {"messages": [{"content": name}]}


def text(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"]


@asynccontextmanager
async def asking(client: str, attempts: int) -> AsyncIterator[Ask]:
    """A function that sends a request through one shared client."""
    if client == "requests":
        async with AsyncExitStack() as stack:
            session = stack.enter_context(requests.Session())
            session.mount("http://", HTTPAdapter(pool_maxsize=attempts))
            yield lambda url, name: asyncio.to_thread(
                lambda: text(session.post(url, json=body(name), timeout=30).json())
            )
    elif client == "aiohttp":
        async with aiohttp.ClientSession() as shared:

            async def ask(url: str, name: str) -> str:
                async with shared.post(url, json=body(name)) as answer:
                    return text(await answer.json())

            yield ask
    else:
        async with (httpx if client == "httpx" else httpx2).AsyncClient(timeout=30) as shared:

            async def ask(url: str, name: str) -> str:
                return text((await shared.post(url, json=body(name))).json())

            yield ask


async def rollout(ask: Ask, origin: str, name: str) -> None:
    """One attempt: attached once, it sends requests in sequence and in parallel."""
    with lightningrl.attach(f"token-{name}", base_url=f"{origin}/v1"):
        assert await ask(f"{origin}/v1/chat", name) == name
        assert await asyncio.gather(*(ask(f"{origin}/v1/chat", name) for _ in range(2))) == [name, name]
    assert identity.get() is None


async def in_one_loop(client: str, origin: str, mine: list[str]) -> None:
    async with asking(client, len(mine)) as ask:
        await asyncio.gather(*(rollout(ask, origin, name) for name in mine))


def in_threads(client: str, origin: str, mine: list[str]) -> None:
    """Each attempt in a thread and an event loop of its own."""
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            asyncio.run(in_one_loop(client, origin, [name]))
        except BaseException as error:  # noqa: BLE001 - compared below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("client", ["httpx", "httpx2", "aiohttp", "requests"])
@pytest.mark.parametrize("where", ["loop", "threads", "both"])
async def test_fifty_concurrent_attempts_keep_their_own_tokens(client: str, where: str) -> None:
    with gateway() as (origin, seen):
        in_loop = {"loop": ATTEMPTS, "threads": 0, "both": ATTEMPTS // 2}[where]
        await asyncio.gather(
            in_one_loop(client, origin, names[:in_loop]), asyncio.to_thread(in_threads, client, origin, names[in_loop:])
        )
    assert len(seen) == 3 * ATTEMPTS
    assert [baggage for _, baggage, _, _ in seen] == [f"lightningrl.token=token-{name}" for _, _, _, name in seen]


def test_blocking_clients_in_threads_keep_their_own_tokens() -> None:
    """All attempts share a thread pool, and its threads share one client of each kind."""
    with (
        gateway() as (origin, seen),
        httpx.Client() as one,
        httpx2.Client() as two,
        requests.Session() as three,
        ThreadPoolExecutor(16) as pool,
    ):

        def run(name: str) -> None:
            with lightningrl.attach(f"token-{name}", base_url=f"{origin}/v1"):
                for client in (one, two, three):
                    assert text(client.post(f"{origin}/v1/chat", json=body(name)).json()) == name

        assert list(pool.map(run, names)) == [None] * ATTEMPTS
    assert [baggage for _, baggage, _, _ in seen] == [f"lightningrl.token=token-{name}" for _, _, _, name in seen]


async def test_without_a_block_the_context_belongs_to_the_attempt_until_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with gateway() as (origin, seen):
        monkeypatch.setenv("OPENAI_BASE_URL", f"{origin}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "key with, odd;signs")

        async def plain() -> None:
            lightningrl.attach()
            async with (
                aiohttp.ClientSession(headers={"baggage": "mine=1"}) as session,
                session.post(f"{origin}/v1/chat", json=body("x")) as answer,
            ):
                assert answer.status == 200

        await asyncio.create_task(plain())
    assert identity.get() is None
    assert [baggage for _, baggage, _, _ in seen] == ["mine=1,lightningrl.token=key%20with%2C%20odd%3Bsigns"]


def test_attaching_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(lightningrl.UserError, match="no token"):
        lightningrl.attach(base_url="http://h/v1")
    with pytest.raises(lightningrl.UserError, match="not the URL"):
        lightningrl.attach("token")


LATER = """
import sys, lightningrl
loaded = {"torch", "numpy.random", "httpx", "httpx2", "aiohttp", "requests"} & set(sys.modules)
assert loaded <= {"numpy.random"}, loaded
lightningrl.attach("token-n", base_url=sys.argv[1] + "/v1")
assert not {"httpx", "httpx2", "aiohttp", "requests"} & set(sys.modules), "attaching imports no client"
import asyncio, httpx, httpx2, requests, aiohttp.client
url, body = sys.argv[1] + "/v1/chat", {"messages": [{"content": "n"}]}
for client in (httpx, httpx2, requests):
    assert client.post(url, json=body).status_code == 200
async def ask():
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200
asyncio.run(ask())
"""


def test_clients_that_are_imported_later_are_patched_too() -> None:
    with gateway() as (origin, seen):
        subprocess.run([sys.executable, "-c", LATER, origin], check=True, timeout=60)
    assert [baggage for _, baggage, _, _ in seen] == ["lightningrl.token=token-n"] * 4
