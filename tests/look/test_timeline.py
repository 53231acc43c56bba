"""Lanes of a timeline."""

import random

from lightningrl.look.timeline import Event, lanes


def event(name: str, start: float, end: float, after: str | None = None) -> Event:
    return Event(id=name, started_at=start, ended_at=end, after=after)


def test_parallel_solvers_lie_in_two_lanes_and_the_judge_after_them_in_the_first() -> None:
    events = [event("p", 0, 1), event("s1", 1, 4, "p"), event("s2", 2, 3, "p"), event("j", 4, 5, "s1")]
    assert lanes(events) == {"p": 0, "s1": 0, "s2": 1, "j": 0}


def test_a_branch_keeps_its_lane_although_another_has_become_free() -> None:
    events = [event("a1", 0, 3), event("b1", 1, 4), event("b2", 5, 6, "b1"), event("a2", 5.5, 7, "a1")]
    assert lanes(events) == {"a1": 0, "b1": 1, "b2": 1, "a2": 0}


def test_an_event_lies_above_those_that_it_encloses() -> None:
    assert lanes([event("call", 0, 1), event("agent", 0, 9), event("tool", 1, 2, "call")]) == {
        "agent": 0,
        "call": 1,
        "tool": 1,
    }


def test_events_of_a_lane_never_overlap() -> None:
    draw = random.Random(3)
    for _ in range(200):
        events = []
        for n in range(draw.randrange(1, 12)):
            start = draw.randrange(10)
            end = start + draw.choice([-1, 0, 1, 3])
            events.append(event(str(n), start, end, draw.choice([None, "0", "1", "7"])))
        found = lanes(events)
        for one in events:
            for other in events:
                apart = max(one.ended_at, one.started_at) <= other.started_at or (
                    max(other.ended_at, other.started_at) <= one.started_at
                )
                assert one is other or apart or found[one.id] != found[other.id], (one, other, found)
