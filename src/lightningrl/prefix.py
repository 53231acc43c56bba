"""How long is the prefix that two sequences share? Used for token histories, stored requests and cached prompts."""

import numpy as np
import numpy.typing as npt


def common_prefix(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> int:
    """Number of leading elements that two one-dimensional arrays share: `[1, 2, 3]` and `[1, 2, 4, 5]` share 2."""
    length = min(len(one), len(other))
    if not length:
        return 0
    same = one[:length] == other[:length]
    first = int(same.argmin())
    return length if same[first] else first
