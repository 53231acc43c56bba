"""After every publication the engine serves the published weights; an engine that does not is detected."""

from pathlib import Path

import pytest

from lightningrl.conformance import SilentWatcher
from lightningrl.errors import EngineError
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from tests.conftest import SmallRecipe

ENGINES = '''
"""Engines with weights of their own, as on other machines."""
import dataclasses

from lightningrl.engine.base import on_server
from lightningrl.engine.embedded import embedded


class Faithful:
    """Loads the weights that it is given."""

    def __init__(self, setup):
        self.engine = embedded(dataclasses.replace(setup, model=None))

    def generate(self, prompt_ids, *, sampling, policy, stream=False):
        return self.engine.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream)

    async def load(self, weights):
        await self.engine.load(weights)

    async def pause(self, *, timeout_s=60.0):
        await self.engine.pause(timeout_s=timeout_s)

    async def resume(self):
        await self.engine.resume()

    async def close(self):
        await self.engine.close()


class Stale(Faithful):
    """Reports the new version without loading its weights."""

    async def load(self, weights):
        self.engine.version = weights.version


class OneStale(Faithful):
    """Has eight servers, of which the last loads nothing."""

    def __init__(self, setup):
        super().__init__(setup)
        self.last = Stale(setup)

    def generate(self, prompt_ids, *, sampling, policy, stream=False):
        engine = self.last if on_server.get() == 7 else self.engine
        return engine.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream)

    async def load(self, weights):
        await self.engine.load(weights)
        await self.last.load(weights)

    async def close(self):
        await self.engine.close()
        await self.last.close()


class Boastful(Faithful):
    """Says that its tokens were likelier than they were."""

    async def generate(self, prompt_ids, *, sampling, policy, stream=False):
        async for delta in self.engine.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream):
            yield dataclasses.replace(delta, logprobs=tuple(p / 1.01 for p in delta.logprobs))
'''


@pytest.fixture
def recipe(small_recipe: SmallRecipe) -> SmallRecipe:
    (small_recipe.folder / "weighty.py").write_text(ENGINES)
    return small_recipe


async def learn(recipe: SmallRecipe, engine: str, *overrides: str) -> int:
    config = load_config(recipe.path, [f"engine.name=weighty:{engine}", "tasks.heldout=1", *overrides])
    folder = recipe.folder / "run"
    folder.mkdir()
    async with lightning(config, folder) as server:
        await server.loop(SilentWatcher()).run()
        return await server.version()


async def test_an_engine_that_loads_what_is_published_goes_on(recipe: SmallRecipe) -> None:
    assert await learn(recipe, "Faithful") == 2


async def test_an_engine_that_ignores_new_weights_is_found_out(recipe: SmallRecipe) -> None:
    with pytest.raises(EngineError, match=r"still serves the old weights, not version `1` ") as raised:
        await learn(recipe, "Stale")
    assert "hint:" in str(raised.value)


async def test_one_server_of_many_that_ignores_new_weights_is_named(recipe: SmallRecipe) -> None:
    urls = ", ".join(f'"http://127.0.0.1:{port}"' for port in range(8000, 8008))
    with pytest.raises(
        EngineError, match=r"^server `http://127.0.0.1:8007` still serves the old weights, not version `1`"
    ):
        await learn(recipe, "OneStale", f"engine.urls=[{urls}]")


async def test_an_engine_whose_logprobs_are_not_those_of_its_policy_is_found_out_at_once(recipe: SmallRecipe) -> None:
    with pytest.raises(EngineError, match=r"serves other weights than were published: logprobs of version 0 "):
        await learn(recipe, "Boastful")


async def test_one_small_step_is_seen(recipe: SmallRecipe) -> None:
    """The check detects an update at a learning rate that is usual for large models."""
    with pytest.raises(EngineError, match="still serves the old weights"):
        await learn(recipe, "Stale", "trainer.learning_rate=1e-4", "trainer.minibatches=1")
    assert not (recipe.folder / "run" / "checkpoints" / "step-00002" / Path("config.json")).exists(), (
        "it stopped at the first step"
    )


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_in_narrow_dtypes_too_the_engine_serves_what_the_trainer_trains(
    small_recipe: SmallRecipe, dtype: str, rank: int
) -> None:
    overrides = [f"model.dtype={dtype}", f"model.lora_rank={rank}", "trainer.learning_rate=1e-3", "tasks.heldout=1"]
    gaps: list[float] = []

    class Reader(SilentWatcher):
        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            gaps.append(metrics["policy/logprob_gap"])

    folder = small_recipe.folder / "run"
    folder.mkdir()
    async with lightning(load_config(small_recipe.path, overrides), folder) as server:
        await server.loop(Reader()).run()
    assert len(gaps) == 2 and max(gaps) < {"bfloat16": 0.1, "float16": 0.02}[dtype]
