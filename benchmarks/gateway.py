"""The cost of our gateway and of `agentlightning` 1.0.2: CPU, memory and disk per call, and many calls at once.

Both sides run before one scripted upstream that speaks vLLM's HTTP API (`gateway/upstream.py`), under the same 64
clients (`gateway/clients.py`). All four are separate processes. Both sides record token ids and logprobs of every call.
The upstream answers at once, so the gateways are never idle, or takes 5 ms per token, so they mostly wait: then each
wake-up serves one call and costs more. Streams send one event per token, at 5 ms each. CPU is user + system time of the
gateway's process with its threads, from /proc. Linux only.

The peer needs a Python of its own (3.12 or later). uvloop and httptools make it faster; its users have them, as they
come with vLLM:

    python3.12 -m venv .venv-peer && .venv-peer/bin/pip install agentlightning==1.0.2 uvloop httptools
    python benchmarks/gateway.py [--peer-python .venv-peer/bin/python | --skip-peer] [--quick]
                                 [--json benchmarks/results/gateway.json]

The peer refuses streams (HTTP 400), so our streams are compared with its complete answers. It limits its connections to
the upstream to 100 (httpx's default), so 156 of 256 agents wait. It keeps its records in memory, so there is no disk
usage to compare.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gateway.phases import Bench, Cell, agents, cpu, disk, memory, streams
from gateway.sides import Ours, Peer, Upstream

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "recipes" / "sql_langgraph" / "warmstart"
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"
OPEN_FILES = 65536
"""Limit to ask for: 5,000 streams are 10,000 sockets of the gateway."""

PHASES = ["cpu", "memory", "disk", "agents", "streams"]
STEP_S = 0.005
"""Seconds per token of the slower upstream: 200 tokens per second, as a fast server gives each of 64 streams."""
LESS_CPU = {50: 10.0, 2000: 4.0}
"""Tokens → required ratio of the peer's CPU to ours. The bars are those of the issue that introduced the gateway."""
BYTES_PER_TOKEN = 15.0
GROWTH = 64.0
"""Bytes per call that count as none: over thousands of calls, far less than one page per call."""
SLOWED = 1.15
"""256 agents may take this many times the upstream's 2 s: connecting and answering all of them takes time, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A requirement and its measurement."""

    bar: str
    measured: str
    met: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON)
    parser.add_argument("--skip-peer", action="store_true", help="measure our side alone")
    parser.add_argument("--quick", action="store_true", help="one round, fewer calls: 10 minutes instead of 30")
    parser.add_argument("--only", nargs="*", choices=PHASES, help="some of the phases; others stay as in the file")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    peer = None if arguments.skip_peer or not arguments.peer_python.exists() else arguments.peer_python.absolute()
    if peer is None:
        print("our side alone: `--skip-peer`, or no Python with `agentlightning`; see the head of this file")
    _allow_open_files()
    upstream = Upstream(TOKENIZER)
    try:
        bench = Bench(upstream=upstream, tokenizer=TOKENIZER, peer_python=peer, quick=arguments.quick)
        result = measure(bench, phases=arguments.only or PHASES)
    finally:
        upstream.close()
    if arguments.only and arguments.json is not None and arguments.json.exists():
        known = json.loads(arguments.json.read_text(encoding="utf-8"))
        result = {name: values for name in PHASES if (values := result.get(name, known.get(name))) is not None}
    result["verdicts"] = [{"bar": v.bar, "measured": v.measured, "met": v.met} for v in verdicts(result)]
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**result, **about(peer)}, indent=2) + "\n", encoding="utf-8")


def measure(bench: Bench, *, phases: list[str]) -> dict[str, Any]:
    """Run the phases, one after the other."""
    quick = bench.quick
    turns = {50: 8, 2000: 4}
    kinds = [(step_s, stream) for step_s, stream in ((0.0, False), (STEP_S, False), (STEP_S, True))]
    cells = [
        Cell(tokens=n, turns=t, stream=stream, step_s=step_s)
        for n in turns
        for t in (1, turns[n])
        for step_s, stream in kinds
    ]
    at_once = [cell for cell in cells if not cell.step_s]

    def calls(cell: Cell) -> int:
        few = {50: 512 if quick else 1536, 2000: 64 if quick else 128}[cell.tokens]
        return few * (2 if cell.turns > 1 and cell.tokens == 2000 else 1) * (1 if cell.step_s else 2)

    run = {
        "cpu": lambda: cpu(bench, cells=cells, rounds=1 if quick else 3, calls=calls),
        "memory": lambda: memory(bench),
        "disk": lambda: disk(bench, cells=at_once, calls=calls),
        "agents": lambda: agents(bench, rounds=1 if quick else 3),
        "streams": lambda: streams(bench, count=5000),
    }
    result: dict[str, Any] = {}
    for name in phases:
        print(f"measuring {name} …", flush=True)
        result[name] = run[name]()
    return result


