"""A gateway's cost per call in CPU, memory and disk, and its behaviour under many calls at once. One function each."""

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gateway.sides import HERE, Attempts, Ours, Peer, Side, Upstream, cost, peak_rss
from lightningrl.store import open_store

CONCURRENCY = 64

Columns: TypeAlias = dict[str, list[float]]
"""Quantity → its value in each round."""


class Failed(Exception):
    """A call was not answered correctly, so there is nothing to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One kind of call."""

    tokens: int
    turns: int
    """Calls per attempt: 1 for single calls, more for a growing conversation."""
    stream: bool
    step_s: float
    """The upstream's seconds per token. 0: it answers at once, so that the gateway is never idle."""

    @property
    def name(self) -> str:
        kind = "single calls" if self.turns == 1 else f"conversations of {self.turns} calls"
        pace = f"{1e3 * self.step_s:g} ms a token" if self.step_s else "at once"
        return f"{self.tokens} tokens {pace}, {kind}, {'streaming' if self.stream else 'whole'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The setup that all phases share."""

    upstream: Upstream
    tokenizer: Path
    peer_python: Path | None
    """None to measure only our side."""
    quick: bool

    @contextmanager
    def side(self, name: str) -> Iterator[Any]:
        """A new gateway in a folder of its own."""
        folder = Path(tempfile.mkdtemp(prefix="gateway-bench-"))
        try:
            if name == Ours.name:
                side: Side = Ours(folder, tokenizer=self.tokenizer, upstream=self.upstream.url)
            else:
                assert self.peer_python is not None
                side = Peer(folder, python=self.peer_python, upstream=self.upstream.url)
            try:
                yield side
            finally:
                side.close()
        finally:
            shutil.rmtree(folder)

    @property
    def names(self) -> list[str]:
        return [Ours.name] if self.peer_python is None else [Ours.name, Peer.name]


def drive(attempts: Attempts, *, processes: int = 1, **load: Any) -> dict[str, Any]:
    """Run clients and return their summed outcome. Raises `Failed` on any error. The processes share the attempts."""
    command = [sys.executable, str(HERE / "clients.py")]
    running: list[subprocess.Popen[str]] = []
    for part in range(processes):
        mine = [attempt[1:] for attempt in attempts[part::processes]]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps({"attempts": mine, "seed": part, **load}))
        process.stdin.close()
        process.stdin = None  # `communicate` would flush it
        running.append(process)
    outcomes = [json.loads(process.communicate()[0]) for process in running]
    errors = sum((Counter(outcome["errors"]) for outcome in outcomes), Counter[str]())
    if errors:
        raise Failed("; ".join(f"{count}× {error}" for error, count in errors.most_common(3)))
    added = {name: sum(outcome[name] for outcome in outcomes) for name in ("calls", "reads", "open_peak")}
    joined = {name: [s for outcome in outcomes for s in outcome[name]] for name in ("latency_s", "first_byte_s")}
    return {**added, **joined, "wall_s": max(outcome["wall_s"] for outcome in outcomes)}


# ---- CPU -----------------------------------------------------------------------------------------------------------


def cpu(
    bench: Bench, *, cells: Sequence[Cell], rounds: int, calls: Callable[[Cell], int]
) -> dict[str, dict[str, Columns]]:
    """Milliseconds of CPU per call, for each cell, side and round.

    The sides take turns, so that a busy machine slows both. A first round, which does not count, warms them up.
    """
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        cell.name: {name: [] for name in bench.names} for cell in cells
    }
    with (
        bench.side(bench.names[0]) as first,
        bench.side(bench.names[-1]) if len(bench.names) > 1 else nullcontext() as second,
    ):
        sides: list[Side] = [side for side in (first, second) if side is not None]
        for turn in range(rounds + 1):
            for cell in cells:
                bench.upstream.pace(step_s=cell.step_s)
                for side in sides if turn % 2 else sides[::-1]:
                    if cell.stream and not side.streams:
                        continue
                    count = calls(cell) if turn else CONCURRENCY * cell.turns
                    found[cell.name][side.name].append(_cpu_of(side, cell, count=count))
    return {
        name: {side: _columns(rows[1:]) for side, rows in by_side.items() if rows} for name, by_side in found.items()
    }


