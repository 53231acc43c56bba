"""How much is each call worth? Credit within a rollout, then advantage within a group. Pure numpy."""

from lightningrl.algorithms.credit import Credit
from lightningrl.algorithms.lessons import lessons_of

__all__ = ["Credit", "lessons_of"]
