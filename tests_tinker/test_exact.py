"""A service's gradient is ours: log-probabilities, loss, gradient and updates of one batch, for every loss.

The reference is the local trainer with the same adapter, exported from the service.

How a gradient is read from a service: with β1 = β2 = 0 and a huge ε, AdamW's step is -rate / ε · gradient.
Some services fuse projections: q, k and v share one A, and so do gate and up. Its gradient is the sum of theirs.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightningrl import plugins
from lightningrl.algorithms import lessons_of
from lightningrl.config import AlgorithmConfig, LossConfig, ServiceConfig, TrainerConfig
from lightningrl.data.forest import Forest, Lesson, build_forest
from lightningrl.data.packing import pack
from lightningrl.data.rows import rows_of
from lightningrl.hosted.adapters import RemotePolicy
from lightningrl.hosted.service import Service
from lightningrl.models.base import Decoder
from lightningrl.models.load import load_model
from lightningrl.models.lora import WEIGHTS, load_adapter
from lightningrl.trainer.base import Evaluation
from lightningrl.trainer.conformance import lessons
from lightningrl.trainer.local import BETAS, LocalTrainer
from lightningrl.trainer.tinker import TinkerTrainer
from lightningrl.types import Trajectory, Transition
from tests.trainer.test_forest_gradients import centred

log = logging.getLogger(__name__)
"""The errors: `--log-cli-level INFO`."""

LOSSES: dict[str, dict[str, Any]] = {
    "pg": {"name": "pg"},
    "ppo_clip": {},
    "ppo_clip, narrow": {"clip_low": 0.05, "clip_high": 0.1},
    "dual": {"clip_dual": 1.3},
    "gspo": {"ratio": "call", "clip_low": 0.1, "clip_high": 0.1},
    "gspo of rollouts": {"ratio": "rollout", "clip_low": 0.1, "clip_high": 0.1, "clip_dual": 1.1},
    "cispo": {"name": "cispo"},
    "cispo of calls": {"name": "cispo", "ratio": "call", "clip_low": 0.1, "clip_high": 0.1},
    "proximal": {"proximal": True},
    "cispo, proximal": {"name": "cispo", "proximal": True},
    "proximal, corrected": {"proximal": True, "importance": "call-mask"},
    **{f"pg, {kl}": {"name": "pg", "kl_coef": 0.3, "kl_estimator": kl} for kl in ("k1", "k2", "k3")},
    "ppo_clip, k3": {"kl_coef": 0.3},
    **{
        f"pg, {level}{how}": {"name": "pg", "importance": level + how, "importance_cap": 1.3}
        for level in ("token", "call", "rollout")
        for how in ("", "-mask")
    },
}
CREDITS: dict[str, dict[str, float | str]] = {
    "uniform": {},
    "discounted": {"discount": 0.9},
    "air": {},
    "fork": {},
    "gigpo": {},
    "tree_loo": {},
}
TOLERANCE = 1e-4
"""Largest relative error. The largest seen is 2.4e-5."""
EPSILON = 1e9
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Tensors: TypeAlias = dict[str, Tensor]


@dataclasses.dataclass
class Scene:
    """An adapter that has learnt a little, at the service and here."""

    service: Service
    policy: RemotePolicy
    state: str
    """Where the service keeps it."""
    folder: Path
    """The same adapter, exported."""
    base: Path
    given: list[Lesson]
    exported: int = 0

    def remote(self, **loss: Any) -> TinkerTrainer:
        self.service.call("go back", lambda: self.policy.training.load_state(self.state))
        return TinkerTrainer(self.policy, config=TrainerConfig(), loss=LossConfig(**loss), tokenizer=None)

    def local(self, folder: Path | None = None, **loss: Any) -> LocalTrainer:
        return trainer_of(load_adapter(load_model(str(self.base)), folder or self.folder), **loss)

    def weights(self) -> Tensors:
        """The adapter's, as the service has them now."""
        self.exported += 1
        folder = self.folder.parent / f"now-{self.exported}"
        folder.mkdir()
        self.policy.download(self.policy.save_sampler(), folder)
        return load_file(folder / WEIGHTS)

    def gradient(self) -> Tensors:
        """What the service has added, and has cleared now."""
        before, rate = load_file(self.folder / WEIGHTS), 100 * EPSILON
        params = self.service.sdk.types.AdamParams(learning_rate=rate, beta1=0.0, beta2=0.0, eps=EPSILON)
        self.service.call("step", lambda: self.policy.training.optim_step(params))
        after = self.weights()
        return {name: (before[name].double() - after[name].double()) * EPSILON / rate for name in before}


