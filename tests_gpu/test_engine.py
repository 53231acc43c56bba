"""The embedded engine on the device: the checks for all engines, and the trainer's log-probabilities."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lightningrl.chat import ChatTemplate
from lightningrl.config import EngineConfig, LossConfig, TrainerConfig
from lightningrl.engine.base import Engine, EngineSetup
from lightningrl.engine.conformance import CHECKS, GRAMMAR_CHECKS, LOAD_CHECKS, Conformance
from lightningrl.engine.embedded import EmbeddedEngine, embedded
from lightningrl.models.load import load_model
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Sampling
from tests.engine.test_conformance import two_versions

Check = Callable[[Engine, Conformance], Awaitable[None]]


@pytest.fixture
async def served(model_folder: Path, tmp_path: Path, device: torch.device) -> AsyncIterator[tuple[Engine, Conformance]]:
    """An engine over a model folder, made as a server makes it."""
    template = ChatTemplate.load(model_folder)
    setup = EngineSetup(
        policy="policy",
        config=EngineConfig(slots=4, max_length=64),
        folder=model_folder,
        dtype="float32",
        device="cuda" if device.type == "cuda" else "cpu",
        decode=template.decode,
        turn_end_id=template.turn_end_id,
    )
    about = Conformance(
        policy="policy",
        vocab_size=load_model(str(model_folder)).vocab_size,
        decode=template.decode,
        turn_end_id=template.turn_end_id,
        weights=two_versions(model_folder, tmp_path),
        tolerance=1e-4 if device.type == "cuda" else 0.0,
    )
    engine: Engine = embedded(setup)
    yield engine, about
    await engine.close()


@pytest.mark.parametrize("check", [*CHECKS, *LOAD_CHECKS], ids=lambda check: check.__name__)
async def test_the_embedded_engine_conforms(check: Check, served: tuple[Engine, Conformance]) -> None:
    await check(*served)


@pytest.mark.parametrize("check", GRAMMAR_CHECKS, ids=lambda check: check.__name__)
async def test_the_embedded_engine_keeps_to_grammars(check: Check, served: tuple[Engine, Conformance]) -> None:
    pytest.importorskip("llguidance")
    await check(*served)


@pytest.mark.parametrize("prompts", [1, 7])
async def test_engine_and_trainer_give_the_same_logprobs(
    prompts: int, model_folder: Path, device: torch.device
) -> None:
    model = load_model(str(model_folder), device=device)
    trainer = LocalTrainer(model, config=TrainerConfig(), loss=LossConfig(), export=lambda model, path: None)
    engine = EmbeddedEngine(model, slots=8, max_length=64, shared=True)
    try:
        for seed in range(prompts):
            prompt = np.arange(3, 9 + seed, dtype=np.int32)
            ids: list[int] = []
            logprobs: list[float] = []
            sampling = Sampling(max_tokens=24, temperature=1.0, seed=seed)
            async for delta in engine.generate(prompt.tolist(), sampling=sampling, policy="policy"):
                ids += delta.token_ids
                logprobs += delta.logprobs
            found = trainer.logprobs(prompt, np.array(ids, np.int32))
            assert float(np.abs(found - np.array(logprobs)).max()) < 1e-4
    finally:
        await engine.close()
