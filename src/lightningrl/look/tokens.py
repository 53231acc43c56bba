"""The tokens of one call: who brought each prompt token in, and what is recorded of each sampled token.

call 1   prompt [1 2 3]             sampled [7 8]
call 2   prompt [1 2 3 7 8 9 4 5]   the first three were rendered for call 1, the next two were sampled in it. Its
                                    answer was cut off, so the bridge has inserted its end 9. 4 and 5 are new.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from lightningrl.dialects.recorded import Reader
from lightningrl.look.texts import Texts
from lightningrl.prefix import common_prefix
from lightningrl.types import Call

Origin: TypeAlias = Literal["rendered", "sampled", "inserted"]
"""`rendered`: from the messages of a request. `sampled`: by the engine. `inserted`: the end of an answer that was cut
off; the model did not sample it, and it is never trained.
"""
Alternatives: TypeAlias = tuple[tuple[str, float], ...]
"""(text, logprob in nats) of the likeliest tokens at one position, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Neighbouring prompt tokens that came in the same way."""

    start: int
    end: int
    """The tokens `start:end` of the prompt."""
    origin: Origin
    number: int
    """The call that the tokens were rendered for, that sampled them, or before which they were inserted; from 1."""

    def as_json(self) -> dict[str, Any]:
        return {"from": self.start, "to": self.end, "origin": self.origin, "call": self.number}


def origins(calls: Sequence[Call], *, texts: Mapping[str, Texts | None]) -> dict[str, tuple[Run, ...]]:
    """Call id → runs of its prompt. `calls` are all calls of an attempt, in order. `texts`: by policy; without them,
    inserted tokens count as rendered.
    """
    found: dict[str, tuple[Run, ...]] = {}
    known: dict[str, Call] = {}
    for call in calls:
        parent = known.get(call.parent_call_id or "")
        read = 0 if parent is None else _continued(parent, call)
        runs: list[Run] = []
        if parent is not None and read:
            runs = [*found[parent.id], *_run(len(parent.prompt_ids), read, "sampled", parent)]
            inserted = _inserted(parent, call, read, texts.get(call.policy))
            runs += [*_run(read, inserted, "inserted", call)] if inserted else []
        runs += _run(runs[-1].end if runs else 0, len(call.prompt_ids), "rendered", call)
        found[call.id] = tuple(runs)
        known[call.id] = call
    return found


def alternatives(calls: Sequence[Call], call: Call) -> tuple[Alternatives, ...] | None:
    """[C] the likeliest tokens at each sampled token of one of the calls, as the response shows them. None: the agent
    did not ask for them, or the response does not show all sampled tokens.
    """
    if not call.sampling.top_logprobs:
        return None
    reader = Reader()
    requests = [reader.request(one) for one in calls if one.index <= call.index]  # one may refer to those before it
    tokens = reader.tokens(requests[-1], call) if requests and requests[-1] is not None else None
    return tuple(token.top for token in tokens) if tokens and len(tokens) == len(call.completion_ids) else None


def _continued(parent: Call, call: Call) -> int:
    """Length of the parent's tokens, if the prompt begins with all of them; else 0: then it was rendered afresh."""
    before = np.concatenate((parent.prompt_ids, parent.completion_ids))
    continues = call.capture not in ("rendered", "forked") and common_prefix(before, call.prompt_ids) == len(before)
    return len(before) if continues else 0


def _inserted(parent: Call, call: Call, start: int, texts: Texts | None) -> int | None:
    """The end of the tokens from `start` on that close the parent's answer; None: the engine sampled its end."""
    if texts is None or start == len(call.prompt_ids):
        return None
    ended = len(parent.completion_ids) > 0 and texts.is_added(int(parent.completion_ids[-1]))
    return start + 1 if not ended and texts.is_added(int(call.prompt_ids[start])) else None


def _run(start: int, end: int, origin: Origin, call: Call) -> list[Run]:
    return [Run(start=start, end=end, origin=origin, number=call.index + 1)] if end > start else []
