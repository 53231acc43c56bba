"""What the page's API answers: runs, metrics with a cursor, health, rollouts; and live updates."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from lightningrl.look.process import named
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Rollout, Task
from lightningrl.ui import live
from lightningrl.ui.files import PAGE
from tests.ui.conftest import ODD, ROWS, Page, make_run, write_rows


async def get(client: httpx2.AsyncClient, path: str, *, status: int = 200) -> Any:
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_runs_are_listed_with_their_state_and_progress(run: Path, page: Page) -> None:
    (run / "result.json").write_text(json.dumps({"heldout_after": 0.5, "learnt": "yes"}))
    async with page(run.parent) as client:
        told = (await get(client, "/api/runs"))["runs"]
        assert len(told) == 1
        line = told[0]
        assert (line["run"], line["recipe"], line["state"], line["path"]) == ("one", "small", "complete", str(run))
        assert (line["step"], line["steps"], line["rollouts"], line["began_at"]) == (2, 2, 2, 100.0)
        assert line["seconds"] == pytest.approx(line["changed_at"] - 100.0 - 90.0), "it was stopped from 110 to 200"
        assert line["policies"] == ["policy"]
        heldout = {"before": 0.3, "latest": 0.5, "after": 0.5, "low": None, "high": None, "learnt": "yes"}
        assert line["heldout"] == heldout
        (run / "result.json").unlink()
        assert (await get(client, "/api/runs/one"))["state"] == "stopped"
        with named(run):
            assert (await get(client, "/api/runs/one"))["state"] == "running"
        assert (await get(client, "/api/runs/one"))["state"] == "stopped"


async def test_runs_that_come_later_are_seen_and_names_are_made_unique(run: Path, page: Page, tmp_path: Path) -> None:
    async with page(run.parent, tmp_path / "more") as client:
        assert [line["run"] for line in (await get(client, "/api/runs"))["runs"]] == ["one"]
        await make_run(tmp_path / "more" / "one")
        told = {line["run"]: line["path"] for line in (await get(client, "/api/runs"))["runs"]}
        assert told == {"one": str(run), "one~2": str(tmp_path / "more" / "one")}
        assert (await get(client, "/api/runs/one~2"))["path"] == told["one~2"]


async def test_a_run_has_its_settings_and_those_that_differ(run: Path, page: Page) -> None:
    async with page(run) as client:
        told = await get(client, "/api/runs/one")
    assert told["settings"]["loop"]["group_size"] == 4
    assert told["changed"]["loop.group_size"] == 4 and told["changed"]["agent.entry"] == "agent:run"
    assert not {"loop.max_off_policy_steps", "seed", "store.url", "root", "agent.max_calls"} & told["changed"].keys()
    assert told["counts"] == {"succeeded": 2} and told["splits"] == ["train"]
    assert told["resume_command"].endswith(" --resume") and told["result"] is None


async def test_metrics_come_with_a_cursor_events_and_intervals(run: Path, page: Page) -> None:
    async with page(run) as client:
        first = await get(client, "/api/runs/one/metrics")
        assert first["reset"] is False and first["intervals"] == {}
        assert first["rows"][:4] == ROWS[:4] and first["rows"][4]["loss/kl"] is None, "NaN is no JSON"
        assert [(event["step"], event["kind"], event["at"]) for event in first["events"]] == [
            (0, "began", 100.0),
            (1, "resumed", 200.0),
            (1, "warning", 210.0),
        ]
        assert "were skipped" in first["events"][2]["text"]
        same = await get(client, f"/api/runs/one/metrics?after={first['cursor']}")
        assert (same["rows"], same["reset"], same["cursor"]) == ([], False, first["cursor"])
        write_rows(run, [*ROWS, {"kind": "exam", "step": 2, "mode": "greedy", "reward/mean": 0.6}])
        more = await get(client, f"/api/runs/one/metrics?after={first['cursor']}")
        assert [row["mode"] for row in more["rows"]] == ["greedy"] and more["reset"] is False


async def test_a_cursor_from_before_a_resume_gets_all_rows_again(run: Path, page: Page) -> None:
    async with page(run) as client:
        cursor = (await get(client, "/api/runs/one/metrics"))["cursor"]
        write_rows(run, [*ROWS[:3], {**ROWS[4], "at": 999.0}, *ROWS[5:], {"kind": "began", "step": 2, "at": 300.0}])
        told = await get(client, f"/api/runs/one/metrics?after={cursor}")
        assert told["reset"] is True and len(told["rows"]) == 6
        assert [event["kind"] for event in told["events"]] == ["began", "warning", "resumed"]


async def test_health_says_which_curve_each_word_is_about(run: Path, page: Page) -> None:
    async with page(run) as client:
        told = await get(client, "/api/runs/one/health")
    assert told["steps"] == 2
    assert {signal["name"]: signal["metric"] for signal in told["signals"]}["groups that teach nothing"] == (
        "groups/silent"
    )
    [warning] = told["warnings"]
    assert warning["metric"] == "optim/skipped" and "; hint:" not in warning["text"] and "`skipped/`" in warning["hint"]


async def test_ids_may_have_any_characters(run: Path, page: Page) -> None:
    address = f"/api/runs/one/rollouts/{quote(ODD, safe='')}"
    async with page(run) as client:
        rows = (await get(client, f"/api/runs/one/rollouts?group={quote('g/1', safe='')}"))["rows"]
        assert [row["id"] for row in rows] == [ODD, "train-00000-000-00"]
        told = await get(client, address)
        assert told["rollout"] == ODD and told["reward"] == 0.0 and "tokens" not in told["calls"][0]
        assert (await get(client, f"{address}/calls/1"))["tokens"]["sampled"]["ids"] == [3, 4]


async def test_workers_are_told_with_what_they_did(run: Path, page: Page) -> None:
    async with page(run) as client:
        told = await get(client, "/api/runs/one/workers")
    assert told["counts"] == {"succeeded": 2} and told["queued"] == 0
    assert [(one["worker"], one["ended"], one["running"]) for one in told["workers"]] == [("w", 2, [])]


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/runs/two", 404, "there is no run `two`"),
        ("/api/runs/..%2Fone", 404, "there is no run `../one`"),
        ("/api/runs/one/rollouts/x", 404, "no rollout `x`"),
        ("/api/runs/one/rollouts?sort=size", 400, "cannot sort by `size`"),
        (f"/api/runs/one/rollouts?task={'x' * 1001}", 400, "task has `1001` characters"),
        ("/api/runs/one/rollouts/train-00000-000-00/calls/0", 400, "`call` is `0`"),
        ("/api/runs/one/rollouts/train-00000-000-00/calls/7", 404, "no call `7`"),
        ("/api/runs/one/rollouts/train-00000-000-00?attempt=7", 404, "no attempt `7`"),
        ("/api/runs/one/rollouts/train-00000-000-00?attempt=x", 400, "`attempt` is `x`"),
        ("/api/nothing", 404, "nothing at this address"),
    ],
)
async def test_mistakes_are_answered_with_a_hint(run: Path, page: Page, path: str, status: int, said: str) -> None:
    async with page(run) as client:
        error = (await get(client, path, status=status))["error"]
    assert said in error["message"] and error["hint"]


async def test_a_run_without_records_yet_is_shown(tmp_path: Path, page: Page) -> None:
    run = await make_run(tmp_path / "new")
    for file in run.glob("store.sqlite*"):
        file.unlink()
    (run / "metrics.jsonl").unlink()
    async with page(run) as client:
        assert (await get(client, "/api/runs"))["runs"][0]["rollouts"] is None
        assert (await get(client, "/api/runs/new/metrics"))["rows"] == []
        assert "no records" in (await get(client, "/api/runs/new/rollouts", status=400))["error"]["message"]


async def events(client: httpx2.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("GET", "/api/runs/one/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def test_viewers_hear_of_changes_and_one_task_looks_for_all(
    run: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "EVERY_S", 0.05)

    def looking() -> int:
        return sum("Watch._look" in repr(task.get_coro()) for task in asyncio.all_tasks())

    async with page(run) as client:
        assert looking() == 0, "nobody watches"
        streams = [events(client) for _ in range(3)]
        first = [await anext(stream) for stream in streams]
        assert first[0] == first[1] == first[2] and first[0]["state"] == "stopped"
        assert looking() == 1
        write_rows(run, [*ROWS, {"kind": "exam", "step": 2, "mode": "greedy", "reward/mean": 0.6}])
        for stream, before in zip(streams, first, strict=True):
            now = await asyncio.wait_for(anext(stream), 60)
            assert now["metrics"] != before["metrics"] and now["rollouts"] == before["rollouts"]
        store = await SQLiteStore.open(run / "store.sqlite")
        task = Task(id="t8", input={}, split="train")
        await store.enqueue([Rollout(id="new", group_id="new", task=task)])
        assert (await asyncio.wait_for(anext(streams[0]), 5))["rollouts"] > first[0]["rollouts"]
        await store.close()
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        for _ in range(100):
            if not looking():
                break
            await asyncio.sleep(0.05)
        assert looking() == 0, "viewers that hang up are forgotten"


async def test_files_are_sent_once_to_a_browser(run: Path, page: Page) -> None:
    types = {".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css"}
    async with page(run) as client:
        for file in PAGE.rglob("*"):
            if file.suffix not in types:
                continue
            name = file.relative_to(PAGE).as_posix()
            answer = await client.get(f"/{name}")
            assert answer.status_code == 200 and answer.content == file.read_bytes(), name
            assert answer.headers["content-type"].startswith(types[file.suffix]), name
            again = await client.get(f"/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b""), name
        assert (await client.get("/")).content == (PAGE / "index.html").read_bytes()


async def test_files_are_sent_compressed_and_named_before_they_are_imported(run: Path, page: Page) -> None:
    async with page(run) as client:
        index = await client.get("/", headers={"accept-encoding": "gzip"})
        modules = re.findall(r"<([^>]+)>; rel=modulepreload", index.headers["link"])
        assert sorted(modules) == sorted(file.relative_to(PAGE).as_posix() for file in PAGE.rglob("*.*js"))
        sent = {name: await client.get(f"/{name}", headers={"accept-encoding": "gzip"}) for name in modules}
        plain = await client.get("/app.js", headers={"accept-encoding": "identity"})
    assert all(answer.headers["content-encoding"] == "gzip" for answer in sent.values())
    assert all(answer.content == (PAGE / name).read_bytes() for name, answer in sent.items())
    assert "content-encoding" not in plain.headers and plain.content == (PAGE / "app.js").read_bytes()
    sizes = [(int(answer.headers["content-length"]), len(answer.content)) for answer in sent.values()]
    assert 2 * sum(packed for packed, _ in sizes) < sum(whole for _, whole in sizes)


async def test_a_group_is_answered_as_a_tree_of_calls(run: Path, page: Page) -> None:
    async with page(run) as client:
        line = (await get(client, "/api/runs/one/rollouts"))["rows"][0]
        told = await get(client, f"/api/runs/one/groups/{quote(line['group'], safe='')}")
        assert told["group"] == line["group"] and line["id"] in [member["id"] for member in told["members"]]
        refused = await get(client, "/api/runs/one/groups/none", status=404)
    assert "no group `none`" in refused["error"]["message"]
