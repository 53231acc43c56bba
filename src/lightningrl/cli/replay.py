"""`lightningrl replay RUN [ROLLOUT]`: runs a recorded agent again, on its recorded answers or on another one."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightningrl.cli.console import say
from lightningrl.cli.extras import require
from lightningrl.cli.hosted_checks import check_service
from lightningrl.cli.live import Progress
from lightningrl.cli.ready import check_device
from lightningrl.cli.stop import Interrupted, run
from lightningrl.errors import Stopped, UserError
from lightningrl.messages import Message
from lightningrl.replays.comparison import Parting, as_text, figure
from lightningrl.replays.given import answer_of
from lightningrl.replays.recording import Recording, first_line, place_of, recording, trunk_of
from lightningrl.replays.replay import Ending, Regression, Replayed, replay, replay_all, succeeded
from lightningrl.replays.serving import Doing
from lightningrl.replays.what_if import Turn, Way, WhatIf, answer_otherwise, sample

LINES, CHARACTERS = 8, 400
"""Of each text, the first lines and characters are shown."""
EXAMPLES = 3
"""Rollouts that are named of those that part at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of the command line."""

    run_dir: Path
    rollout: str | None
    overrides: Sequence[str]
    attempt: int | None
    at: int | None
    answer: str | None
    samples: int | None
    checkpoint: Path | None
    no_engine: bool
    every: bool
    split: str | None
    step: int | None
    limit: int | None

    def check(self) -> None:
        """Raises `UserError` for options that do not go together."""
        if self.every == (self.rollout is not None):
            hint = "`lightningrl rollouts RUN` lists them; `--all` replays all that succeeded"
            raise UserError("give either one rollout or `--all`", hint=hint)
        for name, value in (("--split", self.split), ("--step", self.step), ("--limit", self.limit)):
            _needs(name, value, "--all", self.every or None)
        for name, value in (("--at", self.at), ("--attempt", self.attempt)):
            _needs(name, value, "ROLLOUT", self.rollout)
        for name, value in (("--answer", self.answer), ("--samples", self.samples), ("--checkpoint", self.checkpoint)):
            _needs(name, value, "--at", self.at)
        _needs("--no-engine", self.no_engine or None, "--answer", self.answer)
        if self.at is not None and (self.answer is None) == (self.samples is None):
            hint = '`--answer "…"` gives it, `--samples 8` samples it eight times'
            raise UserError(f"`--at {self.at}` needs another answer", hint=hint)
        if self.no_engine and self.checkpoint is not None:
            raise UserError("`--no-engine` does not go with `--checkpoint`", hint="leave out one of them")


Result = Replayed | Regression | WhatIf


def replay_command(options: ReplayOptions, *, console: Console) -> Result:
    """Run the agent again and print what came of it. Raises `UserError` for what cannot be replayed."""
    options.check()
    answer = None if options.answer is None else answer_of(options.answer)
    progress = Progress(
        console, name=f"{options.run_dir.resolve().name}: replay", steps=None, where=str(options.run_dir)
    )
    try:
        with progress:
            return run(_replay(options, answer, doing=progress.doing))
    except Interrupted as stop:
        said = f"stopped by {stop.signal.name}; a replay keeps no partial results"
        raise Stopped(said, hint="repeat the command to start again", exit_code=stop.exit_code) from None


def exit_code(result: Result) -> int:
    """0: the agent went the same way, or got to the place. 1: it did not."""
    if isinstance(result, Replayed):
        return 0 if result.same else 1
    if isinstance(result, Regression):
        return 1 if result.parted else 0
    return 1 if all(way.void is not None for way in result.others) else 0


async def _replay(options: ReplayOptions, answer: Any, *, doing: Doing) -> Result:
    async with recording(options.run_dir, options.overrides) as opened:
        if options.rollout is None:
            chosen = await succeeded(opened, split=options.split, step=options.step, limit=options.limit)
            return await replay_all(opened, chosen, doing=doing)
        trunk = await trunk_of(opened, options.rollout, number=options.attempt)
        if options.at is None:
            return await replay(opened, trunk, doing=doing)
        place = place_of(trunk, options.at, run=options.run_dir)
        if not options.no_engine:
            _check_engine(opened, doing)
        if options.samples is not None:
            return await sample(
                opened, trunk, place, samples=options.samples, checkpoint=options.checkpoint, doing=doing
            )
        return await answer_otherwise(
            opened, trunk, place, answer, checkpoint=options.checkpoint, engine=not options.no_engine, doing=doing
        )


def _check_engine(opened: Recording, doing: Doing) -> None:
    """Raises `UserError` if this machine cannot load the weights."""
    if ":" not in opened.config.engine.name:
        require("train")
        doing("loading torch", 0, 0)
        check_device(opened.config)
        if opened.config.backend == "tinker":
            check_service(opened.config)


def _needs(name: str, value: object, other: str, given: object) -> None:
    if value is not None and given is None:
        raise UserError(f"`{name}` needs `{other}`", hint=f"add `{other}`, or leave out `{name}`")


def show(result: Result, console: Console) -> None:
    """Print the result."""
    if isinstance(result, Replayed):
        _show_one(result, console)
    elif isinstance(result, Regression):
        _show_all(result, console)
    else:
        _show_ways(result, console)


def as_json(result: Result) -> str:
    return json.dumps(result.as_json())


def _show_one(result: Replayed, console: Console) -> None:
    recorded, parting = result.recorded, result.parting
    say(console, (result.rollout, "bold"), f"  {_ended(recorded)}, {_calls(recorded.calls)}")
    if parting is None:
        same = "same calls, same output, same reward" if recorded.error is None else "same calls, same error"
        say(console, ("✓ ", "bold green"), f"the agent went the same way: {same}")
        return
    say(console, ("✗ ", "bold red"), ("the agent went another way ", "bold"), _where(parting))
    if result.again.error is not None and parting.kind == "error":
        console.print(_indented(_clipped(Text(result.again.error, style="red"))))
    else:
        say(console, f"  {parting.example}" if parting.kind == "request" else f"  {parting.why}: {parting.example}")
    if result.printed is not None:
        say(console, ("\nit printed", "dim"))
        console.print(_indented(_clipped(Text(result.printed.text))))


def _show_all(result: Regression, console: Console) -> None:
    parted, total = result.parted, len(result.replays)
    same = total - len(parted)
    mark = ("✗ ", "bold red") if parted else ("✓ ", "bold green")
    say(console, mark, (f"{same:,} of {total:,} rollouts go the same way", "bold"), f", in {result.seconds:.1f} s")
    if not parted:
        return
    table = _table("rollouts", "where", "for example", right=("rollouts",))
    for parting, group in result.groups():
        example = Text.assemble(parting.example, "\n", (_named(group), "dim"))
        where = _where(parting) if parting.kind == "request" else f"{_where(parting)}: {parting.why}"
        table.add_row(f"{len(group):,}", Text(where), example)
    console.print()
    console.print(table)
    first = result.groups()[0][1][0].rollout
    command = shlex.join(["lightningrl", "replay", result.run, first, *result.overrides])
    say(console, ("\nsee one: ", "dim"), command)


def _show_ways(result: WhatIf, console: Console) -> None:
    say(
        console, (result.rollout, "bold"), f"  {_ended(result.recorded.ending)}; another answer at call {result.call}\n"
    )
    if len(result.others) == 1:
        console.print(_two_ways(result.recorded, result.others[0], call=result.call))
    else:
        console.print(_many_ways(result))
    for line in _verdict(result):
        say(console, line)


def _two_ways(recorded: Way, other: Way, *, call: int) -> Table:
    """One row for each call from the place on, and the ends."""
    table = _table("", "recorded", "with the other answer")
    table.columns[0].no_wrap = True
    ways = (recorded, other)
    numbers = sorted({turn.number for way in ways for turn in way.turns})
    for number in numbers:
        turns = [next((turn for turn in way.turns if turn.number == number), None) for way in ways]
        table.add_row(f"call {number}", *(_turn(turn, asked=number != call) for turn in turns))
    table.add_section()
    for name, cell in _ends().items():
        table.add_row(name, *(cell(way) for way in ways))
    return table


def _many_ways(result: WhatIf) -> Table:
    """One row for each ending."""
    table = _table("", f"answer at call {result.call}", "calls", "output", "reward", right=("calls", "reward"))
    for number, way in enumerate((result.recorded, *result.others)):
        answer = Text("it never got there", style="yellow") if way.answer is None else _clipped(_said(way.answer))
        name = str(number) if number else "recorded"
        cells = [cell(way) for cell in _ends().values()]
        table.add_row(name, answer, *cells)
        if not number:
            table.add_section()
    return table


def _ends() -> dict[str, Callable[[Way], RenderableType]]:
    """Name → the cell of a way."""
    return {"calls": lambda way: str(way.ending.calls), "output": _output, "reward": _reward}


def _output(way: Way) -> Text:
    if way.void is not None:
        return _clipped(Text(f"void: {way.void}", style="yellow"))
    if way.stopped is not None:
        return Text(f"stopped at call {way.stopped}, which was not recorded", style="yellow")
    error = first_line(way.ending.error)
    return _clipped(Text(as_text(way.ending.output)) if error is None else Text(error, style="red"))


def _reward(way: Way) -> Text:
    return Text("–" if way.reward is None else figure(way.reward), style="bold")


def _turn(turn: Turn | None, *, asked: bool) -> Text:
    """What a call asked and was answered. `asked`: false where both ways ask the same."""
    if turn is None:
        return Text("")
    text = Text()
    for message in turn.asked if asked else ():
        text.append_text(_clipped(Text(f"{message.role}: {message.content}", style="dim"))).append("\n")
    if turn.answer is None:
        return text.append("not answered", style="yellow")
    return text.append_text(_clipped(_said(turn.answer)))


def _said(answer: Message) -> Text:
    text = Text(answer.content)
    for call in answer.tool_calls:
        text.append("\n" if text.plain else "").append(f"→ {call.name}({call.arguments})", style="yellow")
    return text


def _verdict(result: WhatIf) -> list[str]:
    """What the endings say about the decision."""
    lines: list[str] = []
    if result.greedy:
        lines.append("its answers were recorded at temperature 0; the others are sampled at temperature 1")
    stopped = next((way.stopped for way in result.others if way.stopped is not None), None)
    if stopped is not None:
        lines.append(f"the agent stopped at call {stopped}: it was not recorded, and no engine answers")
    unusable = sum(way.void is not None for way in result.others)
    if unusable:
        lines.append(
            f"void: {unusable} of {len(result.others)}, where the agent went another way before call {result.call}"
        )
    return lines + _worth(result)


def _worth(result: WhatIf) -> list[str]:
    recorded, found, rewards = result.recorded.reward, result.mean, result.rewards
    if found is None or recorded is None:
        return []
    if len({round(reward, 9) for reward in (recorded, *rewards)}) == 1:
        return [f"the decision did not matter here: all {len(rewards) + 1} endings have the reward {figure(recorded)}"]
    mean, half = found
    if half is None:
        return [f"reward: {figure(recorded)} recorded, {figure(mean)} with the other answer"]
    change = f"{recorded - mean:+.3g}"
    values = (
        f"the others {mean:.3g} ± {half:.2g} (95 %, {len(rewards)} endings), the recorded answer {figure(recorded)}"
    )
    if abs(recorded - mean) > half:
        return [f"the decision mattered: {values}, that is {change}"]
    return [f"endings differ, and the recorded answer is within their spread: {values} ({change})"]


def _where(parting: Parting) -> str:
    if parting.kind == "output":
        return "after its last call"
    if parting.kind == "reward":
        return "in its reward"
    return "at its end" if parting.call is None else f"at call {parting.call}"


def _named(group: Sequence[Replayed]) -> str:
    names = [replay.rollout for replay in group[:EXAMPLES]]
    return ", ".join(names) + (f" and {len(group) - EXAMPLES:,} more" if len(group) > EXAMPLES else "")


def _ended(ending: Ending) -> str:
    if ending.error is not None:
        return f"{ending.status}: {first_line(ending.error)}"
    return "no reward" if ending.reward is None else f"reward {figure(ending.reward)}"


def _calls(count: int) -> str:
    return f"{count} call" + ("" if count == 1 else "s")


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="dim")
    for column in columns:
        narrow = column in right
        table.add_column(column, justify="right" if narrow else "left", no_wrap=narrow, overflow="fold")
    return table


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2))


def _clipped(text: Text) -> Text:
    lines = text.split("\n", allow_blank=True)
    kept = Text("\n").join(lines[:LINES])[:CHARACTERS]
    return kept if len(kept.plain) >= len(text.plain) else kept.append(" …", style="dim")
