"""`lightningrl rollouts RUN_DIR`: what has been run, how it went, and how its calls were captured; also while it goes on."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightningrl.cli.census import CAPTURES, Census, Reader, Reason
from lightningrl.errors import UserError
from lightningrl.store import Records, Where, open_records
from lightningrl.store.base import ANY
from lightningrl.types import FINAL, Attempt, Reward, Rollout, RolloutStatus

BATCH = 64
"""Rollouts whose calls are in memory together."""
ERRORS = 1000
"""Failed rollouts whose errors are counted, the latest."""
STYLES: Mapping[RolloutStatus, str] = {"succeeded": "green", "failed": "red", "running": "cyan", "queued": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One rollout."""

    id: str
    task: str
    split: str
    status: RolloutStatus
    attempts: int
    calls: int
    """Of the attempt that was accepted, or else the latest; so are tokens, reward and error."""
    sampled_tokens: int
    reward: float | None
    """None: there is none (yet)."""
    seconds: float | None
    """None: it has not ended."""
    error: str | None
    """Its first line."""

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The rollouts of a store that were asked for."""

    path: Path
    lines: tuple[Line, ...]
    """The latest of them, in the order they were enqueued."""
    counts: Mapping[RolloutStatus, int]
    """All of them, by status."""
    errors: Mapping[str, tuple[int, str]]
    """First line of an error → how many of the latest failed rollouts have it, and the id of one."""
    census: Census | None
    """Over every attempt at them, accepted or not; None if it was not asked for."""

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"store": str(self.path), "counts": self.counts, "rollouts": [line.as_json() for line in self.lines]}
        return found if self.census is None else {**found, "report": _census_json(self.census)}


def read(path: Path, *, where: Where = ANY, before: str | None = None, limit: int | None = None, report: bool = False) -> Listing:
    """Of a run's folder, or its `store.sqlite`. Raises `UserError` where there is none. `report` counts calls, which reads all of them."""
    return asyncio.run(_read(store_file(path), where=where, before=before, limit=limit, report=report))


def store_file(path: Path) -> Path:
    """Of a run's folder, or the file itself. Raises `UserError` if it is not there."""
    file = path / "store.sqlite" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no records at `{path}`", hint="give the folder of a run, e.g. `runs/…`, or its store.sqlite")
    return file


def where_of(*, reward: str | None, failed: bool, task: str, step: int | None, split: str | None) -> Where:
    """The filter that the options of the command line ask for."""
    return Where(
        prefix="" if step is None else f"train-{step - 1:05d}-",
        split=split,
        status="failed" if failed else None,
        text=task,
        reward=None if reward is None else _range(reward),
    )


def _range(text: str) -> tuple[float, float]:
    """`0` is one value, `0..0.5` a range."""
    low, dots, high = text.partition("..")
    try:
        return float(low or "-inf"), float((high or "inf") if dots else low)
    except ValueError:
        raise UserError(f"`--reward {text}` is no number", hint="give one reward, e.g. `0`, or a range, e.g. `0..0.5`") from None


def show(listing: Listing, console: Console) -> None:
    tables = [_rollouts_table(listing), *_errors_table(listing.errors)]
    for place, table in enumerate([*tables, *(_report_tables(listing.census) if listing.census else [])]):
        if place:
            console.print()
        console.print(table)


async def _read(file: Path, *, where: Where, before: str | None, limit: int | None, report: bool) -> Listing:
    records = await open_records(f"sqlite://{file.resolve()}")
    try:
        return Listing(
            path=file,
            lines=tuple(await _lines(records, await records.rollouts(where=where, before=before, limit=limit))),
            counts=await records.count(where),
            errors=await _errors(records, where),
            census=await _census(records, where) if report else None,
        )
    finally:
        await records.close()


async def _census(records: Records, where: Where) -> Census:
    """A page at a time: the calls of a whole run need not fit into memory."""
    census, reader, before = Census(), Reader(), None
    while page := await records.rollouts(where=where, before=before, limit=BATCH):
        for attempt in await records.attempts([rollout.id for rollout in page]):
            census.add(await records.calls([attempt.id]), reader)
        before = page[0].id
    return census


