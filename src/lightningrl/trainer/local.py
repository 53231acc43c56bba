"""Update the policy in this process. Engine and trainer share one model, which is changed in place.

forest → hidden states of unique tokens → logprobs of sampled tokens → loss → gradient; clip → AdamW in float32 → the
model's own dtype. Training is deterministic: the same forests in the same order, on the same device and number of
threads, give the same weights bit for bit.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Forest, is_finite, one_call
from lightningrl.models.base import Decoder
from lightningrl.models.determinism import repeatable
from lightningrl.trainer import checkpoint
from lightningrl.trainer.base import Evaluation
from lightningrl.trainer.budget import Budget, budget_counters, free_bytes, make_budget, resumed_budget
from lightningrl.trainer.critic import value_head
from lightningrl.trainer.exhaustion import LOOKING, in_parts, unit_of
from lightningrl.trainer.forward import Outputs, forward
from lightningrl.trainer.masters import Masters
from lightningrl.trainer.objective import look_metrics, objective
from lightningrl.trainer.reference import Reference
from lightningrl.trainer.scaling import LossScale, smaller
from lightningrl.types import Doubles, Ints

BETAS = (0.9, 0.95)
"""AdamW's β1 and β2. There is no weight decay: it would pull good initial weights towards zero."""
MAX_GRAD_NORM = 1.0
"""A gradient with a larger L2 norm is scaled down to this norm (arXiv 2005.14165, appendix B)."""
Export: TypeAlias = Callable[[Decoder, Path], None]
"""Writes a model as a Hugging Face folder, complete or absent."""


