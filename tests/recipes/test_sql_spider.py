"""The loader reads Spider's folder as it is downloaded; here a small one of the same layout."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    schema = {
        "db_id": "shops",
        "table_names_original": ["Shop", "Item"],
        "table_names": ["shop", "item"],
        "column_names_original": [[-1, "*"], [0, "Shop_ID"], [0, "City"], [1, "Item_ID"], [1, "Shop_ID"], [1, "Price"]],
        "column_names": [[-1, "*"], [0, "shop id"], [0, "city"], [1, "item id"], [1, "shop id"], [1, "price"]],
        "column_types": ["text", "number", "text", "number", "number", "number"],
        "primary_keys": [1, 3],
        "foreign_keys": [[4, 1]],
    }
    questions = [
        {
            "db_id": "shops",
            "question": "How many shops are there?",
            "query": "SELECT count(*) FROM Shop",
            "query_toks": [],
            "sql": {},
        },
        {
            "db_id": "shops",
            "question": "List prices, cheapest first.",
            "query": "SELECT Price FROM Item ORDER BY Price",
            "query_toks": [],
            "sql": {},
        },
    ]
    (tmp_path / "tables.json").write_text(json.dumps([schema]))
    (tmp_path / "train_spider.json").write_text(json.dumps(questions))
    (tmp_path / "dev.json").write_text(json.dumps(questions[1:]))
    (tmp_path / "database" / "shops").mkdir(parents=True)
    database = sqlite3.connect(tmp_path / "database" / "shops" / "shops.sqlite")
    database.executescript(
        "CREATE TABLE Shop(Shop_ID INTEGER PRIMARY KEY, City TEXT);"
        "CREATE TABLE Item(Item_ID INTEGER, Shop_ID INTEGER REFERENCES Shop, Price REAL);"
        "INSERT INTO Shop VALUES (1,'Rome'),(2,'Oslo'); INSERT INTO Item VALUES (1,1,2.5),(2,2,1.5);"
    )
    database.close()
    return tmp_path


def test_questions_become_tasks_that_reward_understands(sql: Any, folder: Path) -> None:
    first, second = sql.spider.load(folder, "train")
    assert (
        first["input"]["schema"]
        == "table Shop: Shop_ID City\ntable Item: Item_ID Shop_ID Price\nItem.Shop_ID = Shop.Shop_ID"
    )
    assert sql.tasks.reward(first["input"], {"sql": "SELECT COUNT(Shop_ID) FROM Shop"}) == 1.0
    assert sql.tasks.reward(first["input"], "SELECT City FROM Shop") == 0.0
    assert sql.tasks.reward(second["input"], "SELECT Price FROM Item ORDER BY Price") == 1.0
    assert sql.tasks.reward(second["input"], "SELECT Price FROM Item ORDER BY Price DESC") == 0.0


def test_the_agents_feedback_works_on_a_database_file_and_cannot_change_it(sql: Any, folder: Path) -> None:
    row = sql.spider.load(folder, "heldout")[0]["input"]
    before = Path(row["database"]).read_bytes()
    database = sql.database.open_database(row)
    assert (
        sql.feedback.execute(database, "SELECT Cost FROM Item").text
        == "no such column: Cost\ncolumns of Item: Item_ID Shop_ID Price"
    )
    assert (
        sql.feedback.execute(database, "SELECT City FROM Shop WHERE City = 'rome'").text
        == "nothing found\nvalues of City: 'Rome' 'Oslo'"
    )
    assert not sql.feedback.execute(database, "DELETE FROM Shop").good
    database.close()
    assert Path(row["database"]).read_bytes() == before


def test_tasks_of_the_folder_in_the_environment_follow_from_the_seed(
    sql: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPIDER", str(folder))
    rows = sql.spider.tasks("train", seed=1, count=5)
    assert len(rows) == 5
    assert rows == sql.spider.tasks("train", seed=1, count=5)
    assert [row["input"]["question"] for row in sql.spider.tasks("heldout", seed=1, count=1)] == [
        "List prices, cheapest first."
    ]


def test_a_broken_entry_is_named_and_the_others_are_read(sql: Any, folder: Path) -> None:
    good = json.loads((folder / "train_spider.json").read_text())
    bad = [{"db_id": "shops", "question": "Half a question"}, "nothing", {**good[0], "db_id": "ships"}]
    (folder / "train_spider.json").write_text(json.dumps([good[0], *bad, good[1]]))
    with pytest.warns(UserWarning) as caught:
        rows = sql.spider.load(folder, "train")
    assert [row["input"]["gold"] for row in rows] == [entry["query"] for entry in good]
    said = [str(warning.message).partition("\nhint: ")[0] for warning in caught]
    assert [line.partition(" is left out: ")[0].partition("` ")[2] for line in said] == [
        "entry 2",
        "entry 3",
        "entry 4",
    ]
    assert said[0].endswith("'query' is missing or unknown") and said[2].endswith("'ships' is missing or unknown")
    (folder / "dev.json").write_text('[{"db_id": ')
    with pytest.raises(ValueError, match=r"dev.json` cannot be read: .*\nhint: "):
        sql.spider.load(folder, "heldout")


def test_a_missing_folder_is_named(sql: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPIDER", raising=False)
    with pytest.raises(ValueError, match="SPIDER"):
        sql.spider.tasks("train", seed=0, count=1)
