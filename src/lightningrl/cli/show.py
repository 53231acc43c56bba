"""`lightningrl show RUN_DIR [ROLLOUT]`: prints everything about one rollout, as `lightningrl.look` reads it."""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from lightningrl.look import RolloutView, look_at, opened
from lightningrl.look.branches import branched_words
from lightningrl.look.call import CallView
from lightningrl.look.census import UNEXPLAINED
from lightningrl.messages import Message
from lightningrl.types import Floats, Reward

Tokens: TypeAlias = Literal["none", "logprob", "advantage"]

LINES = 12
"""Without `--full`, the first lines and characters of a message are shown."""
CHARACTERS = 1200
ROLES = {"system": "dim", "user": "cyan", "tool": "yellow", "assistant": "bold", "prompt": "cyan"}
SURE = ((0.9, "on rgb(20,60,20)"), (0.5, "on rgb(60,80,20)"), (0.1, "on rgb(120,90,0)"), (0.0, "on rgb(140,30,30)"))
"""(least probability, colour of the token)"""
BETTER, WORSE, EVEN = "on rgb(20,80,30)", "on rgb(130,30,30)", "on rgb(60,60,60)"


def read(path: Path, rollout_id: str | None) -> RolloutView:
    """Read a rollout. Raises `UserError` if there are no records, or no such rollout."""

    async def look() -> RolloutView:
        async with opened(path) as run:
            return await look_at(run, rollout_id)

    return asyncio.run(look())


def show(view: RolloutView, console: Console, *, run_dir: Path, tokens: Tokens, full: bool) -> None:
    console.print(_head(view))
    for call in view.calls:
        console.print(_call(call, tokens=tokens, full=full))
    if not view.calls:
        console.print(Text("\nThe agent did not call the model.", style="yellow"))
    console.print(_outcome(view, full=full))
    if tokens != "none":
        console.print(_legend(tokens))
    _print_next(console, view, run_dir=run_dir, tokens=tokens)


def _head(view: RolloutView) -> Group:
    rollout = view.rollout
    title = Text.assemble((rollout.id, "bold"), "  ", _verdict(view))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("task", Text(f"{rollout.task.id} ({rollout.task.split})"))
    facts.add_row("group", _group(view))
    for name, words in _branching(view):
        facts.add_row(name, words)
    facts.add_row("taught", _taught(view))
    facts.add_row("input", Text(json.dumps(dict(rollout.task.input), ensure_ascii=False)))
    return Group(title, facts)


def _verdict(view: RolloutView) -> Text:
    if view.reward is None:
        return Text(f"{view.rollout.status}, no reward", style="red" if view.rollout.status == "failed" else "yellow")
    mean = view.group_mean
    style = "green" if mean is not None and view.reward >= mean else "red"
    return Text(f"reward {view.reward:.3g}", style=f"bold {style}")


def _group(view: RolloutView) -> Text:
    """All rewards of the group; that of this rollout is marked."""
    if len(view.group) == 1:
        return Text("only this rollout, so there is nothing to compare")
    branches = sum(sibling.trunk is not None for sibling in view.siblings)
    parts = [f"{len(view.group) - branches} rollouts", *([f"{branches} branches"] if branches else [])]
    mean = "mean without branches" if branches else "mean"
    text = Text(f"{' and '.join(parts)}, {mean} {view.group_mean:.3g}: " if view.group_mean is not None else "")
    for place, (name, reward) in enumerate(view.group.items()):
        shown = "failed" if reward is None else f"{reward:.3g}"
        text.append(", " if place else "")
        text.append(f"▸{shown}◂" if name == view.rollout.id else shown, style="bold" if name == view.rollout.id else "")
    return text


def _branching(view: RolloutView) -> Iterator[tuple[str, Text]]:
    """What the rollout repeats, how its siblings did, and where it was branched itself."""
    if (branch := view.branch) is not None:
        yield "branch", Text(branch.words)
        if branch.answers:
            text = Text("")
            for place, answer in enumerate(branch.answers):
                own = answer.rollout == view.rollout.id
                shown = answer.status if answer.reward is None else f"{answer.reward:.3g}"
                text.append(", " if place else "").append(f"▸{shown}◂" if own else shown, style="bold" if own else "")
            yield "siblings", text
        if branch.void is not None:
            yield "void", Text(branch.void, style="red")
    for words in branched_words(view.branches):
        yield "branches", Text(words)


