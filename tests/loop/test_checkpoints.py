"""Checkpoints: damage is detected, a run continues from the version before, and saving does not block."""

import asyncio
import logging
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightningrl.checkpoints import damage, seal
from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.conformance import SilentWatcher
from lightningrl.errors import UserError
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from lightningrl.store import wait
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Rollout, Task
from tests.conftest import AGENT, RECIPE, SmallRecipe
from tests.loop.test_policies import digest
from tests.loop.test_policies import recipe as two_policies
from tests.loop.test_served import ENGINES

__all__ = ["two_policies"]


async def learn(recipe: SmallRecipe, run: str) -> Path:
    folder = recipe.folder / run
    folder.mkdir(exist_ok=True)
    async with lightning(load_config(recipe.path, ["tasks.heldout=1"]), folder) as server:
        await server.loop(SilentWatcher()).run()
        await server.export(folder / "model")
    return folder


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


# What is noticed


@pytest.fixture(scope="module")
def checkpoint(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `step-00001` and `step-00002` of one trainer."""
    tokenizer, folder = load_tokenizer(str(model_folder)), tmp_path_factory.mktemp("checkpoints")
    trainer = LocalTrainer(
        load_model(str(model_folder)),
        config=TrainerConfig(threads=1),
        loss=LossConfig(),
        export=lambda model, path: export_folder(model, path, tokenizer=tokenizer),
    )
    for version in (1, 2):
        conformance.step(trainer, version)
        path = folder / f"step-{version:05d}"
        trainer.publish(path)
        trainer.save(path / "trainer")
        seal(path, policy="policy", version=version)
        assert damage(path, policy="policy", version=version) is None
    return folder


Files = dict[Path, bytes]


def damaged(files: Files, older: Files, *, kind: str, rng: random.Random) -> dict[Path, bytes | None]:
    """Path → new content; None: delete the file."""
    path = rng.choice(sorted(files))
    content = bytearray(files[path])
    match kind:
        case "flip":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case "truncate":
            del content[rng.randrange(len(content)) :]
        case "lengthen":
            content += rng.randbytes(rng.randint(1, 100))
        case "zero":
            content = bytearray(len(content))
        case "exchange":
            other = rng.choice([other for other in sorted(files) if files[other] != files[path]])
            return {path: files[other], other: files[path]}
        case "older":
            return {path: older[path]} if older[path] != files[path] else dict(older)
        case _:
            return {path: None}
    return {path: bytes(content)}


def test_each_of_a_thousand_damages_is_noticed(checkpoint: Path) -> None:
    rng = random.Random(0)
    good = checkpoint / "step-00002"
    files = {path: path.read_bytes() for path in good.rglob("*") if path.is_file()}
    older = {path: (checkpoint / "step-00001" / path.relative_to(good)).read_bytes() for path in files}
    assert {"manifest.json", "model.safetensors", "moments.safetensors", "weights.safetensors", "trainer.json"} <= {
        path.name for path in files
    }
    for number in range(1000):
        kind = ("flip", "truncate", "lengthen", "zero", "exchange", "older", "remove")[number % 7]
        changed = damaged(files, older, kind=kind, rng=rng)
        for path, content in changed.items():
            path.unlink() if content is None else path.write_bytes(content)
        assert damage(good, policy="policy", version=2), (kind, *changed)
        for path in changed:
            path.write_bytes(files[path])
    assert damage(good, policy="policy", version=2) is None


def test_a_checkpoint_of_another_policy_or_version_is_noticed(checkpoint: Path) -> None:
    folder = checkpoint / "step-00002"
    assert damage(folder, policy="other", version=2) == f"`{folder}` holds version 2 of `policy`"
    assert damage(folder, policy="policy", version=3) == f"`{folder}` holds version 2 of `policy`"


# What a run does about it


async def test_a_damaged_checkpoint_costs_a_step_and_changes_nothing(
    two_policies: SmallRecipe, caplog: pytest.LogCaptureFixture
) -> None:
    """Both policies return to the version before and train on the same records again."""
    run = await learn(two_policies, "run")
    learnt = {policy: digest(run / "model" / policy) for policy in ("asker", "picker")}
    flip_a_bit(run / "checkpoints/step-00002/picker/trainer/moments.safetensors")
    with caplog.at_level(logging.WARNING):
        await learn(two_policies, "run")
    (said,) = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert (
        "checkpoint 2 is damaged: `" in said
        and "moments.safetensors` has changed since it was written; continuing from version 1" in said
    )
    assert {policy: digest(run / "model" / policy) for policy in ("asker", "picker")} == learnt


async def test_what_was_queued_waits_for_the_weights_that_it_is_to_run_with(finished: SmallRecipe) -> None:
    """A rollout of the next step is already queued when a damaged checkpoint is computed again."""
    run = finished.folder / "run"
    flip_a_bit(run / "checkpoints/step-00002/model.safetensors")
    finished.rewrite_agent(
        lambda text: text.replace("    messages = ", "    open('asks', 'w').close()\n    messages = ")
    )
    async with lightning(load_config(finished.path, ["tasks.heldout=1"]), run) as server:
        task = Task(id="t", input={"question": "say a word"}, split="train")
        await server.store.enqueue(
            [Rollout(id="next", group_id="next", task=task, sampling={"temperature": 1.0, "seed": 1})]
        )
        while not (finished.folder / "asks").exists():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # its first call waits for the engine
        await server.loop(SilentWatcher()).run()
        (rollout,) = await wait(server.store, ["next"])
        calls = await server.store.calls([rollout.accepted_attempt_id or ""])
    assert [call.policy_version for call in calls] == [2, 2]


async def test_an_engine_with_weights_of_its_own_is_not_asked_before_it_serves_some(finished: SmallRecipe) -> None:
    run = finished.folder / "run"
    flip_a_bit(run / "checkpoints/step-00002/model.safetensors")
    (finished.folder / "weighty.py").write_text(ENGINES)
    config = load_config(finished.path, ["engine.name=weighty:Faithful", "tasks.heldout=1"])
    async with asyncio.timeout(60), lightning(config, run) as server:
        await server.loop(SilentWatcher()).run()
        assert await server.version() == 2


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> SmallRecipe:
    """Run two steps in the folder `run`."""
    folder = tmp_path_factory.mktemp("learnt")
    (folder / "agent.py").write_text(AGENT)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "model").symlink_to(model_folder)
    recipe = SmallRecipe(folder)
    asyncio.run(learn(recipe, "run"))
    return recipe


@pytest.fixture
def finished(learnt: SmallRecipe, tmp_path: Path) -> SmallRecipe:
    shutil.copytree(learnt.folder, tmp_path / "copy", symlinks=True)
    return SmallRecipe(tmp_path / "copy")


async def version(recipe: SmallRecipe) -> int:
    async with lightning(load_config(recipe.path, ["tasks.heldout=1"]), recipe.folder / "run") as server:
        return await server.version()


async def test_two_versions_are_kept(finished: SmallRecipe) -> None:
    assert sorted(path.name for path in (finished.folder / "run/checkpoints").iterdir()) == ["step-00001", "step-00002"]
    assert await version(finished) == 2


@pytest.mark.parametrize(
    "harm",
    [
        lambda checkpoints: [flip_a_bit(path) for path in checkpoints.glob("*/model.safetensors")],
        lambda checkpoints: [path.unlink() for path in checkpoints.glob("*/manifest.json")],
        lambda checkpoints: [path.write_bytes(b"\xff\xff") for path in checkpoints.glob("*/manifest.json")],
        lambda checkpoints: [shutil.rmtree(path) for path in checkpoints.glob("*/trainer")],
        lambda checkpoints: shutil.rmtree(checkpoints),
    ],
    ids=["flipped", "no manifest", "broken manifest", "no trainer", "nothing left"],
)
async def test_a_run_without_a_good_checkpoint_says_so(finished: SmallRecipe, harm: Callable[[Path], object]) -> None:
    harm(finished.folder / "run" / "checkpoints")
    with pytest.raises(
        UserError, match=r"(?s)no checkpoint to continue from: .*\nhint: restore the run's `checkpoints`"
    ):
        await version(finished)


async def test_checkpoints_without_their_store_are_not_written_over(finished: SmallRecipe) -> None:
    (finished.folder / "run" / "store.sqlite").unlink()
    before = digest(finished.folder / "run/checkpoints/step-00002")
    for _ in range(2):
        with pytest.raises(UserError, match="up to version 2") as error:
            await learn(finished, "run")
        assert "`store.sqlite`" in (error.value.hint or "")
    assert digest(finished.folder / "run/checkpoints/step-00002") == before


# While a checkpoint is written or read

SLOW = '''
"""A trainer whose disk is slow."""
import time

from lightningrl.trainer.local import LocalTrainer


class Slow(LocalTrainer):
    def export(self, path):
        time.sleep(2.5)
        super().export(path)

    def save(self, path):
        time.sleep(2.5)
        super().save(path)

    def load(self, path):
        time.sleep(2.5)
        super().load(path)
'''


async def test_the_event_loop_runs_on_while_a_checkpoint_is_written_and_read(small_recipe: SmallRecipe) -> None:
    (small_recipe.folder / "slow.py").write_text(SLOW)
    (small_recipe.folder / "run").mkdir()
    async with lightning(
        load_config(small_recipe.path, ["trainer.name=slow:Slow"]), small_recipe.folder / "run"
    ) as server:
        loop = server.loop(SilentWatcher())
        for busy in (loop.restore, loop.restore, lambda: server.export(small_recipe.folder / "out")):
            began, longest = time.monotonic(), 0.0
            task = asyncio.create_task(busy())
            while not task.done():
                ticked = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - ticked)
            await task
            assert time.monotonic() - began > 2.5 > longest