def _cpu_of(side: Side, cell: Cell, *, count: int) -> dict[str, float]:
    attempts = side.attempts(count // cell.turns)
    before = cost(side.pid).cpu_s
    outcome = drive(attempts, turns=cell.turns, tokens=cell.tokens, stream=cell.stream, concurrency=CONCURRENCY)
    spent_s = cost(side.pid).cpu_s - before
    side.finish(attempts)
    seen = {
        "cpu_ms": 1e3 * spent_s / outcome["calls"],
        "busy": spent_s / outcome["wall_s"],
        "latency_s": statistics.median(outcome["latency_s"]),
    }
    return seen | ({"reads_per_token": outcome["reads"] / outcome["calls"] / cell.tokens} if cell.stream else {})


def _columns(rows: Sequence[dict[str, float]]) -> Columns:
    return {name: [row[name] for row in rows] for name in rows[0]}


# ---- memory --------------------------------------------------------------------------------------------------------


def memory(bench: Bench) -> dict[str, dict[str, float]]:
    """RSS growth per call of a warm gateway, in bytes: in attempts that end, and within one attempt that does not."""
    bench.upstream.pace()
    found: dict[str, dict[str, float]] = {}
    for name in bench.names:
        with bench.side(name) as side:
            warm, measured = (12288, 6144) if name == Ours.name else (2048, 2048)
            ending = _growth(side, warm=warm, measured=measured, turns=4)
        with bench.side(name) as side:
            attempt = side.attempts(1)
            drive(attempt * 512, concurrency=CONCURRENCY)
            before, count = cost(side.pid).rss, 1024 if bench.quick else 4096
            drive(attempt * count, concurrency=CONCURRENCY, seed=1)
            within = (cost(side.pid).rss - before) / count
        found[name] = {"bytes_per_call_of_attempts_that_end": ending, "bytes_per_call_within_one_attempt": within}
    return found


def _growth(side: Side, *, warm: int, measured: int, turns: int) -> float:
    """RSS growth per call, in bytes. First `warm` attempts fill all bounded caches.

    Our gateway remembers 32 MB of conversations, some 45,000 calls of this kind.
    """

    def some(count: int) -> int:
        done = 0
        for _ in range(count // 128):
            attempts = side.attempts(128)
            done += drive(attempts, turns=turns, concurrency=CONCURRENCY)["calls"]
            side.finish(attempts)
        return done

    some(warm)
    before = cost(side.pid).rss
    calls = some(measured)
    return (cost(side.pid).rss - before) / calls


# ---- disk ----------------------------------------------------------------------------------------------------------


def disk(bench: Bench, *, cells: Sequence[Cell], calls: Callable[[Cell], int]) -> dict[str, dict[str, float]]:
    """Bytes of our closed store per token. A prompt's tokens that an earlier call already had do not count again."""
    bench.upstream.pace()
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        folder = Path(tempfile.mkdtemp(prefix="gateway-bench-"))
        try:
            side = Ours(folder, tokenizer=bench.tokenizer, upstream=bench.upstream.url)
            empty = side.store.stat().st_size
            attempts = side.attempts(calls(cell) // cell.turns)
            drive(attempts, turns=cell.turns, tokens=cell.tokens, concurrency=CONCURRENCY)
            side.finish(attempts)
            side.close()
            files = [path for path in folder.iterdir() if path.name.startswith("store.sqlite")]
            written = sum(path.stat().st_size for path in files) - empty
            found[cell.name] = asyncio.run(_tokens(side.store, [a[0] for a in attempts], cell=cell, written=written))
        finally:
            shutil.rmtree(folder)
    return found


async def _tokens(path: Path, attempt_ids: Sequence[str], *, cell: Cell, written: int) -> dict[str, float]:
    """Read the store back. Every call must be complete and continue the call before it."""
    store = await open_store(f"sqlite://{path}")
    calls = await store.calls(attempt_ids)
    await store.close()
    by_id = {call.id: call for call in calls}
    new = 0
    for call in calls:
        parent = by_id.get(call.parent_call_id or "")
        expected = "rendered" if call.index == 0 else "bridged"
        if (call.capture, len(call.completion_ids), len(call.logprobs)) != (expected, cell.tokens, cell.tokens):
            tokens = len(call.completion_ids)
            raise Failed(f"call {call.id}: `{call.capture}` ({call.capture_reason}) with {tokens} tokens")
        new += len(call.prompt_ids) - (0 if parent is None else len(parent.prompt_ids) + len(parent.completion_ids))
    sampled = sum(len(call.completion_ids) for call in calls)
    return {
        "bytes_per_token": written / (new + sampled),
        "bytes_per_sampled_token": written / sampled,
        "bytes_per_call": written / len(calls),
        "new_prompt_tokens_per_call": new / len(calls),
        "calls": len(calls),
    }


# ---- many at once --------------------------------------------------------------------------------------------------


def agents(bench: Bench, *, rounds: int, count: int = 256, takes_s: float = 2.0) -> dict[str, dict[str, float]]:
    """Wall-clock seconds of `count` simultaneous agents, each with one call that takes the upstream `takes_s`."""
    found: dict[str, dict[str, float]] = {}
    for name in bench.names:
        with bench.side(name) as side:
            walls: list[float] = []
            for _ in range(rounds + 1):
                bench.upstream.pace(delay_s=takes_s)
                walls.append(drive(side.attempts(count), concurrency=count)["wall_s"])
            found[name] = {
                "wall_s": statistics.median(walls[1:]),
                "open_at_the_upstream": bench.upstream.counts()["peak"],
            }
    return found


def streams(bench: Bench, *, count: int, tokens: int = 24, step_s: float = 2.0) -> dict[str, float]:
    """`count` simultaneous streams in one process of ours. They start over 20 s, and each lasts at least 46 s."""
    with bench.side(Ours.name) as side:
        drive(side.attempts(CONCURRENCY), stream=True)
        bench.upstream.pace(step_s=step_s)
        idle = cost(side.pid)
        attempts = side.attempts(count)
        outcome = drive(attempts, stream=True, tokens=tokens, concurrency=count, ramp_s=20.0, processes=2)
        busy = cost(side.pid)
        open_at_once = bench.upstream.counts()["peak"]
        return {
            "streams": outcome["calls"],
            "open_at_once": open_at_once,
            "first_byte_median_s": statistics.median(outcome["first_byte_s"]),
            "first_byte_p99_s": statistics.quantiles(outcome["first_byte_s"], n=100)[98],
            "first_byte_max_s": max(outcome["first_byte_s"]),
            "longest_s": max(outcome["latency_s"]),
            "rss_per_stream": (peak_rss(side.pid) - idle.rss) / count,
            "cpu_ms_per_stream": 1e3 * (busy.cpu_s - idle.cpu_s) / count,
            "token_s": step_s,
        }