async def _errors(records: Records, where: Where) -> dict[str, tuple[int, str]]:
    """The most frequent first. A filter by reward finds only rollouts that succeeded."""
    failed = await records.rollouts(where=replace(where, status="failed"), limit=ERRORS)
    last = {attempt.rollout_id: attempt for attempt in await records.attempts([rollout.id for rollout in failed])}
    found: dict[str, list[str]] = {}
    for rollout_id, attempt in last.items():
        if line := _first_line(attempt.error):
            found.setdefault(line, []).append(rollout_id)
    return {line: (len(ids), ids[0]) for line, ids in sorted(found.items(), key=lambda item: -len(item[1]))}


async def _lines(store: Records, rollouts: Sequence[Rollout]) -> list[Line]:
    return [line for start in range(0, len(rollouts), BATCH) for line in await _batch(store, rollouts[start : start + BATCH])]


async def _batch(store: Records, rollouts: Sequence[Rollout]) -> list[Line]:
    attempts = await store.attempts([rollout.id for rollout in rollouts])
    calls: dict[str, int] = Counter()
    tokens: dict[str, int] = Counter()
    for attempt in attempts:
        made = await store.calls([attempt.id])
        calls[attempt.id] = len(made)
        tokens[attempt.id] = sum(len(call.completion_ids) for call in made)
    rewards = {reward.attempt_id: reward for reward in await store.rewards([a.id for a in attempts]) if reward.name == FINAL and not reward.call_id}
    by_rollout: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_rollout.setdefault(attempt.rollout_id, []).append(attempt)
    return [_line(rollout, by_rollout.get(rollout.id, []), calls, tokens, rewards) for rollout in rollouts]


def _line(rollout: Rollout, tries: Sequence[Attempt], calls: Mapping[str, int], tokens: Mapping[str, int], rewards: Mapping[str, Reward]) -> Line:
    accepted = next((attempt for attempt in tries if attempt.id == rollout.accepted_attempt_id), None)
    told = accepted or (tries[-1] if tries else None)
    reward = rewards.get(told.id) if told else None
    return Line(
        id=rollout.id,
        task=rollout.task.id,
        split=rollout.task.split,
        status=rollout.status,
        attempts=len(tries),
        calls=calls[told.id] if told else 0,
        sampled_tokens=tokens[told.id] if told else 0,
        reward=reward.value if reward else None,
        seconds=round(told.ended_at - told.started_at, 3) if told and told.ended_at else None,
        error=_first_line(told.error) if told else None,
    )


def _first_line(error: str | None) -> str | None:
    return error.splitlines()[0] if error else None


def _census_json(census: Census) -> dict[str, Any]:
    def reasons(of: Mapping[str, Reason]) -> dict[str, Any]:
        return {why: {"calls": reason.calls, "example": reason.example} for why, reason in of.items()}

    return {
        "calls": census.calls,
        **{capture: census.captures[capture] for capture in CAPTURES},
        "partly_reasons": reasons(census.partly_reasons),
        "fork_reasons": reasons(census.fork_reasons),
        "incomplete_reasons": reasons(census.incomplete_reasons),
        "agents": census.agents,
        "dialects": census.dialects,
        "policies": census.policies,
        "fingerprints": {
            name: {"calls": role.calls, "sampled_tokens": role.sampled_tokens, "system": role.system, "tools": role.tools, "agents": role.agents}
            for name, role in census.roles.items()
        },
        "sampled_tokens": census.sampled_tokens,
        "prompt_tokens": census.prompt_tokens,
        "reused_tokens": census.reused_tokens,
    }


def _table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        header_style="dim",
    )
    for column in columns:
        right = column in numbers
        table.add_column(column, justify="right" if right else "left", no_wrap=right, overflow="fold", min_width=len(column) if right else None)
    return table


