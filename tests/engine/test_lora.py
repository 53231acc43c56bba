"""Several policies in one process, each an adapter over one base: served together, trained separately."""

import asyncio
import hashlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.engine.base import Delta
from lightningrl.engine.conformance import CHECKS, Conformance
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.errors import UserError
from lightningrl.models.base import Decoder
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.lora import with_adapter
from lightningrl.models.tiny import build_model
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Sampling, Weights

NAMES = ("planner", "solver", "critic")


def adapted(base: Decoder, *, rank: int = 4, seed: int = 0) -> Decoder:
    """An adapter whose logits differ from the base model's."""
    model = with_adapter(base, rank=rank, seed=seed)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.hf.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=chance)
    return model


def digest(model: Decoder) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.hf.parameters())).hexdigest()


def trainer_of(model: Decoder) -> LocalTrainer:
    return LocalTrainer(model, config=TrainerConfig(threads=1), loss=LossConfig(), export=lambda model, path: None)


def prompts(count: int) -> list[list[int]]:
    return [[(salt * 11 + i * i * 7 + i) % 48 for i in range(4 + 5 * salt % 37)] for salt in range(count)]


async def ask(engine: EmbeddedEngine, prompt: list[int], *, seed: int = 1, max_tokens: int = 12) -> Delta:
    sampling = Sampling(max_tokens=max_tokens, seed=seed)
    (delta,) = [d async for d in engine.generate(prompt, sampling=sampling, policy=engine.policy)]
    return delta


def gap(trainer: LocalTrainer, prompt: list[int], answer: Delta) -> float:
    expected = trainer.logprobs(np.array(prompt, np.int32), np.array(answer.token_ids, np.int32))
    return float(np.abs(expected - np.array(answer.logprobs)).max())


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_an_engine_of_an_adapter_conforms(check: object, rank: int) -> None:
    engine = EmbeddedEngine(adapted(build_model(300, eos_token_id=2), rank=rank), slots=4, max_length=64)
    try:
        await check(engine, Conformance(policy="policy", vocab_size=300))  # pyright: ignore[reportCallIssue]
    finally:
        await engine.close()


async def test_policies_over_one_base_answer_at_once_as_each_would_alone_while_one_is_trained() -> None:
    base = build_model(48)
    before = digest(base)
    models = {name: adapted(base, seed=seed) for seed, name in enumerate(NAMES)}
    engines = {
        name: EmbeddedEngine(model, policy=name, slots=4, max_length=64, shared=True) for name, model in models.items()
    }
    trained = with_adapter(base, rank=4, seed=9)
    trainer = trainer_of(trained)
    untrained = {name: digest(model) for name, model in models.items()}

    def train() -> None:
        for seed in range(4):
            assert conformance.step(trainer, seed)["optim/skipped"] == 0.0

    asked = [(name, prompt) for prompt in prompts(8) for name in NAMES]
    training = asyncio.create_task(asyncio.to_thread(train))
    together = await asyncio.gather(*(ask(engines[name], prompt) for name, prompt in asked))
    await training

    assert digest(base) == before
    assert {name: digest(model) for name, model in models.items()} == untrained
    assert all(torch.equal(a, b) for a, b in zip(base.hf.parameters(), build_model(48).hf.parameters(), strict=True))
    trainers = {name: trainer_of(model) for name, model in models.items()}
    assert (
        max(gap(trainers[name], prompt, answer) for (name, prompt), answer in zip(asked, together, strict=True)) < 1e-4
    )
    assert len({answer.token_ids for answer in together[-3:]}) == 3
    for (name, prompt), answer in list(zip(asked, together, strict=True))[::4]:
        alone = EmbeddedEngine(models[name], policy=name, slots=1, max_length=64)
        assert await ask(alone, prompt) == answer
        await alone.close()
    for engine in engines.values():
        await engine.close()


async def test_an_engine_serves_what_its_adapter_has_learnt() -> None:
    base = build_model(48)
    model = with_adapter(base, rank=4)
    engine, trainer = EmbeddedEngine(model, slots=4, max_length=64, shared=True), trainer_of(model)
    old = [await ask(engine, prompt) for prompt in prompts(6)]
    for step in (1, 2):
        await engine.pause()
        conformance.step(trainer, step)
        await engine.load(Weights(policy="policy", version=step, uri="", kind="lora"))
        await engine.resume()
        new = [await ask(engine, prompt) for prompt in prompts(6)]
        assert [answer.policy_version for answer in new] == [step] * 6
        assert max(gap(trainer, prompt, answer) for prompt, answer in zip(prompts(6), new, strict=True)) < 1e-4
        assert [answer.logprobs for answer in new] != [answer.logprobs for answer in old]
        old = new
    await engine.close()


async def test_an_adapters_folder_loads_into_an_engine_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    """Loading works over the bare base, and over an earlier version of the adapter."""
    base, export = load_model(str(model_folder)), partial(export_folder, tokenizer=load_tokenizer(str(model_folder)))
    versions = {version: adapted(base, seed=version) for version in (1, 2)}
    for version, model in versions.items():
        export(model, tmp_path / str(version))
    engine = EmbeddedEngine(load_model(str(model_folder)), slots=2, max_length=64)
    for version in (1, 2, 1):
        await engine.pause()
        await engine.load(Weights(policy="policy", version=version, uri=str(tmp_path / str(version)), kind="lora"))
        await engine.resume()
        answer = await ask(engine, prompts(6)[5])
        assert answer.policy_version == version
        assert gap(trainer_of(versions[version]), prompts(6)[5], answer) < 1e-4
    await engine.pause()
    with pytest.raises(UserError, match="are no adapter"):
        await engine.load(Weights(policy="policy", version=3, uri=str(model_folder)))
    await engine.close()
