"""What does a recorded call cost in disk, CPU and memory? Compared with plain JSON rows, one a call, in the same run.

The load are agents with tools. Each request repeats the whole history. System prompt and tools are the same in all
attempts, and eight attempts share a task. Text is English (the help of the standard library) at 4 characters a token.
Token ids are uniform in a vocabulary of 151,643, and logprobs are random float32, so only text and repeats compress.
Disk is the size of the closed file, per `sampled` token and per `recorded` token (also those that are new in prompts).
CPU is that of the whole process, both threads, while 64 attempts write at once.

Reads are measured on a store of `--reads` rollouts with four calls each: the list of the latest 40, the number of
rollouts, and one check whether any of the latest 10,000 has ended. Each is compared with a read of all rollouts.

    python benchmarks/store.py [--rounds 3] [--reads 25000] [--json benchmarks/results/store.json]
"""

import argparse
import asyncio
import json
import os
import platform
import pydoc_data.topics
import random
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightningrl.store import Store
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Call, Reward, Rollout, Sampling, Task

VOCAB, GROUP, AT_ONCE, CHARACTERS = 151_643, 8, 64, 4
TEXT = " ".join(" ".join(pydoc_data.topics.topics.values()).split())
SYSTEM, QUESTION, RESULT = 600, 50, 30
"""Tokens of the system prompt, the task, and the result of a tool."""


@dataclass(frozen=True)
class Load:
    """One cell of the table."""

    dialect: str
    tokens: int
    turns: int
    attempts: int

    @property
    def sampled(self) -> int:
        return self.tokens * self.turns * self.attempts

    @property
    def name(self) -> str:
        return f"{self.dialect}, {self.tokens} tokens, {self.turns} turn{'s' * (self.turns > 1)}"