def _taught(view: RolloutView) -> Text:
    teaching = view.teaching
    if teaching.why_not is not None:
        return Text(f"nothing: {teaching.why_not}", style="dim")
    advantages = [call.advantage for call in view.calls if call.advantage is not None and call.left_out is None]
    if not any(advantages):
        return Text(f"nothing in step {teaching.step}: its advantage is 0")
    lowest, highest = min(advantages), max(advantages)
    span = f"{highest:+.3g}" if highest == lowest else f"{lowest:+.3g} to {highest:+.3g}"
    when = f"step {teaching.step}" if teaching.learnt else f"step {teaching.step}, which is not finished"
    meaning = "up (+) or down (−), depending on the sign of each call"
    if highest < 0:
        meaning = "down"
    elif lowest > 0:
        meaning = "up"
    others = "; other rollouts push the same tokens too"
    return Text(f"{when}: advantage {span}, so its tokens are pushed {meaning}{others}")


def _call(view: CallView, *, tokens: Tokens, full: bool) -> Group:
    turns = Group(*_turns(view, tokens=tokens, full=full))
    return Group(Text(), _call_rule(view), turns if view.played is None else Styled(turns, "dim"))


def _call_rule(view: CallView) -> Group:
    call = view.call
    facts = [f"{view.sampled_tokens} tokens", f"{call.ended_at - call.started_at:.2f} s"]
    if call.finish_reason not in ("stop", "tool_calls"):
        facts.append("cut off at the token limit" if call.finish_reason == "length" else call.finish_reason)
    if view.advantage is not None and view.left_out is None:
        facts.append(f"advantage {view.advantage:+.3g}")
    if view.left_out is not None and view.played is None:
        facts.append(f"not trained: {view.left_out}")
    title = Text.assemble((f"call {view.number}", "bold"), f" {call.agent}" if call.agent else "", style="magenta")
    return Group(
        Rule(title, align="left", style="dim"),
        Padding(Text(" · ".join([view.origin, *facts]), style="dim"), (0, 0, 0, 2)),
    )


def _turns(view: CallView, *, tokens: Tokens, full: bool) -> Iterator[RenderableType]:
    for message in view.said.messages:
        yield _turn(message.role, Text(message.content), message, full=full)
    answer = view.said.answer
    if tokens != "none" and view.pieces is not None:
        yield _turn("assistant", _coloured(view, tokens), None, full=True)
    elif answer is not None:
        yield _turn("assistant", _answer_text(answer), answer, full=full)
    elif view.pieces is not None:
        yield _turn("assistant", Text("".join(view.pieces)), None, full=full)
    for tool in view.tools:
        if tool.status == "error":
            failed = Text(f"{tool.name} failed: {tool.error or UNEXPLAINED}", style="red")
            yield _turn("tool", failed, None, full=full)
    for reward in view.rewards:
        yield _turn("reward", _reward(reward), None, full=True)
    if view.credit is not None and view.left_out is None:
        yield _turn("credit", Text(view.credit.words, style="dim"), None, full=True)


def _answer_text(answer: Message) -> Text:
    return Text.assemble((f"{answer.reasoning}\n", "italic dim") if answer.reasoning else "", answer.content)


def _turn(role: str, text: Text, message: Message | None, *, full: bool) -> Padding:
    """A role and its text, with the tool calls of `message`."""
    for call in message.tool_calls if message else ():
        text.append("\n" if text.plain else "")
        text.append(f"→ {call.name}({call.arguments})", style="yellow")
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(width=9, no_wrap=True)
    line.add_column(overflow="fold", ratio=1)
    line.add_row(Text(role, style=ROLES.get(role, "")), text if full else _clipped(text))
    return Padding(line, (0, 0, 0, 2))


