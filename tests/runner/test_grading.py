"""`agent.grade = "server"`: agents run in one pool, their answers are graded in another."""

from pathlib import Path

from lightningrl.config import AgentConfig
from lightningrl.leases import Outcome
from lightningrl.runner.conformance import attempt
from lightningrl.runner.pool import WorkerPool

AGENT = """
import sys

def run(task):
    return {"graders loaded": "rewards" in sys.modules, "answer": 7}
"""
REWARDS = """
import sys

def reward(task, output):
    assert "agent" not in sys.modules and output["answer"] == 7 and task == {"question": "?"}
    if output.get("broken"):
        raise ValueError("cannot tell")
    return 0.5
"""


async def test_the_agent_runs_without_the_grader_and_the_grader_without_the_agent(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rewards.py").write_text(REWARDS)
    settings = AgentConfig(entry="agent:run", reward="rewards:reward", workers=1, grade="server")
    agents, graders = WorkerPool(settings, root=tmp_path), WorkerPool(settings, root=tmp_path, grades=True)
    await agents.start()
    await graders.start()
    try:
        rollout, tried, env = attempt({"question": "?"}, name="1", timeout_s=20.0)
        ran = await agents.run(rollout, tried, env)
        assert (ran.status, ran.output, ran.rewards) == ("succeeded", {"graders loaded": False, "answer": 7}, ())
        graded = await graders.grade(rollout, tried, ran)
        assert (graded.status, graded.output) == ("succeeded", ran.output)
        assert [(reward.name, reward.value) for reward in graded.rewards] == [("final", 0.5)]
        broken = Outcome(status="succeeded", output={"answer": 7, "broken": True})
        failed = await graders.grade(rollout, tried, broken)
        assert failed.status == "failed" and (failed.error or "").startswith("GraderError: ValueError: cannot tell")
    finally:
        await agents.close()
        await graders.close()
