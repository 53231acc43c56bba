"""Which lane of a timeline does each event lie in? Events that overlap in time lie in different lanes.

A planner p calls two solvers s1 and s2 in parallel, then a judge j. Time goes to the right:

    lane 0   p p s1 s1 s1 j j
    lane 1       s2 s2
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A call or a span."""

    id: str
    started_at: float
    ended_at: float
    """Unix seconds. An event that ends before it starts, as its end is unknown, has no duration."""
    after: str | None = None
    """Id of the event that this one continues. It takes that event's lane if it is free."""


def lanes(events: Sequence[Event]) -> dict[str, int]:
    """Event id → lane, from 0. An event that encloses others lies in a lane above them."""
    free_at: list[float] = []
    found: dict[str, int] = {}
    for event in sorted(events, key=lambda event: (event.started_at, -event.ended_at)):
        wanted = found.get(event.after or "")
        if wanted is None or free_at[wanted] > event.started_at:
            wanted = next((lane for lane, at in enumerate(free_at) if at <= event.started_at), len(free_at))
        free_at[wanted:] = [max(event.ended_at, event.started_at), *free_at[wanted + 1 :]]
        found[event.id] = wanted
    return found
