"""Branches as people see them: what they repeat, what their siblings got, and why one is void."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lightningrl.algorithms.credit_fork import fork
from lightningrl.cli.show import show
from lightningrl.look import RolloutView, look_at, look_at_call, look_at_group, opened
from lightningrl.look.families import Families, families_of
from lightningrl.look.group import Node, branches
from lightningrl.look.opened import Opened
from lightningrl.notebook.rollout import shown
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Branch, Call, Rollout, Task, Trajectory
from tests.algorithms.rollouts import call as transition
from tests.conftest import SmallRecipe
from tests.look.branched import AT_2, OTHER, TRUNK, VOID_AT_3, WHY, answers, branched_run

TASK = Task(id="t7", input={"question": "who?"}, split="train")


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Opened]:
    async with opened(await branched_run(tmp_path)) as run:
        yield run


def ending(rollout: str, reward: float | None, status: str = "succeeded") -> dict[str, object]:
    return {"rollout": rollout, "reward": reward, "status": status}


async def test_a_branch_names_its_trunk_its_place_and_its_siblings(run: Opened) -> None:
    found = json.loads(json.dumps((await look_at(run, AT_2[0])).as_json()))
    assert found["branch"] == {
        "rollout": TRUNK,
        "attempt": f"{TRUNK}.1",
        "call": 2,
        "is_replay": False,
        "here": 2,
        "void": None,
        "answers": [ending(TRUNK, 1.0), ending(AT_2[0], 0.0), ending(AT_2[1], 1.0)],
    }
    assert found["branches"] == []
    assert [one["trunk"] for one in found["siblings"]] == [None, None, TRUNK, TRUNK, TRUNK]


async def test_a_trunk_says_where_it_was_branched(run: Opened) -> None:
    found = (await look_at(run, TRUNK)).as_json()
    assert found["branch"] is None
    assert found["branches"] == [
        ending(AT_2[0], 0.0) | {"call": 2},
        ending(AT_2[1], 1.0) | {"call": 2},
        ending(VOID_AT_3, None, "failed") | {"call": 3},
    ]
    assert (await look_at(run, OTHER)).branches == ()


async def test_calls_that_were_played_back_cost_and_teach_nothing(run: Opened, small_recipe: SmallRecipe) -> None:
    (run.file.parent / "config.toml").symlink_to(small_recipe.path)
    async with opened(run.file.parent) as known:
        first, second = (await look_at(known, AT_2[0])).as_json()["calls"]
        detail = (await look_at_call(known, AT_2[0], 1)).as_json()
    assert first["replays"] == {"rollout": TRUNK, "call": 1} and first["sampled_tokens"] == 0
    assert first["origin"] == f"played back from call 1 of {TRUNK}" and first["left_out"] == "played back"
    assert first["credit"] is None and detail["tokens"]["sampled"]["advantages"] is None
    assert detail["tokens"]["why_not"]["advantages"] == "the call is not trained: played back"
    assert second["replays"] is None and second["sampled_tokens"] == 1 and second["left_out"] is None


async def test_the_mean_of_a_group_is_that_of_its_rollouts_without_branches(run: Opened) -> None:
    group = await look_at_group(run, "g")
    assert (await look_at(run, TRUNK)).group_mean == 0.5 == group.mean and group.std == pytest.approx(0.5**0.5)
    assert [(m.id, m.trunk, m.place, m.tokens) for m in group.members] == [
        (TRUNK, None, None, 3),
        (OTHER, None, None, 1),
        (AT_2[0], TRUNK, 2, 1),
        (AT_2[1], TRUNK, 2, 2),
        (VOID_AT_3, TRUNK, 3, 0),
    ]


async def test_the_tree_has_one_node_for_each_answer_at_a_place(run: Opened) -> None:
    assert tree((await look_at_group(run, "g")).nodes) == {
        "a": ([TRUNK, *AT_2, VOID_AT_3], pytest.approx(2 / 3), [*AT_2, VOID_AT_3], []),
        "a b": ([TRUNK, AT_2[1]], 1.0, [], [TRUNK, AT_2[1]]),
        "a b c": ([TRUNK], 1.0, [], []),
        "a b C": ([AT_2[1]], 1.0, [], []),
        "a B": ([AT_2[0]], 0.0, [], [AT_2[0]]),
        "a -": ([VOID_AT_3], None, [], []),
        "x": ([OTHER], 0.0, [], []),
    }


def tree(nodes: Sequence[Node]) -> dict[str, tuple[list[str], float | None, list[str], list[str]]]:
    """The answers up to each node → members, reward, those that played it back, siblings."""
    texts: dict[str | None, str] = {None: ""}
    for node in nodes:
        answer = "-" if node.answer is None else node.answer.content
        texts[node.id] = f"{texts[node.parent]} {answer}".strip()
    return {texts[node.id]: (list(node.calls), node.reward, list(node.played_back), node.siblings) for node in nodes}


def forked(**branched_at: int) -> tuple[dict[str, list[Call]], Families]:
    """A trunk with the answers `1 2 3`, and branches of it that answer `x` at their place."""
    trunk = answers(attempt("t"), "1", "2", "3")
    calls = {"t": trunk}
    rollouts = [Rollout(id="t", group_id="g", task=TASK)]
    for name, place in branched_at.items():
        recorded = trunk[: place - 1]
        calls[name] = answers(attempt(name), *(str(n) for n in range(1, place)), f"x{name}", trunk=recorded)
        branch = Branch(attempt_id="t.1", call_id=trunk[place - 1].id)
        rollouts.append(Rollout(id=name, group_id="g", task=TASK, branch=branch))
    return calls, families_of(rollouts, calls)


def attempt(name: str) -> Attempt:
    return Attempt(id=name, rollout_id=name, number=1, token="t")


def test_a_trunk_with_two_places_is_worth_the_mean_of_the_siblings_at_each() -> None:
    calls, families = forked(a=2, b=3, c=3)
    rewards = {"t": 1.0, "a": 0.0, "b": 0.0, "c": 0.5}
    found = tree(branches(calls, rewards=rewards, lessons={}, families=families)[1])
    at_3 = (1 + 0 + 0.5) / 3
    assert {words: node[1] for words, node in found.items()} == {
        "1": pytest.approx((at_3 + 0) / 2),
        "1 2": pytest.approx(at_3),
        "1 2 3": 1.0,
        "1 2 xb": 0.0,
        "1 2 xc": 0.5,
        "1 xa": 0.0,
    }


def test_a_place_counts_only_the_siblings_that_have_a_reward() -> None:
    calls, families = forked(a=2, b=2)
    found = tree(branches(calls, rewards={"t": 1.0, "a": 0.0, "b": None}, lessons={}, families=families)[1])
    assert found["1"][1] == 0.5 and found["1 xb"][1] is None


@pytest.mark.parametrize("seed", range(3))
def test_the_tree_has_the_values_of_fork_credit(seed: int) -> None:
    draw = np.random.default_rng(seed)
    places = {"a": 2, "b": 2, "c": 3, "d": 1}
    calls, families = forked(**places)
    rewards = {name: float(draw.random()) for name in calls}
    group = [
        Trajectory(
            rollout_id=name,
            group_id="g",
            task_id="t7",
            transitions=tuple(
                replace(transition(call.id, prompt=call.prompt_ids.tolist()), replays=call.replays) for call in own
            ),
            reward=rewards[name],
            branch=Branch(attempt_id="t.1", call_id=calls["t"][places[name] - 1].id) if name in places else None,
        )
        for name, own in calls.items()
    ]
    values = dict(zip(calls, (credit.values for credit in fork(group)), strict=True))
    for node in branches(calls, rewards=rewards, lessons={}, families=families)[1]:
        (sampled,) = [name for name in node.calls if name not in node.played_back]
        assert node.reward == pytest.approx(values[sampled][node.calls[sampled] - 1])


async def test_a_void_branch_says_why_with_the_example(run: Opened) -> None:
    view = await look_at(run, VOID_AT_3)
    found = view.as_json()
    assert found["branch"]["void"] == f"call 2 differs from the record: {WHY}" and found["branch"]["here"] is None
    assert "went another way" in found["teaching"]["why_not"] and "differs" in found["calls"][1]["origin"]
    assert (await look_at(run, TRUNK)).as_json()["teaching"]["why_not"] != found["teaching"]["why_not"]


async def test_a_replay_has_no_branching_call_and_may_be_of_another_run(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "store.sqlite")
    branch = Branch(attempt_id=f"{TRUNK}.1", call_id=None)
    await store.enqueue([Rollout(id="again", group_id="g", task=TASK, branch=branch)])
    [(_, attempt)] = await store.claim("w", limit=1, lease_s=60)
    await store.append(*answers(attempt, "a", trunk=answers(attempt, "a")))
    await store.close()
    async with opened(tmp_path) as run:
        view = await look_at(run, "again")
        assert (await look_at_group(run, "g")).members[0].trunk == TRUNK
    found = view.as_json()
    assert (found["branch"]["rollout"], found["branch"]["call"], found["branch"]["is_replay"]) == (None, None, True)
    assert found["calls"][0]["replays"] == {"rollout": None, "call": None}
    assert f"a replay of attempt {TRUNK}.1, which is not recorded here" in printed(view)


def printed(view: RolloutView) -> str:
    file = StringIO()
    show(view, Console(file=file, width=160, markup=False), run_dir=Path("runs/r"), tokens="none", full=False)
    return " ".join(file.getvalue().split())


async def test_a_notebook_tells_the_same(run: Opened) -> None:
    trunk, branch = [shown(await look_at(run, name))._repr_html_() for name in (TRUNK, AT_2[0])]
    assert "branched at call 2: 2 branches, rewards 0 and 1" in trunk and "played back" not in trunk
    assert f"a branch of {TRUNK} at call 2" in branch and branch.count(f"played back from call 1 of {TRUNK}") == 1


async def test_the_command_line_tells_the_same(run: Opened) -> None:
    trunk, branch, void = [printed(await look_at(run, name)) for name in (TRUNK, AT_2[0], VOID_AT_3)]
    assert "branched at call 2: 2 branches, rewards 0 and 1" in trunk and "2 rollouts and 3 branches" in trunk
    assert "branched at call 3: 1 branch, 1 without a reward" in trunk and "played back" not in trunk
    assert f"a branch of {TRUNK} at call 2" in branch and "siblings 1, ▸0◂, 1" in branch
    assert f"played back from call 1 of {TRUNK} · 0 tokens" in branch and f"show runs/r {TRUNK}" in branch
    assert f"void call 2 differs from the record: {WHY}" in void
