"""A server that answers `/v1/completions` in vLLM 0.32's format, from a model that is a hash function.

The next token depends on the ids before it, the seed and the loaded weights, so a lost, doubled or swapped token shows.
The server runs in the test's own event loop, behind a real socket.
"""

import asyncio
import hashlib
import json
import math
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web

Row: TypeAlias = list[tuple[int, float]]
"""(token id, logprob), best first."""


@dataclass(kw_only=True)
class Upstream:
    """One server, with settings for tests."""

    texts: Mapping[int, str]
    """Token id → text; its keys are the vocabulary."""
    eos: int = 2
    max_model_len: int = 512
    processed_logprobs: bool = True
    dev_mode: bool = True
    token_ids: bool = True
    """Report token ids; False: texts only."""
    pieces: bool = False
    """Report logprobs in llama.cpp's format."""
    step_s: float = 0.0
    """Seconds between two tokens."""
    burst: int = 1
    """Events per write."""
    refuse: tuple[int, dict[str, str], bytes] | None = None
    """Status, headers and body of every response to a completion; None: a completion."""
    break_after: int | None = None
    """Number of tokens after which the connection is cut; None: never."""
    reset: bool = True
    """Whether the prefix cache can be reset."""
    lora_room: int | None = None
    """Most adapters at a time; None: adapters are disabled."""
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    """Name → hash of the folder."""
    roots: dict[str, str] = field(default_factory=dict[str, str])
    """Name of an adapter → folder that it was read from."""
    swapped: str | None = None
    """Folder that every adapter is read from; None: the one that was asked for."""
    dtype: str = "float32"
    weights: str = "first"
    loaded: list[dict[str, str]] = field(default_factory=list)
    """For each loaded folder: file name → hash."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    url: str = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._completions)])
        if self.dev_mode:
            app.add_routes(
                [
                    web.post("/collective_rpc", self._rpc),
                    web.post("/reset_prefix_cache", self._reset_prefix_cache),
                    web.get("/server_info", self._server_info),
                ]
            )
        if self.lora_room is not None:
            app.add_routes(
                [
                    web.post("/v1/load_lora_adapter", self._load_lora),
                    web.post("/v1/unload_lora_adapter", self._unload_lora),
                ]
            )
        return app

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": "served", "object": "model", "max_model_len": self.max_model_len}
        adapters = [
            {"id": name, "object": "model", "parent": "served", "max_model_len": None, "root": self.roots.get(name)}
            for name in self.adapters
        ]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    async def _load_lora(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name, folder = asked["lora_name"], Path(asked["lora_path"])
        if (
            name in self.adapters
            or not (folder / "adapter_config.json").is_file()
            or len(self.adapters) == self.lora_room
        ):
            return _bad(f"The lora adapter '{name}' cannot be loaded.")
        self.adapters[name] = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
        self.roots[name] = self.swapped or str(folder)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_lora(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _bad(f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _rpc(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["method"] == "reload_weights"
        files = sorted(Path(asked["kwargs"]["weights_path"]).iterdir())
        self.loaded.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
        self.weights = json.dumps(self.loaded[-1])
        return web.json_response({"results": [None]})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.json_response({"success": self.reset})

    async def _server_info(self, request: web.Request) -> web.Response:
        assert request.query["config_format"] == "json"
        return web.json_response({"vllm_config": {"model_config": {"dtype": f"torch.{self.dtype}"}}})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        if self.refuse is not None:
            status, headers, body = self.refuse
            return web.Response(status=status, headers=headers, body=body)
        if problem := self._problem(asked):
            return _bad(problem)
        self.running += 1
        try:
            return await (self._stream(request, asked) if asked.get("stream") else self._whole(request, asked))
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def _problem(self, asked: dict[str, Any]) -> str | None:
        prompt = asked["prompt"]
        if asked["model"] not in {"served", *self.adapters}:
            return f"The model `{asked['model']}` does not exist."
        if max(prompt) > max(self.texts):
            return f"Token id {max(prompt)} is out of vocabulary"
        if len(prompt) + asked["max_tokens"] > self.max_model_len:
            return f"This model's maximum context length is {self.max_model_len} tokens."
        return None

    async def _whole(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        ids: list[int] = []
        rows: list[tuple[float, Row]] = []
        reason = None
        async for token_id, logprob, row, ended in self._sample(asked):
            ids.append(token_id)
            rows.append((logprob, row))
            reason = ended
            self._maybe_break(request, len(ids))
        choice = self._choice(asked, ids, rows, reason, prompt=True)
        usage = {
            "prompt_tokens": len(asked["prompt"]),
            "total_tokens": len(asked["prompt"]) + len(ids),
            "completion_tokens": len(ids),
        }
        nothing = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
        return web.json_response(
            {
                "id": "cmpl-1",
                "object": "text_completion",
                "created": 1,
                "model": "served",
                "choices": [choice],
                "usage": usage,
                **nothing,
            }
        )

    async def _stream(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        waiting, sent = b"", 0
        async for token_id, logprob, row, reason in self._sample(asked):
            choice = self._choice(asked, [token_id], [(logprob, row)], reason, prompt=not sent)
            event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "served", "choices": [choice]}
            waiting += b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
            sent += 1
            self._maybe_break(request, sent)
            if sent % self.burst == 0 or reason is not None:
                half = len(waiting) // 2  # an event may come in two reads
                await response.write(waiting[:half])
                await asyncio.sleep(self.step_s / 2)
                await response.write(waiting[half:])
                waiting = b""
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _maybe_break(self, request: web.Request, sent: int) -> None:
        if self.break_after is not None and sent > self.break_after and request.transport is not None:
            request.transport.abort()

    async def _sample(self, asked: dict[str, Any]) -> AsyncIterator[tuple[int, float, Row, str | None]]:
        """(Token, its logprob, the reported distribution, finish reason or None) for each sampled token."""
        ids, seed = list(asked["prompt"]), asked.get("seed")
        rng = random.Random(seed) if seed is not None else random.Random()
        stops = {self.eos, *asked.get("stop_token_ids", ())}
        text = ""
        for count in range(1, asked["max_tokens"] + 1):
            await asyncio.sleep(self.step_s / 2)
            raw = self._logprobs(ids, model=asked["model"])
            row = _shaped(raw, asked)
            target, token_id = rng.random(), row[-1][0]
            for candidate, logprob in row:
                target -= math.exp(logprob)
                if target < 0:
                    token_id = candidate
                    break
            if asked["temperature"] == 0:
                token_id = row[0][0]
            shown = row if self.processed_logprobs else raw
            ids.append(token_id)
            text += self.texts[token_id]
            stopped = token_id in stops or any(stop in text for stop in asked.get("stop", ()))
            at_end = "length" if count == asked["max_tokens"] else None
            reason = "stop" if stopped else at_end
            yield token_id, dict(shown)[token_id], shown, reason
            if reason is not None:
                return

    def weights_of(self, model: str) -> str:
        """What a model's distributions depend on, besides the ids."""
        return self.weights + self.adapters.get(model, "")

    def _logprobs(self, ids: list[int], *, model: str) -> Row:
        digest = hashlib.sha256(json.dumps([self.weights_of(model), ids[-32:]]).encode()).digest()
        rng = random.Random(digest)
        return _normed([(token_id, rng.gauss(0.0, 2.0)) for token_id in self.texts])

    def _choice(
        self, asked: dict[str, Any], ids: list[int], rows: list[tuple[float, Row]], reason: str | None, *, prompt: bool
    ) -> dict[str, Any]:
        by_id = asked.get("return_tokens_as_token_ids")
        name = (lambda token_id: f"token_id:{token_id}") if by_id else self.texts.__getitem__
        count, tokens = asked["logprobs"], [name(token_id) for token_id in ids]
        tops = [
            {name(token_id): logprob} | {name(t): p for t, p in row[:count]}
            for token_id, (logprob, row) in zip(ids, rows, strict=True)
        ]
        logprobs: dict[str, Any] = {
            "text_offset": [0] * len(ids),
            "token_logprobs": [logprob for logprob, _ in rows],
            "tokens": tokens,
            "top_logprobs": tops,
        }
        if self.pieces:
            told = zip(ids, tokens, rows, tops, strict=True)
            ranked = [
                [{"token": t, "logprob": p} for t, p in sorted(top.items(), key=lambda item: -item[1])] for top in tops
            ]
            logprobs = {
                "content": [
                    {"id": i, "token": t, "bytes": list(t.encode()), "logprob": p, "top_logprobs": best}
                    for (i, t, (p, _), _), best in zip(told, ranked, strict=True)
                ]
            }
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(self.texts[token_id] for token_id in ids),
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": None,
        }
        if self.token_ids and asked.get("return_token_ids"):
            choice |= {"prompt_token_ids": asked["prompt"] if prompt else None, "token_ids": ids}
        return choice


