"""In real runs of the LangGraph recipes a database breaks, and a node raises. Neither is a reward of 0 or trained.

Recipes whose frameworks need their own venvs have such tests in `tests_recipes`.
"""

import sqlite3
from pathlib import Path

from tests.recipes.failures import copied, trained

SQL = """
from pathlib import Path

DATABASE = Path({database!r})
WHOLE = DATABASE.read_bytes()
begun = 0


def script(prompt, messages, tools):
    global begun
    if len(messages) == 2:
        DATABASE.write_bytes(WHOLE)
        begun += 1
        return "SELECT c FROM t"
    if begun == 3:
        DATABASE.write_bytes(b"nothing" * 4096)
    return "SELECT a FROM t" if begun % 2 else "SELECT b FROM t"
"""
TEAM = """
begun = 0


def script(prompt, messages, tools):
    global begun
    match messages[0]["content"]:
        case "plan":
            begun += 1
            return "3 + 2"
        case "solve":
            return "FAIL" if begun == 3 else str(4 + begun % 2)
    return "good"
"""
SOLVED = '    answer = ask("solver", messages)\n'


async def test_a_database_that_breaks_fails_its_attempt_and_the_next_one_is_rewarded(
    model_folder: Path, tmp_path: Path
) -> None:
    database = tmp_path / "shop.sqlite"
    with sqlite3.connect(database) as connection:
        connection.executescript("CREATE TABLE t(a INTEGER, b TEXT); INSERT INTO t VALUES (7,'RED'),(8,'BLUE');")
    connection.close()
    task = {"question": "a of t", "schema": "table t: a b", "database": str(database), "gold": "SELECT a FROM t"}
    script = SQL.format(database=str(database))
    run = await trained(copied("sql_langgraph", tmp_path, model=model_folder, task=task, script=script, change={}))
    (failed,) = run.failed()
    assert failed == "AgentError: DatabaseFailed: file is not a database"
    run.check()


async def test_a_node_that_raises_fails_its_attempt_and_the_next_one_is_rewarded(
    model_folder: Path, tmp_path: Path
) -> None:
    change = {
        "agent.py": (SOLVED, SOLVED + '    if answer.text == "FAIL":\n        raise OSError("no table of sums")\n')
    }
    recipe = copied(
        "multi_agent", tmp_path, model=model_folder, task={"riddle": "3 + 2", "answer": "5"}, script=TEAM, change=change
    )
    run = await trained(recipe, "policies={}")
    assert run.failed() == ["AgentError: OSError: no table of sums"]
    run.check()
