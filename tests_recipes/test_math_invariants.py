"""The tokens that AutoGen was served are those that are trained: invariants 1 to 3, with a calculator behind MCP."""

from collections import Counter
from pathlib import Path
from typing import Any

from lightningrl.chat.reasons import TOOLS_CHANGED
from lightningrl.conformance import check, collected

SMALL = ["loop.tasks_per_step=3", "loop.group_size=4", "trainer.threads=1"]


async def test_every_served_token_is_trained_as_it_was(math: Any, tmp_path: Path) -> None:
    batch = await collected(math.folder / "recipe.toml", tmp_path, overrides=SMALL)
    check(batch)
    roots = Counter(call.attempt_id for call in batch.calls if call.capture == "rendered")
    assert set(roots.values()) == {1}, "a rollout is one conversation: only its first prompt is rendered"
    assert any(call.capture == "bridged" for call in batch.calls)
    for call in batch.calls:
        if call.capture == "forked":
            assert (call.capture_reason, call.request.get("tools")) == (TOOLS_CHANGED, None), (
                "only the reflection without tools is a new prompt"
            )


async def test_a_reflection_without_tools_is_learnt_from_as_well(math: Any, tmp_path: Path) -> None:
    """The template writes the tools first, so a prompt without tools differs from the start."""
    batch = await collected(
        math.folder / "recipe.toml", tmp_path, overrides=[*SMALL, 'agent.env.MATH_TOOL_ITERATIONS="1"']
    )
    check(batch)
    reflections = [call for call in batch.calls if not call.request.get("tools")]
    assert reflections
    assert {(call.capture, call.capture_reason) for call in reflections} == {("forked", TOOLS_CHANGED)}