@asynccontextmanager
async def running(upstream: Upstream) -> AsyncIterator[Upstream]:
    """Serve `upstream` while the block runs, at its `url`."""
    runner = web.AppRunner(upstream.app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    upstream.url = f"http://{host}:{port}"
    try:
        yield upstream
    finally:
        await runner.cleanup()


def _bad(problem: str) -> web.Response:
    return web.json_response(
        {"error": {"message": problem, "type": "BadRequestError", "param": None, "code": 400}}, status=400
    )


def _shaped(raw: Row, asked: dict[str, Any]) -> Row:
    """The distribution after temperature, top-k and top-p, in vLLM's order."""
    temperature = asked["temperature"]
    if temperature == 0:
        return raw
    row = _normed([(token_id, logprob / temperature) for token_id, logprob in raw])
    kept = row[: asked.get("top_k") or len(row)]
    share, top_p = 0.0, asked["top_p"]
    for index, (_, logprob) in enumerate(kept):
        if share >= top_p:
            kept = kept[:index]
            break
        share += math.exp(logprob)
    return _normed(kept)


def _normed(row: Row) -> Row:
    total = math.log(sum(math.exp(logit) for _, logit in row))
    return sorted(((token_id, logit - total) for token_id, logit in row), key=lambda item: -item[1])
