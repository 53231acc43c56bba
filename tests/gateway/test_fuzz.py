"""Random requests: no answer has status 5xx, errors have the client's own shape, and records equal the answers.

`make fuzz` sends 50,000 requests; the tests send some thousands of them.
"""

import asyncio
import copy
import os
from collections import Counter
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightningrl.chat import ChatTemplate
from lightningrl.gateway import create_app
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Rollout, Task

from .conftest import ScriptedEngine

REQUESTS = int(os.environ.get("LIGHTNINGRL_FUZZ", "3000"))
CALLS_PER_ATTEMPT = 100

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
USER = {"role": "user", "content": "say a word"}

CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "seed": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "max_tokens": 5,
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
}
CHAT["messages"] = [
    *CHAT["messages"],
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
]  # type: ignore[misc]
RESPONSES = {
    "model": "m",
    "instructions": "s",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto",
    "stream": False,
    "store": True,
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
    "max_output_tokens": 5,
    "text": {"format": {"type": "text"}},
    "previous_response_id": None,
    "include": [],
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "temperature": 1,
    "top_p": 1,
}
RESPONSES["input"] = [  # type: ignore[assignment]
    *RESPONSES["input"],  # type: ignore[misc]
    {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "r"},
]
CLAUDE = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "stream": True,
    "messages": [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
}
CLAUDE["messages"] = [
    *CLAUDE["messages"],
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
]  # type: ignore[misc]
GEMINI = {
    "contents": [
        {"role": "user", "parts": [{"text": "x"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": "b"}}}]},
    ],
    "systemInstruction": {"parts": [{"text": "s"}]},
    "tools": [{"functionDeclarations": [{**FUNCTION, "parameters": {"type": "OBJECT"}}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {"temperature": 1, "topP": 0.9, "topK": 3, "maxOutputTokens": 5, "stopSequences": ["x"]},
}
GEMINI["contents"] = [
    *GEMINI["contents"],
    {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"r": 1}}}]},
]  # type: ignore[misc]
COMPLETIONS = {
    "model": "m",
    "prompt": ["x", "y"],
    "n": 1,
    "max_tokens": 5,
    "logprobs": 1,
    "stop": "x",
    "echo": False,
    "stream": False,
    "seed": 1,
}
COMPLETIONS |= {"temperature": 0.5, "top_p": 0.9, "top_k": 3}

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", RESPONSES),
    ("/v1/messages", CLAUDE),
    ("/v1/messages/count_tokens", CLAUDE),
    ("/v1beta/models/m:generateContent", GEMINI),
    ("/v1beta/models/m:streamGenerateContent", GEMINI),
    ("/v1beta/models/m:countTokens", GEMINI),
    ("/v1/completions", COMPLETIONS),
]

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["auto", "none", "required", "json_schema", "<|im_end|>", "<tool_call>", "\x00", "é🦊", "resp_x"]),
)
unbounded = st.sampled_from(["inf", "-Infinity", "nan", "1e999"])
"""Numbers that some dialects accept as text."""
numbers = st.one_of(
    st.integers(),
    st.integers(-2, 300),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([10**30, -0.0, 1e300]),
)
scraps = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts, unbounded),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(texts, st.sampled_from(["type", "text", "role", "content", "name", "function", "id", "parts"])),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a valid body with random changes."""
    path, body = draw(st.sampled_from(BODIES))
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(0, 3))):
        _damage(draw, body)
    raw = bytearray(msgspec.json.encode(body))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        place = draw(st.integers(0, len(raw)))
        raw[place : place + draw(st.integers(0, 5))] = draw(st.binary(max_size=6))
    elif kind == 1:
        del raw[draw(st.integers(0, len(raw))) :]
    elif kind == 2:
        raw = bytearray(draw(st.binary(max_size=50)))
    elif kind == 3:
        raw = raw.replace(
            b'"x"',
            draw(st.sampled_from([b"NaN", b"1e999", b'"\\ud800"', b'"\xff"', b'"\\u0000"', b"[" * 200 + b"]" * 200])),
        )
    return path, bytes(raw)


def _damage(draw: st.DrawFn, tree: Any) -> None:
    """Replace, remove or add something at a random place."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        if isinstance(tree[key], dict | list) and tree[key] and draw(st.booleans()):
            tree = tree[key]
            continue
        verb = draw(st.integers(0, 3))
        if verb == 0:
            del tree[key]
        elif verb == 1 and isinstance(tree, list):
            tree.append(copy.deepcopy(tree[key]))
        else:
            tree[key] = draw(scraps)
        return


