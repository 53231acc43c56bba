"""Another answer at one call: the user's, or sampled ones."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.recipe import load_config
from lightningrl.replays.given import answer_of
from lightningrl.replays.recording import Course, Recording, place_of, recording, trunk_of
from lightningrl.replays.weights import folders_of
from lightningrl.replays.what_if import WhatIf, answer_otherwise, sample
from lightningrl.store import open_records, open_store
from lightningrl.types import Attempt, Branch, Rollout, Task, Weights
from tests.cli.test_rollouts import call
from tests.conftest import SmallRecipe
from tests.replays.recorded import Recorded
from tests.replays.test_replay import quiet

FIRST = "train-00000-000-00"


def otherwise(recorded: Recorded, *overrides: str, at: int, answer: str, engine: bool = True) -> WhatIf:
    async def run() -> WhatIf:
        async with recording(recorded.run, overrides) as opened:
            trunk = await trunk_of(opened, FIRST)
            place = place_of(trunk, at, run=recorded.run)
            given = answer_of(answer)
            return await answer_otherwise(opened, trunk, place, given, checkpoint=None, engine=engine, doing=quiet)

    return asyncio.run(run())


def sampled(recorded: Recorded, rollout: str, *overrides: str, at: int, samples: int) -> WhatIf:
    async def run() -> WhatIf:
        async with recording(recorded.run, overrides) as opened:
            trunk = await trunk_of(opened, rollout)
            place = place_of(trunk, at, run=recorded.run)
            return await sample(opened, trunk, place, samples=samples, checkpoint=None, doing=quiet)

    return asyncio.run(run())


def test_the_agent_goes_on_from_the_answer_that_is_given(recorded: Recorded) -> None:
    found = otherwise(recorded, at=2, answer="10")
    [way] = found.others
    assert way.answer is not None and way.answer.content == "10" and way.void is None
    assert [turn.number for turn in way.turns] == [2, 3], "call 1 is played back"
    assert way.turns[1].asked[-1].content == "-8 to go"
    assert (way.ending.output, way.reward) == ({"total": 12}, 0.0)
    assert (found.recorded.ending.output, found.recorded.reward) == ({"total": 3}, 1.0)


def test_without_an_engine_it_stops_at_the_next_call_and_says_so(recorded: Recorded) -> None:
    [way] = otherwise(recorded, at=2, answer="10", engine=False).others
    assert way.stopped == 3 and way.reward is None and way.void is None
    assert [(turn.number, turn.answer is None) for turn in way.turns] == [(2, False), (3, True)]
    assert way.turns[1].asked[-1].content == "-8 to go", "it shows what the agent asks next"


def test_the_last_answer_needs_no_engine(recorded: Recorded) -> None:
    [way] = otherwise(recorded, at=3, answer="5", engine=False).others
    assert way.stopped is None and way.ending.output == {"total": 7}


def test_an_agent_that_parts_before_the_place_is_void(recorded: Recorded, tmp_path: Path) -> None:
    changed = recorded.changed(tmp_path / "copy", 'f"{goal - total} to go"', 'f"{goal - total} left"')
    [way] = otherwise(recorded, changed, at=3, answer="5").others
    assert way.answer is None and way.reward is None and "call 2 differs from the record" in (way.void or "")


def test_sampled_answers_have_a_mean_and_share_what_was_before(recorded: Recorded) -> None:
    found = sampled(recorded, FIRST, "engine.name=scripts:counting", "agent.concurrency=1", at=3, samples=4)
    answers = [way.answer.content for way in found.others if way.answer is not None]
    assert answers == ["1", "2", "3", "4"] and not found.greedy
    assert found.rewards == [1.0, 0.0, 0.0, 0.0]
    assert found.mean is not None and found.mean[0] == 0.25 and found.mean[1] == pytest.approx(0.7956, abs=1e-3)
    assert all(way.ending.calls == 3 and len(way.turns) == 1 for way in found.others)


def test_a_greedy_rollout_is_sampled_at_temperature_1(recorded: Recorded) -> None:
    found = sampled(recorded, "exam-00001-greedy-0000", at=3, samples=1)
    assert found.greedy and found.mean == (1.0, None)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("blue", "blue"),
        ("42", "42"),
        ('{"answer": 4}', '{"answer": 4}'),
        ('{"content": "x"}', {"content": "x"}),
        ('[{"name": "f", "arguments": {}}]', [{"name": "f", "arguments": {}}]),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_an_answer_is_json_only_if_it_has_the_fields_of_one(text: str, means: object) -> None:
    assert answer_of(text) == means


def test_an_answer_with_wrong_fields_is_refused() -> None:
    with pytest.raises(UserError, match="`--answer` is no valid answer"):
        answer_of('{"content": 4}')


def course(**fields: Any) -> Course:
    branch = Branch(attempt_id="q-7.1", call_id=None) if "replays" in fields else None
    rollout = Rollout(id="r", group_id="r", task=Task(id="t", input={}, split="train"), branch=branch)
    attempt = Attempt(id="r.1", rollout_id="r", number=1, token="", status="succeeded")
    calls = (call(attempt, 0, prompt=[1], said=[2], **fields), call(attempt, 1, prompt=[3], said=[4]))
    return Course(rollout=rollout, attempt=attempt, calls=calls)


@pytest.mark.parametrize(
    ("fields", "number", "said"),
    [
        ({}, 99, "rollout `r` has no call 99: it has calls 1 to 2"),
        ({"capture": "upstream", "policy": "upstreams.big"}, 1, "answered by another server, `upstreams.big`"),
        ({"capture": "incomplete", "capture_reason": "it broke"}, 1, "call 1 of `r` was never answered: it broke"),
        ({"replays": "chatcmpl-q-7.1-0"}, 1, "call 1 of `r` was played back from call 1 of `q-7`"),
    ],
    ids=["beyond the end", "relayed", "incomplete", "played back"],
)
def test_a_call_that_cannot_be_answered_otherwise_is_refused(fields: dict[str, Any], number: int, said: str) -> None:
    with pytest.raises(UserError) as refused:
        place_of(course(**fields), number, run=Path("runs/r"))
    assert said in refused.value.message and "lightningrl show runs/r r" in (refused.value.hint or "")


async def weights_of(recipe: SmallRecipe, version: int) -> dict[str, Path]:
    run = recipe.folder / "run"
    run.mkdir(exist_ok=True)
    store = await open_store(f"sqlite://{run / 'store.sqlite'}")
    await store.publish(Weights(policy="policy", version=5, uri="checkpoints/step-00005"))
    await store.close()
    records = await open_records(f"sqlite://{run / 'store.sqlite'}")
    config: Config = load_config(recipe.path)
    trunk = course(policy_version=version)
    opened = Recording(folder=run, records=records, config=config)
    try:
        return await folders_of(opened, trunk, trunk.calls[0], checkpoint=None)
    finally:
        await records.close()


async def test_weights_that_are_gone_are_named_with_those_that_are_there(small_recipe: SmallRecipe) -> None:
    assert await weights_of(small_recipe, 0) == {"policy": small_recipe.folder / "model"}, "before training"
    (small_recipe.folder / "run" / "checkpoints" / "step-00004").mkdir(parents=True)
    with pytest.raises(UserError, match="version 3 of `policy`, which answered, is gone") as refused:
        await weights_of(small_recipe, 3)
    assert "versions that are there: 0, 4;" in (refused.value.hint or "")
    result = small_recipe.folder / "run" / "model"
    result.symlink_to(small_recipe.folder / "model")
    assert await weights_of(small_recipe, 5) == {"policy": result}, "the run's result is its latest version"
