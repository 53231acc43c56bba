"""`lightningrl show` on a short real training, and on known records."""

import asyncio
import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from rich.console import Console

from lightningrl.cli.show import Tokens, read, show
from lightningrl.conformance import SilentWatcher
from lightningrl.data.forest import Lesson
from lightningrl.data.taught import Taught
from lightningrl.errors import UserError
from lightningrl.learner import Learner
from lightningrl.look import RolloutView, look_at, look_at_call, opened
from lightningrl.look.call import origin
from lightningrl.look.teaching import teaching_of
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from lightningrl.store import Where
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Capture, Reward, Rollout, Task
from tests.cli.test_rollouts import call
from tests.conftest import SmallRecipe


def printed(view: RolloutView, *, tokens: Tokens = "none", width: int = 80, full: bool = False) -> str:
    file = StringIO()
    show(
        view,
        Console(file=file, width=width, markup=False, highlight=False),
        run_dir=Path("runs/r"),
        tokens=tokens,
        full=full,
    )
    return file.getvalue()


def noted(learner: Learner, used: list[Lesson]) -> None:
    """Keep the lessons that the learner is updated with."""
    update = learner.update

    async def noting(lessons: Sequence[Lesson], **options: Any) -> tuple[dict[str, float], Taught]:
        used.extend(lessons)
        return await update(lessons, **options)

    learner.update = noting


SETTINGS = {
    "plain": "",
    "critic": """
        [algorithm]
        advantage = "reinforce++"
        credit = "gae_calls"
    """,
    "branched": """
        fork_share = 0.5
        forks = 1
        [algorithm]
        advantage = "reinforce++"
        credit = "fork"
        dynamic_sampling = 2
    """,
    "shaped": """
        [algorithm]
        advantage = "reinforce++"
        credit = "discounted"
        credit_options = { discount = 0.9 }
        truncation_penalty = 0.1
        dynamic_sampling = 2
        shaping = "potential"
        [[air]]
        rule = "costly"
        over = 3
        value = -0.25
    """,
}


@pytest.mark.parametrize("settings", SETTINGS)
async def test_the_advantages_that_are_shown_are_those_that_training_used(
    small_recipe: SmallRecipe, settings: str
) -> None:
    small_recipe.rewrite_agent(
        lambda text: text.replace("len(answer) % 5 / 4", "len(answer) % 5 / 4 if 'word' in task['question'] else 1")
    )
    small_recipe.path.write_text(small_recipe.path.read_text() + SETTINGS[settings])
    run, used = small_recipe.folder / "run", list[Lesson]()
    run.mkdir()
    config = load_config(small_recipe.path)
    async with lightning(config, run) as server:
        noted(server.learners[0], used)
        await server.loop(SilentWatcher()).run()
    (run / "config.toml").symlink_to(small_recipe.path)
    (run / "agent.py").symlink_to(small_recipe.folder / "agent.py")
    shown: dict[str, Lesson] = {}
    measured: dict[str, str] = {}
    branches = 0
    async with opened(run) as looked:
        for rollout in await looked.records.rollouts(where=Where(prefix="train-")):
            teaching = await teaching_of(looked, rollout)
            branches += rollout.branch is not None and bool(teaching.credits)
            assert teaching.learnt and (teaching.lessons or teaching.why_not)
            shown |= teaching.lessons
            measured |= dict.fromkeys(teaching.entropies.keys() & teaching.logprobs_after.keys(), rollout.id)
            for call_id, credit in teaching.credits.items():
                assert credit.baseline is not None and credit.scale is not None
                advantage = (credit.value - credit.baseline) / credit.scale
                assert advantage == pytest.approx(float(teaching.lessons[call_id].advantages[0]), abs=1e-6)
        call_id, rollout_id = next(iter(measured.items()))
        number = next(view.number for view in (await look_at(looked, rollout_id)).calls if view.call.id == call_id)
        detail = (await look_at_call(looked, rollout_id, number)).as_json()["tokens"]
        assert len(detail["sampled"]["entropies"]) == len(detail["sampled"]["ratios"]) == len(detail["sampled"]["ids"])
        assert any(ratio != 1 for ratio in detail["sampled"]["ratios"]) and not detail["why_not"].keys() & {"ratios"}
    assert (branches > 0) == (settings == "branched")
    assert set(shown) == {lesson.transition.call_id for lesson in used} and any(
        lesson.advantages.any() for lesson in used
    )
    for lesson in used:
        again = shown[lesson.transition.call_id]
        assert np.array_equal(again.advantages, lesson.advantages) and np.array_equal(again.weights, lesson.weights)
        assert again.transition.left_out == lesson.transition.left_out


def test_a_real_run_is_shown(small_recipe: SmallRecipe) -> None:
    small_recipe.train("--run-dir", "run", "loop.steps=1", "tasks.heldout=2")
    done = small_recipe.cli("show", "run", "--json", "--tokens", "advantage")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (
        found["reward"] < found["group"]["mean"]
        and found["step"] == 1
        and found["teaching"] == {"learnt": True, "why_not": None}
    )
    first, second = found["calls"]
    assert [message["role"] for message in first["messages"]] == ["user"] and second["earlier_messages"] == 2
    assert [message["content"] for message in second["messages"]] == ["again : pick another one"]
    assert second["capture"] == "bridged" and second["parent_call_id"] == first["id"] and first["advantage"] < 0
    assert "".join(first["tokens"]["texts"]).startswith(first["answer"]["content"])
    assert found["attempts"][0]["output"] == second["answer"]["content"] and "token_hash" not in done.stdout
    assert "less likely" in done.stderr and "call 2" in done.stderr and "--reward 0" in done.stderr
    listed = small_recipe.cli("rollouts", "run", "--json", "--limit", "1", "--step", "1")
    (line,) = json.loads(listed.stdout.splitlines()[-1])["rollouts"]
    assert line["conversation"][0]["messages"][0]["role"] == "user" and isinstance(line["output"], str)


