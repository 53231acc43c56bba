"""Update a policy from a forest. A trainer knows losses and optimizers, but not the algorithm behind the advantages."""

from lightningrl.trainer.base import Trainer

__all__ = ["Trainer"]
