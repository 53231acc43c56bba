"""A run's folder with settings, metrics and records, and a page that serves it on a real socket."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import pytest

from lightningrl.recipe import dump_config, load_config
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Reward, Rollout, Task
from lightningrl.ui.door import address, take
from lightningrl.ui.server import serving
from tests.cli.test_rollouts import call
from tests.conftest import RECIPE
from tests.test_health import HEALTHY

ODD = 'train-00000-000-01/../ä "%2F?<b>'
"""An id with characters that addresses and markup give a meaning."""
ROWS: list[dict[str, Any]] = [
    {"kind": "began", "step": 0, "at": 100.0},
    {"kind": "exam", "step": 0, "mode": "sampled", "reward/mean": 0.3, "reward/low": 0.2, "reward/high": 0.4},
    {"kind": "step", "step": 0, "at": 110.0, **HEALTHY},
    {"kind": "began", "step": 1, "at": 200.0},
    {"kind": "step", "step": 1, "at": 210.0, **HEALTHY, "optim/skipped": 1.0, "loss/kl": float("nan")},
    {"kind": "exam", "step": 2, "mode": "sampled", "reward/mean": 0.5},
]
Page: TypeAlias = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def make_run(folder: Path) -> Path:
    """Two rollouts of one group; the second one made a call and got 0."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "config.toml").write_text(dump_config(load_config(folder / "recipe.toml")))
    write_rows(folder, ROWS)
    store = await SQLiteStore.open(folder / "store.sqlite")
    task = Task(id="t7", input={"question": "?"}, split="train")
    await store.enqueue([Rollout(id=name, group_id="g/1", task=task) for name in ("train-00000-000-00", ODD)])
    for value, (_, attempt) in enumerate(await store.claim("w", limit=2, lease_s=60)):
        await store.append(call(attempt, 0, prompt=[1, 2], said=[3, 4]))
        rewards = [Reward(attempt_id=attempt.id, value=1.0 - value, source="grader")]
        await store.finish(attempt.id, "succeeded", rewards=rewards, output="x")
    await store.close()
    return folder


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    return await make_run(tmp_path / "runs" / "one")


@pytest.fixture
def page() -> Page:
    """Serves runs at the given paths; `key` as in `create_app`. Yields a client."""

    @asynccontextmanager
    async def serve(*paths: Path, key: str | None = None) -> AsyncIterator[httpx2.AsyncClient]:
        with take(port=0) as sock:
            async with (
                serving(paths, sock, key=key),
                httpx2.AsyncClient(base_url=address(sock).rstrip("/"), verify=False) as client,
            ):
                yield client

    return serve
