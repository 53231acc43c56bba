"""What does a branch play back of its trunk, and did its agent go the same way?

Everything that an agent does between two calls follows from the answers that it got. So an agent that gets an attempt's
recorded answers again comes to the same calls, and the next answer can be sampled afresh. Two things decide:

    what is played back   all complete calls of the trunk but the branching call and its possible consequences
    what is void          a branch whose agent went another way before it got to the branching call
"""

from collections.abc import Sequence

from lightningrl.causal import consequences
from lightningrl.types import Branch, Call

DIFFERS = "differs from the record: "
"""The beginning of `Call.capture_reason` of a request that a branch cannot place: the agent went another way."""
VOID = "void: "
"""The beginning of the error of an attempt whose branch is void. It has no reward, and its group is told."""


def played_back(trunk: Sequence[Call], branch: Branch) -> list[Call]:
    """The calls of the trunk whose answers are played back, in their order. `trunk`: all calls of the attempt."""
    complete = [call for call in trunk if call.capture != "incomplete"]
    ids = [call.id for call in complete]
    if branch.call_id is None or branch.call_id not in ids:
        return complete
    place = ids.index(branch.call_id)
    after = consequences(complete)[place]
    return [call for c, call in enumerate(complete) if c != place and not after[c]]


def why_void(branch: Branch, *, trunk: Sequence[Call], calls: Sequence[Call]) -> str | None:
    """Why a branch that has ended teaches nothing, and beginning with `VOID`; None if it went the same way up to its
    branching call. `calls`: those of the branch.
    """
    different = next((call for call in calls if (call.capture_reason or "").startswith(DIFFERS)), None)
    if different is not None:
        return f"{VOID}call {different.index + 1} {different.capture_reason}"
    if not trunk:
        return f"{VOID}its trunk `{branch.attempt_id}` has no calls"
    replayed = len({call.replays for call in calls if call.capture != "incomplete"} - {None})
    if branch.call_id is None:
        wanted = len(played_back(trunk, branch))
        return None if replayed == wanted else f"{VOID}it ended after {replayed} of {wanted} recorded calls"
    place = next((call for call in trunk if call.id == branch.call_id), None)
    if place is None:
        return f"{VOID}its trunk `{branch.attempt_id}` has no call `{branch.call_id}`"
    if any(is_branching(call, place) for call in calls):
        return None
    return f"{VOID}it ended after {replayed} recorded calls, before call {place.index + 1} was reached"


def is_branching(call: Call, place: Call) -> bool:
    """Whether a call of a branch is its branching call: a fresh answer to the prompt of `place`, a trunk's call.

    A relayed call has no prompt ids. There it is any fresh relayed call: before it, all others are played back.
    """
    fresh = call.replays is None and call.capture != "incomplete"
    return fresh and call.prompt_ids.tolist() == place.prompt_ids.tolist()
