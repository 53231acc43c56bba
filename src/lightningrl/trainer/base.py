"""What a trainer promises: the verbs the field has settled on, and the same gradient however the tokens are packed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightningrl.data.forest import Forest
from lightningrl.types import Doubles, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was found out about a forest."""

    metrics: dict[str, float]
    """`area/name` → value, e.g. `loss/value`, `loss/clip_fraction`."""
    logprobs: Doubles
    """[M] logprob of each sampled token under the current weights, in the forest's order."""
    values: Doubles | None = None
    """[K] what the critic expects at the last token of each call's prompt, in the order of `Forest.call_ids`; None
    without a critic.
    """


class Trainer(Protocol):
    """`lightningrl.trainer.conformance` is the suite that every implementation passes."""

    def forward_backward(self, forest: Forest) -> Evaluation:
        """Add the gradient of this forest's loss. May be called several times before `optim_step`: the sums are what
        one call would give.

        Whatever is not finite, in the forest or in what comes of it, adds nothing, and the next update is skipped.
        """
        ...

    def evaluate(self, forest: Forest) -> Evaluation:
        """The same look at the forest, without a loss and without a gradient. Changes nothing."""
        ...

    def optim_step(self, *, learning_rate: float) -> dict[str, float]:
        """Clip, update, clear. Returns metrics, e.g. `optim/grad_norm`."""
        ...

    def logprobs(self, prompt_ids: Ints, completion_ids: Ints) -> Doubles:
        """[C] of each token of a completion under the current weights, at temperature 1. Changes nothing."""
        ...

    def save(self, path: Path) -> None:
        """Write weights, optimizer and counters so that `load` goes on bit for bit. The folder is complete or absent,
        never half there.
        """
        ...

    def load(self, path: Path) -> None: ...

    def publish(self, path: Path) -> None:
        """Export the weights as an ordinary Hugging Face folder, tokenizer included; complete or absent."""
        ...
