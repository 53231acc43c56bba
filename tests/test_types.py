"""Can the records that workers receive be sent as JSON?"""

import msgspec

from lightningrl.types import Attempt, Rollout, Task


def test_a_rollout_and_an_attempt_survive_the_way_through_json() -> None:
    task = Task(id="t", input={"question": "wie groß?", "n": [1, 2.5, None]}, split="train")
    rollout = Rollout(id="r", group_id="g", task=task, sampling={"temperature": 0.0}, labels=("gpu", "browser"))
    attempt = Attempt(id="r.1", rollout_id="r", number=1, token="lrl-x", worker="w", gateway="one", output={"a": [1]})
    text = msgspec.json.encode((rollout, attempt))
    assert msgspec.json.decode(text, type=tuple[Rollout, Attempt]) == (rollout, attempt)
