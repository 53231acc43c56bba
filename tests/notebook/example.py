"""The example of docs/python.md. `test_example.py` runs it in the folder of a recipe."""

import lightningrl as lrl

run = lrl.train("recipe.toml", steps=2, overrides={"loop.group_size": 6, "tasks.heldout": 4})

run = lrl.open(run.path)  # any run, also one that goes on

curve = run.curve()  # steps and exams, in order
rewards = {point.step: point.reward for point in curve if point.kind == "step"}
best = max(curve, key=lambda point: point.reward)
entropy = [point.metrics["policy/entropy"] for point in curve if point.kind == "step"]

worst = run.rollouts(split="train", sort="reward", limit=3)
good = run.rollouts(reward=(0.5, 1.0), step=1, split="train")
failed = run.rollouts(failed=True, limit=None)  # None: all of them
blue = run.rollouts(said="blue")  # in the messages and answers of their calls

rollout = run.rollout(worst[0].id)
question = rollout.task.input["question"]
answers = [call.answer.content for call in rollout.calls if call.answer]

tokens = rollout.calls[1].tokens
surprise = min(tokens, key=lambda token: token.logprob)
pushed_up = [token.text for token in tokens if token.advantage and token.advantage > 0]

warnings = run.health().warnings
group_size = run.settings["loop"]["group_size"]

table = run.rollouts(limit=None).to_pandas()
by_step = table[table.kind == "train"].groupby("step").reward.mean()
