"""Weights are read and written in threads: on the event loop every heartbeat, stream and request would wait."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightningrl.conformance import SilentWatcher
from lightningrl.models.load import load_model, load_tokenizer
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from lightningrl.trainer.imitation import Example, Imitation, imitator
from lightningrl.warmstart.steering import steered
from lightningrl.warmstart.tryout import Trial
from tests.conftest import SmallRecipe
from tests.loop.test_served import ENGINES


@dataclass
class Opened:
    """The files below a folder that Python code of this process opens."""

    folder: str = ""
    """Empty: not watching."""
    loop: int = 0
    """The event loop's thread."""
    there: set[str] = field(default_factory=set[str])
    """Opened on the event loop."""
    elsewhere: set[str] = field(default_factory=set[str])


OPENED = Opened()


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook. It sees `open` and `os.open`, by which weights are checked, sealed, flushed and restored."""
    if event != "open" or not OPENED.folder or not isinstance(arguments[0], (str, os.PathLike)):
        return
    path = os.fspath(arguments[0])
    if path.startswith(OPENED.folder):
        (OPENED.there if threading.get_ident() == OPENED.loop else OPENED.elsewhere).add(Path(path).name)


sys.addaudithook(note)  # for ever: Python cannot remove one


@pytest.fixture
def watch() -> Iterator[Callable[[Path], Opened]]:
    """Watch the files of a folder from now on. This thread is the event loop's."""

    def begin(folder: Path) -> Opened:
        OPENED.folder, OPENED.loop, OPENED.there, OPENED.elsewhere = str(folder), threading.get_ident(), set(), set()
        return OPENED

    yield begin
    OPENED.folder = ""


Watch = Callable[[Path], Opened]


async def run(recipe: SmallRecipe, *overrides: str, steps: int = 2) -> None:
    config = load_config(recipe.path, ["tasks.heldout=1", f"loop.steps={steps}", *overrides])
    folder = recipe.folder / "run"
    folder.mkdir(exist_ok=True)
    async with lightning(config, folder) as server:
        await server.loop(SilentWatcher()).run()
        await server.export(recipe.folder / "out")


@pytest.mark.parametrize("overrides", [[], ["model.lora_rank=4", "model.dtype=bfloat16"]], ids=["full", "lora"])
async def test_a_run_loads_saves_seals_resumes_and_exports_in_threads(
    small_recipe: SmallRecipe, watch: Watch, overrides: list[str]
) -> None:
    opened = watch(small_recipe.folder / "model")
    await run(small_recipe, *overrides, steps=1)
    assert {"config.json", "model.safetensors"} <= opened.elsewhere and not opened.there
    for folder, files in (("run/checkpoints", {"manifest.json", "trainer.json"}), (".out.draft", {"tokenizer.json"})):
        opened = watch(small_recipe.folder / folder)
        await run(small_recipe, *overrides)
        assert files <= opened.elsewhere and any(name.endswith(".safetensors") for name in opened.elsewhere)
        assert not opened.there


async def test_an_engine_with_weights_of_its_own_loads_them_in_its_thread(
    small_recipe: SmallRecipe, watch: Watch
) -> None:
    (small_recipe.folder / "weighty.py").write_text(ENGINES)
    opened = watch(small_recipe.folder / "run" / "checkpoints")
    await run(small_recipe, "engine.name=weighty:Faithful", steps=1)
    assert "model.safetensors" in opened.elsewhere and not opened.there


async def test_a_warm_start_keeps_and_restores_its_best_state_in_threads(
    model_folder: Path, tmp_path: Path, watch: Watch
) -> None:
    trainer = imitator(load_model(str(model_folder)), tokenizer=load_tokenizer(str(model_folder)), threads=1)
    examples = [[Example(prompt_ids=[1, 2], completion_ids=[3, i])] for i in range(4)]
    successes = iter([0.1, 0.9, *[0.4] * 20])

    async def tryout() -> Trial:
        success = np.array([next(successes)])
        return Trial(success=success, failed=0, error="", truncated=0.0, heads=frozenset())

    def way(peak: float | None) -> Imitation:
        return Imitation(trainer, examples, peak=0.05, steps=240, size=4, seed=0)

    opened = watch(tmp_path)
    found = await steered(way, tryout, shelf=tmp_path / "shelf", told=lambda look: None)  # pyright: ignore[reportArgumentType]
    assert found.reached and next(successes, None) is not None
    assert "trainer.json" in opened.elsewhere and not opened.there
