"""Tasks depend on (split, seed) alone; luck, tampering or peeking earns no reward."""

import re
import sqlite3
import time
from typing import Any

import pytest

COUNT = 200


@pytest.fixture(scope="module")
def heldout(sql: Any) -> list[Any]:
    return sql.tasks.problems("heldout", seed=0, count=COUNT)


@pytest.fixture(scope="module")
def train(sql: Any) -> list[Any]:
    return sql.tasks.problems("train", seed=0, count=COUNT)


def test_tasks_follow_from_split_and_seed_alone(sql: Any) -> None:
    first = sql.tasks.tasks("train", seed=3, count=8)
    assert sql.tasks.tasks("train", seed=3, count=12)[:8] == first
    assert sql.tasks.tasks("train", seed=4, count=8) != first
    assert len({row["id"] for row in first}) == 8


def test_a_known_task_is_the_same_on_every_machine(sql: Any) -> None:
    row = sql.tasks.tasks("heldout", seed=0, count=1)[0]["input"]
    assert row["question"] == "list the genre , area of game with its club whose nation equals 'norway'"
    assert row["gold"] == "SELECT genre , area FROM game JOIN club USING ( club_id ) WHERE country = 'norway'"


def test_no_schema_and_no_structure_is_in_both_splits(sql: Any, train: list[Any], heldout: list[Any]) -> None:
    for seen in (lambda p: p.schema.signature(), lambda p: sql.grammar.structure(p.gold)):
        assert not {seen(p) for p in train} & {seen(p) for p in heldout}
        assert {sql.schema.is_heldout(seen(p)) for p in train} == {False}
        assert {sql.schema.is_heldout(seen(p)) for p in heldout} == {True}


def test_every_word_of_the_heldout_split_is_known_from_training(sql: Any, heldout: list[Any]) -> None:
    known = {word for p in sql.tasks.problems("train", seed=1, count=1000) for word in words_of(p)}
    assert {word for p in heldout for word in words_of(p)} <= known


def words_of(problem: Any) -> list[str]:
    return re.findall(r"\w+", f"{problem.schema.text()} {problem.question} {problem.gold}")


def test_databases_have_two_or_three_tables_of_8_to_20_rows_and_foreign_keys_that_hold(
    sql: Any, heldout: list[Any]
) -> None:
    for problem in heldout[:50]:
        for setup in problem.setups:
            database = sqlite3.connect(":memory:")
            database.executescript(setup)
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            assert 2 <= len(tables) <= 3
            assert all(8 <= database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] <= 20 for table in tables)
            assert database.execute(f"PRAGMA foreign_key_list({problem.query.table})").fetchall()
            assert database.execute("PRAGMA foreign_key_check").fetchall() == []
            database.close()


def test_gold_earns_one_and_every_typical_mistake_earns_nothing(sql: Any, heldout: list[Any], train: list[Any]) -> None:
    for problem in [*heldout, *train]:
        row = sql.tasks.as_task(problem, "x")["input"]
        assert sql.tasks.reward(row, {"sql": problem.gold}) == 1.0
        assert sql.tasks.reward(row, problem.gold) == 1.0
        for name, wrong in sql.slips.slips(problem.query):
            assert sql.tasks.reward(row, sql.problems.gold_sql(wrong)) == 0.0, (name, problem.gold)


def test_a_query_that_is_right_on_one_fill_only_earns_nothing(sql: Any, heldout: list[Any]) -> None:
    problem = next(p for p in heldout if p.query.aggregate == "SUM" and p.query.group is None)
    row = sql.tasks.as_task(problem, "x")["input"]
    database = sql.database.open_database(row)
    lucky = f"SELECT {sql.database.run_query(database, problem.gold)[0][0]}"
    database.close()
    assert sql.tasks.reward({k: v for k, v in row.items() if k != "second_setup"}, lucky) == 1.0
    assert sql.tasks.reward(row, lucky) == 0.0