LOADS = [
    Load("openai.chat", tokens, turns, 64 * (96 if tokens == 50 else 16) // turns)
    for tokens in (50, 2000)
    for turns in (1, 8)
]
LOADS += [Load(dialect, 50, 8, 64 * 12) for dialect in ("openai.responses", "anthropic.messages", "google.gemini")]


class Writer:
    """Makes random text and tokens."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)

    def text(self, tokens: int) -> str:
        start = self.random.randrange(len(TEXT) - tokens * CHARACTERS)
        return TEXT[start : start + tokens * CHARACTERS]

    def ids(self, tokens: int) -> np.ndarray:
        return self.numpy.integers(0, VOCAB, tokens, dtype=np.int32)


TOOLS = [
    {
        "name": name,
        "description": Writer(hash_).text(40),
        "parameters": {
            "type": "object",
            "properties": {
                key: {"type": "string", "description": Writer(hash_ + k).text(12)}
                for k, key in enumerate(("query", "table", "limit"))
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    }
    for hash_, name in enumerate(("run_sql", "list_tables", "describe_table", "search_documents", "submit_answer"))
]


def message_of(dialect: str, role: str, text: str) -> dict[str, Any]:
    """A message as clients of the dialect write it."""
    if dialect == "google.gemini":
        return {"parts": [{"text": text}], "role": "model" if role == "assistant" else role}
    if dialect == "anthropic.messages" and role == "assistant":
        return {"role": role, "content": [{"type": "text", "text": text}]}
    if dialect == "openai.responses" and role == "assistant":
        return {
            "type": "message",
            "role": role,
            "content": [{"type": "output_text", "text": text, "annotations": []}],
            "status": "completed",
        }
    return {"role": role, "content": text}


def request(dialect: str, system: str, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    messages = list(history)
    if dialect == "openai.responses":
        tools = [{"type": "function", **tool, "strict": True} for tool in TOOLS]
        return {
            "model": "policy",
            "instructions": system,
            "input": messages,
            "tools": tools,
            "temperature": 1.0,
            "stream": False,
        }
    if dialect == "anthropic.messages":
        tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in TOOLS
        ]
        blocks = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        return {
            "max_tokens": 4096,
            "messages": messages,
            "model": "policy",
            "system": blocks,
            "tools": tools,
            "stream": True,
        }
    if dialect == "google.gemini":
        config = {"temperature": 1.0, "maxOutputTokens": 4096}
        parts = {"parts": [{"text": system}], "role": "user"}
        return {
            "contents": messages,
            "systemInstruction": parts,
            "tools": [{"functionDeclarations": TOOLS}],
            "generationConfig": config,
        }
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    messages = [{"role": "system", "content": system}, *messages]
    return {
        "messages": messages,
        "model": "policy",
        "temperature": 1.0,
        "tools": tools,
        "max_completion_tokens": 4096,
        "stream": False,
    }


def response(dialect: str, call_id: str, text: str, *, read: int, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": read, "completion_tokens": tokens, "total_tokens": read + tokens}
    message = message_of(dialect, "assistant", text)
    if dialect == "openai.responses":
        usage = {"input_tokens": read, "output_tokens": tokens, "total_tokens": read + tokens}
        return {
            "id": call_id,
            "object": "response",
            "created_at": 1790000000,
            "status": "completed",
            "output": [message],
            "usage": usage,
        }
    if dialect == "anthropic.messages":
        usage = {"input_tokens": read, "output_tokens": tokens}
        return {
            "id": call_id,
            "type": "message",
            **message,
            "model": "policy",
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": usage,
        }
    if dialect == "google.gemini":
        usage = {"promptTokenCount": read, "candidatesTokenCount": tokens, "totalTokenCount": read + tokens}
        return {
            "candidates": [{"content": message, "finishReason": "STOP", "index": 0}],
            "usageMetadata": usage,
            "modelVersion": "policy",
        }
    choice = {"index": 0, "message": {**message, "refusal": None}, "logprobs": None, "finish_reason": "stop"}
    head = {"id": call_id, "object": "chat.completion", "created": 1790000000, "model": "policy"}
    return {**head, "choices": [choice], "usage": usage, "system_fingerprint": None}


def calls_of(load: Load, attempt: Attempt, seed: int, *, task: int) -> Iterator[Call]:
    """The calls of one attempt, in order."""
    shared, mine, own = Writer(0), Writer(1000 + task), Writer(10**6 + seed)
    system, prompt = shared.text(SYSTEM), shared.ids(SYSTEM + len(json.dumps(TOOLS)) // CHARACTERS)
    history = [message_of(load.dialect, "user", mine.text(QUESTION))]
    prompt, parent = np.concatenate((prompt, mine.ids(QUESTION))), None
    for index in range(load.turns):
        text, started = own.text(load.tokens), 1.79e9 + own.random.random() * 1e6
        call = Call(
            id=f"chatcmpl-{attempt.id}-{index}",
            attempt_id=attempt.id,
            index=index,
            parent_call_id=parent,
            agent="policy",
            policy="policy",
            policy_version=3,
            dialect=load.dialect,
            request=request(load.dialect, system, history),
            response=response(
                load.dialect, f"chatcmpl-{attempt.id}-{index}", text, read=len(prompt), tokens=load.tokens
            ),
            prompt_ids=prompt,
            completion_ids=own.ids(load.tokens),
            logprobs=-own.numpy.exponential(size=load.tokens).astype(np.float32),
            sampling=Sampling(max_tokens=4096 - len(prompt), seed=own.random.getrandbits(63)),
            finish_reason="stop",
            capture="bridged" if parent else "rendered",
            started_at=started,
            ended_at=started + own.random.random() * 3,
        )
        yield call
        history += [message_of(load.dialect, "assistant", text), message_of(load.dialect, "user", own.text(RESULT))]
        prompt, parent = np.concatenate((prompt, call.completion_ids, own.ids(RESULT + 8))), call.id


def recorded(load: Load) -> int:
    """New tokens: the sampled ones, one prompt for each task, and the results of tools."""
    first = SYSTEM + len(json.dumps(TOOLS)) // CHARACTERS + QUESTION * load.attempts // GROUP
    return load.sampled + first + (RESULT + 8) * (load.turns - 1) * load.attempts


async def begin(store: Store, load: Load) -> list[Attempt]:
    tasks = [
        Task(id=f"train-{n}", input={"question": Writer(1000 + n).text(QUESTION)}, split="train")
        for n in range(load.attempts // GROUP + 1)
    ]
    names = [f"0/{n // GROUP}/{n % GROUP}" for n in range(load.attempts)]
    await store.enqueue([Rollout(id=name, group_id=name[:-2], task=tasks[n // GROUP]) for n, name in enumerate(names)])
    return [attempt for _, attempt in await store.claim("worker-0", limit=load.attempts, lease_s=600)]


async def measure_store(path: Path, load: Load) -> dict[str, float]:
    store = await SQLiteStore.open(path)
    attempts = await begin(store, load)
    cpu = 0.0
    for start in range(0, load.attempts, AT_ONCE):
        batch = attempts[start : start + AT_ONCE]
        prepared = [list(calls_of(load, a, start + n, task=(start + n) // GROUP)) for n, a in enumerate(batch)]

        async def lane(calls: list[Call]) -> None:
            for call in calls:
                await store.append(call)

        began = time.process_time()
        await asyncio.gather(*map(lane, prepared))
        cpu += time.process_time() - began
        for attempt, calls in zip(batch, prepared, strict=True):
            await store.finish(
                attempt.id, "succeeded", rewards=[Reward(attempt_id=attempt.id, value=0.5)], output={"answer": 1}
            )
            assert (await store.calls([attempt.id]))[-1].request == calls[-1].request
    await store.close()
    return {"bytes": float(path.stat().st_size), "cpu_s": cpu}


def measure_plain(path: Path, load: Load) -> dict[str, float]:
    """The baseline: one row a call, the whole record as JSON, with the same group commits as the store."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE calls (id TEXT PRIMARY KEY, attempt_id TEXT NOT NULL, record TEXT NOT NULL)")
    connection.execute("CREATE INDEX calls_by_attempt ON calls (attempt_id)")
    cpu = 0.0
    for start in range(0, load.attempts, AT_ONCE):
        names = [f"0/{n // GROUP}/{n % GROUP}.1" for n in range(start, start + AT_ONCE)]
        batch = [Attempt(id=name, rollout_id=name[:-2], number=1, token="") for name in names]
        prepared = [list(calls_of(load, a, start + n, task=(start + n) // GROUP)) for n, a in enumerate(batch)]
        began = time.process_time()
        for calls in zip(*prepared, strict=True):
            connection.execute("BEGIN IMMEDIATE")
            for call in calls:
                record = msgspec.json.encode(call, enc_hook=lambda array: array.tolist()).decode()
                connection.execute("INSERT INTO calls VALUES (?, ?, ?)", (call.id, call.attempt_id, record))
            connection.execute("COMMIT")
        cpu += time.process_time() - began
    connection.close()
    return {"bytes": float(path.stat().st_size), "cpu_s": cpu}


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure_memory(path: Path, *, calls: int) -> dict[str, float]:
    """Growth of the process during the second half of the calls. In the first half, caches fill up to their limits."""
    load = Load("openai.chat", 50, 8, calls // 8)
    store = await SQLiteStore.open(path)
    attempts, start = await begin(store, load), 0
    for number, attempt in enumerate(attempts):
        if number == len(attempts) // 2:
            start = rss()
        for call in calls_of(load, attempt, number, task=number // GROUP):
            await store.append(call)
        await store.finish(attempt.id, "succeeded")
    growth = (rss() - start) / (calls / 2)
    await store.close()
    return {"calls": calls, "rss_bytes_per_call": growth}


async def write_run(path: Path, *, rollouts: int) -> None:
    """Rollouts that have ended, except the last one."""
    store = await SQLiteStore.open(path)
    load = Load("openai.chat", 50, 4, rollouts)
    attempts = await begin(store, load)

    async def one(number: int, attempt: Attempt) -> None:
        for call in calls_of(load, attempt, number, task=number // GROUP):
            await store.append(call)
        if number < rollouts - 1:
            await store.finish(
                attempt.id, "succeeded", rewards=[Reward(attempt_id=attempt.id, value=0.5)], output={"answer": 1}
            )

    for start in range(0, rollouts, AT_ONCE):
        await asyncio.gather(*(one(start + n, attempt) for n, attempt in enumerate(attempts[start : start + AT_ONCE])))
    await store.close()


async def measure_reads(path: Path, *, rounds: int) -> dict[str, float]:
    """Milliseconds of wall-clock, the lowest of all rounds. `all_…` reads all rollouts for the same result."""
    records = await SQLiteStore.read(path)
    ids = [rollout.id for rollout in await records.rollouts(limit=10_000)]
    cursor = (await records.changes()).cursor

    async def read_list(limit: int | None) -> None:
        attempts = await records.attempts([rollout.id for rollout in await records.rollouts(limit=limit)])
        for attempt in attempts:
            await records.calls([attempt.id])
        await records.rewards([attempt.id for attempt in attempts])

    reads: dict[str, Callable[[], Awaitable[object]]] = {
        "list": lambda: read_list(40),
        "all_list": lambda: read_list(None),
        "count": records.count,
        "all_count": records.rollouts,
        "look": lambda: records.changes(cursor),
        "all_look": lambda: records.rollouts(ids=ids),
    }
    found = {name: min([await _seconds(read) for _ in range(rounds)]) * 1e3 for name, read in reads.items()}
    await records.close()
    ratios = {f"{name}_ratio": found[f"all_{name}"] / found[name] for name in ("list", "count", "look")}
    return {f"{name}_ms": ms for name, ms in found.items()} | ratios


async def _seconds(read: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await read()
    return time.perf_counter() - began


def measure(load: Load, folder: Path, *, rounds: int) -> dict[str, float]:
    """The lowest CPU of all rounds, since other programs on the machine only add to it."""
    ours, plain = [], []
    for number in range(rounds):
        ours.append(asyncio.run(measure_store(folder / f"{load.name}-{number}.db", load)))
        plain.append(measure_plain(folder / f"{load.name}-{number}.plain", load))
    calls = load.turns * load.attempts
    cpu, plain_cpu = (min(side["cpu_s"] for side in sides) / calls * 1e6 for sides in (ours, plain))
    return {
        "calls": calls,
        "bytes_per_call": ours[0]["bytes"] / calls,
        "bytes_per_sampled_token": ours[0]["bytes"] / load.sampled,
        "bytes_per_recorded_token": ours[0]["bytes"] / recorded(load),
        "plain_bytes_per_sampled_token": plain[0]["bytes"] / load.sampled,
        "disk_ratio": plain[0]["bytes"] / ours[0]["bytes"],
        "cpu_us_per_call": cpu,
        "plain_cpu_us_per_call": plain_cpu,
        "cpu_ratio": plain_cpu / cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="loads whose name contains this")
    parser.add_argument(
        "--memory",
        type=int,
        default=20_000,
        help="calls over which the growth of the process is measured; 0 to leave it out",
    )
    parser.add_argument(
        "--reads", type=int, default=25_000, help="rollouts of the store that is read; 0 to leave it out"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.memory:
            results["memory"] = asyncio.run(measure_memory(Path(folder) / "memory.db", calls=arguments.memory))
            print(f"memory: {results['memory']['rss_bytes_per_call']:.1f} bytes a call over {arguments.memory} calls")
        if arguments.reads:
            asyncio.run(write_run(Path(folder) / "reads.db", rollouts=arguments.reads))
            reads = results["reads"] = asyncio.run(measure_reads(Path(folder) / "reads.db", rounds=arguments.rounds))
            for name in ("list", "count", "look"):
                made = f"{reads[f'{name}_ms']:8.1f} ms, from all rollouts {reads[f'all_{name}_ms']:8.1f} ms"
                print(f"{name:6} {made}: {reads[f'{name}_ratio']:.0f} times")
        disk = f"{'B/sampled':>9} {'B/recorded':>10} {'plain':>8} {'ratio':>6}"
        print(f"{'':38} {disk} {'us/call':>8} {'plain':>8} {'ratio':>6}")
        for load in LOADS:
            if arguments.only in load.name:
                row = results[load.name] = measure(load, Path(folder), rounds=arguments.rounds)
                sizes = f"{row['bytes_per_sampled_token']:9.2f} {row['bytes_per_recorded_token']:10.2f}"
                plain = f"{row['plain_bytes_per_sampled_token']:8.1f} {row['disk_ratio']:6.1f}"
                cpu = f"{row['cpu_us_per_call']:8.1f} {row['plain_cpu_us_per_call']:8.1f} {row['cpu_ratio']:6.2f}"
                print(f"{load.name:38} {sizes} {plain} {cpu}")
    if arguments.json:
        about = {"machine": platform.machine(), "load_average": os.getloadavg()[0], "rounds": arguments.rounds}
        arguments.json.write_text(json.dumps(results | about, indent=2) + "\n")


if __name__ == "__main__":
    main()
