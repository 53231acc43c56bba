"""What was each call of a rollout worth? Trajectory in, one value per call out."""

import numpy as np

from lightningrl.types import Doubles, Trajectory


def uniform(trajectory: Trajectory) -> Doubles:
    """[calls] every call is worth the final reward: the paper's credit assignment (arXiv 2508.03680, section 3.3)."""
    return np.full(len(trajectory.transitions), trajectory.reward, dtype=np.float64)
