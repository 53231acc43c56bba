"""The screen of an estimate: what takes memory, how long a step takes, and what the run costs."""

from collections.abc import Sequence
from itertools import cycle

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightningrl.cli.console import say
from lightningrl.estimate import Estimate, HostedEstimate
from lightningrl.estimate.cards import GIB
from lightningrl.estimate.parts import Part, total

COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_cyan", "bright_green", "white")
WIDTH = 60
"""Columns of the bar."""


def show(found: Estimate | HostedEstimate, console: Console) -> None:
    """Print the estimate."""
    if isinstance(found, HostedEstimate):
        _hosted(found, console)
        return
    console.print()
    _headline(found, console)
    for phase in found.memory.phases:
        _memory(phase.title, phase.parts, found, console)
    if found.memory.host_bytes:
        say(console, f"  and {size(found.memory.host_bytes)} of the machine's own memory, for weights off the card")
    _advice(found, console)
    _step(found, console)
    _run(found, console)
    measured = (
        "speed measured on this machine, as loaded as it is now"
        if found.card.is_measured
        else "not measured on this card"
    )
    say(console, (f"\nAn estimate, {measured}. Tokens: {found.work.source}. Assumed:", "dim"))
    for assumption in found.assumptions:
        say(console, (f"  · {assumption}", "dim"))


def _hosted(found: HostedEstimate, console: Console) -> None:
    """Tokens of each kind, of a step and of the run, and what they cost."""
    say(console, ("\n" + found.name, "bold"), f" at a service: {found.model}")
    work = found.work
    calls = f"{work.calls:.3g} calls × {work.prompt_tokens:,.0f} tokens read + {work.completion_tokens:,.0f} sampled"
    say(console, (f"{found.rollouts:,} rollouts a step, {found.steps:,} steps; a rollout: {calls}", "dim"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("tokens", "a step", "evaluations", "the run", "$ a million", "$ the run"):
        table.add_column(column, justify="left" if column == "tokens" else "right")
    for kind, note in (("prefill", "prompts"), ("sample", "sampled"), ("train", "trained")):
        price = found.prices.get(kind)
        cost = ("–", "–") if price is None else (f"{price:g}", f"{found.tokens[kind] * price / 1e6:,.2f}")
        counts = (found.step_tokens[kind], found.exam_tokens[kind], found.tokens[kind])
        table.add_row(f"{kind} ({note})", *map(amount, counts), *cost)
    console.print(table)
    if found.usd is None:
        say(console, ("hint: ", "yellow"), "set `service.prices` from the service's price page to see what it costs")
    else:
        say(
            console,
            ("The run ", "bold"),
            "costs about ",
            (f"${found.usd:,.2f}", "bold"),
            f", a step ${found.step_usd:,.4f}",
        )
    say(console, (f"\nAn estimate, not the service's bill. Tokens: {work.source}. Assumed:", "dim"))
    for assumption in found.assumptions:
        say(console, (f"  · {assumption}", "dim"))


def amount(number: float) -> str:
    """`596 M`"""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """`< 0.1 s`, `4.2 s`, `2.5 min`, `3.4 hours`, `12 days`"""
    if seconds < 0.1:
        return "< 0.1 s"
    count, unit = seconds, "s"
    if seconds > 72 * 3600:
        count, unit = seconds / 86400, "days"
    elif seconds >= 5400:
        count, unit = seconds / 3600, "hours"
    elif seconds >= 90:
        count, unit = seconds / 60, "min"
    return f"{count:.0f} {unit}" if count >= 20 else f"{count:.2g} {unit}"


def _headline(found: Estimate, console: Console) -> None:
    refused = "✗ cannot run" if found.cannot_run else "✗ does not fit"
    verdict = ("✓ fits", "bold green") if found.fits else (refused, "bold red")
    say(console, (found.name, "bold"), f" on {found.card.name}   ", verdict)
    learning = "all learn" if found.learning == found.parameters else f"{amount(found.learning)} learn"
    learning += f" in {found.policies} policies" if found.policies > 1 else ""
    say(console, (f"{found.model} · {amount(found.parameters)} parameters, {learning}", "dim"))


def _memory(title: str, parts: Sequence[Part], found: Estimate, console: Console) -> None:
    console.print()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    capacity = found.card.memory_bytes
    used = total(parts)
    say(console, (f"Memory: {title}", "bold"))
    console.print(_bar(parts, capacity))
    for part, colour in zip(parts, cycle(COLOURS), strict=False):
        table.add_row(Text.assemble(("  ■ ", colour), part.name), size(part.bytes), part.note)
    table.add_row(Text("    total", style="bold"), Text(size(used), style="bold"), f"of {size(capacity)}")
    console.print(table)


def size(count: int) -> str:
    """`1.20 GiB`"""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 100 else f"{count / 2**20:.1f} MiB"


def _bar(parts: Sequence[Part], capacity: int) -> Text:
    """A bar of the device's memory. What does not fit is left out."""
    bar, filled, sum_bytes = Text("  "), 0, 0
    for part, colour in zip(parts, cycle(COLOURS), strict=False):
        sum_bytes += part.bytes
        end = min(round(sum_bytes / capacity * WIDTH), WIDTH)
        bar.append("█" * (end - filled), colour)
        filled = end
    bar.append("░" * (WIDTH - filled), "dim")
    return bar


def _advice(found: Estimate, console: Console) -> None:
    """What to do if it does not fit, and what vLLM must be told if both share a card."""
    for hint in found.advice:
        say(console, ("hint: ", "yellow"), hint)


def _step(found: Estimate, console: Console) -> None:
    console.print()
    say(console, (f"A step of {found.rollouts:,} rollouts", "bold"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    seconds, work = found.seconds, found.work
    calls = f"{work.calls:.3g} calls × {work.prompt_tokens:,.0f} tokens read + {work.completion_tokens:,.0f} sampled"
    table.add_row("  tokens", amount(found.step_tokens), f"a rollout: {calls}")
    ratio = found.step_tokens / max(found.unique_tokens, 1)
    table.add_row(
        "  after merging", amount(found.unique_tokens), f"shared prefixes are computed once: {ratio:.1f} × fewer"
    )
    twice = ", each layer computed twice" if found.memory.forests.checkpointing else ""
    for name, value, note in (
        ("generation", seconds.generation, f"{amount(found.sampled_tokens)} tokens sampled"),
        ("agents", seconds.agent, "their own time, as in these rollouts"),
        ("training", seconds.training, f"forests of {found.memory.forests.tokens:,} tokens{twice}"),
        ("saving", seconds.saving, "checkpoint, and weights into the engine"),
        ("sleeping", seconds.sleeping or None, "vLLM gives the card to the trainer and takes it back"),
    ):
        if value is not None:
            table.add_row(f"  {name}", duration(value), note)
    if seconds.total is not None:
        name = "  total, at least" if seconds.agent is None else "  total"
        table.add_row(Text(name, style="bold"), Text(duration(seconds.total), style="bold"))
    console.print(table)


def _run(found: Estimate, console: Console) -> None:
    if found.hours is None:
        return
    console.print()
    least = "at least " if found.seconds.agent is None else ""  # the agents' own time is missing
    exams = f", {duration(found.exams_s)} of them evaluations" if found.exams_s else ""
    price = "" if found.price is None else f" · costs {least}{found.price:,.2f} at {found.per_hour:,.2f} an hour"
    say(
        console,
        ("The run ", "bold"),
        f"{found.steps:,} steps: ",
        (f"{least}{duration(found.hours * 3600)}", "bold"),
        f"{exams}{price}",
    )
