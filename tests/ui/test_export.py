"""The page of a run in one file: it holds what the API answers, and no script but its own."""

import hashlib
import json
import math
import re
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from lightningrl.errors import UserError
from lightningrl.look.columns import Columns
from lightningrl.store.base import Outcome
from lightningrl.ui.export import assembled, chosen_rollouts, exported
from lightningrl.ui.files import PAGE
from tests.ui.conftest import ODD, Page

EVIL = "</script><script>alert(1)</script><!--<script>\u2028"


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="embedded">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])["answers"]


def blocks(page: str) -> list[tuple[str, str]]:
    """(attributes, text) of each script."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)


async def test_it_holds_what_the_api_answers(run: Path, page: Page) -> None:
    answers = embedded((await exported(run)).decode())
    async with page(run) as client:
        for path, answer in answers.items():
            told = await client.get(path)
            assert told.status_code == 200, path
            assert told.json() == answer, path
    assert {"/api/runs", "/api/runs/one", "/api/runs/one/metrics", "/api/runs/one/health"} <= answers.keys()
    assert {f"/api/runs/one/rollouts/{quote(name, safe='')}/calls/1" for name in (ODD, "train-00000-000-00")} <= (
        answers.keys()
    )
    assert len(answers["/api/runs/one/groups/g%2F1"]["members"]) == 2
    assert answers["/api/runs/one/rollouts?limit=100"]["total"] == 2
    assert [row["reward"] for row in answers["/api/runs/one/rollouts?sort=reward&limit=100"]["rows"]] == [0.0, 1.0]


async def test_only_its_own_scripts_run_and_all_they_import_is_there(run: Path) -> None:
    page = (await exported(run)).decode()
    policy = re.search(r'http-equiv="content-security-policy" content="([^"]+)"', page)
    assert policy is not None and "'unsafe" not in policy[1] and "http" not in policy[1]
    hashes = re.findall(r"'sha256-([^']+)'", policy[1])
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    scripts = [text for attributes, text in blocks(page) if "json" not in attributes]
    assert [b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (*scripts, *styles)] == hashes
    imports = json.loads(scripts[0])["imports"]
    assert len(imports) == sum(1 for file in PAGE.rglob("*") if file.suffix in (".js", ".mjs"))
    for name, url in imports.items():
        text = b64decode(url.partition("base64,")[2]).decode()
        asked = re.findall(r'\b(?:from|import)\s*"((?:\.|page)[^"]*)"', text)
        assert set(asked) <= imports.keys(), name
    assert not re.search(r'(?:src|href)="(?!data:|#)', page), "nothing outside the file is loaded"


def test_what_an_agent_said_cannot_end_the_script_that_holds_it() -> None:
    page = assembled({"/api/runs": {"said": EVIL}}).decode()
    assert embedded(page) == {"/api/runs": {"said": EVIL}}
    assert len(blocks(page)) == 3 and "alert(1)</script>" not in page


def columns(rewards: list[float | None], *, size: int) -> Columns:
    """Rollouts of training steps with two groups of `size` each."""
    found = Columns()
    found.put(
        [
            Outcome(
                place=place,
                id=f"train-{place // (2 * size):05d}-{place:03d}",
                group_id=f"g{place // size}",
                task_id="t",
                split="train",
                status="succeeded",
                attempts=1,
                attempt_status="succeeded",
                worker="w",
                started_at=1.0,
                ended_at=2.0,
                error=None,
                reward=reward,
                calls=1,
                sampled_tokens=1,
            )
            for place, reward in enumerate(rewards)
        ]
    )
    return found


@pytest.mark.parametrize(
    ("rewards", "chosen"),
    [
        ([], []),
        ([None, None, None, None], [math.nan]),
        ([0.5, None, None, None], [0.5]),
        ([9, 9, 9, 9, 9, 9, 0.1, 0.4, 0.2, 1.0, 0.3, 0.0], [1.0, 0.0, 0.3]),
        ([1, 1, 1, 0.2, 0.4, 0.3], [0.4, 0.2, 0.3]),
        ([1, 1, 1, 1, 1, 1], [1, 1, 1]),
    ],
)
def test_best_worst_and_median_are_of_the_last_step_and_of_groups_that_differ(
    rewards: list[float | None], chosen: list[float]
) -> None:
    found = columns(rewards, size=3)
    ids = chosen_rollouts(found)
    assert len(set(ids)) == len(ids)
    assert [float(found.rows["reward"][found.ids.index(name)]) for name in ids] == pytest.approx(
        np.array(chosen), nan_ok=True
    )


async def test_a_run_without_records_cannot_be_exported(run: Path) -> None:
    for file in run.glob("store.sqlite*"):
        file.unlink()
    with pytest.raises(UserError, match="no records"):
        await exported(run)
