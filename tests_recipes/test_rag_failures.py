"""In a real run of the research agent, its search raises and its MCP server is killed. Neither counts as reward 0."""

from pathlib import Path

import pytest

from tests.recipes.failures import copied, trained

SCRIPT = """
from tests.recipes.forced import kill

KILL = {kill}
begun = 0


def script(prompt, messages, tools):
    global begun
    results = [message for message in messages if message["role"] == "tool"]
    if not results:
        begun += 1
        return [{{"name": "search", "arguments": {{"query": "nobody knows this"}}}}]
    if len(results) == 1:
        if begun == KILL:
            kill("server.py")
        return [{{"name": "search", "arguments": {{"query": "FAIL"}} if begun == 3 else {{"find": 1}}}}]
    assert begun not in (3, KILL)
    return "<answer> oak ford </answer>" if begun % 2 else "oak"
"""
BREAK = "        scores = self.scorer(query)\n"
CHANGE = {"search.py": (BREAK, '        if query == "FAIL":\n            raise OSError("the index is gone")\n' + BREAK)}
TASK = {"question": "where is it", "world": "heldout-0", "answer": "oak ford"}


@pytest.mark.parametrize(("where", "killed"), [("local", None), ("mcp", 5)])
async def test_a_search_that_raises_or_is_killed_fails_its_attempt_and_the_next_one_is_rewarded(
    model_folder: Path, tmp_path: Path, where: str, killed: int | None
) -> None:
    recipe = copied(
        "rag_openai_agents", tmp_path, model=model_folder, task=TASK, script=SCRIPT.format(kill=killed), change=CHANGE
    )
    run = await trained(recipe, f"agent.env={{RAG_SEARCH='{where}', RAG_MAX_TOKENS='400'}}")
    failed = run.failed()
    assert all(line.startswith("AgentError: ") for line in failed) and len(failed) == (1 if killed is None else 2)
    assert sum("the index is gone" in line for line in failed) == 1, failed
    run.check()
