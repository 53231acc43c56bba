"""What every store must do, as checks for authors of store plugins. Each check needs a fresh store.

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    async def test_store_keeps_its_promises(check): await check(await MyStore.open(...))

A store on disk also passes `check_history_costs_linear_space`, which needs to know the size of the store.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lightningrl.errors import StoreError
from lightningrl.store import conformance_claims, conformance_many
from lightningrl.store.base import Changes, Store, Where, wait
from lightningrl.store.examples import begin, call, refuses, rollout, same
from lightningrl.types import Branch, Call, Reward, Sampling, Span, Task, Weights, hash_token


async def check_enqueueing_twice_changes_nothing(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    await store.claim("w", limit=1, lease_s=60)
    await store.enqueue([rollout("a", group_id="other"), rollout("c")])
    stored = [(r.id, r.group_id, r.status) for r in await store.rollouts()]
    assert stored == [("a", "g", "running"), ("b", "g", "queued"), ("c", "g", "queued")]
    assert await store.rollouts(ids=["b"]) == [rollout("b")]
    assert [r.id for r in await store.rollouts(group_ids=["g"])] == ["a", "b", "c"]
    assert await store.rollouts(ids=[]) == []


async def check_no_rollout_is_claimed_twice(store: Store) -> None:
    await store.enqueue([rollout(f"r{n}") for n in range(40)])
    claims = await asyncio.gather(*(store.claim(f"w{n}", limit=3, lease_s=60) for n in range(20)))
    claimed = [r.id for claim in claims for r, _ in claim]
    assert sorted(claimed) == sorted(f"r{n}" for n in range(40))
    attempts = await store.attempts([f"r{n}" for n in range(40)])
    assert [a.rollout_id for a in attempts] == [f"r{n}" for n in range(40)]
    assert len({a.token_hash for a in attempts}) == 40


async def check_a_token_leads_to_its_own_attempt(store: Store) -> None:
    attempt = await begin(store)
    found = await store.attempt_by_token(attempt.token)
    assert found is not None
    assert (found[0].id, found[1]) == ("r", attempt)
    assert [replace(found[1], token="")] == await store.attempts(["r"]), "records do not have the token"
    assert attempt.token_hash == hash_token(attempt.token)
    assert [found[0]] == await store.rollouts()
    near = (attempt.token[:-1], attempt.token + "A", attempt.token.removeprefix("lrl-"), attempt.token_hash)
    for nobodys in ("nobody's", "", "lrl-\udcff", "\x00", *near):
        assert await store.attempt_by_token(nobodys) is None


async def check_a_token_tells_at_once_how_its_attempt_stands(store: Store) -> None:
    attempt = await begin(store)
    await store.heartbeat([attempt.id], lease_s=1000)
    found = await store.attempt_by_token(attempt.token)
    assert found is not None
    assert [replace(found[1], token="")] == await store.attempts(["r"])
    assert found[1].lease_until > attempt.lease_until + 900
    await store.finish(attempt.id, "failed")
    found = await store.attempt_by_token(attempt.token)
    assert found is not None
    assert (found[0].status, found[1].status) == ("failed", "failed")
    await store.enqueue([rollout("other")])
    ((_, lost),) = await store.claim("w", limit=1, lease_s=0.0)
    assert (await store.attempt_by_token(lost.token)) is not None
    ((_, again),) = await store.claim("w", limit=1, lease_s=60.0)
    for token, status in ((lost.token, "lost"), (again.token, "running")):
        found = await store.attempt_by_token(token)
        assert found is not None
        assert found[1].status == status


async def check_calls_come_back_as_they_were(store: Store) -> None:
    attempt = await begin(store)
    root = call(attempt, 0, [1, 2, 3], [7, 8, 9])
    child = call(attempt, 2, [1, 2, 3, 7, 8, 9, 4, 5], [6, 9], parent=root.id, capture="bridged")
    sibling = call(attempt, 1, [1, 2, 3], [8], logprob=-1e-9)
    fork = replace(call(attempt, 3, [1, 2, 4], [], parent=child.id, capture="forked"), request_id="q-1")
    odd = call(attempt, 4, [2**31 - 1], [5], logprob=math.nan, capture="incomplete")
    await store.append(root)
    reward = Reward(attempt_id=attempt.id, value=0.5, name="format", source="air", call_id=child.id)
    await asyncio.gather(store.append(child, reward), store.append(sibling))
    await store.append(fork, odd)
    kept = await store.calls([attempt.id])
    assert [c.index for c in kept] == [0, 1, 2, 3, 4]
    assert all(same(one, other) for one, other in zip(kept, [root, sibling, child, fork, odd], strict=True))
    assert await store.rewards([attempt.id]) == [reward]


async def check_branches_and_their_calls_come_back_as_they_were(store: Store) -> None:
    """The trunk may be in another store: here, too, it does not exist."""
    branch = Branch(attempt_id="elsewhere.1", call_id="elsewhere.1/1")
    made = [replace(rollout("b"), branch=branch), replace(rollout("p"), branch=replace(branch, call_id=None))]
    await store.enqueue([*made, rollout("r")])
    claimed = {r.id: (r, attempt) for r, attempt in await store.claim("w", limit=3, lease_s=60)}
    wanted = {"b": branch, "p": Branch(attempt_id="elsewhere.1", call_id=None), "r": None}
    assert {name: r.branch for name, (r, _) in claimed.items()} == wanted
    assert {r.id: r.branch for r in await store.rollouts()} == wanted
    assert {r.id: r.branch for r in await store.rollouts(ids=["p"])} == {"p": wanted["p"]}
    assert {r.id: r.branch for r in (await store.changes(0)).rollouts} == wanted
    attempt = claimed["b"][1]
    found = await store.attempt_by_token(attempt.token)
    assert found is not None and found[0].branch == branch
    root = replace(call(attempt, 0, [1, 2, 3], [7, 8, 9]), replays="elsewhere.1/0")
    child = call(attempt, 1, [1, 2, 3, 7, 8, 9, 4], [6], parent=root.id, capture="bridged")
    await store.append(root, child)
    assert [c.replays for c in await store.calls([attempt.id])] == ["elsewhere.1/0", None]
    assert all(same(one, other) for one, other in zip(await store.calls([attempt.id]), [root, child], strict=True))
    told = {row.id: (row.branch, row.sampled_tokens) for row in (await store.outcomes(after=0)).rows}
    assert told == {"b": (True, 1), "p": (True, 0), "r": (False, 0)}, "played-back tokens were not sampled"
    await store.finish(attempt.id, "failed", error="void: no")
    await store.enqueue([rollout("b")])  # requested again: it stays a branch
    ((again, _),) = await store.claim("w", limit=1, lease_s=60)
    assert again.branch == branch


TEXT = 'naïve 🙂 \u2028 \x00 \x7f \\n \n\t"\\'
MESSAGES = [{"role": "user", "content": "x" * 3000}, {"content": "order", "role": "matters"}]
NUMBERS = [0, -0.0, 1.0, 1e-300, 0.1 + 0.2, True, False, None]
BODY: dict[str, Any] = {
    "zeta": [{"b": 1, "a": [[], {}, [[{"": None}]]]}, TEXT, "", *NUMBERS],
    "alpha": 2**63 - 1,
    "large": [2**64, -(2**70), 123456789012345678901234567890],
    "\n": {"text": "one\ntwo", "deep": {"er": {"and": ["deeper", {"still": [1.5]}]}}},
    "messages": MESSAGES,
    "empty": {},
}


async def check_bodies_come_back_exactly(store: Store) -> None:
    """With key order and the types of numbers, whatever a body shares with the one before."""
    attempt = await begin(store)
    answered = [{"role": "assistant", "content": "naïve 🙂"}, {"role": "tool", "content": '{"a":"\\ud83d"}'}]
    rewritten = {"role": "user", "content": "after a change further up"}
    requests: list[dict[str, Any]] = [
        BODY,
        {**BODY, "messages": [*MESSAGES, *answered]},
        {**BODY, "alpha": 2, "messages": [*MESSAGES, rewritten], "empty": []},
        {**dict(reversed(BODY.items())), "messages": MESSAGES[1:]},
        {},
        {"prompt": "x" * 3000},
        {"prompt": "x" * 2999 + "y" + "x" * 3000},
        {"prompt": [1, 2, 3]},
        {"prompt": "x" * 3000},
    ]
    kept: list[Call] = []
    for index, request in enumerate(requests):
        parent = kept[-1].id if index % 3 == 1 else None
        response = {**BODY, "index": index, "id": [request]}
        kept.append(replace(call(attempt, index, [1, 2], [3], parent=parent), request=request, response=response))
    for one in kept:
        await store.append(one)
    again = await store.calls([attempt.id])
    for one, other in zip(kept, again, strict=True):
        assert json.dumps([one.request, one.response]) == json.dumps([other.request, other.response])
        assert same(one, other)


async def check_token_ids_and_logprobs_come_back_bit_for_bit(store: Store) -> None:
    attempt = await begin(store)
    odd = np.array([-0.0, -1e-45, -3.4e38, math.nan, -math.inf, 0.1], np.float32)
    kept: list[Call] = []
    for index, largest in enumerate((0, 255, 65_535, 65_536, 2**18 - 1, 2**18, 2**31 - 1)):
        for count in range(6):
            ids = np.full(count, largest, np.int32)
            bare = call(attempt, len(kept), [largest - largest // 3, 1] * index, ids.tolist(), capture="incomplete")
            kept.append(replace(bare, logprobs=odd[:count], parent_call_id=kept[-1].id if count % 2 else None))
    await store.append(*kept)
    for one, other in zip(kept, await store.calls([attempt.id]), strict=True):
        assert same(one, other)
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


async def check_numbers_of_any_size_come_back(store: Store) -> None:
    attempt = await begin(store)
    seeds = (None, 0, 2**63 - 1, 2**63, 2**64 - 1, -1)
    stamps = ((0.0, 0.0), (1.79e9, 1.79e9 + 0.1), (2.0, 1.0), (-1.0, 1.79e9), (0.1, 0.1 + 2**-50), (1.0, 5e-324))
    kept: list[Call] = []
    for index, (seed, (began, ended)) in enumerate(zip(seeds, stamps, strict=True)):
        sampling = Sampling(seed=seed, max_tokens=2 ** (5 * index))
        bare = call(attempt, index, [1], [2])
        kept.append(replace(bare, sampling=sampling, started_at=began, ended_at=ended))
    await store.append(*kept)
    assert all(same(one, other) for one, other in zip(kept, await store.calls([attempt.id]), strict=True))


async def check_history_costs_linear_space(store: Store, *, size: Callable[[], Awaitable[int]]) -> None:
    """`size` returns the bytes that the store takes. Each request repeats the whole history, in text and in tokens. It
    begins and ends with a field that changes; tools and grammar are long.
    """
    words = np.random.default_rng(0)

    def text(length: int) -> str:
        return words.bytes(length // 2).hex()

    attempt = await begin(store)
    tools, grammar = [{"name": text(50), "description": text(2000)} for _ in range(4)], text(8000)
    messages, parent = [{"role": "system", "content": text(4000)}], None
    prompt = words.integers(0, 150_000, 1000).tolist()
    size_before = 0
    for index in range(120):
        if index == 80:
            size_before = await size()
        request = {"user": f"{index}", "messages": list(messages), "tools": tools, "seed": index, "model": "policy"}
        answer = {"role": "assistant", "content": text(400)}
        completion = words.integers(0, 150_000, 50).tolist()
        bare = call(attempt, index, prompt, completion, parent=parent, capture="bridged")
        sampling = Sampling(grammar=grammar, seed=index)
        await store.append(replace(bare, request=request, response={"message": answer}, sampling=sampling))
        messages += [answer, {"role": "user", "content": text(100)}]
        prompt, parent = [*prompt, *completion, *words.integers(0, 150_000, 20).tolist()], bare.id
    size_after = await size()
    assert (await store.calls([attempt.id]))[-1].request["messages"] == messages[:-2]
    # By now a request has 60 kB. A turn has 500 random hexadecimal digits (250 bytes), 70 tokens (at most 280 bytes)
    # and 50 logprobs (200 bytes). The rest is rows and pages.
    assert size_after - size_before < 40 * 1500


async def check_what_is_not_finite_is_refused_whole(store: Store) -> None:
    attempt = await begin(store)
    good = call(attempt, 0, [1], [2])
    for value in (math.nan, math.inf, -math.inf):
        await refuses(store.append(good, Reward(attempt_id=attempt.id, value=value)))
        await refuses(store.finish(attempt.id, "succeeded", rewards=[Reward(attempt_id=attempt.id, value=value)]))
        await refuses(store.append(replace(good, sampling=Sampling(temperature=value))))
        await refuses(store.append(replace(good, sampling=Sampling(top_p=value))))
    await refuses(store.append(call(attempt, 0, [1], [2], logprob=math.nan)))
    assert await store.calls([attempt.id]) == []
    assert (await store.attempts(["r"]))[0].status == "running"
    await store.append(good)
    await store.append(call(attempt, 1, [1, 2, 3], [4], parent=good.id))
    assert (await store.calls([attempt.id]))[1].prompt_ids.tolist() == [1, 2, 3]


async def check_a_bad_record_does_not_touch_its_neighbours(store: Store) -> None:
    attempt = await begin(store)
    appends = [store.append(call(attempt, n, [n], [n])) for n in range(8)]
    twice = [store.append(call(attempt, n, [n], [n])) for n in range(4)]
    lonely = store.append(call(attempt, 9, [1], [1], parent="nobody"))
    stray = store.append(Reward(attempt_id=attempt.id, value=1.0, call_id="nobody"))
    results = await asyncio.gather(*appends, *twice, lonely, stray, return_exceptions=True)
    assert [isinstance(r, StoreError) for r in results] == [False] * 8 + [True] * 6
    assert [c.index for c in await store.calls([attempt.id])] == list(range(8))


async def check_an_ended_attempt_takes_no_more(store: Store) -> None:
    attempt = await begin(store)
    rewards = [Reward(attempt_id=attempt.id, value=1.0)]
    await store.finish(attempt.id, "succeeded", rewards=rewards, output={"sql": "SELECT 1"})
    await store.finish(attempt.id, "failed", rewards=[Reward(attempt_id=attempt.id, value=0.0)], error="late")
    await refuses(store.append(call(attempt, 0, [1], [2])))
    await refuses(store.append(Reward(attempt_id=attempt.id, value=9.0)))
    await refuses(store.append(Reward(attempt_id="nobody", value=1.0)))
    assert await store.rewards([attempt.id]) == rewards
    [ended] = await store.attempts(["r"])
    assert (ended.status, ended.output, ended.error) == ("succeeded", {"sql": "SELECT 1"}, None)
    assert ended.ended_at is not None
    assert (await store.rollouts())[0].accepted_attempt_id == attempt.id


async def check_spans_come_back_as_they_were(store: Store) -> None:
    attempt = await begin(store)
    asked = call(attempt, 0, [1], [2])
    tool = Span(
        id="00f067aa0ba902b7",
        attempt_id=attempt.id,
        call_id=asked.id,
        kind="tool",
        name="wetter",
        status="error",
        error="naïve \udcff",
        input='{"city":  "Oslo"}',
        output="",
        started_at=1.79e9 + 0.25,
        ended_at=1.79e9 + 0.5,
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        parent_id="00f067aa0ba902b8",
        attributes={"gen_ai.tool.call.id": "call_1", "n": [1, 2.5, None, True]},
    )
    bare = Span(id="00f067aa0ba902b9", attempt_id=attempt.id, call_id=None, kind="other", name="x", started_at=1.0)
    await store.append(asked, tool)
    await store.append(bare, replace(tool, name="again"))
    kept = [bare, replace(tool, error="naïve \\udcff")]
    assert await store.spans([attempt.id]) == kept
    assert await store.spans(["nobody"]) == await store.spans([]) == []
    await refuses(store.append(replace(bare, id="1", call_id="nobody")))
    await refuses(store.append(replace(bare, id="1", attempt_id="nobody")))
    await store.finish(attempt.id, "succeeded")
    late = replace(bare, id="2", call_id=asked.id, started_at=2.0)
    await store.append(late)
    assert await store.spans([attempt.id]) == [bare, late, kept[1]]


async def check_wait_wakes_when_the_last_one_ends(store: Store) -> None:
    await store.enqueue([rollout("a"), rollout("b")])
    [(_, a), (_, b)] = await store.claim("w", limit=2, lease_s=60)
    assert await wait(store, ["a", "b"], timeout_s=0.01) == []
    seen: list[int] = []
    waiting = asyncio.create_task(wait(store, ["a", "b"], timeout_s=30, progress=seen.append))
    await store.finish(a.id, "succeeded")
    assert not (await asyncio.wait([waiting], timeout=0.05))[0]
    started = time.monotonic()
    await store.finish(b.id, "failed")
    assert [(r.id, r.status) for r in await waiting] == [("a", "succeeded"), ("b", "failed")]
    assert time.monotonic() - started < 1.0
    assert seen == sorted(seen) and seen[-1] == 2
    assert len(await wait(store, ["a"], timeout_s=0)) == 1
    assert await wait(store, [], timeout_s=0) == []


async def check_changes_are_told_in_order_and_once(store: Store) -> None:
    await store.enqueue([rollout("early")])
    start = (await store.changes()).cursor
    assert await store.changes(start) == Changes(cursor=start, rollouts=())
    await store.enqueue([rollout("a"), rollout("b", max_attempts=2), rollout("early")])
    new = await store.changes(start)
    assert [(r.id, r.status) for r in new.rollouts] == [("a", "queued"), ("b", "queued")]
    for _, attempt in (claimed := await store.claim("w", limit=3, lease_s=60)):
        await store.finish(attempt.id, "failed")
    assert [r.id for r, _ in claimed] == ["early", "a", "b"]
    ended = await store.changes(new.cursor)
    assert [(r.id, r.status) for r in ended.rollouts] == [("early", "failed"), ("a", "failed"), ("b", "queued")]
    await store.enqueue([rollout("a")])  # requested again
    again = await store.changes(ended.cursor)
    assert [(r.id, r.status) for r in again.rollouts] == [("a", "queued")]
    assert [r.id for r in (await store.changes(start)).rollouts] == ["early", "b", "a"]


async def check_changes_are_waited_for(store: Store) -> None:
    cursor = (await store.changes()).cursor
    waiting = asyncio.create_task(store.changes(cursor, timeout_s=30))
    assert not (await asyncio.wait([waiting], timeout=0.05))[0]
    started = time.monotonic()
    await store.enqueue([rollout("a")])
    assert [r.id for r in (await waiting).rollouts] == ["a"]
    assert time.monotonic() - started < 1.0


async def check_many_changes_come_in_pieces(store: Store) -> None:
    ids = [f"r{number:04d}" for number in range(1100)]
    await store.enqueue([rollout(rollout_id) for rollout_id in ids])
    cursor, seen = 0, list[str]()
    while rollouts := (news := await store.changes(cursor)).rollouts:
        assert len(rollouts) <= 500
        cursor = news.cursor
        seen += [r.id for r in rollouts]
    assert seen == ids


async def check_rollouts_are_found_and_counted(store: Store) -> None:
    """By prefix of their ids, split, status, task and reward, and page by page."""
    questions = (('say "Ähre"', "train"), ("50 % of _", "train"), ("x", "heldout"))
    tasks = [Task(id=f"t{n}", input={"question": text}, split=split) for n, (text, split) in enumerate(questions)]
    made = [replace(rollout(f"train-{n // 3}-{n % 3}"), task=tasks[n % 3]) for n in range(9)]
    await store.enqueue(made)
    for n, (_, attempt) in enumerate(await store.claim("w", limit=4, lease_s=60)):
        extra = Reward(attempt_id=attempt.id, name="format", value=9.0)
        rewards = [Reward(attempt_id=attempt.id, value=n / 2), extra]
        await store.finish(attempt.id, "succeeded" if n else "failed", rewards=rewards)
    expected: list[tuple[Where, list[int]]] = [
        (Where(), list(range(9))),
        (Where(prefix="train-1"), [3, 4, 5]),
        (Where(prefix="train_1"), []),
        (Where(split="heldout"), [2, 5, 8]),
        (Where(status="succeeded"), [1, 2, 3]),
        (Where(text="T1"), [1, 4, 7]),
        (Where(text='"Ähre"'), [0, 3, 6]),
        (Where(text="% of _"), [1, 4, 7]),
        (Where(text="_x_"), []),
        (Where(reward=(0.0, 0.5)), [1]),
        (Where(reward=(1.0, 9.0)), [2, 3]),
        (Where(prefix="train-0", split="train", status="succeeded", text="t", reward=(0.5, 0.5)), [1]),
    ]
    for where, places in expected:
        ids = [made[place].id for place in places]
        assert [r.id for r in await store.rollouts(where=where)] == ids, where
        assert [r.id for r in await store.rollouts(where=where, limit=2)] == ids[-2:], where
        assert sum((await store.count(where)).values()) == len(ids), where
    assert await store.count() == {"failed": 1, "succeeded": 3, "queued": 5}
    latest = await store.rollouts(limit=4)
    page = await store.rollouts(limit=4, before=latest[0].id)
    assert [r.id for r in (*page, *latest)] == [r.id for r in made[1:]]
    assert await store.rollouts(limit=0) == [] and await store.rollouts(before=made[0].id) == []


async def check_the_latest_weights_are_found(store: Store) -> None:
    assert await store.weights("policy") is None
    for version in (0, 10, 9):
        await store.publish(Weights(policy="policy", version=version, uri=f"/w/{version}"))
    await store.publish(Weights(policy="policy", version=10, uri="/elsewhere"))
    assert await store.weights("policy") == Weights(policy="policy", version=10, uri="/w/10")


CHECKS: tuple[Callable[[Store], Awaitable[None]], ...] = (
    check_enqueueing_twice_changes_nothing,
    check_no_rollout_is_claimed_twice,
    check_a_token_leads_to_its_own_attempt,
    check_a_token_tells_at_once_how_its_attempt_stands,
    check_calls_come_back_as_they_were,
    check_branches_and_their_calls_come_back_as_they_were,
    check_bodies_come_back_exactly,
    check_token_ids_and_logprobs_come_back_bit_for_bit,
    check_numbers_of_any_size_come_back,
    check_what_is_not_finite_is_refused_whole,
    check_a_bad_record_does_not_touch_its_neighbours,
    check_an_ended_attempt_takes_no_more,
    check_spans_come_back_as_they_were,
    *conformance_claims.CHECKS,
    check_wait_wakes_when_the_last_one_ends,
    check_changes_are_told_in_order_and_once,
    check_changes_are_waited_for,
    check_many_changes_come_in_pieces,
    check_rollouts_are_found_and_counted,
    *conformance_many.CHECKS,
    check_the_latest_weights_are_found,
)
