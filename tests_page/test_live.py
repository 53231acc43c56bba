"""The page of a run that goes on: it follows the run, outlives its own server, and says when the run is over."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from lightningrl import keeper
from tests_page.conftest import START_S, Watched, address_of, train

STEPS = 300
"""More than the run makes before it is interrupted."""
CALL = re.compile(r"/api/runs/sql/rollouts/([^/]+)/calls/(\d+)")
SOON_MS = 1000 * START_S


def page_process(run: int) -> int:
    """The id of the process that serves the page of the run in this process, without its keeper."""
    below = keeper.descendants([run], keeper.parents())
    told = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in below}
    [found] = [child for child, line in told.items() if b"\0ui\0--fd\0" in line and b"keeper" not in line]
    return found


def finished_steps(page: Page) -> int:
    """The number of finished steps that the page of curves tells."""
    found = re.search(rf"(\d+) of {STEPS}", page.get_by_label("Summary").inner_text())
    assert found is not None
    return int(found[1])


def await_step(page: Page, step: int) -> None:
    """Wait until the page tells of so many finished steps, without loading it again."""
    until = time.monotonic() + START_S
    while finished_steps(page) < step:
        assert time.monotonic() < until, f"the page stays at step {finished_steps(page)}"
        page.wait_for_timeout(100)


def test_the_page_follows_a_run_through_the_death_of_its_server_to_the_end(chromium: Browser, tmp_path: Path) -> None:
    process = train("sql_langgraph", tmp_path / "live", f"loop.steps={STEPS}")
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    window = Watched(context)
    try:
        page = window.open(f"{address_of(process)}#/run/live")
        page.evaluate("window.same = true")
        state = page.get_by_role("banner").get_by_role("status")
        expect(state).to_have_text("running", timeout=SOON_MS)
        await_step(page, 2)
        page.get_by_role("link", name="Rollouts", exact=True).click()
        total = page.get_by_text(re.compile(r"^[\d,]+ match")).first
        before = total.inner_text(timeout=SOON_MS)
        expect(total).not_to_have_text(before, timeout=SOON_MS)
        page.get_by_role("link", name="Curves", exact=True).click()
        window.settle()
        assert window.complaints == []

        os.kill(page_process(process.pid), signal.SIGKILL)
        await_step(page, finished_steps(page) + 5)
        expect(state).to_have_text("running", timeout=SOON_MS)

        process.terminate()
        process.communicate(timeout=START_S)
        expect(state).to_have_text("not connected", timeout=SOON_MS)
        assert page.evaluate("window.same")
        assert finished_steps(page) > 5
    finally:
        context.close()
        process.kill()
        process.communicate(timeout=START_S)


@pytest.fixture
def file(runs: Path, tmp_path: Path) -> Path:
    """The exported page of the SQL run."""
    exported = tmp_path / "sql.html"
    subprocess.run(
        [sys.executable, "-m", "lightningrl", "ui", str(runs / "sql"), "--export", str(exported)],
        check=True,
        timeout=START_S,
        capture_output=True,
    )
    return exported


def test_the_exported_file_opens_anywhere_and_asks_for_nothing(window: Watched, file: Path) -> None:
    page, asked = window.page, list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.context.set_offline(True)
    window.open(file.as_uri())
    page.get_by_role("link", name="sql", exact=True).click()
    expect(page.get_by_label("Summary")).to_contain_text("2 of 2")
    page.get_by_role("link", name="Rollouts", exact=True).click()
    held = page.evaluate("Object.keys(JSON.parse(document.getElementById('embedded').textContent).answers)")
    calls = [found for path in held if (found := CALL.fullmatch(path))]
    for rollout in {found[1] for found in calls}:
        page.locator(f'a.open[href="#/run/sql/rollout/{rollout}"]').click()
        for number in sorted(int(found[2]) for found in calls if found[1] == rollout):
            page.locator(f'.call > header a[href="#/run/sql/rollout/{rollout}/call/{number}"]').click()
            expect(page.get_by_role("heading", level=1)).to_contain_text(f"Call {number} of")
            page.go_back()
        page.go_back()
    assert len({found[1] for found in calls}) == 3
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in asked if url.startswith("file:")]) == 1
