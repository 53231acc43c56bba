"""The embedded engine on a simulated GPU: nothing is made on the host by accident, and the answers are the CPU's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightningrl import plugins
from lightningrl.chat import ChatTemplate
from lightningrl.config import EngineConfig
from lightningrl.engine import attention, embedded
from lightningrl.engine.base import Engine, EngineSetup
from lightningrl.engine.conformance import GRAMMAR_CHECKS, LOAD_CHECKS, Conformance
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.errors import UserError
from lightningrl.models.determinism import repeatable
from lightningrl.models.devices import device_of
from lightningrl.models.load import load_model
from lightningrl.types import Sampling
from tests.engine.test_conformance import two_versions
from tests.simulated import CPU, GPU, Simulation, has_gpu, simulated_gpu, thread_in

Check = Callable[[Engine, Conformance], Awaitable[None]]
pytestmark = pytest.mark.skipif(has_gpu(), reason="this machine has a real GPU")
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=0.0),
    Sampling(top_p=0.9),
    Sampling(top_k=7, top_logprobs=3),
    Sampling(stop=("e",)),
)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    with simulated_gpu() as simulation:
        monkeypatch.setattr(embedded.threading, "Thread", thread_in(simulation))
        yield simulation


def engine_on(device: torch.device, folder: Path) -> EmbeddedEngine:
    template = ChatTemplate.load(folder)
    model = load_model(str(folder), device=device)
    return EmbeddedEngine(model, slots=4, max_length=160, decode=template.decode)


async def answers(engine: EmbeddedEngine) -> list[tuple[tuple[int, ...], tuple[float, ...], object]]:
    """What the engine answers to prompts of many lengths, some with a common prefix, in all kinds of settings."""

    async def one(index: int) -> tuple[tuple[int, ...], tuple[float, ...], object]:
        prompt = [(index // 6 * 101 + i * i * 7 + i * 3) % 270 for i in range((1, 5, 33, 100)[index % 4])]
        sampling = replace(SAMPLINGS[index % len(SAMPLINGS)], max_tokens=10, seed=index)
        (delta,) = [delta async for delta in engine.generate(prompt, sampling=sampling, policy="policy")]
        return delta.token_ids, delta.logprobs, delta.finish_reason

    try:
        return await asyncio.gather(*(one(index) for index in range(24)))
    finally:
        await engine.close()


async def test_a_gpu_gives_the_answers_of_the_cpu_and_waits_once_a_token(
    model_folder: Path, simulation: Simulation
) -> None:
    expected = await answers(engine_on(CPU, model_folder))
    engine = engine_on(GPU, model_folder)
    simulation.strict = True
    simulation.waits.clear()
    found = await answers(engine)
    for (tokens, logprobs, finish), (same_tokens, same_logprobs, same_finish) in zip(found, expected, strict=True):
        assert (tokens, finish) == (same_tokens, same_finish)
        assert logprobs == pytest.approx(same_logprobs, abs=1e-5)
    assert simulation.waits == {"copy to the host": engine.statistics.steps}


def test_a_number_names_a_gpu_and_one_that_is_missing_is_refused(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of(name) for name in ("auto", "cuda", "cuda:0")] == [GPU] * 3
    assert device_of("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"`trainer.device` is `cuda:2`, but torch sees 2 GPUs\nhint: .*`cuda:1`"):
        device_of("cuda:2")


@pytest.mark.parametrize("check", [*LOAD_CHECKS, *GRAMMAR_CHECKS[:1]], ids=lambda check: check.__name__)
async def test_the_engine_conforms_on_a_gpu(
    check: Check, model_folder: Path, tmp_path: Path, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "device_of", lambda name: GPU)
    template = ChatTemplate.load(model_folder)
    setup = EngineSetup(
        policy="policy",
        config=EngineConfig(slots=4, max_length=64),
        folder=model_folder,
        dtype="float32",
        device="cuda",
        decode=template.decode,
        turn_end_id=template.turn_end_id,
    )
    weights = two_versions(model_folder, tmp_path) if check in LOAD_CHECKS else None
    engine = plugins.load("embedded", kind="engine")(setup)
    about = Conformance(
        policy="policy",
        vocab_size=270,
        decode=template.decode,
        turn_end_id=template.turn_end_id,
        weights=weights,
        tolerance=1e-5,
    )
    try:
        await check(engine, about)
    finally:
        await engine.close()


def test_large_products_attend_as_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 4 * 300 * 7)  # seven tokens at once
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((20, 4, 16), (2, 300, 16), (2, 300, 16))
    )
    mask = attention.causal_mask(torch.arange(270, 290), 300, dtype=torch.float64)
    one, other = torch.empty_like(q), torch.empty_like(q)
    attention.attend_prompt(q, keys, values, mask, one)
    attention.together(q, keys, values, mask, other)
    torch.testing.assert_close(other, one, rtol=0, atol=1e-12)


async def test_a_step_waits_while_a_trainer_has_errors_set(model_folder: Path, simulation: Simulation) -> None:
    engine = engine_on(GPU, model_folder)

    async def answer() -> list[int]:
        sampling = Sampling(max_tokens=5, seed=0)
        (delta,) = [delta async for delta in engine.generate([1, 2, 3], sampling=sampling, policy="policy")]
        return list(delta.token_ids)

    try:
        with repeatable("error"):
            running = asyncio.create_task(answer())
            await asyncio.sleep(0.3)
            assert engine.statistics.steps == 0 and not running.done()
        assert await running
    finally:
        await engine.close()
