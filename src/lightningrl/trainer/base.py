"""The interface of a trainer: `forward_backward`, `optim_step`, `save`, `load`, `publish`.

The gradient does not depend on how tokens are packed into forests.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightningrl.data.forest import Forest
from lightningrl.errors import LightningError
from lightningrl.types import Doubles, Ints

TRAINER = "trainer"
"""Folder of a checkpoint from which a trainer resumes: float32 weights, optimizer state, counters."""


class TrainerLost(LightningError):
    """The trainer's weights are unknown: an update may have been made or not. `load` a version, and repeat it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of a forward pass over a forest."""

    metrics: dict[str, float]
    """`area/name` → value, e.g. `loss/value`, `loss/clip_fraction`."""
    logprobs: Doubles
    """[M] log-probability in nats of each sampled token under the current weights, in the forest's order."""
    entropies: Doubles | None = None
    """[M] entropy in nats of the distribution of each sampled token; None if the trainer does not compute it. It is
    only recorded, so that people can look at it.
    """
    values: Doubles | None = None
    """[K] the critic's values at the last prompt token of each of `Forest.call_ids`; None without a critic."""


class Trainer(Protocol):
    """Updates one policy. Every implementation passes the checks in `lightningrl.trainer.conformance`."""

    @property
    def max_tokens(self) -> int:
        """Most unique tokens of a forest. The caller packs accordingly; a single rollout may have more."""
        ...

    def forward_backward(self, forest: Forest) -> Evaluation:
        """Add the gradient of this forest's loss. Calls before `optim_step` add up to one call on all forests.

        A value that is not finite, in the forest or computed from it, adds nothing and skips the next update.
        """
        ...

    def evaluate(self, forest: Forest) -> Evaluation:
        """The same forward pass without loss and gradient. Changes nothing."""
        ...

    def optim_step(self, *, learning_rate: float) -> dict[str, float]:
        """Clip the gradient, update the weights, clear the gradient. Returns metrics, e.g. `optim/grad_norm`."""
        ...

    def logprobs(self, prompt_ids: Ints, completion_ids: Ints) -> Doubles:
        """[C] log-probability of each token of a completion under the current weights, at temperature 1."""
        ...

    def save(self, path: Path) -> None:
        """Write weights, optimizer and counters, so that `load` resumes bit for bit. Complete or absent. `save` and
        `load` leave no unused memory reserved on a GPU: an engine in another process may wake up on it next.
        """
        ...

    def load(self, path: Path) -> None: ...

    def publish(self, path: Path) -> None:
        """Write the folder from which the engine loads these weights, complete or absent."""
        ...

    def export(self, path: Path) -> None:
        """Write weights and tokenizer as a Hugging Face folder, complete or absent."""
        ...
