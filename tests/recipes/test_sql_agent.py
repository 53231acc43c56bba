"""The agent writes, executes, checks and rewrites queries, here with a scripted server on a real socket."""

import json
import subprocess
import sys
from typing import Any

import pytest

GOOD, EMPTY, BROKEN = "SELECT a FROM t WHERE b = 'RED'", "SELECT a FROM t WHERE b = 'red'", "SELECT c FROM t"
SETUP = "CREATE TABLE t(a INTEGER, b TEXT); INSERT INTO t VALUES (7,'RED'),(8,'BLUE');"
TASK = {"question": "the a of t where b is 'red'", "schema": "table t: a b", "setup": SETUP}


def test_a_good_query_is_the_answer_at_once(sql: Any, server: Any) -> None:
    server.answers = [f" {GOOD}\n"]
    assert sql.agent.run(TASK) == {"sql": GOOD, "queries": [GOOD]}
    (request,) = server.asked
    assert request["model"] == "sql-writer"
    assert server.keys == ["Bearer attempt-token"]
    assert request["messages"][1]["content"] == f"{TASK['schema']}\n{TASK['question']}"
    assert "temperature" not in request


def test_an_error_and_an_empty_result_are_read_and_rewritten_in_one_growing_conversation(sql: Any, server: Any) -> None:
    server.answers = [BROKEN, EMPTY, GOOD]
    assert sql.agent.run(TASK) == {"sql": GOOD, "queries": [BROKEN, EMPTY, GOOD]}
    assert [request["model"] for request in server.asked] == ["sql-writer", "sql-rewriter", "sql-rewriter"]
    first, second, third = (request["messages"] for request in server.asked)
    assert second == [
        *first,
        {"role": "assistant", "content": BROKEN},
        {"role": "user", "content": "no such column: c\ncolumns of t: a b"},
    ]
    assert third == [
        *second,
        {"role": "assistant", "content": EMPTY},
        {"role": "user", "content": "nothing found\nvalues of b: 'RED' 'BLUE'"},
    ]


def test_the_third_query_is_the_last(sql: Any, server: Any) -> None:
    server.answers = [BROKEN] * 4
    assert sql.agent.run(TASK)["queries"] == [BROKEN] * 3
    assert len(server.answers) == 1


def test_rewriting_can_be_switched_off(sql: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQL_MAX_TURNS", "1")
    server.answers = [BROKEN, GOOD]
    assert sql.agent.run(TASK) == {"sql": BROKEN, "queries": [BROKEN]}


def test_a_model_may_check_in_place_of_the_rule(sql: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQL_CHECKER", "model")
    server.answers = ["SELECT a FROM t", "no", GOOD, "Yes"]
    assert sql.agent.run(TASK) == {"sql": GOOD, "queries": ["SELECT a FROM t", GOOD]}
    assert [request["model"] for request in server.asked] == [
        "sql-writer",
        "sql-checker",
        "sql-rewriter",
        "sql-checker",
    ]
    assert server.asked[1]["messages"][-1]["content"] == "7\n8\nis this right ? yes or no"


def test_model_names_come_from_the_environment(sql: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQL_WRITER_MODEL", "other")
    server.answers = [GOOD]
    sql.agent.run(TASK)
    assert server.asked[0]["model"] == "other"


def test_a_key_that_changes_is_used_from_the_next_run_on(
    sql: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [GOOD, GOOD]
    sql.agent.run(TASK)
    monkeypatch.setenv("OPENAI_API_KEY", "another-token")
    sql.agent.run(TASK)
    assert server.keys == ["Bearer attempt-token", "Bearer another-token"]


def test_the_agent_is_also_a_program(sql: Any, server: Any) -> None:
    server.answers = [GOOD]
    done = subprocess.run(
        [sys.executable, "agent.py"],
        cwd=sql.folder,
        input=json.dumps(TASK),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == {"sql": GOOD, "queries": [GOOD]}


def test_the_agent_has_no_trace_of_training(sql: Any) -> None:
    for name in ("agent", "database", "feedback"):
        assert "lightningrl" not in (sql.folder / f"{name}.py").read_text().lower()
