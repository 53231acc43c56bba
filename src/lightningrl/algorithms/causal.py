"""Which call of a rollout may be a consequence of which? Order in time and in conversation, as a matrix.

A call d may be a consequence of c if it continues c's conversation, or if it began after c had ended. Calls that
overlap in time are parallel: neither is a consequence of the other. Where nobody recorded times, all of them are 0 and
the order of the trajectory is what there is.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightningrl.types import Ints, Transition

Bools: TypeAlias = npt.NDArray[np.bool_]


def consequences(transitions: Sequence[Transition]) -> Bools:
    """[calls, calls] whether the column is a consequence of the row; never of itself.

    A planner p asks two solvers at once, s1 and s2, and a judge j when both are done:

        call   from  to        p  s1 s2 j
        p      0     1      p  .  x  x  x
        s1     1     4      s1 .  .  .  x
        s2     2     3      s2 .  .  .  x
        j      4     5      j  .  .  .  .
    """
    started = np.array([call.started_at for call in transitions], np.float64)
    ended = np.array([call.ended_at for call in transitions], np.float64)
    after = np.triu(ended[:, None] <= started[None, :], k=1)
    place = {call.call_id: c for c, call in enumerate(transitions)}
    for d, call in enumerate(transitions):
        c = place.get(call.parent_call_id or "", d)
        if c < d:
            after[c, d] = True
        after[:, d] |= after[:, after[:, d]].any(axis=1)
    return after


def distances(after: Bools) -> Ints:
    """[calls, calls] calls in the longest chain from the row to the column, without the first: 0 on the diagonal, -1
    where there is no chain.

    In the example of `consequences` j is at distance 2 from p and at distance 1 from s1: s2 is not between them.
    """
    D = np.full(after.shape, -1, np.int32)
    for d in range(len(after)):
        before = D[:, after[:, d]]
        longest = before.max(axis=1) if before.size else D[:, d]
        D[:, d] = np.where(longest >= 0, longest + 1, -1)
        D[d, d] = 0
    return D
