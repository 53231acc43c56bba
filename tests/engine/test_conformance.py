"""The embedded engine passes the checks for all engines."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from lightningrl import plugins
from lightningrl.chat import ChatTemplate
from lightningrl.config import EngineConfig
from lightningrl.engine.base import Engine, EngineSetup
from lightningrl.engine.conformance import CHECKS, GRAMMAR_CHECKS, LOAD_CHECKS, Conformance
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.tiny import build_model
from lightningrl.types import Weights

Check = Callable[[Engine, Conformance], Awaitable[None]]


@pytest.fixture
async def served(model_folder: Path, tmp_path: Path) -> AsyncIterator[tuple[Engine, Conformance]]:
    """An engine over a model folder, made as a server makes it."""
    template = ChatTemplate.load(model_folder)
    setup = EngineSetup(
        policy="policy",
        config=EngineConfig(slots=4, max_length=64),
        folder=model_folder,
        dtype="float32",
        decode=template.decode,
        turn_end_id=template.turn_end_id,
    )
    engine: Engine = plugins.load("embedded", kind="engine")(setup)
    weights = two_versions(model_folder, tmp_path)
    yield (
        engine,
        Conformance(
            policy="policy", vocab_size=270, decode=template.decode, turn_end_id=template.turn_end_id, weights=weights
        ),
    )
    await engine.close()


def two_versions(model_folder: Path, folder: Path) -> tuple[Weights, Weights]:
    """The weights of a folder, and different weights of the same model."""
    model = load_model(str(model_folder))
    for parameter in model.hf.parameters():
        parameter.data *= 1.5
    export_folder(model, folder / "other", tokenizer=load_tokenizer(str(model_folder)))
    one, other = (
        Weights(policy="policy", version=version, uri=str(uri))
        for version, uri in enumerate((model_folder, folder / "other"), start=1)
    )
    return one, other


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_embedded_engine_conforms(check: Check) -> None:
    engine = EmbeddedEngine(build_model(300, eos_token_id=2), slots=4, max_length=64)
    try:
        await check(engine, Conformance(policy="policy", vocab_size=300))
    finally:
        await engine.close()


@pytest.mark.parametrize("check", LOAD_CHECKS, ids=lambda check: check.__name__)
async def test_the_embedded_engine_serves_what_it_has_loaded(check: Check, served: tuple[Engine, Conformance]) -> None:
    await check(*served)


@pytest.mark.parametrize("check", GRAMMAR_CHECKS, ids=lambda check: check.__name__)
async def test_the_embedded_engine_keeps_to_grammars(check: Check, served: tuple[Engine, Conformance]) -> None:
    await check(*served)
