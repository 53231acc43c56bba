"""Demonstrations from a JSONL file, a function or the records of a run: conversations → answers to imitate."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lightningrl import plugins
from lightningrl.config import Config
from lightningrl.dialects.base import Past, Refused
from lightningrl.dialects.openai_chat import OpenAIChat
from lightningrl.dialects.recorded import Reader
from lightningrl.errors import LightningError, UserError
from lightningrl.gateway.scripted import shown
from lightningrl.look.listing import BATCH
from lightningrl.look.rollout import final_rewards
from lightningrl.messages import Message
from lightningrl.store import Records, open_records
from lightningrl.store.place import records_at
from lightningrl.types import Call, by_attempt

ROW = (
    'a demonstration is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], '
    '"tools": […]}, in OpenAI\'s format'
)

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to imitate, with its request.

    The conversation `system, user, assistant (calls a tool), tool, assistant` has two answers: one after two messages,
    one after four.
    """

    messages: tuple[Message, ...]
    """All messages before the answer."""
    tools: tuple[Mapping[str, Any], ...]
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """One demonstration holds all conversations of one task."""

    answers: Sequence[Sequence[Answer]]
    """[demonstrations][answers], in order."""
    rows: Sequence[Row | Sequence[Row]]
    """[demonstrations] Conversations in OpenAI's format, as passed to a `tokenizer` function."""
    source: str
    """A description for people."""


def load_demonstrations(config: Config) -> Demonstrations:
    """Load `warmstart.demonstrations`. A `UserError` names the line or the index of an invalid demonstration."""
    source = config.warmstart.demonstrations
    path = config.root / Path(source).expanduser()
    if source.endswith((".jsonl", ".json")):
        return _of_file(path)
    if ":" in source and not path.exists():
        return _of_function(source, config)
    return read_run(path, reward=config.warmstart.reward)


def read_run(path: Path, *, reward: float) -> Demonstrations:
    """Rollouts of a run (its folder or store.sqlite) with at least this final reward, without held-out tasks."""
    found = records_at(path)
    if found is None:
        raise UserError(
            f"no demonstrations at `{path}`", hint="name a JSONL file, the folder of a run, or `module:function`"
        )
    return asyncio.run(_of_store(*found, reward))


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
            raise UserError(f"`{path}` line {number} is not a demonstration: {error}", hint=ROW) from error
    if not rows:
        raise UserError(f"no demonstrations in `{path}`", hint=ROW)
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
            raise UserError(
                f"`{source}` returned an invalid demonstration at index {number}: {error}", hint=ROW
            ) from error
    if not rows:
        raise UserError(f"`{source}` returned no demonstrations", hint=ROW)
    return Demonstrations(answers=answers, rows=rows, source=f"{len(rows):,} conversations of `{source}`")


def answers_of(row: Any) -> list[Answer]:
    """The answers in one conversation, or in several of one task. Raises `ValueError` for anything else."""
    conversations = row if isinstance(row, list | tuple) else [row]
    found = [answer for conversation in conversations for answer in _of_conversation(conversation)]
    if not found:
        raise ValueError("it has no assistant message")
    return found


def _of_conversation(row: Any) -> list[Answer]:
    """All answers but those of weight 0, which OpenAI's fine-tuning skips, too."""
    if not isinstance(row, Mapping) or not isinstance(row.get("messages"), list | tuple):
        reason = "`messages` is missing" if isinstance(row, Mapping) else f"a `{type(row).__name__}`, not an object"
        raise ValueError(reason)
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
            raise ValueError("the first message is from the assistant; a user or system message must come before")
        if not (message.content or message.reasoning or message.tool_calls):
            raise ValueError(f"message {place + 1} is an empty answer")
        found.append(Answer(messages=request.messages[:place], tools=request.tools, message=message))
    return found


async def _of_store(file: Path, url: str, reward: float) -> Demonstrations:
    store = await open_records(url)
    try:
        done = [r for r in await store.rollouts() if r.accepted_attempt_id and r.task.split != "heldout"]
        rewards = await final_rewards(store, done)
        accepted = {r.id: r.accepted_attempt_id or "" for r in done}
        # rollouts of `lightningrl run` have no reward, and are all kept
        good = [accepted[rollout_id] for rollout_id, value in rewards.items() if value is None or value >= reward]
        answers = await _accepted(store, good)
    finally:
        await store.close()
    known = [value for value in rewards.values() if value is not None]
    if not answers:
        best = f"the best of `{len(known)}` rewards is `{max(known):g}`" if known else "no attempt has succeeded"
        hint = "lower `warmstart.reward`, or use a better teacher; `lightningrl rollouts` shows what it did"
        raise UserError(f"no rollout in `{file.parent}` has a reward of at least `{reward:g}`: {best}", hint=hint)
    chosen = f" with reward ≥ {reward:g}" if known else ""
    source = f"{len(answers):,} of {len(done):,} rollouts in `{file.parent.name}`{chosen}"
    return Demonstrations(answers=answers, rows=[_rows(own) for own in answers], source=source)


async def _accepted(store: Records, attempt_ids: Sequence[str]) -> list[list[Answer]]:
    """The answers of each attempt that has called the model."""
    found: list[list[Answer]] = []
    for start in range(0, len(attempt_ids), BATCH):
        chosen = attempt_ids[start : start + BATCH]
        calls = by_attempt(await store.calls(chosen))
        found += [answers for attempt in chosen if (answers := recorded(calls.get(attempt, [])))]
    return found


def recorded(calls: Sequence[Call]) -> list[Answer]:
    """The answers in the calls of one attempt. Incomplete calls and raw prompts are skipped."""
    reader, found = Reader(), list[Answer]()
    for call in calls:
        request, answer = reader.request(call), reader.answer(call)
        if request is not None and request.messages and answer is not None and call.capture != "incomplete":
            found.append(Answer(messages=request.messages, tools=request.tools, message=answer))
    return found


def _rows(answers: Sequence[Answer]) -> list[Row]:
    """The conversations of one attempt. A conversation that a later call continues is part of that call's own."""
    rows: list[Row] = []
    for place, answer in enumerate(answers):
        if any(later.messages[: len(answer.messages)] == answer.messages for later in answers[place + 1 :]):
            continue
        messages = [shown(message) for message in (*answer.messages, answer.message)]
        rows.append({"messages": messages, "tools": list(answer.tools)})
    return rows
