"""The tokens served to Vercel's AI SDK, in a node process per rollout, are those that are trained: invariants 1-3."""

from collections import Counter
from pathlib import Path
from typing import Any

from lightningrl.conformance import check, collected

SMALL = ["loop.tasks_per_step=2", "loop.group_size=4", "trainer.threads=1"]


async def test_every_served_token_is_trained_as_it_was(shop: Any, tmp_path: Path) -> None:
    batch = await collected(shop.folder / "recipe.toml", tmp_path, overrides=SMALL)
    check(batch)
    roots = Counter(call.attempt_id for call in batch.calls if call.capture == "rendered")
    assert set(roots.values()) == {1}, "a rollout is one conversation: only its first prompt is rendered"
    assert {call.capture for call in batch.calls} == {"rendered", "bridged"}, [
        call.capture_reason for call in batch.calls if call.capture_reason
    ]
