"""A branch that samples the recorded answer again ends exactly as its trunk did: for every call of an agent with
parallel conversations, in every dialect, streaming and not, through real SDKs and a real socket.
"""

import asyncio
import random
from collections.abc import Sequence

import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.leases import Outcome, StoreLeases
from lightningrl.types import Rollout, Sampling, Task
from tests.branched import Ending, assert_same_ending, branches, ended

from .conftest import Script, Stage
from .talks import DIALECTS, Talker, talk

pytestmark = pytest.mark.filterwarnings(
    "ignore:Inheritance class AiohttpClientSession:DeprecationWarning"  # of Google's SDK
)

CITIES = ("Paris", "Rome", "Zürich ❄")
TEXTS = ("it is sunny", "who knows ?", "the word is blue", "äöü €", "")


def undecided(template: ChatTemplate) -> Script:
    """An engine's script whose answers follow from prompt and seed: texts and tool calls, some of them with both."""

    def answer(prompt_ids: list[int], sampling: Sampling) -> Sequence[int]:
        rng = random.Random(f"{prompt_ids}{sampling.seed}")
        wish = f'<tool_call>\n{{"name": "weather", "arguments": {{"city":  "{rng.choice(CITIES)}"}}}}\n</tool_call>'
        text = "\n".join([rng.choice(TEXTS), *[wish] * rng.choice((0, 0, 1, 1, 2))])
        return [*template.encode(text), template.turn_end_id or 0]

    return answer


async def agent(talker: Talker) -> list[str]:
    """A conversation, then four in parallel, two of them about the same; then one about what they said."""
    plan = await talk(talker, "what is the weather ?")
    asked = (f"{plan} {word}" for word in ("left", "right", "right", "again"))
    found = await asyncio.gather(*(talk(talker, text) for text in asked))
    return [*sorted(found), await talk(talker, " | ".join(sorted(found)))]


async def run(stage: Stage, rollout: Rollout, *, dialect: str, stream: bool) -> Ending:
    """Run the agent as a worker would, and end its attempt."""
    await stage.store.enqueue([rollout])
    leases = StoreLeases(stage.store).of("w")
    [(rollout, attempt)] = await leases.claim(limit=1, holding=())
    talker = DIALECTS[dialect](stage.url, attempt.token, stream=stream)
    outcome = Outcome(status="succeeded", output=await agent(talker))
    await talker.close()
    await leases.finish(attempt.id, outcome)
    return await ended(stage.store, rollout)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_branch_that_samples_the_recorded_answer_again_ends_as_its_trunk(
    stage: Stage, dialect: str, stream: bool
) -> None:
    stage.engine.script = undecided(stage.template)
    task = Task(id="t", input={}, split="train")
    first = Rollout(id="r", group_id="g", task=task, sampling={"seed": 1})
    trunk = await run(stage, first, dialect=dialect, stream=stream)
    assert {call.dialect for call in trunk.calls} == {dialect}
    assert len(trunk.calls) > 6
    for rollout in branches(trunk):
        asked = len(stage.engine.asked)
        branch = await run(stage, rollout, dialect=dialect, stream=stream)
        assert_same_ending(trunk, branch)
        fresh = sum(call.replays is None for call in branch.calls)
        assert len(stage.engine.asked) - asked == fresh, "only fresh answers cost the engine anything"
