"""`lightningrl rollouts RUN_DIR`: tables of rollouts, of their errors, and of how their calls were captured."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightningrl.look import opened
from lightningrl.look.census import CAPTURES, Census
from lightningrl.look.listing import Listing, list_rollouts
from lightningrl.look.selection import reward_range
from lightningrl.store import Where
from lightningrl.store.base import ANY
from lightningrl.types import RolloutStatus

NO_NAME = "(no name)"
STYLES: Mapping[RolloutStatus, str] = {"succeeded": "green", "failed": "red", "running": "cyan", "queued": "dim"}


def read(
    path: Path,
    *,
    where: Where = ANY,
    before: str | None = None,
    limit: int | None = None,
    report: bool = False,
    conversations: bool = False,
) -> Listing:
    """Read a run's folder, or its `store.sqlite`. Raises `UserError` if there is none."""

    async def look() -> Listing:
        async with opened(path) as run:
            return await list_rollouts(
                run, where=where, before=before, limit=limit, report=report, conversations=conversations
            )

    return asyncio.run(look())


def where_of(*, reward: str | None, failed: bool, task: str, step: int | None, split: str | None) -> Where:
    """The filter for the options of the command line."""
    return Where(
        prefix="" if step is None else f"train-{step - 1:05d}-",
        split=split,
        status="failed" if failed else None,
        text=task,
        reward=None if reward is None else reward_range(reward),
    )


def show(listing: Listing, console: Console) -> None:
    tables = [_rollouts_table(listing), *_errors_table(listing.errors)]
    for place, table in enumerate([*tables, *(_report_tables(listing.census) if listing.census else [])]):
        if place:
            console.print()
        console.print(table)


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
        table.add_column(
            column,
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            min_width=len(column) if right else None,
        )
    return table


def _rollouts_table(listing: Listing) -> Table:
    numbers = ("tries", "calls", "tokens", "reward", "seconds")
    total = sum(listing.counts.values())
    parts = [f"{total:,} rollout" + ("" if total == 1 else "s")]
    parts += [f"{listing.counts[status]:,} {status}" for status in STYLES if listing.counts.get(status)]
    table = _table(" · ".join(parts), "rollout", "task", "status", *numbers, numbers=numbers)
    table.columns[2].no_wrap = True
    if total > len(listing.lines):
        table.caption = f"and {total - len(listing.lines):,} more; use --limit 0 to show all"
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
    table = _table("How prompts were made", "capture", "calls", "share", "", numbers=("calls", "share"))
    meaning = {
        "bridged": "continues an earlier call with its exact token ids",
        "partly": "the same, but later answers were rendered again",
        "rendered": "begins a conversation",
        "forked": "the agent rewrote the history, so it was rendered again",
        "upstream": "answered by another server; not trained",
        "incomplete": "the answer broke off; not trained",
    }
    for capture in CAPTURES:
        times = census.captures[capture]
        table.add_row(
            capture,
            f"{times:,}",
            f"{times / max(census.calls, 1):.0%}",
            Text(meaning[capture], style="dim"),
            style="" if times else "dim",
        )
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
    reused = f"{census.reused_tokens:,} reused ({census.reused_tokens / max(census.prompt_tokens, 1):.0%})"
    table.add_row("sampled", f"{census.sampled_tokens:,} tokens")
    if census.replayed:
        table.add_row("played back", f"{census.replayed:,} calls of branches, without a token sampled")
    table.add_row("read", f"{census.prompt_tokens:,} tokens · {census.new_tokens:,} new, {reused}")
    for title, counts in (("agents", census.agents), ("dialects", census.dialects), ("policies", census.policies)):
        if counts:
            table.add_row(title, tally(counts, most=12))
    return table


def tally(counts: Counter[str], *, most: int) -> Text:
    """`policy 12 · judge 3`: the most frequent names with their counts."""
    return Text(" · ".join(f"{name or NO_NAME} {times:,}" for name, times in counts.most_common(most)))


def _roles_table(census: Census) -> Table:
    """One row for each fingerprint, which a route can name."""
    numbers = ("calls", "tokens")
    table = _table(
        "Roles: same system prompt, same tools",
        "fingerprint",
        *numbers,
        "agent",
        "system prompt",
        "tools",
        numbers=numbers,
    )
    table.columns[0].no_wrap = True
    for name, role in sorted(census.roles.items(), key=lambda item: -item[1].calls):
        agents = ", ".join(agent or NO_NAME for agent, _ in role.agents.most_common(3))
        table.add_row(
            name,
            f"{role.calls:,}",
            f"{role.sampled_tokens:,}",
            *map(_one_line, (agents, role.system, ", ".join(role.tools))),
        )
    return table


def _one_line(text: str) -> Text:
    """The text on one line, cut off where the column ends."""
    return Text(text or "—", no_wrap=True, overflow="ellipsis")