class Bench:
    """A gateway, and counts of its answers and records."""

    def __init__(self, template: ChatTemplate) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._template = template
        self._sent = self._attempts = 0
        self._attempt: Attempt | None = None
        self._calls = 0

    async def open(self) -> None:
        words = [
            self._template.encode(text)
            for text in ("hello", '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>', "é€🦊", "")
        ]
        self.engine = ScriptedEngine(
            lambda ids, sampling: [*words[len(ids) % 4], self._template.turn_end_id or 0][: sampling.max_tokens]
        )
        self.store = await SQLiteStore.open(":memory:")
        self.app = create_app(store=self.store, chat=self._template, engines={"policy": self.engine}, max_length=4000)

    async def send(
        self, path: str, body: bytes, *, query: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        if self._sent % CALLS_PER_ATTEMPT == 0:
            await self._next_attempt()
        assert self._attempt is not None
        self._sent += 1
        self.engine.asked.clear()
        status, answer = await self._post(
            path, body, query, ((b"authorization", f"Bearer {self._attempt.token}".encode()), *headers)
        )
        self.statuses[path, status] += 1
        assert status < 500, (path, body, answer)
        calls = await self.store.calls([self._attempt.id])
        new, self._calls = calls[self._calls :], len(calls)
        if status != 200:
            assert new == [], (path, body, answer)
            assert "error" in msgspec.json.decode(answer)
        elif not path.endswith(("count_tokens", "countTokens")):
            assert len(new) == len(self.engine.asked) >= 1
            assert [call.prompt_ids.tolist() for call in new] == [ids for ids, _, _ in self.engine.asked]
            assert all(call.capture != "incomplete" and len(call.completion_ids) for call in new)

    async def _next_attempt(self) -> None:
        self._attempts += 1
        if self._attempt is not None:
            await self.store.finish(self._attempt.id, "succeeded")
        name = f"r{self._attempts}"
        await self.store.enqueue([Rollout(id=name, group_id=name, task=Task(id="t", input={}, split="train"))])
        [(_, self._attempt)] = await self.store.claim("w", limit=1, lease_s=600)
        self._calls = 0

    async def _post(
        self, path: str, body: bytes, query: bytes, headers: tuple[tuple[bytes, bytes], ...]
    ) -> tuple[int, bytes]:
        sent: list[Any] = []
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.sleep(3600)
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(event: Any) -> None:
            sent.append(event)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": query, "headers": list(headers)}
        await self.app(scope, receive, send)
        return sent[0]["status"], b"".join(event.get("body", b"") for event in sent[1:])


def test_no_request_breaks_the_gateway_or_leaves_a_wrong_record(template: ChatTemplate) -> None:
    bench = Bench(template)
    with asyncio.Runner() as runner:
        runner.run(bench.open())

        @settings(
            max_examples=REQUESTS,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.filter_too_much,
                HealthCheck.large_base_example,
            ],
        )
        @given(
            bodies(),
            st.binary(max_size=10),
            st.lists(st.tuples(st.sampled_from([b"baggage", b"session_id", b"x-api-key"]), st.binary(max_size=20))),
        )
        def fuzz(asked: tuple[str, bytes], query: bytes, headers: list[tuple[bytes, bytes]]) -> None:
            runner.run(bench.send(*asked, query=query, headers=tuple(headers)))

        fuzz()
        runner.run(bench.store.close())
    total = sum(bench.statuses.values())
    assert total >= REQUESTS
    for path, _ in BODIES:  # some bodies are valid, and some are not
        assert bench.statuses[path, 200] > total / len(BODIES) / 20
        assert bench.statuses[path, 400] > total / len(BODIES) / 10


def test_any_path_and_method_gets_an_answer(template: ChatTemplate) -> None:
    bench = Bench(template)
    with asyncio.Runner() as runner:
        runner.run(bench.open())

        @settings(max_examples=REQUESTS // 10, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
        @given(
            st.text(max_size=40),
            st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", ""]),
            st.booleans(),
        )
        def fuzz(text: str, method: str, below: bool) -> None:
            path = f"/v1/{text}" if below else f"/{text}"

            async def ask() -> int:
                sent: list[Any] = []

                async def receive() -> dict[str, Any]:
                    return (
                        {"type": "http.request", "body": b"{}", "more_body": False}
                        if not sent
                        else {"type": "http.disconnect"}
                    )

                async def send(event: Any) -> None:
                    sent.append(event)

                await bench.app(
                    {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}, receive, send
                )
                return sent[0]["status"]

            assert runner.run(ask()) in (200, 401, 404, 405)

        fuzz()
        runner.run(bench.store.close())