def _clipped(text: Text) -> Text:
    lines = text.split("\n", allow_blank=True)
    kept = Text("\n").join(lines[:LINES])
    left = len(text.plain) - len(kept.plain)
    if len(kept.plain) > CHARACTERS:
        kept, left = kept[:CHARACTERS], len(text.plain) - CHARACTERS
    return kept if left <= 0 else Text.assemble(kept, (f" … {left:,} more characters; use --full", "dim"))


def _coloured(view: CallView, tokens: Tokens) -> Text:
    text = Text()
    advantages = view.lesson.advantages if view.lesson is not None and view.left_out is None else None
    for place, piece in enumerate(view.pieces or ()):
        by_logprob = tokens == "logprob"
        text.append(piece, style=_sure(view.call.logprobs[place]) if by_logprob else _better(advantages, place))
    return text


def _sure(logprob: float) -> str:
    return next((style for least, style in SURE if math.exp(min(logprob, 0.0)) >= least), SURE[-1][1])


def _better(advantages: Floats | None, place: int) -> str:
    """The colour of a token; "" if the call is not trained."""
    if advantages is None:
        return ""
    if advantages[place] == 0:
        return EVEN
    return BETTER if advantages[place] > 0 else WORSE


def _outcome(view: RolloutView, *, full: bool) -> Group:
    """Output, rewards, and the errors of all attempts."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    attempt = view.attempt
    if attempt is not None and attempt.status == "succeeded":
        given = attempt.output
        output = Text(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
        table.add_row("output", output if full else _clipped(output))
    for place, reward in enumerate(view.rewards):
        table.add_row("" if place else "rewards", _reward(reward))
    for tried in view.attempts:
        seconds = f", {tried.ended_at - tried.started_at:.1f} s" if tried.ended_at else ""
        table.add_row(
            f"attempt {tried.number}", Text(f"{tried.status}{seconds}", style="" if tried.error is None else "red")
        )
        if tried.error:
            error = Text(tried.error, style="red")
            table.add_row("", error if full else _clipped(error))
    return Group(
        Text(), Rule(Text("outcome", style="bold magenta"), align="left", style="dim"), Padding(table, (0, 0, 0, 2))
    )


def _reward(reward: Reward) -> Text:
    given = {
        "grader": "by the reward function",
        "air": "by a rule (AIR)",
        "agent": "by the agent",
        "system": "by LightningRL",
    }[reward.source]
    return Text.assemble(
        (f"{reward.value:+.3g}" if reward.source == "air" else f"{reward.value:.3g}", "bold"),
        f" {reward.name}, ",
        (given, "dim"),
    )


def _legend(tokens: Tokens) -> Text:
    if tokens == "advantage":
        labels = {
            "pushed up: more likely": BETTER,
            "pushed down: less likely": WORSE,
            "advantage 0": EVEN,
            "plain: not trained": "",
        }
    else:
        names = ("probability ≥ 0.9", "≥ 0.5", "≥ 0.1", "below")
        labels = dict(zip(names, (style for _, style in SURE), strict=True))
    text = Text("\ncolours:")
    for label, style in labels.items():
        text.append(" ").append(f" {label} ", style=style)
    return text


def _print_next(console: Console, view: RolloutView, *, run_dir: Path, tokens: Tokens) -> None:
    """Print commands that show more. A command is never broken, so that it can be copied."""
    others = [(reward, name) for name, reward in view.group.items() if reward is not None and name != view.rollout.id]
    best, name = max(others, default=(-math.inf, ""))
    rows = [("best of its group", f"lightningrl show {run_dir} {name}")] if best > (view.reward or 0) else []
    if view.branch is not None and view.branch.rollout is not None:
        rows.append(("its trunk", f"lightningrl show {run_dir} {view.branch.rollout}"))
    if tokens == "none" and any(call.pieces for call in view.calls):
        rows.append(("token probabilities", f"lightningrl show {run_dir} {view.rollout.id} --tokens logprob"))
    if any(reward is not None for reward in view.group.values()):
        rows.append(("rollouts with reward 0", f"lightningrl rollouts {run_dir} --reward 0"))
    console.print()
    for label, command in rows:
        console.print(Text.assemble((f"{label}: ", "dim"), command), soft_wrap=True)
