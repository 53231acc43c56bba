"""Does `lightningrl rollouts` count the calls and tokens of branches once?"""

import asyncio
from io import StringIO
from pathlib import Path

from rich.console import Console

from lightningrl.cli.rollouts import read, show
from tests.look.branched import AT_2, OTHER, TRUNK, VOID_AT_3, branched_run


async def test_played_back_calls_are_counted_as_calls_without_tokens(tmp_path: Path) -> None:
    await branched_run(tmp_path)
    listing = await asyncio.to_thread(read, tmp_path, limit=9, report=True)
    sampled = {line.id: (line.calls, line.sampled_tokens) for line in listing.lines}
    own = {TRUNK: (3, 3), OTHER: (1, 1), AT_2[0]: (2, 1), AT_2[1]: (3, 2), VOID_AT_3: (2, 0)}
    assert sampled == own
    census = listing.census
    assert census is not None and (census.calls, census.replayed, census.sampled_tokens) == (11, 3, 7)
    assert sum(role.sampled_tokens for role in census.roles.values()) == 7
    assert listing.as_json()["report"]["replayed"] == 3
    console = Console(file=StringIO(), width=140)
    show(listing, console)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "3 calls of branches, without a token sampled" in shown
