"""Update a policy at a service that speaks the Tinker API. Nothing is computed here but the loss.

    built in    `ppo_clip` and `cispo` with one ratio per token, and `pg`: one request, forward and backward
    any other   forward; the loss and its derivative by each log-probability here; then a request whose gradient is the
                sum of these derivatives times the gradients of the log-probabilities

The second way gives every loss that is a function of log-probabilities its exact gradient, for one more forward pass.

Services differ in how they reduce a batch. The API's own gives the sum over all tokens; SkyRL's JAX backend divides
each row by its weights, and the sum by the number of rows. `reduction` finds out which, and the rows are scaled so that
the gradient is that of the sum. With several forests in one update, it is that up to one factor for all of them: the
share of the first forest's rows. AdamW hardly sees it.

Legend: M sampled tokens · R rows · L tokens of a row.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Forest, is_finite, one_call
from lightningrl.data.rows import Row, rows_of
from lightningrl.errors import UserError
from lightningrl.hosted.adapters import RemotePolicy
from lightningrl.hosted.kept import read_saved, write_saved
from lightningrl.hosted.service import REFUSED, Reduction, ServiceError
from lightningrl.models.folder import whole_folder
from lightningrl.trainer.base import Evaluation, TrainerLost
from lightningrl.trainer.forward import Outputs
from lightningrl.trainer.objective import look_metrics, objective
from lightningrl.types import Doubles, Ints

BETAS, EPSILON, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 1.0
"""As `trainer.local` has them. A service may not clip: SkyRL 0.3 does not."""
MAX_TOKENS = 65536
"""Most unique tokens of a request's forest, unless `trainer.max_tokens` says otherwise."""
GRAD_NORM = "grad_norm"
"""How the metric of an update ends that is the norm of its gradient."""


