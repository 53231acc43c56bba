"""Where do demonstrations come from? From a JSONL file, a function, or the records of a run: conversations → the
answers to imitate.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from lightningrl import plugins
from lightningrl.config import Config
from lightningrl.dialects.base import Dialect, Past, Refused
from lightningrl.dialects.openai_chat import OpenAIChat
from lightningrl.errors import LightningError, UserError
from lightningrl.gateway.scripted import shown
from lightningrl.messages import Message
from lightningrl.store import Records, open_records
from lightningrl.types import FINAL, Call

ROW = 'a demonstration is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], "tools": […]}, as OpenAI writes it'
BATCH = 64
"""Rollouts whose calls are in memory together."""

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to imitate, and what the model was asked.

    The conversation `system, user, assistant (calls a tool), tool, assistant` has two of them: one after two messages,
    one after four.
    """

    messages: tuple[Message, ...]
    """All that stands before it."""
    tools: tuple[Mapping[str, Any], ...]
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Each is all that was said on one task."""

    answers: Sequence[Sequence[Answer]]
    """[demonstrations][answers] in their order."""
    rows: Sequence[Row | Sequence[Row]]
    """[demonstrations] their conversations, as OpenAI's chat writes them: what a `tokenizer` function is given."""
    source: str
    """In words, for people."""


def load_demonstrations(config: Config) -> Demonstrations:
    """What `warmstart.demonstrations` names. Raises `UserError` for what is none, with its line or number."""
    source = config.warmstart.demonstrations
    path = config.root / Path(source).expanduser()
    if source.endswith((".jsonl", ".json")):
        return _of_file(path)
    if ":" in source and not path.exists():
        return _of_function(source, config)
    return read_run(path, reward=config.warmstart.reward)


def read_run(path: Path, *, reward: float) -> Demonstrations:
    """Rollouts of a run's folder, or its store.sqlite, with at least this final reward. Those on held-out tasks are
    left alone.
    """
    file = path / "store.sqlite" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"no demonstrations at `{path}`", hint="name a JSONL file, the folder of a run, or `module:function`"
        )
    return asyncio.run(_of_store(file, reward))


