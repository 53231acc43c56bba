"""Update a policy from a forest. A trainer knows losses and optimizers; which algorithm made the advantages is not its
business.
"""

from lightningrl.trainer.base import Trainer

__all__ = ["Trainer"]
