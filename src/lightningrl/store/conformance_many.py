"""Checks of the verbs that read many rollouts at once: `outcomes`, `places` and `said`. Part of `conformance`."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from lightningrl.store.base import Outcome, Store, Where
from lightningrl.store.examples import call, rollout
from lightningrl.types import Attempt, Call, Reward, Task


async def _all(store: Store, *, limit: int = 2) -> list[Outcome]:
    """The outcomes of all rollouts, page by page, in the order they were enqueued."""
    cursor = (await store.changes()).cursor
    found: list[Outcome] = []
    while rows := (page := await store.outcomes(before=cursor, limit=limit)).rows:
        assert len(rows) <= limit
        cursor = page.cursor
        found += rows
    return sorted(found)


async def check_outcomes_agree_with_the_records(store: Store) -> None:
    """A rollout that succeeded at its second attempt, one that failed, one that runs, and one that is queued."""
    await store.enqueue([rollout(name, max_attempts=2 if name == "a" else 1) for name in "abcd"])
    [(_, lost), (_, failed), (_, runs)] = await store.claim("w", limit=3, lease_s=60)
    await store.append(call(lost, 0, [1], [2, 3, 4]))
    await store.finish(lost.id, "failed", error="ValueError: first\nTraceback")
    await store.finish(failed.id, "timeout", error="it took too long")
    [(_, accepted)] = await store.claim("w2", limit=1, lease_s=60)
    root = call(accepted, 0, [1], [2, 3, 4])
    await store.append(root, call(accepted, 1, [1, 2, 3, 4], [], parent=root.id), call(runs, 0, [1], [2] * 70_000))
    final = Reward(attempt_id=accepted.id, value=0.25)
    others = (replace(final, name="format"), replace(final, source="agent"), replace(final, call_id=root.id))
    rewards = [final, *(replace(other, value=9.0) for other in others)]
    await store.finish(accepted.id, "succeeded", rewards=rewards)
    found = await _all(store)
    assert [row.id for row in found] == ["a", "b", "c", "d"]
    assert [(row.group_id, row.task_id, row.split) for row in found] == [("g", "t", "train")] * 4
    assert [row.status for row in found] == ["succeeded", "failed", "running", "queued"]
    assert [row.attempts for row in found] == [2, 1, 1, 0]
    assert [row.attempt_status for row in found] == ["succeeded", "timeout", "running", None]
    assert [row.worker for row in found] == ["w2", "w", "w", ""]
    assert [row.error for row in found] == [None, "it took too long", None, None]
    assert [row.reward for row in found] == [0.25, None, None, None]
    assert [(row.calls, row.sampled_tokens) for row in found] == [(2, 3), (0, 0), (1, 70_000), (0, 0)]
    told = [(await store.attempts([row.id]))[-1] if row.attempts else None for row in found]
    assert [row.started_at for row in found] == [attempt and attempt.started_at for attempt in told]
    assert [row.ended_at for row in found] == [attempt and attempt.ended_at for attempt in told]


async def check_outcomes_follow_the_changes(store: Store) -> None:
    """Earlier rollouts are read backwards from a cursor, later changes forwards; both together are all."""
    await store.enqueue([rollout(f"r{number}") for number in range(5)])
    start = (await store.changes()).cursor
    assert (await store.outcomes(after=start)).rows == ()
    [(_, first), (_, second)] = await store.claim("w", limit=2, lease_s=60)
    await store.finish(second.id, "failed", error="bad")
    assert [row.id for row in (await store.outcomes(before=start)).rows] == ["r4", "r3", "r2"]
    news = await store.outcomes(after=start)
    assert {(row.id, row.status) for row in news.rows} == {("r0", "running"), ("r1", "failed")}
    assert news.cursor == (await store.changes()).cursor
    await store.append(call(first, 0, [1], [2]))
    again = await store.outcomes(after=news.cursor)
    assert [(row.id, row.calls) for row in again.rows] == [("r0", 1)], "calls of a rollout that runs are new"
    assert again.cursor == news.cursor
    page = await store.outcomes(after=0, limit=2)
    assert [row.id for row in (await store.outcomes(after=page.cursor, limit=9)).rows if row.id != "r0"] == ["r4", "r1"]


async def check_places_are_those_of_the_rollouts(store: Store) -> None:
    tasks = [Task(id=f"t{n}", input={"question": text}, split="train") for n, text in enumerate(("one", "two"))]
    await store.enqueue([replace(rollout(f"r{n}"), task=tasks[n % 2]) for n in range(4)])
    [(_, ended)] = await store.claim("w", limit=1, lease_s=60)
    await store.finish(ended.id, "succeeded", rewards=[Reward(attempt_id=ended.id, value=1.0)])
    place_of = {row.id: row.place for row in await _all(store)}

    async def ids(where: Where) -> Sequence[str]:
        places = await store.places(where)
        return sorted(name for name, place in place_of.items() if place in places)

    assert sorted(place_of.values()) == [place_of[row.id] for row in await store.rollouts()]
    assert await ids(Where(text="TWO")) == ["r1", "r3"]
    assert await ids(Where(text="t0", prefix="r2")) == ["r2"]
    assert await ids(Where(reward=(0.5, 1.0))) == ["r0"]
    assert await ids(Where(split="heldout")) == []


SYSTEM = "You answer questions about singers and songs. " * 40


def _turn(attempt: Attempt, index: int, texts: Sequence[str], answer: str, *, parent: str | None = None) -> Call:
    """A call whose request has these texts. Its prompt is alike in all attempts, so it is stored as a difference."""
    messages = [{"role": "user", "content": text} for text in (SYSTEM, *texts)]
    bare = call(attempt, index, [*range(40 + index)], [7], parent=parent)
    response = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
    return replace(bare, request={"messages": messages, "model": "m"}, response=response)


async def check_what_was_said_is_found(store: Store) -> None:
    """In each rollout that said it, although each call is stored as a difference to another, also of other rollouts."""
    await store.enqueue([rollout(name, max_attempts=2) for name in "abc"])
    [(_, a), (_, b), (_, c)] = await store.claim("w", limit=3, lease_s=60)
    roots = [_turn(a, 0, ["How many singers?"], "ten"), _turn(b, 0, ["How many songs?"], 'The "Größe"\nis 3')]
    await store.append(*roots)
    await store.append(_turn(a, 1, ["How many singers?", "ten", "And their ages?"], "9 to 99", parent=roots[0].id))
    await store.append(_turn(a, 2, ["How many singles?"], "none", parent=roots[0].id))
    arguments = json.dumps({"sql": 'SELECT "Name"\nFROM s'})
    await store.append(_turn(b, 1, ["How many songs?", arguments, "x" * 9000 + "far"], "yes", parent=roots[1].id))
    await store.append(_turn(c, 0, ["How many singers?"], "forgotten"))
    await store.finish(c.id, "failed", error="bad")
    [(_, again)] = await store.claim("w", limit=1, lease_s=60)
    await store.append(_turn(again, 0, ["How many singers?"], "twelve"))
    place_of = {row.id: row.place for row in await _all(store)}
    expected: dict[str, dict[str, str]] = {
        "ten": {"a": "ten"},
        "HOW MANY SINGERS": {"a": "How many singers?", "c": "How many singers?"},
        "many so": {"b": "How many songs?"},
        "many singl": {"a": "How many singles?"},
        "their ages": {"a": "And their ages?"},
        '"Größe"\nis': {"b": 'The "Größe" is 3'},
        'SELECT "Name"\nFROM': {"b": '{"sql": "SELECT \\"Name\\"\\nFROM s"}'},
        "content": {},
        "far": {"b": "…" + "x" * 60 + "far"},
        "forgotten": {},
        "twelve": {"c": "twelve"},
        "no such words": {},
    }
    for text, hits in expected.items():
        found = await store.said(text, places=list(place_of.values()))
        assert found == {place_of[name]: words for name, words in hits.items()}, text
    assert await store.said("How", places=[place_of["b"]]) == {place_of["b"]: "How many songs?"}
    assert await store.said("How", places=[]) == await store.said("How", places=[10**9]) == {}


CHECKS: tuple[Callable[[Store], Awaitable[None]], ...] = (
    check_outcomes_agree_with_the_records,
    check_outcomes_follow_the_changes,
    check_places_are_those_of_the_rollouts,
    check_what_was_said_is_found,
)
