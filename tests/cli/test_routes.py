"""Routes in one training run: to the policy, to frozen weights, and to another server."""

import asyncio
from pathlib import Path

from lightningrl.models.load import load_model
from lightningrl.store import open_store
from lightningrl.types import Call
from tests.conftest import SmallRecipe
from tests.gateway.test_embedded import logprobs_of

TWO_ROLES = 'for follow_up, model in (("again : pick another one", "policy"), (None, "checker")):'


def with_a_checker(recipe: SmallRecipe) -> None:
    recipe.rewrite_agent(
        lambda text: text.replace('for follow_up in ("again : pick another one", None):', TWO_ROLES).replace(
            'model="policy"', "model=model"
        )
    )


def calls_of(path: Path) -> list[Call]:
    async def read() -> list[Call]:
        store = await open_store(f"sqlite://{path}")
        attempts = await store.attempts([rollout.id for rollout in await store.rollouts()])
        calls = await store.calls([attempt.id for attempt in attempts])
        await store.close()
        return sorted(calls, key=lambda call: call.started_at)

    return asyncio.run(read())


def test_a_checkpoint_of_another_run_answers_unchanged(small_recipe: SmallRecipe) -> None:
    with_a_checker(small_recipe)
    plain = ("loop.steps=2", "loop.group_size=2", "tasks.heldout=1")
    small_recipe.train("--run-dir", "first", *plain)
    frozen = 'policy="frozen", weights="first/checkpoints/step-00001"'
    routes = f'routes=[{{model="checker", {frozen}, agent="judge"}}, {{model="*"}}]'
    small_recipe.train("--run-dir", "second", *plain, routes)
    calls = calls_of(small_recipe.folder / "second" / "store.sqlite")
    judged = [call for call in calls if call.agent == "judge"]
    assert {call.policy for call in judged} == {"frozen:first/checkpoints/step-00001"}
    assert len(judged) == 2 * 2 * 2 + 4, "steps · tasks · group, and four exams"
    assert {call.policy_version for call in calls if call.policy == "policy"} == {0, 1, 2}
    checkpoint = load_model(str(small_recipe.folder / "first" / "checkpoints" / "step-00001"))
    sampled = [call for call in judged if call.sampling.temperature == 1]
    for call in (sampled[0], sampled[-1]):  # the last one was answered after two steps of learning
        assert abs(logprobs_of(checkpoint.hf, call) - call.logprobs).max() < 1e-4


def test_missing_weights_are_named(small_recipe: SmallRecipe) -> None:
    done = small_recipe.cli(
        "train", str(small_recipe.path), "--run-dir", "run", 'routes=[{policy="frozen", weights="./nothing"}]'
    )
    assert done.returncode == 2
    assert "nothing" in done.stderr and "hint:" in done.stderr


def test_routes_that_make_no_sense_are_refused(small_recipe: SmallRecipe) -> None:
    for routes, said in (
        ('routes=[{policy="upstreams.nobody"}]', "no policy `upstreams.nobody`"),
        ('routes=[{policy="other"}]', "no policy `other`"),
        ('routes=[{system="*title*", train=false}]', "needs an `agent`"),
    ):
        done = small_recipe.cli("train", str(small_recipe.path), "--dry-run", routes)
        assert done.returncode == 2
        assert said in " ".join(done.stderr.split())