def test_the_order_of_rows_counts_only_if_gold_has_one(sql: Any) -> None:
    row = {"setup": "CREATE TABLE t(a INTEGER); INSERT INTO t VALUES (1),(2),(2);"}
    unordered, ordered = {**row, "gold": "SELECT a FROM t"}, {**row, "gold": "SELECT a FROM t ORDER BY a"}
    assert sql.tasks.reward(unordered, "SELECT a FROM t ORDER BY a DESC") == 1.0
    assert sql.tasks.reward(unordered, "SELECT DISTINCT a FROM t") == 0.0
    assert sql.tasks.reward(ordered, "SELECT a FROM t ORDER BY a DESC") == 0.0
    assert sql.tasks.reward(ordered, "SELECT a + 0.0 FROM t ORDER BY a") == 1.0


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "hello",
        "SELECT",
        "SELECT 1; SELECT 2",
        "PRAGMA user_version = 1",
        "DROP TABLE t",
        "SELECT '\x00",
        "\x00",
        None,
        3,
        {},
        {"sql": None},
        ["SELECT a FROM t"],
    ],
)
def test_garbage_earns_nothing(sql: Any, garbage: object) -> None:
    row = {"setup": "CREATE TABLE t(a INTEGER); INSERT INTO t VALUES (1);", "gold": "SELECT a FROM t"}
    assert sql.tasks.reward(row, garbage) == 0.0


@pytest.mark.parametrize(
    "query",
    [
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
        "SELECT COUNT(*) FROM " + ", ".join(f"t AS t{i}" for i in range(12)),
        "SELECT length(zeroblob(1000000000))",
    ],
)
def test_a_query_that_would_run_for_ever_is_stopped(sql: Any, query: str) -> None:
    rows = ",".join(f"({i})" for i in range(20))
    row = {"setup": f"CREATE TABLE t(a INTEGER); INSERT INTO t VALUES {rows};", "gold": "SELECT a FROM t"}
    began = time.perf_counter()
    assert sql.tasks.reward(row, query) == 0.0
    assert time.perf_counter() - began < 2.0


def test_a_query_can_only_read(sql: Any, tmp_path: Any) -> None:
    database = sql.database.open_database({"setup": "CREATE TABLE t(a INTEGER); INSERT INTO t VALUES (1);"})
    for query in (
        "DELETE FROM t",
        "INSERT INTO t VALUES (2)",
        "CREATE TABLE u(a)",
        f"ATTACH '{tmp_path / 'x.db'}' AS x",
        "PRAGMA writable_schema = 1",
    ):
        with pytest.raises(sqlite3.Error):
            sql.database.run_query(database, query)
    assert sql.database.run_query(database, "SELECT a FROM t") == [(1,)]
    assert list(tmp_path.iterdir()) == []
    database.close()


def test_feedback_is_needed_for_at_least_a_third_of_the_tasks_and_then_tells_what_was_missing(
    sql: Any, heldout: list[Any]
) -> None:
    hidden = [p for p in heldout if p.kind != "plain"]
    assert len(hidden) >= COUNT / 3
    for problem in hidden:
        naive = sql.grammar.sql(problem.query, name=lambda column: column.shown, literal=lambda column, word: word)
        database = sql.database.open_database({"setup": problem.setups[0]})
        feedback = sql.feedback.execute(database, naive)
        database.close()
        assert not feedback.good
        if problem.kind == "literal":
            compared = [c for c in problem.query.filters if c.column.kind == "text"]
            written = [f"'{sql.words.stored(word, c.column.form)}'" for c in compared for word in c.values]
            assert all(word in feedback.text for word in written)
        else:
            assert feedback.text.startswith("no such column")
            assert any(
                column.name in feedback.text.split("\n", 1)[1]
                for column in problem.query.used()
                if column.name != column.shown
            )


def test_feedback_on_a_good_query_is_its_first_rows(sql: Any) -> None:
    database = sql.database.open_database({"setup": "CREATE TABLE t(a INTEGER); INSERT INTO t VALUES (1),(2),(3),(4);"})
    assert sql.feedback.execute(database, "SELECT a FROM t") == sql.feedback.Feedback(text="1\n2\n3", good=True)
    assert sql.feedback.execute(database, "SELECT SUM(a) FROM t WHERE a > 9") == sql.feedback.Feedback(
        text="nothing found", good=False
    )
    database.close()