def _rollouts_table(listing: Listing) -> Table:
    numbers = ("tries", "calls", "tokens", "reward", "seconds")
    total = sum(listing.counts.values())
    title = f"{total:,} rollout{'s' * (total != 1)}" + "".join(f" · {listing.counts[s]:,} {s}" for s in STYLES if listing.counts.get(s))
    table = _table(title, "rollout", "task", "status", *numbers, numbers=numbers)
    table.columns[2].no_wrap = True
    if total > len(listing.lines):
        table.caption = f"and {total - len(listing.lines):,} more: --limit 0 shows all"
        table.caption_justify = "left"
    for line in listing.lines:
        table.add_row(
            Text(line.id),
            Text(line.task),
            Text(line.status, style=STYLES.get(line.status, "")),
            str(line.attempts),
            f"{line.calls:,}",
            f"{line.sampled_tokens:,}",
            "" if line.reward is None else f"{line.reward:.3g}",
            "" if line.seconds is None else f"{line.seconds:.1f}",
        )
    return table


def _errors_table(errors: Mapping[str, tuple[int, str]]) -> list[Table]:
    """One table, or none."""
    if not errors:
        return []
    table = _table("What went wrong", "rollouts", "error", "for example", numbers=("rollouts",))
    for error, (count, example) in errors.items():
        table.add_row(f"{count:,}", Text(error, style="red"), Text(example, style="dim"))
    return [table]


def _report_tables(census: Census) -> list[Table]:
    tables = [_captures_table(census)]
    if any(census.reasons().values()):
        tables.append(_reasons_table(census))
    tables.append(_shares_table(census))
    if census.roles:
        tables.append(_roles_table(census))
    return tables


def _captures_table(census: Census) -> Table:
    table = _table("How prompts came about", "capture", "calls", "share", "", numbers=("calls", "share"))
    told = {
        "bridged": "continues an earlier call with its exact ids",
        "partly": "the same, but later answers were rendered anew",
        "rendered": "begins a conversation",
        "forked": "the history was rewritten: rendered anew",
        "upstream": "answered by another server: not trained",
        "incomplete": "the answer broke: not trained",
    }
    for capture in CAPTURES:
        times = census.captures[capture]
        table.add_row(capture, f"{times:,}", f"{times / max(census.calls, 1):.0%}", Text(told[capture], style="dim"), style="" if times else "dim")
    table.add_section()
    table.add_row("all", f"{census.calls:,}", "", "")
    return table


def _reasons_table(census: Census) -> Table:
    table = _table("Why", "capture", "calls", "reason", "for example", numbers=("calls",))
    for capture, reasons in census.reasons().items():
        for why, reason in sorted(reasons.items(), key=lambda item: -item[1].calls):
            table.add_row(capture, f"{reason.calls:,}", Text(why), Text(reason.example, style="dim"))
    return table


def _shares_table(census: Census) -> Table:
    table = _table("Calls and tokens", "", "", numbers=())
    table.show_header = False
    new = census.prompt_tokens - census.reused_tokens
    table.add_row("sampled", f"{census.sampled_tokens:,} tokens")
    table.add_row("read", f"{census.prompt_tokens:,} tokens · {new:,} new, {census.reused_tokens:,} reused ({_share(census.reused_tokens, census)})")
    for title, counts in (("agents", census.agents), ("dialects", census.dialects), ("policies", census.policies)):
        table.add_row(title, Text(" · ".join(f"{name or '(no name)'} {times:,}" for name, times in counts.most_common(12))))
    return table


def _share(tokens: int, census: Census) -> str:
    return f"{tokens / max(census.prompt_tokens, 1):.0%}"


def _roles_table(census: Census) -> Table:
    """`fingerprint` is what a route may name."""
    numbers = ("calls", "tokens")
    table = _table("Roles: same system prompt, same tools", "fingerprint", *numbers, "agent", "system prompt", "tools", numbers=numbers)
    table.columns[0].no_wrap = True
    for name, role in sorted(census.roles.items(), key=lambda item: -item[1].calls):
        agents = ", ".join(agent or "(no name)" for agent, _ in role.agents.most_common(3))
        table.add_row(name, f"{role.calls:,}", f"{role.sampled_tokens:,}", *map(_one_line, (agents, role.system, ", ".join(role.tools))))
    return table


def _one_line(text: str) -> Text:
    """As much of it as there is room for."""
    return Text(text or "—", no_wrap=True, overflow="ellipsis")
