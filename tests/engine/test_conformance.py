"""The embedded engine keeps the promises of `engine.base`."""

from collections.abc import Awaitable, Callable

import pytest

from lightningrl.engine.base import Engine
from lightningrl.engine.conformance import CHECKS, Conformance
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.models.tiny import build_model


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_embedded_engine_conforms(check: Callable[[Engine, Conformance], Awaitable[None]]) -> None:
    engine = EmbeddedEngine(build_model(300, eos_token_id=2), slots=4, max_length=64)
    try:
        await check(engine, Conformance(policy="policy", vocab_size=300))
    finally:
        await engine.close()
