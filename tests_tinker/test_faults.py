"""A service that fails in the middle of an update: the weights end up as if it had not, or the update stops."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from lightningrl.config import EngineConfig, LearnerConfig, LossConfig, ModelConfig, ServiceConfig, TrainerConfig
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.engine.base import EngineSetup
from lightningrl.engine.tinker import TinkerEngine
from lightningrl.hosted.adapters import RemotePolicy
from lightningrl.hosted.service import Service, ServiceError
from lightningrl.learner import Learner
from lightningrl.models.load import load_tokenizer
from lightningrl.trainer.base import TrainerLost
from lightningrl.trainer.conformance import lessons
from lightningrl.trainer.tinker import TinkerTrainer
from lightningrl.types import Doubles
from tests_tinker.proxy import Fault, Proxy, proxied

TIMEOUT_S = 300.0
SHORT_S = 30.0
NEAR = 1e-4
"""In nats. Measured: at most 5e-6; the update itself moves log-probabilities by 3."""
NAN = "not finite|unexpected character"
"""What this SDK says of a `NaN` in an answer: that it is not JSON."""
UPDATES = 2
"""Optimizer steps of the update: one for each of the two groups."""


@pytest.fixture
def proxy(service_url: str) -> Iterator[Proxy]:
    with proxied(service_url) as found:
        yield found


def taught(seed: int = 0) -> list[Lesson]:
    """Calls of two groups. A service only learns at temperature 1."""
    made = lessons(seed, groups=UPDATES, group_size=2, turns=1)[:-1]
    return [replace(lesson, transition=replace(lesson.transition, temperature=1.0)) for lesson in made]


class Policy:
    """One policy that learns at the service, as in a run, but from given lessons."""

    def __init__(self, url: str, model: Path, folder: Path, *, max_tokens: int | Literal["auto"] = "auto") -> None:
        self.service = Service(ServiceConfig(url=url, timeout_s=TIMEOUT_S))
        self.remote = RemotePolicy(self.service, base=str(model), rank=4, seed=7, near=NEAR)
        tokenizer = load_tokenizer(str(model))
        config = TrainerConfig(minibatches=UPDATES, learning_rate=1e-2, max_tokens=max_tokens)
        self.trainer = TinkerTrainer(self.remote, config=config, loss=LossConfig(), tokenizer=tokenizer)
        setup = EngineSetup(
            policy="policy",
            config=EngineConfig(name="tinker"),
            folder=model,
            dtype="float32",
            decode=lambda token_ids: "",
            turn_end_id=None,
            model=self.remote,
        )
        self.learner = Learner(
            "policy",
            LearnerConfig(model=ModelConfig(path=str(model)), trainer=config),
            engine=TinkerEngine(setup),
            trainer=self.trainer,
            compute=ThreadPoolExecutor(1),
            folder=folder,
            checkpoints="step-{:05d}",
            kind="lora",
            routes=(),
            root=folder,
        )

    async def begin(self) -> None:
        """Keep the first version, and let the server compile what an update needs."""
        assert self.trainer.reduction in ("sum", "row-mean")
        await self.learner.save(self.learner.weights(0))

    async def update(self, given: Sequence[Lesson] | None = None) -> dict[str, float]:
        metrics, _ = await self.learner.update(given or taught(), seed=0, remaining=1.0)
        return metrics

    def look(self) -> Doubles:
        """Log-probabilities of some tokens under the current weights."""
        return self.trainer.evaluate(build_forest(taught(99))).logprobs


@pytest.fixture(scope="module")
def undisturbed(service_url: str, service_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Doubles:
    """What a policy computes after the update at a service that does not fail."""
    policy = Policy(service_url, service_model, tmp_path_factory.mktemp("undisturbed"))

    async def learn() -> tuple[Doubles, dict[str, float], Doubles]:
        await policy.begin()
        return policy.look(), await policy.update(), policy.look()

    before, metrics, after = asyncio.run(learn())
    policy.service.close()
    assert metrics["optim/steps"] == UPDATES
    assert np.abs(after - before).max() > 1e-2, "an update that changes nothing shows nothing"
    return after


BROKEN = {
    "the first gradient is refused": (Fault(path="forward_backward"), 1),
    "the first gradient is added and its answer lost": (Fault(path="forward_backward", breaks="after"), 1),
    "the second gradient is added and the connection cut": (Fault(path="forward_backward", breaks="cut", skip=1), 1),
    "an update is made and its answer lost": (Fault(path="optim_step", breaks="after"), 1),
    "the second update is made and the connection cut": (Fault(path="optim_step", breaks="cut", skip=1), 1),
    "the adapter is forgotten": (Fault(path="forward_backward", status=404, skip=1), 1),
    "a look at the weights is refused": (Fault(path="forward", status=404), 1),
    "two updates of one step are lost": (Fault(path="optim_step", breaks="after", times=2), 2),
    "the service is at its limit": (
        Fault(path="forward_backward", status=429, headers={"retry-after": "1"}, times=2),
        0,
    ),
    "an answer is asked for again": (Fault(path="retrieve_future", times=3), 0),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_update_is_made_again_and_nothing_is_learnt_twice(
    name: str, proxy: Proxy, service_model: Path, tmp_path: Path, undisturbed: Doubles
) -> None:
    fault, repeated = BROKEN[name]
    policy = Policy(proxy.url, service_model, tmp_path / "run")
    await policy.begin()
    proxy.faults = [replace(fault)]
    metrics = await policy.update()
    assert proxy.faults[0].times == 0, "the fault did not happen"
    assert metrics.get("optim/repeated", 0.0) == repeated
    assert metrics["optim/steps"] == UPDATES
    np.testing.assert_allclose(policy.look(), undisturbed, atol=NEAR)
    policy.service.close()


async def test_weights_are_saved_again_when_the_answer_is_lost(
    proxy: Proxy, service_model: Path, tmp_path: Path
) -> None:
    policy = Policy(proxy.url, service_model, tmp_path / "run")
    before = proxy.count("save_weights")
    proxy.faults = [Fault(path="save_weights", breaks="after"), Fault(path="save_weights_for_sampler", breaks="cut")]
    await policy.learner.save(policy.learner.weights(0))
    assert proxy.count("save_weights") - before == proxy.count("save_weights_for_sampler") == 2
    await policy.learner.load(policy.learner.weights(0))
    policy.service.close()


async def test_a_service_that_keeps_failing_ends_the_update_after_three_attempts(
    proxy: Proxy, service_model: Path, tmp_path: Path
) -> None:
    policy = Policy(proxy.url, service_model, tmp_path / "run")
    await policy.begin()
    asked = proxy.count("forward_backward")
    proxy.faults = [Fault(path="forward_backward", times=100)]
    with pytest.raises(TrainerLost, match="unknown whether it was done") as failed:
        await policy.update()
    assert failed.value.hint
    assert proxy.count("forward_backward") - asked == 3
    policy.service.close()


async def test_a_service_that_hangs_is_given_up_in_time(
    proxy: Proxy, service_model: Path, tmp_path: Path, undisturbed: Doubles
) -> None:
    policy = Policy(proxy.url, service_model, tmp_path / "run")
    await policy.begin()
    policy.service.config = ServiceConfig(url=proxy.url, timeout_s=SHORT_S)
    proxy.faults = [Fault(path="optim_step", breaks="hang", hang_s=2 * SHORT_S)]
    metrics = await policy.update()
    assert metrics["optim/repeated"] == 1
    np.testing.assert_allclose(policy.look(), undisturbed, atol=NEAR)
    policy.service.close()


def poisoned(path: str, body: bytes) -> bytes:
    """The answer of a backward pass with a log-probability that is not a number."""
    if not path.endswith("/retrieve_future"):
        return body
    answer = json.loads(body)
    for output in answer.get("loss_fn_outputs") or ():
        output["logprobs"]["data"][0] = float("nan")
    return json.dumps(answer).encode()


async def test_a_log_probability_that_is_not_a_number_is_never_learnt(
    proxy: Proxy, service_model: Path, tmp_path: Path, undisturbed: Doubles
) -> None:
    policy = Policy(proxy.url, service_model, tmp_path / "run")
    await policy.begin()
    before = policy.look()
    updates = proxy.count("optim_step")
    proxy.rewrite = poisoned
    with pytest.raises(TrainerLost, match=NAN):
        await policy.update()
    with pytest.raises(TrainerLost, match=NAN):
        policy.look()
    proxy.rewrite = None
    assert proxy.count("optim_step") == updates + 2, "an update was made of it"  # each repetition drops gradients
    await policy.learner.load(policy.learner.weights(0))
    np.testing.assert_allclose(policy.look(), before, atol=NEAR)
    await policy.update()
    np.testing.assert_allclose(policy.look(), undisturbed, atol=NEAR)
    policy.service.close()


async def test_making_an_adapter_is_given_up_in_time(proxy: Proxy, service_model: Path) -> None:
    service = Service(ServiceConfig(url=proxy.url, timeout_s=SHORT_S))
    assert service.client is not None
    proxy.faults = [Fault(path="create_model", breaks="hang", hang_s=2 * SHORT_S)]
    began = time.monotonic()
    with pytest.raises(ServiceError, match="did not create an adapter"):
        RemotePolicy(service, base=str(service_model), rank=4, seed=7, near=NEAR)
    assert time.monotonic() - began < 1.5 * SHORT_S
    service.close()


async def test_a_refused_key_ends_the_update_at_once(proxy: Proxy, service_model: Path, tmp_path: Path) -> None:
    policy = Policy(proxy.url, service_model, tmp_path / "run")
    await policy.begin()
    asked = proxy.count("forward_backward")
    proxy.faults = [Fault(path="forward_backward", status=401, times=9)]
    with pytest.raises(ServiceError, match="401") as failed:
        await policy.update()
    assert failed.value.hint and "TINKER_API_KEY" in failed.value.hint
    assert proxy.count("forward_backward") - asked == 1
    proxy.faults = []
    policy.service.close()


async def test_a_batch_with_a_part_that_is_not_finite_is_skipped_whole(
    proxy: Proxy, service_model: Path, tmp_path: Path
) -> None:
    policy = Policy(proxy.url, service_model, tmp_path / "run", max_tokens=1)  # a forest for each rollout
    await policy.begin()
    before, sent = policy.look(), proxy.count("forward_backward")
    *good, last = taught()
    given = [*good, replace(last, advantages=np.full_like(last.advantages, np.nan))]
    metrics = await policy.update(given)
    assert metrics["optim/skipped"] > 0 and metrics["optim/steps"] == UPDATES - 1
    assert proxy.count("forward_backward") > sent, "the other minibatch is learnt"
    assert np.isfinite(policy.look()).all() and np.abs(policy.look() - before).max() > 1e-3
    policy.service.close()


async def test_gradients_that_an_earlier_adapter_has_left_are_not_learnt(
    proxy: Proxy, service_model: Path, tmp_path: Path, undisturbed: Doubles
) -> None:
    left = [Policy(proxy.url, service_model, tmp_path / f"left-{i}") for i in range(3)]
    for policy in left:
        policy.trainer.forward_backward(build_forest(taught(5)))
    for policy in left:
        policy.service.close()
    policy = Policy(proxy.url, service_model, tmp_path / "run")
    await policy.begin()
    await policy.update()
    np.testing.assert_allclose(policy.look(), undisturbed, atol=NEAR)
    policy.service.close()