class LocalTrainer:
    """A `Trainer` on this machine. It trains the parameters that require a gradient: only the adapter's, if any."""

    def __init__(
        self, model: Decoder, *, config: TrainerConfig, loss: LossConfig, export: Export, critic: bool = False
    ) -> None:
        """`critic`: train a value head too, from the `returns` of the lessons."""
        self.model = model
        self.steps = 0
        """Number of updates made so far."""
        self.critic = value_head(model) if critic else None
        self._config = config
        self._loss = loss
        self._export = export
        self._reference = Reference(model) if loss.kl_coef else None
        head = {f"critic.{name}": p for name, p in self.critic.named_parameters()} if self.critic else {}
        self._masters = Masters({**model.trainable(), **head})
        self._policy = {name: p for name, p in self._masters.tensors.items() if name not in head}
        self._head = {name: self._masters.tensors[name] for name in head}
        self._optimizer = torch.optim.AdamW(
            list(self._masters.tensors.values()),
            lr=config.learning_rate,
            betas=BETAS,
            weight_decay=0.0,
            fused=True,
        )
        self._scale = LossScale(model.dtype)
        self._poisoned = False  # something since the last update was not finite, or failed

    @property
    def max_tokens(self) -> int:
        """Most unique tokens of a forest. It is fixed when it is first read, which is when all models are loaded, and
        lowered when memory runs out. A resumed run goes on with it.
        """
        return self._budget.max_tokens

    @cached_property
    def _budget(self) -> Budget:
        free = free_bytes(self.model, self._masters, frozen=self._started_from().values())
        return make_budget(self.model, self._config, free_bytes=free)

    def forward_backward(self, forest: Forest) -> Evaluation:
        """Add the gradient of the forest's loss. A value that is not finite adds nothing and skips the next update. So
        does an error: some parts of the forest may have added their gradients.
        """
        with _computing(self.model.device, threads=self._config.threads):
            try:
                return in_parts(self._learn, forest, unit=unit_of(self._loss), lower=self._lower_budget)
            except BaseException:
                self._poisoned = True
                raise

    def _learn(self, forest: Forest) -> Evaluation:
        """One forward and backward pass. If it raises, it has changed nothing."""
        reference = self._ask_reference(forest)
        factor = self._scale.value
        while True:
            outputs = self._forward(forest)
            loss, metrics = objective(forest, outputs, self._loss, reference=reference)
            evaluation = _evaluation(forest, outputs, metrics)  # once the gradient is added, nothing may fail
            if not is_finite(forest) or not bool(torch.isfinite(loss)):
                self._poisoned = True
            elif self._masters.add_gradient(loss, factor=factor):
                self._scale.fits(factor)
            elif factor := smaller(factor):
                continue
            else:
                self._poisoned = True
            return evaluation

    def _lower_budget(self, tokens: int) -> bool:
        """Learn that a pass over so many tokens does not fit. Returns whether it may fit with checkpointing."""
        if self._config.checkpointing == "auto" and tokens <= self._budget.kept:
            self._budget = replace(self._budget, kept=tokens - 1)
            return True
        return self._pack_less(tokens)

    def _pack_less(self, tokens: int) -> bool:
        """Learn that no pass over so many tokens fits. Returns False."""
        self._budget = replace(self._budget, max_tokens=max(min(tokens // 2, self._budget.max_tokens), 1))
        return False

    def _forward(self, forest: Forest) -> Outputs:
        """The forward pass of a forest that is learnt from."""
        return forward(
            self.model,
            forest,
            critic=self.critic,
            entropy_gradient=self._loss.entropy_coef > 0,
            checkpointing=len(forest.token_ids) > self._budget.kept,
        )

    @torch.no_grad()
    def evaluate(self, forest: Forest) -> Evaluation:
        with _computing(self.model.device, threads=self._config.threads):
            return in_parts(self._look, forest, unit="call", lower=self._pack_less, hint=LOOKING)

    def _look(self, forest: Forest) -> Evaluation:
        return _evaluation(forest, forward(self.model, forest, critic=self.critic), {})

    def optim_step(self, *, learning_rate: float) -> dict[str, float]:
        """Clip, update, clear. A gradient that is not finite is discarded: weights and moments stay as they are."""
        with _computing(self.model.device, threads=self._config.threads):
            parts = {"optim": self._policy} | ({"critic": self._head} if self._head else {})
            norms = {name: _norm(part) for name, part in parts.items()}
            untaught = all(p.grad is None for p in self._policy.values())
            skipped = self._poisoned or untaught or not all(map(math.isfinite, norms.values()))
            if not skipped:
                for name, part in parts.items():
                    norm = torch.tensor(norms[name], device=self.model.device)
                    torch.nn.utils.clip_grads_with_norm_(part.values(), MAX_GRAD_NORM, norm)
                for group in self._optimizer.param_groups:
                    group["lr"] = learning_rate
                self._optimizer.step()
                self._masters.round()
                self.steps += 1
            self._optimizer.zero_grad(set_to_none=True)
            self._poisoned = False
        metrics = {f"{name}/grad_norm": norm for name, norm in norms.items()}
        return metrics | {
            "optim/learning_rate": learning_rate,
            "optim/skipped": float(skipped),
            "optim/steps": float(self.steps),
        }

    def logprobs(self, prompt_ids: Ints, completion_ids: Ints) -> Doubles:
        return self.evaluate(one_call(prompt_ids, completion_ids)).logprobs

    def save(self, path: Path) -> None:
        counters = {"steps": self.steps, **self._scale.counters(), **budget_counters(self._budget)}
        checkpoint.save(path, self._masters.tensors, self._optimizer, reference=self._started_from(), counters=counters)
        self._give_back()

    def load(self, path: Path) -> None:
        """Read a checkpoint in place: an engine that shares the weights serves the loaded ones."""
        counters = checkpoint.load(path, self._masters.tensors, self._optimizer, reference=self._started_from())
        self.steps = int(counters["steps"])
        self._scale.resume(counters)
        self._budget = resumed_budget(self._budget, self._config, counters=counters)
        self._masters.round()
        self._optimizer.zero_grad(set_to_none=True)
        self._poisoned = False
        self._give_back()

    def publish(self, path: Path) -> None:
        self.export(path)

    def export(self, path: Path) -> None:
        self._export(self.model, path)

    def _give_back(self) -> None:
        """Return unused memory to the GPU: an engine in another process wakes up on it next."""
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _started_from(self) -> Mapping[str, Tensor]:
        return self._reference.parameters() if self._reference else {}

    @torch.no_grad()
    def _ask_reference(self, forest: Forest) -> Tensor | None:
        """[M] log-probabilities under the weights at the start of training; None without KL."""
        return forward(self._reference.model, forest).logprobs if self._reference else None


@contextmanager
def _computing(device: torch.device, *, threads: int) -> Iterator[None]:
    """Compute with `threads` threads within the block, and on a GPU so that equal inputs give equal bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with repeatable("warn") if device.type == "cuda" else nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


def _norm(parameters: Mapping[str, Tensor]) -> float:
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def _evaluation(forest: Forest, outputs: Outputs, metrics: dict[str, float]) -> Evaluation:
    values = outputs.values
    return Evaluation(
        metrics=metrics | look_metrics(forest, outputs),
        logprobs=_doubles(outputs.logprobs),
        entropies=_doubles(outputs.entropies),
        values=None if values is None else _doubles(values),
    )


def _doubles(tensor: Tensor) -> Doubles:
    return tensor.detach().to("cpu", torch.float64).numpy()
