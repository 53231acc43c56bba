"""Which agents go the same way again on recorded answers? Replays and branches every agent of `tests/matrix`.

    make test-agents ARGS=--co                        once: installs the agents' packages
    python benchmarks/replayable.py                   all of them: half an hour on two cores
    python benchmarks/replayable.py --agents 'codex*' 'ai-7-*'
                                                      some; the others keep their figures
    python benchmarks/replayable.py --missing         those that have no figures yet

Each agent is recorded once. Then it runs again, always in an emptied folder of the same name, unless said otherwise:

    replays      five times, with every answer played back
    branches     once for each call, whose answer the script gives again; it follows from the prompt
    elsewhere    once, in a folder of another name

Prompts that name the day are looked for in the record.

An agent that goes another way is void, with the first difference as its example. An agent that never is must also end
as it did: the same calls, bit for bit, and the same printed results; otherwise the script exits with 1.

Writes benchmarks/results/replayable.json and the table in docs/replayable.md.
"""

import argparse
import asyncio
import fnmatch
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lightningrl.branches import VOID
from lightningrl.chat import ChatTemplate
from lightningrl.gateway.scripted import PLAIN
from lightningrl.types import Branch, Call

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.matrix.replaying import Stage, Went, difference, staged
from tests.matrix.test_matrix import CASES, Case
from tests.matrix.test_node import CODING, SDK

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "replayable.json"
PAGE = ROOT / "docs" / "replayable.md"
ALL = [*CASES, *SDK, *CODING]
BEGIN = "<!-- this table is written by `benchmarks/replayable.py` -->\n"
END = "<!-- end of the table -->\n"
REPLAYS = 5
DAYS = ("%Y-%m-%d", "%Y/%m/%d", "%m/%d/%Y", "%B %d, %Y", "%B %-d, %Y", "%d %B %Y", "%a %b %d %Y")
"""How prompts may name a day."""
EXAMPLES, EXAMPLE = 3, 300
"""Examples of an agent that are kept, and characters of each."""