class TinkerTrainer:
    """A `Trainer` of one adapter at a service."""

    def __init__(
        self,
        model: RemotePolicy,
        *,
        config: TrainerConfig,
        loss: LossConfig,
        tokenizer: Any,
    ) -> None:
        """`tokenizer`: the `transformers` tokenizer that is written beside exported weights."""
        self._remote, self._config, self._loss, self._tokenizer = model, config, loss, tokenizer
        self._reference: Any = None
        self._poisoned = False
        self._first = 0
        """Number of rows of this update's first request; 0: none was sent."""

    @property
    def max_tokens(self) -> int:
        return MAX_TOKENS if self._config.max_tokens == "auto" else self._config.max_tokens

    def forward_backward(self, forest: Forest) -> Evaluation:
        """Raises `TrainerLost` if the service fails: it may or may not have added the gradient. After a forest that is
        not finite, nothing is sent to be learnt until `optim_step`.
        """
        rows = rows_of(forest)
        if not rows:
            return _evaluation(forest, np.zeros(0), {})
        self._poisoned = self._poisoned or not is_finite(forest)
        if self._poisoned:
            return self.evaluate(forest)
        self._check(forest)
        with _repeatable():
            built_in = _built_in(self._loss, reduction=self.reduction)
            reference = self._reference_logprobs(forest, rows)
            if built_in is not None:
                name, settings = built_in
                logprobs = self._learn(forest, rows, name, settings, advantages=forest.advantages * forest.weights)
                _, metrics = _loss_of(forest, logprobs, self._loss, reference=reference)
            else:
                before = self._look(forest, rows, self._remote.training)
                slopes, metrics = _loss_of(forest, before, self._loss, reference=reference)
                if not np.isfinite(slopes).all():
                    raise ServiceError("a log-probability or the loss is not finite")
                logprobs = self._learn(forest, rows, "importance_sampling", None, advantages=-slopes, old=before)
        return _evaluation(forest, logprobs, metrics | _row_metrics(forest, rows, passes=1 if built_in else 2))

    def evaluate(self, forest: Forest) -> Evaluation:
        """Raises `TrainerLost` if the service fails."""
        rows = rows_of(forest)
        if not rows:
            return _evaluation(forest, np.zeros(0), {})
        with _repeatable():
            return _evaluation(forest, self._look(forest, rows, self._remote.training), {})

    def optim_step(self, *, learning_rate: float) -> dict[str, float]:
        """Raises `TrainerLost` if the service fails, or if part of a batch was not finite: what was added before cannot
        be taken back.
        """
        remote, skipped = self._remote, not self._first
        if self._first and self._poisoned:
            raise TrainerLost("a part of the batch is not finite, and the service has added the others")
        found: Mapping[str, float] = {}
        if self._first:
            params = remote.service.sdk.types.AdamParams(
                learning_rate=learning_rate,
                beta1=BETAS[0],
                beta2=BETAS[1],
                eps=EPSILON,
                weight_decay=0.0,
                grad_clip_norm=MAX_GRAD_NORM,
            )
            with _repeatable():
                answer = remote.service.call("update the weights", lambda: remote.training.optim_step(params))
            found = answer.metrics or {}
            remote.steps += 1
        self._first, self._poisoned = 0, False
        norms = [value for name, value in found.items() if name.endswith(GRAD_NORM)]
        if norms and not math.isfinite(norms[0]):
            raise TrainerLost(f"{remote.service.name} reports a gradient that is not finite")
        return ({"optim/grad_norm": float(norms[0])} if norms else {}) | {
            "optim/learning_rate": learning_rate,
            "optim/skipped": float(skipped),
            "optim/steps": float(remote.steps),
        }

    def logprobs(self, prompt_ids: Ints, completion_ids: Ints) -> Doubles:
        return self.evaluate(one_call(prompt_ids, completion_ids)).logprobs

    def save(self, path: Path) -> None:
        """Have the service keep weights and optimizer, and write down where."""
        state = self._remote.save_state()
        with whole_folder(path) as draft:
            write_saved(draft, self._remote.describe(state=state))

    def load(self, path: Path) -> None:
        """Continue from what the service keeps, in a new adapter. Gradients that were not applied are dropped. Raises
        `TrainerLost` if the service fails.
        """
        saved = read_saved(path)
        if saved is None:
            hint = "this checkpoint is of another backend: start a new run with another `--run-dir`"
            raise UserError(f"`{path}` does not say where a service keeps its weights", hint=hint)
        with _repeatable():
            self._remote.take_up(saved)
            self._first, self._poisoned = 0, False
            # A service may serve only adapters that are loaded, and the one that saved these weights is not any more.
            self._remote.samplers[path.parent.resolve()] = self._remote.save_sampler()

    def publish(self, path: Path) -> None:
        """Have the service keep the weights for sampling, and write down where, with the tokenizer beside it."""
        sampler = self._remote.save_sampler()
        with whole_folder(path) as draft:
            write_saved(draft, self._remote.describe(sampler=sampler))
            self._tokenizer.save_pretrained(draft)

    def export(self, path: Path) -> None:
        """Download the adapter as a peft folder, with the tokenizer, and write down where the service keeps it."""
        sampler, state = self._remote.save_sampler(), self._remote.save_state()
        with whole_folder(path) as draft:
            self._remote.download(sampler, draft)
            write_saved(draft, self._remote.describe(state=state, sampler=sampler))
            self._tokenizer.save_pretrained(draft)

    @property
    def reduction(self) -> Reduction:
        """How the service reduces the losses of a batch. Asked once a session, with an adapter that is thrown away."""
        service = self._remote.service
        if service.reduction is None:
            service.reduction = reduction_of(self._remote)
        return service.reduction

    def _learn(
        self,
        forest: Forest,
        rows: Sequence[Row],
        loss: str,
        settings: Mapping[str, float] | None,
        *,
        advantages: Doubles,
        old: Doubles | None = None,
    ) -> Doubles:
        """Forward and backward. Returns [M] log-probabilities before the update. `old`: those of the ratio; None: the
        recorded ones, or those before the batch.
        """
        if old is None:
            old = forest.proximal if self._loss.proximal else forest.logprobs
        self._first = self._first or len(rows)
        data = [self._datum(row, loss, old=old, advantages=advantages) for row in rows]
        remote = self._remote
        answer = remote.service.call("learn", lambda: remote.training.forward_backward(data, loss, settings))
        remote.service.spent.add(train=sum(len(row.token_ids) for row in rows))
        return self._terms(answer, forest, rows)

    def _look(self, forest: Forest, rows: Sequence[Row], client: Any) -> Doubles:
        """[M] log-probabilities under the weights of `client`, without a gradient."""
        data = [self._datum(row, "cross_entropy", old=None, advantages=None) for row in rows]
        answer = self._remote.service.call("evaluate", lambda: client.forward(data, "cross_entropy"))
        self._remote.service.spent.add(train=sum(len(row.token_ids) for row in rows))
        return self._terms(answer, forest, rows)

    def _datum(self, row: Row, loss: str, *, old: Doubles | None, advantages: Doubles | None) -> Any:
        types, length = self._remote.service.sdk.types, len(row.token_ids)
        inputs: dict[str, Any] = {"target_tokens": row.targets.astype(np.int64)}
        scale = length * self._first if self._remote.service.reduction == "row-mean" else 1

        def spread(values: Doubles | None, *, times: float = 1.0) -> np.ndarray:
            line = np.zeros(length, np.float32)
            if values is not None:
                taught = row.terms >= 0
                line[taught] = values[row.terms[taught]] * times
            return line

        if loss == "cross_entropy":
            inputs["weights"] = np.ones(length, np.float32) if advantages is None else spread(advantages)
        else:
            inputs |= {"logprobs": spread(old), "advantages": spread(advantages, times=scale)}
        tensors = {name: types.TensorData.from_numpy(array) for name, array in inputs.items()}
        return types.Datum(model_input=types.ModelInput.from_ints(row.token_ids.tolist()), loss_fn_inputs=tensors)

    def _terms(self, answer: Any, forest: Forest, rows: Sequence[Row]) -> Doubles:
        """[M] the log-probabilities of sampled tokens in an answer. Raises `ServiceError` if one is not finite."""
        service = self._remote.service
        lines = service.logprobs_in(answer, [len(row.token_ids) for row in rows])
        found = np.full(len(forest.targets), np.nan)
        for row, line in zip(rows, lines, strict=True):
            taught = row.terms >= 0
            found[row.terms[taught]] = line[taught]
        if not np.isfinite(found).all():
            raise ServiceError(f"{service.name} returned log-probabilities that are not finite")
        return found

    def _reference_logprobs(self, forest: Forest, rows: Sequence[Row]) -> Doubles | None:
        """[M] under the weights at the start of training; None without KL."""
        if not self._loss.kl_coef:
            return None
        if self._reference is None:
            self._reference = self._remote.untrained()
        return self._look(forest, rows, self._reference)

    def _check(self, forest: Forest) -> None:
        wrong = forest.temperatures[forest.temperatures != 1.0]
        if len(wrong):
            hint = "train on rollouts that the run samples itself: these have temperature 1"
            raise UserError(
                f"a call was sampled at temperature `{wrong[0]:g}`; the service only learns at 1", hint=hint
            )


