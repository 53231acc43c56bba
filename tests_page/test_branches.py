"""Branches in a real browser: where they part, what was played back, and why one is void."""

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import expect

from tests.look.branched import AT_2, TRUNK, VOID_AT_3, WHY, branched_run
from tests_page.conftest import Watched, served


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page of a run with branches."""
    folder = tmp_path_factory.mktemp("runs") / "forks"
    with ThreadPoolExecutor(1) as thread:  # the browser's event loop runs in this one
        thread.submit(lambda: asyncio.run(branched_run(folder))).result(timeout=60)
    with served(folder) as address:
        yield address


def test_a_branch_leads_to_its_trunk_and_dims_what_was_played_back(window: Watched, branched: str) -> None:
    page = window.open(f"{branched}#/run/forks/rollout/{AT_2[0]}")
    expect(page.locator(".verdict")).to_contain_text(f"A branch of {TRUNK} at call 2")
    expect(page.locator(".call.played")).to_have_count(1)
    expect(page.locator("#call-2")).to_contain_text("branching call")
    page.locator(".verdict").get_by_role("link", name=TRUNK, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(TRUNK)
    expect(page.locator(".verdict")).to_contain_text("at call 2: 2 branches, rewards 0, 1")


def test_a_void_branch_says_why(window: Watched, branched: str) -> None:
    page = window.open(f"{branched}#/run/forks/rollout/{VOID_AT_3}")
    expect(page.locator(".verdict")).to_contain_text("Void:")
    expect(page.locator(".verdict")).to_contain_text(WHY)


def test_a_group_shows_the_siblings_at_a_place(window: Watched, branched: str) -> None:
    page = window.open(f"{branched}#/run/forks/group/g")
    expect(page.get_by_role("heading", level=1)).to_have_text("2 rollouts and 3 branches of one task")
    expect(page.locator(".at-place")).to_have_count(2)
    expect(page.locator(".branch").first).to_contain_text("one rollout; 3 branches played it back")


def test_the_table_is_filtered_by_kind(window: Watched, branched: str) -> None:
    page = window.open(f"{branched}#/run/forks/rollouts")
    page.get_by_label("kind").select_option("branch")
    expect(page).to_have_url(re.compile("kind=branch"))
    expect(page.locator("tbody tr")).to_have_count(3)