async def written(folder: Path) -> None:
    """A group of two: one rollout succeeded; the other called a tool that failed, and rewrote its history."""
    store = await SQLiteStore.open(folder / "store.sqlite")
    task = Task(id="t7", input={"question": "who?"}, split="train")
    await store.enqueue([Rollout(id=f"train-00000-000-0{n}", group_id="g", task=task) for n in range(2)])
    await store.enqueue([Rollout(id="broken", group_id="broken", task=task)])
    [(_, bad), (_, good), (_, broken)] = await store.claim("w", limit=3, lease_s=60)
    user = {"role": "user", "content": "who?"}
    asks = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"name": "eva"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [asks]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Error: no such name"}
    answered = {"choices": [{"index": 0, "message": said, "finish_reason": "tool_calls"}]}
    first = call(bad, 0, prompt=[1, 2], said=[3], request={"model": "m", "messages": [user]}, response=answered)
    second = call(
        bad,
        1,
        prompt=[1, 2, 3, 4],
        said=[5, 6],
        parent_call_id=first.id,
        capture="forked",
        capture_reason="message 1 was rewritten",
        request={"model": "m", "messages": [user, said, result]},
    )
    await store.append(
        first, second, Reward(attempt_id=bad.id, name="style", value=0.5, source="agent", call_id=first.id)
    )
    await store.finish(bad.id, "succeeded", rewards=[Reward(attempt_id=bad.id, value=0.0)], output="a line\n" * 40)
    await store.finish(good.id, "succeeded", rewards=[Reward(attempt_id=good.id, value=1.0)], output="eva")
    await store.finish(broken.id, "failed", error="AgentError: ValueError: [red]no[/]\nTraceback of it")
    await store.close()


@pytest.mark.parametrize("width", [60, 80, 160])
async def test_the_page_has_the_conversation_and_the_rewards(tmp_path: Path, width: int) -> None:
    await written(tmp_path)
    view = await asyncio.to_thread(read, tmp_path, None)
    assert view.rollout.id == "train-00000-000-00", "the latest below its group's mean"
    page = printed(view, width=width)
    commands = [line for line in page.splitlines() if "lightningrl " in line]
    assert max(len(line) for line in page.splitlines() if line not in commands) <= width
    for text in (
        "reward 0",
        "mean 0.5: ▸0◂, 1",
        '→ look_up({"name": "eva"})',
        "Error: no such name",
        "forked: rendered again, because message 1 was rewritten",
        "0.5 style, by the agent",
        "0 final, by the reward function",
    ):
        assert text in page or text in " ".join(page.split()), text
    assert page.index("look_up") < page.index("Error: no such name") < page.index("outcome")
    assert page.count("who?") == 2, "in the task and in the first call"
    assert page.count("a line") == 12 and "--full" in page and printed(view, full=True).count("a line") == 40
    assert "lightningrl show runs/r train-00000-000-01" in commands[0]


async def test_a_run_with_unreadable_settings_is_shown(tmp_path: Path) -> None:
    await written(tmp_path)
    (tmp_path / "config.toml").write_text("[from_another_version]\nsetting = 1\n")
    page = " ".join(printed(await asyncio.to_thread(read, tmp_path, None)).split())
    assert "reward 0" in page and "unknown, because the run's settings cannot be read" in page


async def test_a_failed_rollout_is_shown_with_its_error(tmp_path: Path) -> None:
    await written(tmp_path)
    async with opened(tmp_path) as run:
        page = printed(await look_at(run, "bro"))
    error = "AgentError: ValueError: [red]no[/]"
    for text in ("failed, no reward", "did not call the model", error, "Traceback of it"):
        assert text in page, text


async def test_an_unknown_rollout_is_refused_with_the_closest_id(tmp_path: Path) -> None:
    await written(tmp_path)
    async with opened(tmp_path) as run:
        with pytest.raises(UserError, match="did you mean `train-00000-000-01`"):
            await look_at(run, "train-00000-00-01")
        with pytest.raises(UserError, match="no rollout `train`"):
            await look_at(run, "train")
    with pytest.raises(UserError, match="no records"):
        await asyncio.to_thread(read, tmp_path / "nowhere", None)


@pytest.mark.parametrize("capture", get_args(Capture))
def test_every_capture_is_described(capture: Capture) -> None:
    attempt = Attempt(id="r.1", rollout_id="r", number=1, token="t")
    one = call(attempt, 0, prompt=[1], said=[2], capture=capture, capture_reason="a reason")
    told = origin(one, parent=None)
    assert told and ("a reason" in told) == (capture in ("partly", "forked", "incomplete"))
    assert ("call 4" in origin(one, parent=4)) == (capture in ("bridged", "partly"))