@contextmanager
def _repeatable() -> Iterator[None]:
    """What fails in here is made again from the version before, unless the service refuses it: it is unknown what the
    service has done.
    """
    try:
        yield
    except ServiceError as error:
        if error.status in REFUSED:
            raise
        raise TrainerLost(error.message, hint=error.hint) from error


def reduction_of(remote: RemotePolicy) -> Reduction:
    """How a service reduces a batch: from the gradients of one row, and of the same row twice. The API says that it
    adds; a service that reports no gradient norm is taken at its word.
    """
    service, client = remote.service, remote.scratch()
    types = service.sdk.types

    def norm(rows: int) -> float | None:
        tensors = {
            "target_tokens": types.TensorData.from_numpy(np.array([5, 6, 7, 8])),
            "weights": types.TensorData.from_numpy(np.ones(4, np.float32)),
        }
        datum = types.Datum(model_input=types.ModelInput.from_ints([4, 5, 6, 7]), loss_fn_inputs=tensors)
        service.call("learn", lambda: client.forward_backward([datum] * rows, "cross_entropy"))
        service.spent.add(train=4 * rows)
        metrics = service.still_update(client)
        return next((value for name, value in metrics.items() if name.endswith(GRAD_NORM)), None)

    try:
        service.still_update(client)  # SkyRL 0.3 may give it the gradients of an adapter that has ended
        once, twice = norm(1), norm(2)
    finally:
        service.unload(client)
    if not once or twice is None or abs(twice / once - 2) < 0.1:
        return "sum"
    if abs(twice / once - 1) < 0.1:
        return "row-mean"
    raise ServiceError(f"{service.name} reduces a batch in an unknown way: `{once:g}` for a row, `{twice:g}` for two")


def passes(loss: LossConfig) -> int:
    """How often a batch is sent to be learnt from, by the API's own reduction: built-in losses need one pass."""
    return 2 if _built_in(loss, reduction="sum") is None else 1


def _built_in(loss: LossConfig, *, reduction: Reduction) -> tuple[str, dict[str, float] | None] | None:
    """The service's loss with exactly this gradient, and its settings; None: there is none."""
    plain = loss.ratio == "token" and loss.importance == "none" and not loss.kl_coef and not loss.clip_dual
    if not plain:
        return None
    clips = {"clip_low_threshold": 1 - loss.clip_low, "clip_high_threshold": 1 + loss.clip_high}
    match loss.name:
        case "ppo_clip":
            return "ppo", clips
        case "cispo":
            return "cispo", clips
        case "pg":  # its weights may be negative, so dividing by their sum means nothing
            return ("cross_entropy", None) if reduction == "sum" else None


def _loss_of(
    forest: Forest, logprobs: Doubles, loss: LossConfig, *, reference: Doubles | None
) -> tuple[Doubles, dict[str, float]]:
    """[M] the derivative of the loss by each log-probability, and metrics."""
    leaf = torch.from_numpy(logprobs.copy()).requires_grad_()
    outputs = Outputs(logprobs=leaf, entropies=-leaf.detach(), values=None)
    against = None if reference is None else torch.from_numpy(reference)
    value, metrics = objective(forest, outputs, loss, reference=against)
    value.backward()  # pyright: ignore[reportUnknownMemberType]
    assert leaf.grad is not None
    return leaf.grad.numpy(), metrics


def _row_metrics(forest: Forest, rows: Sequence[Row], *, passes: int) -> dict[str, float]:
    sent = sum(len(row.token_ids) for row in rows)
    return {"tokens/sent": float(sent * passes), "tokens/sent_again": float(sent - len(forest.token_ids))}


def _evaluation(forest: Forest, logprobs: Doubles, metrics: dict[str, float]) -> Evaluation:
    """The metric `policy/entropy` is estimated by -log π of the sampled tokens: the service has no distributions."""
    found = torch.from_numpy(logprobs)
    looks = look_metrics(forest, Outputs(logprobs=found, entropies=-found, values=None)) if len(logprobs) else {}
    return Evaluation(metrics=metrics | looks, logprobs=logprobs)