def verdicts(result: Mapping[str, Any]) -> Iterator[Verdict]:
    for name in result.get("cpu", {}):
        times = LESS_CPU[int(name.split()[0])]
        if ratio := _ratio(result["cpu"], name):
            yield Verdict(
                bar=f"≥ {times:g}× less CPU: {name}",
                measured=f"{statistics.median(ratio):.1f}×",
                met=statistics.median(ratio) >= times,
            )
    if "memory" in result:
        grown = result["memory"][Ours.name]["bytes_per_call_of_attempts_that_end"]
        yield Verdict(
            bar="RSS does not grow with calls of attempts that end",
            measured=f"{grown:.0f} B a call",
            met=grown <= GROWTH,
        )
    for name, sides in result.get("disk", {}).items():
        per_token = sides["bytes_per_token"]
        yield Verdict(
            bar=f"≤ {BYTES_PER_TOKEN:g} B of disk a token: {name}",
            measured=f"{per_token:.1f} B",
            met=per_token <= BYTES_PER_TOKEN,
        )
    if "agents" in result:
        wall_s = result["agents"][Ours.name]["wall_s"]
        yield Verdict(
            bar="256 agents on a 2 s upstream are not slowed", measured=f"{wall_s:.2f} s", met=wall_s <= 2.0 * SLOWED
        )
    if "streams" in result:
        count = result["streams"]["open_at_once"]
        yield Verdict(
            bar="5,000 streams at once in one process, no errors", measured=f"{count} at once", met=count >= 5000
        )


def _ratio(cells: Mapping[str, Any], name: str) -> list[float]:
    """How many times less CPU than the peer, in each round. Our streams are compared with the peer's complete answers.

    Empty without a peer.
    """
    theirs = cells.get(name.replace(", streaming", ", whole"), {}).get(Peer.name)
    if theirs is None:
        return []
    return [their / our for our, their in zip(cells[name][Ours.name]["cpu_ms"], theirs["cpu_ms"], strict=True)]


def show(result: Mapping[str, Any]) -> None:
    if "cpu" in result:
        title = "CPU a call, ms: median (min–max of the rounds)"
        print(f"\n{title:68} {'lightningrl':>20} {'agentlightning':>20} {'× less':>18}")
        for name, sides in result["cpu"].items():
            theirs = sides.get(Peer.name)
            ratio = _ratio(result["cpu"], name)
            times = f"{_range(ratio, 1)}{'' if theirs else ' *'}" if ratio else ""
            ours = _range(sides[Ours.name]["cpu_ms"], 3)
            peer = _range(theirs["cpu_ms"], 2) if theirs else "refused"
            print(f"{name:68} {ours:>20} {peer:>20} {times:>18}")
        print("* compared with its answer in one piece")
    for phase, heading in (
        ("memory", "RSS growth"),
        ("disk", "disk"),
        ("agents", "256 agents, 2 s"),
        ("streams", "streams"),
    ):
        if phase in result:
            print(f"\n{heading}")
            for name, values in result[phase].items():
                if isinstance(values, dict):
                    text = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
                else:
                    text = f"{values:.4g}"
                print(f"  {name}: {text}")
    print()
    for verdict in result["verdicts"]:
        print(f"{'met   ' if verdict['met'] else 'MISSED'}  {verdict['bar']}: {verdict['measured']}")


def _range(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def about(peer: Path | None) -> dict[str, Any]:
    """Date, machine and versions of this measurement."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    ours = {name: version(name) for name in ("uvicorn", "uvloop", "httptools", "aiohttp", "msgspec")}
    theirs = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found: dict[str, str] = {} if peer is None else json.loads(subprocess.check_output([peer, "-c", theirs], text=True))
    wanted = ("agentlightning", "fastapi", "uvicorn", "httpx", "uvloop", "httptools")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} CPUs, {model}, {platform.system()} {platform.machine()}",
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": ours,
        "peer_versions": {name: found[name] for name in wanted if name in found},
    }


def _allow_open_files() -> None:
    """Raise the limit on open files, also for child processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(OPEN_FILES, hard)), hard))


if __name__ == "__main__":
    sys.exit(main())
