"""What the engine says of a token, the trainer says too: every call of a real LangGraph run, through a real SDK and real sockets."""

from pathlib import Path

import numpy as np
import torch

from lightningrl.config import load_config
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.data.transitions import trajectories_of
from lightningrl.loop import Exam
from lightningrl.serve import lightning

RECIPE = Path(__file__).parents[2] / "recipes" / "sql_langgraph" / "recipe.toml"
SMALL = ["loop.tasks_per_step=6", "loop.group_size=4", "trainer.threads=1"]


class Nobody:
    """Watches, and does nothing."""

    def collecting(self, what: str, done: int, total: int) -> None: ...

    def stepped(self, step: int, metrics: dict[str, float]) -> None: ...

    def examined(self, exam: Exam) -> None: ...


async def test_trainer_and_engine_agree_on_every_call_of_a_langgraph_run(tmp_path: Path) -> None:
    config = load_config(RECIPE, SMALL)
    async with lightning(config, tmp_path) as server:
        loop = server.loop(Nobody())
        assert await loop.restore() == 0
        rollouts = await loop.collect(0)
        accepted = [rollout.accepted_attempt_id or "" for rollout in rollouts]
        calls = await server.store.calls(accepted)
        trajectories, report = trajectories_of(rollouts, calls, await server.store.rewards(accepted), policy="policy")
        sampled = sum(len(call.completion_ids) for call in calls)
        assert report.trained_tokens == sampled, "every sampled token is trained, or this test looks away from some"
        assert {call.capture for call in calls} == {"rendered", "bridged"}
        assert sum(call.capture == "bridged" for call in calls) > 5

        lessons = [
            Lesson(
                rollout_id=t.rollout_id,
                group_id=t.group_id,
                transition=c,
                advantages=np.ones(len(c.completion_ids), np.float32),
                weights=np.ones(len(c.completion_ids)),
            )
            for t in trajectories
            for c in t.transitions
        ]
        forest = build_forest(lessons)
        assert len(forest.targets) == sampled
        found = server.learners[0].trainer.forward_backward(forest)
        assert np.abs(found.logprobs - forest.logprobs).max() < 1e-4

        parent = {call.id: call for call in calls}
        for call in calls:  # the history is the ids that were read and sampled, spliced
            if call.capture == "bridged":
                before = parent[call.parent_call_id or ""]
                spliced = np.concatenate((before.prompt_ids, before.completion_ids))
                assert call.prompt_ids[: len(spliced)].tolist() == spliced.tolist()

    from transformers import AutoModelForCausalLM  # an opinion of neither of the two

    model = AutoModelForCausalLM.from_pretrained(RECIPE.parent / config.model.path)
    for call in calls[::7]:
        ids = torch.tensor(np.concatenate((call.prompt_ids, call.completion_ids)), dtype=torch.long)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        P = len(call.prompt_ids)
        theirs = logprobs[P - 1 : -1].gather(-1, ids[P:, None])[:, 0].numpy()
        assert np.abs(theirs - call.logprobs).max() < 1e-4
