"""Plays vLLM's HTTP API with scripted tokens, cheaply enough that a benchmark of gateways does not measure it.

It serves `/v1/chat/completions` and `/v1/completions` (text or token ids), streaming or not, with `return_token_ids`
and `logprobs`, in the shapes of vLLM 0.20; and `/v1/models`, `/health`, `/version`. An answer has `max_tokens` tokens,
and the last one ends the turn. Bodies and events are made once per length; only the parts that depend on the prompt are
added. As in vLLM, a stream has one event per token, and all streams of a step are served together.

`POST /pace {"step_s", "delay_s"}` sets the seconds per token, and the seconds before the first one. `GET /counts`
returns the counts of requests.

    python benchmarks/gateway/upstream.py FOLDER    # of a tokenizer; prints its port
"""

import asyncio
import itertools
import json
import random
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import uvloop
from tokenizers import Tokenizer

MODEL = "bench"
VARIANTS = 16
"""Different answers per length, so that remembering a single one does not help."""
TICK_S = 0.005
"""A stream starts in one of these phases of a step, as if it came from one of several engines."""
CREATED = 1_760_000_000
TAIL = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

Piece: TypeAlias = tuple[bytes, bool]
"""Bytes to send, and whether they end the answer."""


class Ask(msgspec.Struct):
    """The fields of a request that matter here."""

    messages: list[dict[str, Any]] | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"[]")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: int | bool | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    top_k: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A scripted answer in each of its possible shapes."""

    length: int
    """Sampled tokens, including the end of the turn."""
    chat: bytes
    """The `choices` of a chat completion."""
    plain: bytes
    """The one choice of a completion, up to the place of its prompt ids."""
    events: tuple[tuple[bytes, bytes], ...]
    """For each token of a streamed completion: the bytes before and after the place of the prompt ids."""


class Script:
    """Answers with tokens of a tokenizer, and encodes text."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._words = [
            i
            for i in range(self._tokenizer.get_vocab_size())
            if i not in added and "\ufffd" not in self._tokenizer.decode([i])
        ]
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self._next = itertools.count()
        self._answers: dict[tuple[int, int, bool, bool, bool], Answer] = {}
        self.encode = lru_cache(maxsize=65536)(self._encode)

    def answer(self, ask: Ask) -> Answer:
        length = ask.max_tokens or ask.max_completion_tokens or 16
        wanted = ask.logprobs is not None and ask.logprobs is not False  # 0 asks for them, too
        key = (length, next(self._next) % VARIANTS, wanted, ask.return_tokens_as_token_ids, ask.top_k == 1)
        if key not in self._answers:
            self._answers[key] = self._write(*key)
        return self._answers[key]

    def chat_ids(self, messages: list[dict[str, Any]]) -> bytes:
        """The ids of a conversation in ChatML, as JSON without brackets. Each message can be encoded by itself, as
        control tokens separate them.
        """
        turns = [self.encode(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n") for m in messages]
        return b",".join([*turns, self.encode("<|im_start|>assistant\n")])

    def _encode(self, text: str) -> bytes:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ",".join(map(str, ids)).encode()

    def _write(self, length: int, variant: int, logprobs: bool, as_ids: bool, certain: bool) -> Answer:
        rng = random.Random(f"{length}/{variant}")
        ids = [*(rng.choice(self._words) for _ in range(length - 1)), self._end]
        texts = [self._tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        names = [f"token_id:{i}" for i in ids] if as_ids else texts
        # vLLM's floats are float32 widened to 17 digits
        values = [0.0 if certain else float(np.float32(-rng.expovariate(2.0))) for _ in ids]
        said = "".join(texts[:-1])
        tail = {"finish_reason": "stop", "stop_reason": None}
        shown = [
            {"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []}
            for t, p in zip(names, values, strict=True)
        ]
        chat = {
            "index": 0,
            "message": {"role": "assistant", "content": said, "refusal": None, "annotations": None, "audio": None}
            | {"function_call": None, "reasoning": None},
            "logprobs": {"content": shown} if logprobs else None,
            **tail,
            "token_ids": ids,
            "routed_experts": None,
        }
        plain = {
            "index": 0,
            "text": said,
            "logprobs": _columns(names, values, offset=0) if logprobs else None,
            **tail,
            "token_ids": ids,
        }
        events: list[tuple[bytes, bytes]] = []
        offset = 0
        for place, (token_id, text, name, value) in enumerate(zip(ids, texts, names, values, strict=True)):
            last = place == length - 1
            choice = {
                "index": 0,
                "text": "" if last else text,
                "logprobs": _columns([name], [value], offset=offset) if logprobs else None,
                "finish_reason": "stop" if last else None,
                "stop_reason": None,
            }
            head = {
                "id": f"cmpl-{variant:032x}",
                "object": "text_completion",
                "created": CREATED,
                "model": MODEL,
                "choices": [choice],
            }
            events.append(
                (b"data: " + _json(head)[:-3] + b',"prompt_token_ids":', b',"token_ids":[%d]}]}\n\n' % token_id)
            )
            offset += len(text)
        return Answer(length=length, chat=_json([chat]), plain=_json(plain)[:-1], events=tuple(events))


def _columns(texts: list[str], logprobs: list[float], *, offset: int) -> dict[str, Any]:
    offsets = list(itertools.accumulate((len(t) for t in texts[:-1]), initial=offset))
    top = [{t: p} for t, p in zip(texts, logprobs, strict=True)]
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": texts, "top_logprobs": top}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(slots=True)
class Counts:
    """Numbers of requests."""

    calls: int = 0
    open: int = 0
    peak: int = 0
    """Largest number of simultaneous requests since the pace was set."""
    broken: int = 0
    """Connections that were lost before their answer was complete."""


class Ticker:
    """Serves all streams of a step in one wake-up, as an engine's step does."""

    def __init__(self) -> None:
        self.step_s, self.delay_s = 0.0, 0.0
        self._phases: list[dict[Connection, Iterator[Piece]]] = []
        self._next = itertools.count()
        self._alarm: asyncio.TimerHandle | None = None
        self._now = 0
        self.pace(step_s=0.01, delay_s=0.0)

    def pace(self, *, step_s: float, delay_s: float) -> None:
        """Set the pace. Only while no stream is open."""
        self.step_s, self.delay_s = step_s, delay_s
        self._phases = [{} for _ in range(max(1, round(step_s / TICK_S)))]
        if self._alarm is not None:
            self._alarm.cancel()
        if step_s > 0:
            self._alarm = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def add(self, connection: "Connection", pieces: Iterator[Piece]) -> None:
        self._phases[next(self._next) % len(self._phases)][connection] = pieces

    def drop(self, connection: "Connection") -> None:
        for phase in self._phases:
            phase.pop(connection, None)

    def _tick(self) -> None:
        self._alarm = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._now = (self._now + 1) % len(self._phases)
        streams = self._phases[self._now]
        for connection, pieces in list(streams.items()):
            piece, last = next(pieces)
            connection.write(piece)
            if last:
                del streams[connection]
                connection.done()


@dataclass(slots=True)
class Server:
    script: Script
    ticker: Ticker
    counts: Counts = field(default_factory=Counts)


class Connection(asyncio.Protocol):
    """HTTP/1.1: one request after the other, with `content-length`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.ticker.drop(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._busy:
            self._server.counts.broken += 1
            self._server.counts.open -= 1

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._serve()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def done(self) -> None:
        """The answer is complete; serve the next request."""
        self._busy = False
        self._server.counts.open -= 1
        self._serve()

    def _serve(self) -> None:
        end = self._data.find(b"\r\n\r\n")
        if self._busy or end < 0:
            return
        first, *lines = bytes(self._data[:end]).split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line[:15].lower() == b"content-length:"), 0)
        if len(self._data) < end + 4 + length:
            return
        body = bytes(self._data[end + 4 : end + 4 + length])
        del self._data[: end + 4 + length]
        counts = self._server.counts
        self._busy = True
        counts.open += 1
        counts.peak = max(counts.peak, counts.open)
        self._route(first.split(b" ")[1].decode().partition("?")[0], body)

    def _route(self, path: str, body: bytes) -> None:
        if path in ("/v1/completions", "/v1/chat/completions"):
            self._server.counts.calls += 1
            self._complete(msgspec.json.decode(body, type=Ask), chat=path == "/v1/chat/completions")
            return
        known: dict[str, Any] = {
            "/v1/models": {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "max_model_len": 65536}],
            },
            "/health": {},
            "/version": {"version": "0.20.2"},
            "/counts": {name: getattr(self._server.counts, name) for name in Counts.__slots__},
        }
        if path == "/pace":
            self._server.counts.peak = 0
            self._server.ticker.pace(**json.loads(body))
            self._whole(b"{}")
        elif path in known:
            self._whole(_json(known[path]))
        else:
            self._whole(
                _json({"error": {"message": f"no {path}", "type": "NotFoundError", "param": None, "code": 404}}),
                status=b"404 Not Found",
            )

    def _complete(self, ask: Ask, *, chat: bool) -> None:
        answer = self._server.script.answer(ask)
        ids = self._prompt_ids(ask)
        count = ids.count(b",") + 1
        usage = {
            "prompt_tokens": count,
            "total_tokens": count + answer.length,
            "completion_tokens": answer.length,
            "prompt_tokens_details": None,
        }
        if ask.stream:
            assert not chat, "neither side streams chat completions"
            self._stream(answer, ids, usage if (ask.stream_options or {}).get("include_usage") else None)
            return
        shown = b"[%s]" % ids if ask.return_token_ids else b"null"
        body = self._chat(answer, shown, usage) if chat else self._plain(answer, shown, usage)
        ticker = self._server.ticker
        takes_s = ticker.delay_s + ticker.step_s * answer.length
        if takes_s > 0:
            takes_s *= random.uniform(0.95, 1.05) if ticker.step_s > 0 else 1.0  # keep clients out of step
            self._timer = asyncio.get_running_loop().call_later(takes_s, self._whole, body)
        else:
            self._whole(body)

    def _chat(self, answer: Answer, prompt_ids: bytes, usage: dict[str, Any]) -> bytes:
        body = {
            **self._head(f"chatcmpl-{self._server.counts.calls:032x}", "chat.completion", answer.chat, usage),
            "prompt_logprobs": None,
            "prompt_token_ids": msgspec.Raw(prompt_ids),
            "prompt_text": None,
            **TAIL,
        }
        return msgspec.json.encode(body)

    def _plain(self, answer: Answer, prompt_ids: bytes, usage: dict[str, Any]) -> bytes:
        tail = b',"prompt_logprobs":null,"prompt_token_ids":%s,"routed_experts":null}]' % prompt_ids
        choices = b"[" + answer.plain + tail
        head = self._head(f"cmpl-{self._server.counts.calls:032x}", "text_completion", choices, usage)
        return msgspec.json.encode({**head, **TAIL})

    def _head(self, reply_id: str, kind: str, choices: bytes, usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": reply_id, "object": kind, "created": CREATED, "model": MODEL, "choices": msgspec.Raw(choices)}
        return head | {"service_tier": None, "system_fingerprint": None, "usage": usage}

    def _prompt_ids(self, ask: Ask) -> bytes:
        """The prompt's ids as JSON without brackets."""
        script = self._server.script
        if ask.messages is not None:
            return script.chat_ids(ask.messages)
        raw = bytes(ask.prompt)
        return raw.strip(b" []") if raw[:1] == b"[" else script.encode(json.loads(raw))

    def _whole(self, body: bytes, *, status: bytes = b"200 OK") -> None:
        self.write(
            b"HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (status, len(body), body)
        )
        self.done()

    def _stream(self, answer: Answer, ids: bytes, usage: dict[str, Any] | None) -> None:
        ticker = self._server.ticker
        self.write(
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        pieces = _pieces(answer, ids, usage)
        if ticker.step_s == 0:
            for piece, _ in pieces:
                self.write(piece)
            self.done()
        elif ticker.delay_s > 0:
            self._timer = asyncio.get_running_loop().call_later(ticker.delay_s, self._begin, pieces)
        else:
            self._begin(pieces)

    def _begin(self, pieces: Iterator[Piece]) -> None:
        """Send the first token at once; the others take their steps."""
        piece, last = next(pieces)
        self.write(piece)
        if last:
            self.done()
        else:
            self._server.ticker.add(self, pieces)


def _pieces(answer: Answer, ids: bytes, usage: dict[str, Any] | None) -> Iterator[Piece]:
    """The bytes of each token. The last token's include the end of the stream."""
    last = len(answer.events) - 1
    for place, (head, tail) in enumerate(answer.events):
        chunk = _chunk(head + (b"[%s]" % ids if place == 0 else b"null") + tail)
        if place == last:
            if usage is not None:
                ending = {
                    "id": "cmpl-0",
                    "object": "text_completion",
                    "created": CREATED,
                    "model": MODEL,
                    "choices": [],
                    "usage": usage,
                }
                chunk += _chunk(b"data: %s\n\n" % _json(ending))
            chunk += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        yield chunk, place == last


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def main(folder: Path) -> None:
    server = Server(Script(folder), Ticker())
    sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listening = await asyncio.get_running_loop().create_server(lambda: Connection(server), sock=sock)
    print(sock.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes the pipe or dies
    listening.close()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1])))
