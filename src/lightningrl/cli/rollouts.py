"""`lightningrl rollouts RUN_DIR`: what has been run, how it went, and how its calls were captured; also while it goes
on.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightningrl.errors import UserError
from lightningrl.look import opened
from lightningrl.look.census import CAPTURES, Census
from lightningrl.look.listing import Listing, list_rollouts
from lightningrl.store import Where
from lightningrl.store.base import ANY
from lightningrl.types import RolloutStatus

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
    """Of a run's folder, or its `store.sqlite`. Raises `UserError` where there is none."""

    async def look() -> Listing:
        async with opened(path) as run:
            return await list_rollouts(
                run, where=where, before=before, limit=limit, report=report, conversations=conversations
            )

    return asyncio.run(look())


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
        raise UserError(
            f"`--reward {text}` is no number", hint="give one reward, e.g. `0`, or a range, e.g. `0..0.5`"
        ) from None


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
    title = f"{total:,} rollout{'s' * (total != 1)}" + "".join(
        f" · {listing.counts[s]:,} {s}" for s in STYLES if listing.counts.get(s)
    )
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
        table.add_row(
            capture,
            f"{times:,}",
            f"{times / max(census.calls, 1):.0%}",
            Text(told[capture], style="dim"),
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
    new = census.prompt_tokens - census.reused_tokens
    table.add_row("sampled", f"{census.sampled_tokens:,} tokens")
    table.add_row(
        "read",
        f"{census.prompt_tokens:,} tokens · {new:,} new, {census.reused_tokens:,} reused ({_share(census.reused_tokens, census)})",
    )
    for title, counts in (("agents", census.agents), ("dialects", census.dialects), ("policies", census.policies)):
        table.add_row(
            title, Text(" · ".join(f"{name or '(no name)'} {times:,}" for name, times in counts.most_common(12)))
        )
    return table


def _share(tokens: int, census: Census) -> str:
    return f"{tokens / max(census.prompt_tokens, 1):.0%}"


def _roles_table(census: Census) -> Table:
    """`fingerprint` is what a route may name."""
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
        agents = ", ".join(agent or "(no name)" for agent, _ in role.agents.most_common(3))
        table.add_row(
            name,
            f"{role.calls:,}",
            f"{role.sampled_tokens:,}",
            *map(_one_line, (agents, role.system, ", ".join(role.tools))),
        )
    return table


def _one_line(text: str) -> Text:
    """As much of it as there is room for."""
    return Text(text or "—", no_wrap=True, overflow="ellipsis")
