"""Update the policy in this very process: one model, shared with the engine, changed in place.

forest → hidden states of unique tokens → logprobs of sampled tokens → loss → gradient; clip → AdamW. Everything is deterministic: the
same forests in the same order, on the same number of threads, give the same bits.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Forest, build_forest, unweighted
from lightningrl.models.dense import DenseModel
from lightningrl.models.forest_attention import ForestAttention
from lightningrl.trainer import checkpoint
from lightningrl.trainer.base import Evaluation
from lightningrl.trainer.logprobs import term_logprobs, unique_rows
from lightningrl.trainer.losses import LOSSES, Terms
from lightningrl.types import Doubles, Ints, Transition

BETAS = (0.9, 0.95)
"""Of AdamW."""
Export: TypeAlias = Callable[[DenseModel, Path], None]
"""Writes a model as a Hugging Face folder; complete or absent."""


class LocalTrainer:
    """A `Trainer` on this machine."""

    def __init__(self, model: DenseModel, *, config: TrainerConfig, loss: LossConfig, export: Export) -> None:
        self.model = model
        self.steps = 0
        """Updates made so far."""
        self._config = config
        self._loss = loss
        self._export = export
        self._parameters: dict[str, Tensor] = {name: p for name, p in model.hf.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.learning_rate,
            betas=BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._poisoned = False  # a loss since the last update was not finite

    def forward_backward(self, forest: Forest) -> Evaluation:
        """Add the gradient of Σ_m weight_m · loss_m. A loss that is not finite adds nothing, and the next update is skipped."""
        with _threads(self._config.threads):
            logprobs, entropy = self._logprobs(forest)
            terms = _terms(forest, logprobs)
            losses, clipped = LOSSES[self._loss.name](terms, self._loss)
            loss = (losses * torch.from_numpy(forest.weights).to(losses.dtype)).sum()
            if bool(torch.isfinite(loss)):
                torch.autograd.backward(loss)
            else:
                self._poisoned = True
            metrics = _metrics(forest, loss=loss, terms=terms, clipped=clipped, entropy=entropy)
            return Evaluation(metrics=metrics, logprobs=logprobs.detach().to(torch.float64).numpy())

    def optim_step(self, *, learning_rate: float) -> dict[str, float]:
        """Clip, update, clear. A gradient that is not finite is thrown away: weights and moments stay as they are."""
        with _threads(self._config.threads):
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
            skipped = self._poisoned or not math.isfinite(norm) or not gradients
            if not skipped:
                torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.max_grad_norm, torch.tensor(norm))
                for group in self._optimizer.param_groups:
                    group["lr"] = learning_rate
                self._optimizer.step()
                self.steps += 1
            self._optimizer.zero_grad(set_to_none=True)
            self._poisoned = False
        return {"optim/grad_norm": norm, "optim/learning_rate": learning_rate, "optim/skipped": float(skipped), "optim/steps": float(self.steps)}

    @torch.no_grad()
    def logprobs(self, prompt_ids: Ints, completion_ids: Ints) -> Doubles:
        with _threads(self._config.threads):
            logprobs, _ = self._logprobs(_line(prompt_ids, completion_ids))
            return logprobs.to(torch.float64).numpy()

    def save(self, path: Path) -> None:
        checkpoint.save(path, self._parameters, self._optimizer, steps=self.steps)

    def load(self, path: Path) -> None:
        """Weights are changed in place, so an engine that shares them serves the loaded ones."""
        self.steps = checkpoint.load(path, self._parameters, self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        self._poisoned = False

    def publish(self, path: Path) -> None:
        self._export(self.model, path)

    def _logprobs(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """Logprob of each term [M], and the entropy of each row of logits."""
        model = self.model
        attend = ForestAttention(forest.starts, forest.parents, forest.positions, heads=model.heads, kv_heads=model.kv_heads, dtype=model.dtype)
        hidden = model.hidden(torch.from_numpy(forest.token_ids), torch.from_numpy(forest.positions), attend)
        rows = unique_rows(forest, dtype=torch.promote_types(model.dtype, torch.float32))
        return term_logprobs(model.logits(hidden.index_select(0, rows.sources)), rows)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Training may use more cores than the engine does beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _line(prompt_ids: Ints, completion_ids: Ints) -> Forest:
    """A forest of one call, for looking at it only."""
    call = Transition(
        call_id="",
        parent_call_id=None,
        agent="",
        policy_version=0,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=np.zeros(len(completion_ids), np.float32),
        reward=None,
    )
    return build_forest([unweighted(call)], whole=True)


def _terms(forest: Forest, logprobs: Tensor) -> Terms:
    old, advantages = (torch.from_numpy(x).to(logprobs.dtype) for x in (forest.logprobs, forest.advantages))
    return Terms(logprobs=logprobs, old_logprobs=old, advantages=advantages)


def _metrics(forest: Forest, *, loss: Tensor, terms: Terms, clipped: Tensor, entropy: Tensor) -> dict[str, float]:
    """`policy/kl_engine` is the k3 estimate (joschu.net/blog/kl-approx.html) from the recorded logprobs; before the first update it is noise."""
    delta = terms.logprobs.detach() - terms.old_logprobs
    return {
        "loss/value": float(loss.detach()),
        "loss/clip_fraction": float(clipped.to(delta.dtype).mean()),
        "loss/ratio_max": float(delta.max().exp()),
        "policy/entropy": float(entropy.mean()),
        "policy/kl_engine": float((torch.expm1(delta) - delta).mean()),
        "policy/logprob_gap_max": float(delta.abs().max()),
        "tokens/computed": float(len(forest.token_ids)),
        "tokens/terms": float(len(forest.targets)),
    }
