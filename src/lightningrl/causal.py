"""Which call of a rollout can be a consequence of which? A matrix, from time and conversations.

Call d can be a consequence of c if d continues c's conversation, or if d began after c had ended. Calls that overlap in
time are parallel: neither is a consequence of the other. Without recorded times all of them are 0, and the order of the
trajectory decides.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightningrl.types import Call, Ints, Transition

Bools: TypeAlias = npt.NDArray[np.bool_]


def consequences(calls: Sequence[Call] | Sequence[Transition]) -> Bools:
    """[calls, calls] whether the column's call can be a consequence of the row's; False on the diagonal.

    A planner p calls two solvers s1 and s2 in parallel, and a judge j when both have ended:

        call   from  to        p  s1 s2 j
        p      0     1      p  .  x  x  x
        s1     1     4      s1 .  .  .  x
        s2     2     3      s2 .  .  .  x
        j      4     5      j  .  .  .  .
    """
    started = np.array([call.started_at for call in calls], np.float64)
    ended = np.array([call.ended_at for call in calls], np.float64)
    after = np.triu(ended[:, None] <= started[None, :], k=1)
    place = {call.id if isinstance(call, Call) else call.call_id: c for c, call in enumerate(calls)}
    for d, call in enumerate(calls):
        c = place.get(call.parent_call_id or "", d)
        if c < d:
            after[c, d] = True
        after[:, d] |= after[:, after[:, d]].any(axis=1)
    return after


def distances(after: Bools) -> Ints:
    """[calls, calls] length of the longest chain from row to column: 0 on the diagonal, -1 without a chain.

    In the example of `consequences`, j has distance 2 from p and 1 from s1; s2 is not between s1 and j.
    """
    D = np.full(after.shape, -1, np.int32)
    for d in range(len(after)):
        before = D[:, after[:, d]]
        longest = before.max(axis=1) if before.size else D[:, d]
        D[:, d] = np.where(longest >= 0, longest + 1, -1)
        D[d, d] = 0
    return D
