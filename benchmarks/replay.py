"""Does the SQL agent go the same way on 1,000 recorded rollouts, and are changes of its code found where they are?

    python benchmarks/replay.py [--json benchmarks/results/replay.json] [--folder FOLDER]

It trains the SQL recipe for three steps, which records 1,076 rollouts. Then it removes all weights, of the run and of
the recipe, and runs `lightningrl replay --all --limit 1000` four times:

    unchanged      the recipe as it was: all rollouts should go the same way
    prompt         another system prompt: each should part at its first call
    tool           another text for the result of a query: each that reads it should part at the call after it
    unchanged      once more, for the time

Time is the wall time and the CPU time of the whole command, its start included. That of the live run is without its
training and its start: the time in which agents ran, and the CPU time of agents, gateway and engine. Ratios are live
against replayed, for each rollout.
"""

import argparse
import json
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "sql_langgraph"
LIMIT = 1000
SETTINGS = ("loop.steps=3", "tasks.heldout=125", "loop.eval_every=0")
PROMPT = ("agent.py", 'SYSTEM = "write sqlite"', 'SYSTEM = "write sqlite ."')
TOOL = ("agent.py", 'HumanMessage(state["feedback"].text)]', 'HumanMessage(state["feedback"].text + " .")]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """One `lightningrl replay --all`."""

    exit_code: int
    replayed: int
    same: int
    parted: dict[str, int]
    """Number of the call at which they parted → rollouts."""
    example: str
    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keep run and recipes here; a run that is there is used again")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="replay-"))).resolve()
    found = measure(folder)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.folder is None:
        shutil.rmtree(folder)


def measure(folder: Path) -> dict[str, Any]:
    run = folder / "run"
    if not (run / "result.json").exists():
        lightningrl("train", str(RECIPE), "--run-dir", str(run), "--no-ui", *SETTINGS)
    live = live_run(run)
    for name in ("checkpoints", "model"):
        shutil.rmtree(run / name, ignore_errors=True)
    several = with_several_calls(run)
    unchanged = [replay_all(run, copied(folder, "unchanged")) for _ in range(2)]
    prompt = replay_all(run, copied(folder, "prompt", PROMPT))
    tool = replay_all(run, copied(folder, "tool", TOOL))
    total = unchanged[0].replayed
    assert all(found.same == total and found.exit_code == 0 for found in unchanged), unchanged
    assert prompt.parted == {"1": total} and prompt.exit_code == 1, prompt
    assert tool.parted == {"2": several} and tool.same == total - several, (tool, several)
    best = min(unchanged, key=lambda found: found.wall_s)
    share = total / live["attempts"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "settings": list(SETTINGS),
        "live": live,
        "with_several_calls": several,
        "unchanged": [asdict(found) for found in unchanged],
        "prompt": asdict(prompt),
        "tool": asdict(tool),
        "wall_ratio": round(share * live["wall_s"] / best.wall_s, 2),
        "cpu_ratio": round(share * live["cpu_s"] / best.cpu_s, 2),
    }


def copied(folder: Path, name: str, change: tuple[str, str, str] | None = None) -> Path:
    """The recipe without weights, with this change: file, text, and the text in its place."""
    copy = folder / name
    if not copy.exists():
        shutil.copytree(RECIPE, copy, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__", "runs"))
    if change is not None:
        file, before, after = copy / change[0], change[1], change[2]
        text = file.read_text(encoding="utf-8")
        assert before in text or after in text, change
        file.write_text(text.replace(before, after), encoding="utf-8")
    return copy


def replay_all(run: Path, recipe: Path) -> Replays:
    began, spent = time.monotonic(), cpu_s()
    done = lightningrl("replay", str(run), "--all", "--limit", str(LIMIT), "--json", f"root={recipe}", check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    parted: dict[str, int] = {}
    for group in found["parted"]:
        parted[str(group["call"])] = parted.get(str(group["call"]), 0) + len(group["rollouts"])
    return Replays(
        exit_code=done.returncode,
        replayed=found["replayed"],
        same=found["same"],
        parted=parted,
        example=found["parted"][0]["example"] if parted else "",
        wall_s=round(time.monotonic() - began, 1),
        cpu_s=round(cpu_s() - spent, 1),
    )


def live_run(run: Path) -> dict[str, Any]:
    """Time in which any agent ran, and the CPU time of what ran it."""
    with sqlite3.connect(f"file:{run / 'store.sqlite'}?mode=ro", uri=True) as records:
        spans = records.execute("select started_at, ended_at from attempts order by started_at").fetchall()
        calls = records.execute("select count(*) from calls").fetchone()[0]
    wall, until = 0.0, 0.0
    for started, ended in spans:
        wall += max(0.0, ended - max(started, until))
        until = max(until, ended)
    spent = json.loads((run / "result.json").read_text(encoding="utf-8"))["cpu_s"]
    parts = {name: round(spent[name], 1) for name in ("agents", "gateway", "engine")}
    cpu = round(sum(parts.values()), 1)
    return {"attempts": len(spans), "calls": calls, "wall_s": round(wall, 1), "cpu_s": cpu, "cpu_parts_s": parts}


def with_several_calls(run: Path) -> int:
    """Number of replayed rollouts with more than one call: only those show a query's result to the model."""
    query = f"""
        select sum(count > 1) from (
            select count(*) as count from rollouts
            join attempts on attempts.rollout = rollouts.seq and attempts.number = rollouts.accepted
            join calls on calls.attempt = attempts.seq
            group by rollouts.seq order by rollouts.seq desc limit {LIMIT})
    """
    with sqlite3.connect(f"file:{run / 'store.sqlite'}?mode=ro", uri=True) as records:
        return records.execute(query).fetchone()[0]


def cpu_s() -> float:
    """CPU time of all ended children of this process, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lightningrl(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightningrl", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(done.returncode)
    return done


if __name__ == "__main__":
    main()
