"""Answers of a server of one's own come in pieces, and must be those that one request gets. Outages are reported."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightningrl.config import EngineConfig, ServiceConfig
from lightningrl.engine.base import Delta, EngineSetup
from lightningrl.engine.tinker import FIRST_PIECE, TinkerEngine
from lightningrl.hosted.adapters import RemoteModel
from lightningrl.hosted.service import Service, ServiceError
from lightningrl.types import Sampling
from tests_tinker.proxy import Fault, proxied

PROMPT = [5, 6, 7, 8, 9]
MAX_LENGTH = 100
NEAR = 1e-5


@pytest.fixture(scope="module")
def service(service_url: str) -> Iterator[Service]:
    service = Service(ServiceConfig(url=service_url, timeout_s=300))
    yield service
    service.close()


def _text(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in token_ids)


def engine_of(service: Service, model: Path) -> TinkerEngine:
    """It answers with the model without an adapter."""
    setup = EngineSetup(
        policy="policy",
        config=EngineConfig(name="tinker", max_length=MAX_LENGTH),
        folder=model,
        dtype="float32",
        decode=_text,
        turn_end_id=None,
        model=RemoteModel(service, base=str(model), near=NEAR, begin=None),
    )
    return TinkerEngine(setup)


async def ask(engine: TinkerEngine, sampling: Sampling) -> Delta:
    (delta,) = [delta async for delta in engine.generate(PROMPT, sampling=sampling, policy="policy")]
    return delta


def answer(service: Service, model: Path, sampling: Sampling, *, own: bool) -> Delta:
    """`own`: in pieces, as from a server of one's own."""
    service.own = own
    return asyncio.run(ask(engine_of(service, model), sampling))


@pytest.mark.parametrize("limit", [3, FIRST_PIECE, FIRST_PIECE + 1, 3 * FIRST_PIECE])
def test_an_answer_in_pieces_is_that_of_one_request(service: Service, service_model: Path, limit: int) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=limit)
    pieces, whole = (answer(service, service_model, sampling, own=own) for own in (True, False))
    assert pieces.token_ids == whole.token_ids
    assert len(pieces.token_ids) == min(limit, MAX_LENGTH - len(PROMPT))
    assert pieces.finish_reason == whole.finish_reason == "length"
    assert pieces.logprobs is not None and whole.logprobs is not None
    np.testing.assert_allclose(pieces.logprobs, whole.logprobs, atol=NEAR)


def test_an_answer_ends_at_a_stop_in_any_piece(service: Service, service_model: Path) -> None:
    wild = Sampling(temperature=100.0, seed=1, max_tokens=2 * FIRST_PIECE)
    tokens = answer(service, service_model, wild, own=True).token_ids
    place = next(i for i in range(FIRST_PIECE + 1, len(tokens)) if tokens[i] not in tokens[:i])
    for stop in ({"stop_token_ids": (tokens[place],)}, {"stop": (_text(tokens[place - 1 : place + 1]),)}):
        stopped = answer(service, service_model, replace(wild, **stop), own=True)
        assert (stopped.token_ids, stopped.finish_reason) == (tokens[: place + 1], "stop")


def test_each_piece_is_drawn_anew(service: Service, service_model: Path) -> None:
    """At a temperature of 100 all tokens are about equally likely, so equal draws would be equal tokens."""
    wild = Sampling(temperature=100.0, seed=1, max_tokens=2 * FIRST_PIECE)
    tokens = answer(service, service_model, wild, own=True).token_ids
    same = sum(first == second for first, second in zip(tokens[:FIRST_PIECE], tokens[FIRST_PIECE:], strict=True))
    assert same < FIRST_PIECE / 4


async def test_the_user_is_told_once_that_the_service_does_not_answer(
    service_url: str, service_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with proxied(service_url) as proxy:
        service = Service(ServiceConfig(url=proxy.url, timeout_s=300))
        engine, greedy = engine_of(service, service_model), Sampling(temperature=0.0, max_tokens=3)
        first = await ask(engine, greedy)
        service.config = ServiceConfig(url=proxy.url, timeout_s=5)
        for outage in (1, 2):
            proxy.faults = [Fault(path="asample", breaks="hang", hang_s=10, times=9)]
            for _ in range(2):
                with pytest.raises(ServiceError, match=f"{proxy.url}` did not answer within `5` s"):
                    await ask(engine, greedy)
            proxy.faults = []
            assert (await ask(engine, greedy)).token_ids == first.token_ids
            told = [each.getMessage() for each in caplog.records if each.name.startswith("lightningrl")]
            assert len(told) == outage and all(proxy.url in line and "hint: has it stopped" in line for line in told)
        service.close()
