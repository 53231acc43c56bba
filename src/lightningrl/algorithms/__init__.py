"""What was each call worth? Credit over the calls of a rollout, then advantage over the rollouts of a group. Pure
numpy.
"""

from lightningrl.algorithms.credit import Credit
from lightningrl.algorithms.lessons import lessons_of

__all__ = ["Credit", "lessons_of"]