FRAMEWORKS = {
    "openai_agents_sdk*": "OpenAI Agents SDK",
    "openai_*": "OpenAI SDK",
    "langgraph_*": "LangGraph",
    "langchain_*": "LangChain",
    "autogen_*": "AutoGen",
    "pydantic_*": "Pydantic AI",
    "smol_*": "smolagents",
    "anthropic_*": "Anthropic SDK",
    "gemini_chat*": "Google GenAI SDK",
    "agent_framework_*": "Microsoft Agent Framework",
    "agno_*": "Agno",
    "haystack_*": "Haystack",
    "llamaindex_*": "LlamaIndex",
    "litellm_*": "LiteLLM",
    "mirascope_*": "Mirascope",
    "strands_*": "Strands Agents",
    "ai-6-*": "AI SDK 6 (Node)",
    "ai-7-*": "AI SDK 7 (Node)",
    "claude*": "Claude Code",
    "codex*": "Codex",
    "gemini": "Gemini CLI",
}
"""Names of agents → the framework."""
REASONS = {
    r"agentId|duration_ms|total_tokens": "random id and duration of a subagent",
    r"Chunk ID|Wall time": "random id and duration of a command",
    r"PGID": "process number of a command",
    r"\bdate\b|_date": "today's date",
    r"FOLDER|elsewhere": "the working directory",
}
"""What an example shows → the reason in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of one agent."""

    agent: str
    framework: str
    dialect: str
    calls: int
    replays: int
    void_replays: int
    branches: int
    void_branches: int
    different: list[str]
    """How runs ended otherwise, though none of the agent's was void."""
    examples: list[str]
    """Why runs in the same folder were void: a few of them."""
    elsewhere: str
    """Why it is void in another folder; "": it is not."""
    dated: str
    """Where a prompt names the day; "": none does."""
    seconds: tuple[float, float]
    """Of the recorded run and the median of its replays."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="*", default=["*"], help="patterns of names, as tests/matrix shows them")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--missing", action="store_true", help="only those that have no figures yet")
    options = parser.parse_args()
    known = {row["agent"] for row in published()} if options.missing else set[str]()
    cases = [case for case in ALL if any(fnmatch.fnmatch(str(case), pattern) for pattern in options.agents)]
    cases = [case for case in cases if str(case) not in known]
    measured = asyncio.run(measure_all(cases, at_once=options.at_once))
    odd = [f"{agent.agent}: {why}" for agent in measured for why in agent.different]
    print("\n".join([table(published()), *odd]))
    return 1 if odd else 0


def published() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []


def publish(agent: Measured) -> None:
    """Put the figures of one agent into the results and the page."""
    found = {row["agent"]: row for row in published()} | {agent.agent: asdict(agent)}
    rows = [found[str(case)] for case in ALL if str(case) in found]
    RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")


async def measure_all(cases: Sequence[Case], *, at_once: int) -> list[Measured]:
    turns = asyncio.Semaphore(at_once)

    async def one(case: Case) -> Measured:
        async with turns:
            with tempfile.TemporaryDirectory() as folder:
                async with staged(case.program, Path(folder).resolve()) as stage:
                    measured = await measure(case, stage)
            publish(measured)
            print(f"{case}: {measured.void_replays} of {measured.replays} void {measured.examples}", file=sys.stderr)
            return measured

    return await asyncio.gather(*map(one, cases))


async def measure(case: Case, stage: Stage) -> Measured:
    trunk = await stage.run()
    if trunk.exit_code or not trunk.calls:
        raise SystemExit(f"`{case}` cannot be recorded\n{trunk.log}")
    whole = Branch(attempt_id=trunk.attempt_id, call_id=None)
    replays = [await stage.run(whole) for _ in range(REPLAYS)]
    branches = [await stage.run(Branch(attempt_id=trunk.attempt_id, call_id=call.id)) for call in trunk.calls]
    elsewhere = await stage.run(whole, home="elsewhere")
    again = [*replays, *branches]
    return Measured(
        agent=str(case),
        framework=framework(str(case)),
        dialect=case.dialect,
        calls=len(trunk.calls),
        replays=len(replays),
        void_replays=sum(went.void for went in replays),
        branches=len(branches),
        void_branches=sum(went.void for went in branches),
        different=[] if any(went.void for went in again) else differences(trunk, again),
        examples=sorted({shown(went, stage) for went in again if went.void})[:EXAMPLES],
        elsewhere=shown(elsewhere, stage),
        dated=dated(trunk.calls),
        seconds=(round(trunk.seconds, 2), round(sorted(went.seconds for went in replays)[REPLAYS // 2], 2)),
    )


def framework(agent: str) -> str:
    return next(name for pattern, name in FRAMEWORKS.items() if fnmatch.fnmatch(agent, pattern))


def differences(trunk: Went, again: Sequence[Went]) -> list[str]:
    return sorted({why for went in again if (why := difference(trunk, went))})


def dated(calls: Sequence[Call]) -> str:
    """The text around the day in the first prompt that names it; "": none does."""
    template = ChatTemplate.load(PLAIN)
    for call in calls:
        text, day = template.decode(call.prompt_ids.tolist(), control=True), datetime.fromtimestamp(call.started_at)
        found = re.search("|".join(re.escape(day.strftime(form)) for form in DAYS), text)
        if found is not None:
            return text[max(0, found.start() - 30) : found.end()]
    return ""


def shown(went: Went, stage: Stage) -> str:
    """The error of a run, without what differs from machine to machine; "" if it went well."""
    if not went.error:
        return ""
    line = went.error.splitlines()[0].removeprefix(VOID)
    return line.replace(str(stage.folder), "FOLDER")[:EXAMPLE]


def reason(example: str) -> str:
    found = next((name for pattern, name in REASONS.items() if re.search(pattern, example)), None)
    return found or example


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each framework: void runs of all runs."""
    lines = [
        "| framework | agents | replays | branches | in another folder | on another day | what differs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["framework"] for row in rows):
        mine = [row for row in rows if row["framework"] == name]
        counts = [
            _of(sum(row[f"void_{what}"] for row in mine), sum(row[what] for row in mine))
            for what in ("replays", "branches")
        ]
        counts += [_of(sum(bool(row[what]) for row in mine), len(mine)) for what in ("elsewhere", "dated")]
        examples = [example for row in mine for example in (*row["examples"], row["elsewhere"], row["dated"])]
        why = dict.fromkeys(reason(example) for example in examples if example)
        lines.append(f"| {name} | {len(mine)} | {' | '.join(counts)} | {'; '.join(why)} |")
    lines += ["", f"Measured: {len(rows)} of the {len(ALL)} agents."]
    return "\n".join(lines) + "\n"


def _of(void: int, tried: int) -> str:
    return f"**{void}** of {tried}" if void else f"{void} of {tried}"


if __name__ == "__main__":
    sys.exit(main())