def _of_file(path: Path) -> Demonstrations:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the demonstrations in `{path}`: {error}",
            hint="`warmstart.demonstrations` is relative to the recipe",
        ) from error
    rows: list[Row] = []
    answers: list[list[Answer]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
            answers.append(answers_of(rows[-1]))
        except (ValueError, RecursionError) as error:
            raise UserError(f"`{path}` line {number} is no demonstration: {error}", hint=ROW) from error
    if not rows:
        raise UserError(f"no demonstration in `{path}`", hint=ROW)
    return Demonstrations(answers=answers, rows=rows, source=f"{len(rows):,} conversations of `{path.name}`")


def _of_function(source: str, config: Config) -> Demonstrations:
    make = plugins.load(source, kind="demonstrations", root=config.root)
    try:
        rows = list(make(seed=config.seed, count=config.warmstart.count))
    except LightningError:
        raise
    except Exception as error:  # user code may raise anything
        raise UserError(
            f"`{source}` failed: {type(error).__name__}: {error}", hint="it is called as f(seed=…, count=…)"
        ) from error
    answers: list[list[Answer]] = []
    for number, row in enumerate(rows):
        try:
            answers.append(answers_of(row))
        except ValueError as error:
            raise UserError(f"`{source}` gave no demonstration at index {number}: {error}", hint=ROW) from error
    if not rows:
        raise UserError(f"`{source}` gave no demonstration", hint=ROW)
    return Demonstrations(answers=answers, rows=rows, source=f"{len(rows):,} conversations of `{source}`")


def answers_of(row: Any) -> list[Answer]:
    """Of one conversation, or of several on one task. Raises `ValueError` for what is none."""
    conversations = row if isinstance(row, list | tuple) else [row]
    found = [answer for conversation in conversations for answer in _of_conversation(conversation)]
    if not found:
        raise ValueError("no message of the assistant")
    return found


def _of_conversation(row: Any) -> list[Answer]:
    """Every answer in it, but for those of weight 0, which OpenAI's fine-tuning leaves out, too."""
    if not isinstance(row, Mapping) or not isinstance(row.get("messages"), list | tuple):
        raise ValueError(
            "`messages` is missing" if isinstance(row, Mapping) else f"a `{type(row).__name__}`, not an object"
        )
    given = list(row["messages"])
    try:
        request = OpenAIChat().parse({"model": "", "messages": given, "tools": row.get("tools") or []}, Past())
    except Refused as error:
        raise ValueError(str(error)) from error
    found: list[Answer] = []
    for place, message in enumerate(request.messages):
        if message.role != "assistant" or given[place].get("weight", 1) == 0:
            continue
        if place == 0:
            raise ValueError("the assistant speaks first, and a model is always asked something")
        if not (message.content or message.reasoning or message.tool_calls):
            raise ValueError(f"message {place + 1} is an answer that says nothing")
        found.append(Answer(messages=request.messages[:place], tools=request.tools, message=message))
    return found


async def _of_store(file: Path, reward: float) -> Demonstrations:
    store = await open_records(f"sqlite://{file.resolve()}")
    try:
        done = [r for r in await store.rollouts() if r.accepted_attempt_id and r.task.split != "heldout"]
        accepted = [rollout.accepted_attempt_id or "" for rollout in done]
        rewards = {
            r.attempt_id: r.value for r in await store.rewards(accepted) if r.name == FINAL and r.call_id is None
        }
        good = [
            attempt for attempt in accepted if rewards.get(attempt, reward) >= reward
        ]  # `lightningrl run` rewards nothing
        answers = await _accepted(store, good)
    finally:
        await store.close()
    if not answers:
        best = (
            f"the best of `{len(rewards)}` rewards is `{max(rewards.values()):g}`"
            if rewards
            else "no attempt has succeeded"
        )
        hint = "a lower `warmstart.reward`, or a teacher that does the task: `lightningrl rollouts` shows what it did"
        raise UserError(f"no rollout in `{file.parent}` has a reward of at least `{reward:g}`: {best}", hint=hint)
    source = f"{len(answers):,} of {len(done):,} rollouts in `{file.parent.name}`" + (
        f": those with reward ≥ {reward:g}" if rewards else ""
    )
    return Demonstrations(answers=answers, rows=[_rows(own) for own in answers], source=source)


async def _accepted(store: Records, attempt_ids: Sequence[str]) -> list[list[Answer]]:
    """Of each attempt that has called the model."""
    found: list[list[Answer]] = []
    for start in range(0, len(attempt_ids), BATCH):
        chosen = attempt_ids[start : start + BATCH]
        calls: dict[str, list[Call]] = {attempt: [] for attempt in chosen}
        for call in await store.calls(chosen):
            calls[call.attempt_id].append(call)
        found += [answers for own in calls.values() if (answers := recorded(own))]
    return found


def recorded(calls: Sequence[Call]) -> list[Answer]:
    """Of one attempt, in whatever dialect it asked; what broke off, and raw prompts, are left out."""
    past, dialects, found = Past(), dict[str, Dialect](), list[Answer]()
    for call in calls:
        if call.capture == "incomplete" or call.dialect not in plugins.names("dialect"):
            continue
        dialect = dialects.setdefault(call.dialect, plugins.load(call.dialect, kind="dialect")())
        try:
            request = dialect.parse(call.request, past)
            answer = dialect.answer(call.response)
        except (Refused, KeyError, IndexError, msgspec.ValidationError):
            continue
        dialect.remember(past, request, call.response)
        if request.messages:
            found.append(Answer(messages=request.messages, tools=request.tools, message=answer))
    return found


def _rows(answers: Sequence[Answer]) -> list[Row]:
    """The conversations of one attempt, each once: those that a later call goes on with are part of its own."""
    rows: list[Row] = []
    for place, answer in enumerate(answers):
        if any(later.messages[: len(answer.messages)] == answer.messages for later in answers[place + 1 :]):
            continue
        rows.append(
            {
                "messages": [shown(message) for message in (*answer.messages, answer.message)],
                "tools": list(answer.tools),
            }
        )
    return rows