def trainer_of(model: Decoder, **loss: Any) -> LocalTrainer:
    config = TrainerConfig(threads=1)
    return LocalTrainer(model, config=config, loss=LossConfig(**loss), export=lambda model, path: None)


@pytest.fixture(scope="module")
def scene(service_url: str, service_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    service = Service(ServiceConfig(url=service_url, timeout_s=300))
    policy = RemotePolicy(service, base=str(service_model), rank=8, seed=3, near=TOLERANCE)
    trainer = TinkerTrainer(policy, config=TrainerConfig(), loss=LossConfig(name="pg"), tokenizer=None)
    for seed in (1, 2):  # a new adapter's B is zero, and so is the gradient of A
        trainer.forward_backward(build_forest(warm(lessons(seed))))
        trainer.optim_step(learning_rate=2e-2)
    state, folder = policy.save_state(), tmp_path_factory.mktemp("exact") / "adapter"
    folder.mkdir()
    policy.download(policy.save_sampler(), folder)
    made = Scene(service=service, policy=policy, state=state, folder=folder, base=service_model, given=[])
    made.given = centred(warm(lessons(5, groups=3, group_size=4, turns=4, vocab_size=300)), made.local())
    yield made
    service.close()


def warm(given: Sequence[Lesson]) -> list[Lesson]:
    """All at temperature 1, as a service learns."""
    return [dataclasses.replace(le, transition=dataclasses.replace(le.transition, temperature=1.0)) for le in given]


def gradient_of(trainer: LocalTrainer) -> Tensors:
    """By the names of an exported adapter; that of a fused A is the sum over its projections."""
    found = {
        f"base_model.model.{name.replace('.default', '')}": p.grad.double()
        for name, p in trainer.model.trainable().items()
        if p.grad is not None
    }
    return found | {name: torch.stack([found[n] for n in names]).sum(0) for name, names in shared(found).items()}


def shared(names: Mapping[str, Any]) -> dict[str, list[str]]:
    """The A of a fused projection → those that are the same matrix, itself among them."""
    found: dict[str, list[str]] = {}
    for name in names:
        for group in FUSED:
            part = next((part for part in group if f".{part}.lora_A" in name), None)
            if part is not None:
                found[name] = [name.replace(part, other) for other in group]
    return found


def error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Relative, of all tensors together, in the L2 norm."""
    assert found.keys() == wanted.keys()
    gap = sum(float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    return (gap / sum(float(tensor.double().square().sum()) for tensor in wanted.values())) ** 0.5


def compare(found: Evaluation, wanted: Evaluation) -> dict[str, float]:
    """Relative errors."""
    value = wanted.metrics["loss/value"]
    return {
        "logprobs": float(np.abs(found.logprobs - wanted.logprobs).max() / np.abs(wanted.logprobs).max()),
        "loss": abs(found.metrics["loss/value"] - value) / abs(value),
    }


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_our_gradient(name: str, scene: Scene) -> None:
    remote, local, forest = scene.remote(**LOSSES[name]), scene.local(**LOSSES[name]), build_forest(scene.given)
    assert len(rows_of(forest)) > 8
    found, wanted = remote.forward_backward(forest), local.forward_backward(forest)
    errors = compare(found, wanted) | {"gradient": error(scene.gradient(), gradient_of(local))}
    log.info("%s %s", name, errors)
    assert max(errors.values()) < TOLERANCE
    if LOSSES[name].get("name") != "pg":
        assert 0.02 < wanted.metrics["loss/clip_fraction"] < 0.95
    assert wanted.metrics.keys() - found.metrics.keys() == {"tokens/out_of_memory"}


def test_a_batch_in_parts_has_the_gradient_of_the_batch(scene: Scene) -> None:
    """Up to one factor, the share of the first part's rows, where a service averages over rows."""
    remote, local = scene.remote(), scene.local()
    parts = [build_forest(part) for part in pack(scene.given, max_tokens=60, teaching=list)]
    rows = [len(rows_of(part)) for part in parts]
    assert len(parts) > 2 and len(set(rows)) > 1
    for part in parts:
        remote.forward_backward(part)
        local.forward_backward(part)
    share = rows[0] / sum(rows) if remote.reduction == "row-mean" else 1.0
    wanted = {name: share * tensor for name, tensor in gradient_of(local).items()}
    found = error(scene.gradient(), wanted)
    log.info("in parts %.1e", found)
    assert found < TOLERANCE


def test_every_credit_and_advantage_goes_through_unchanged(scene: Scene) -> None:
    """The sum of the gradients of all pairs. A wrong one of them would be a large error."""
    remote, local = scene.remote(), scene.local()
    trajectories, rows = rollouts_of(scene.given), list[int]()
    for credit, options in CREDITS.items():
        for advantage in plugins.names("advantage"):
            algorithm = AlgorithmConfig(credit=credit, credit_options=options, advantage=advantage)
            forest = build_forest(lessons_of(trajectories, algorithm)[0])
            assert np.abs(forest.advantages).max() > 0.1
            rows.append(len(rows_of(forest)))
            remote.forward_backward(forest)
            local.forward_backward(forest)
    share = rows[0] / sum(rows) if remote.reduction == "row-mean" else 1.0
    wanted = {name: share * tensor for name, tensor in gradient_of(local).items()}
    found = error(scene.gradient(), wanted)
    log.info("%d credits and advantages %.1e", len(rows), found)
    assert found < TOLERANCE


def rollouts_of(given: Sequence[Lesson]) -> list[Trajectory]:
    """The same calls as rollouts with rewards, some of them for single calls."""
    rng, calls = np.random.default_rng(6), dict[tuple[str, str], list[Transition]]()
    for i, lesson in enumerate(given[:-1]):  # the last one is the first call again
        call = dataclasses.replace(lesson.transition, reward=None if i % 3 else float(rng.normal()))
        calls.setdefault((lesson.group_id, lesson.rollout_id), []).append(call)
    return [
        Trajectory(
            rollout_id=rollout, group_id=group, task_id=group, transitions=tuple(own), reward=float(rng.normal())
        )
        for (group, rollout), own in calls.items()
    ]


def test_three_updates_give_the_adapter_that_ours_would_be(scene: Scene, tmp_path: Path) -> None:
    """From a new adapter, whose optimizer is new on both sides, with three batches of different sizes."""
    policy = RemotePolicy(scene.service, base=str(scene.base), rank=8, seed=4, near=TOLERANCE)
    fresh = dataclasses.replace(scene, policy=policy, folder=tmp_path / "adapter", exported=0)
    fresh.folder.mkdir()
    policy.download(policy.save_sampler(), fresh.folder)
    remote = TinkerTrainer(policy, config=TrainerConfig(), loss=LossConfig(), tokenizer=None)
    local = fresh.local()
    mine = {f"base_model.model.{name.replace('.default', '')}": p for name, p in local.model.trainable().items()}
    start = {name: tensor.detach().clone() for name, tensor in mine.items()}
    optimizer = torch.optim.AdamW(mine.values(), lr=3e-3, betas=BETAS, weight_decay=0.0)
    batches = [scene.given[:8], scene.given[8:30], scene.given[30:]]
    for forest in map(build_forest, batches):
        remote.forward_backward(forest)
        remote.optim_step(learning_rate=3e-3)
        local.forward_backward(forest)
        for name, gradient in gradient_of(local).items():
            mine[name].grad = gradient.to(mine[name])
        optimizer.step()
        optimizer.zero_grad()
    found = {name: tensor - start[name] for name, tensor in fresh.weights().items()}
    errors = {
        "change": error(found, {name: tensor.detach() - start[name] for name, tensor in mine.items()}),
        "logprobs": logprob_error(remote, local, build_forest(scene.given)),
    }
    log.info("three updates %s", errors)
    assert errors["logprobs"] < TOLERANCE
    assert errors["change"] < 1e-3  # where a gradient is nearly 0, its rounding decides the sign of AdamW's step


def logprob_error(remote: TinkerTrainer, local: LocalTrainer, forest: Forest) -> float:
    found, wanted = remote.evaluate(forest).logprobs, local.evaluate(forest).logprobs
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
