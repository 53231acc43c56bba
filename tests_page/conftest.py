"""Real runs of two recipes, their page on a real socket, and a Chromium to look at it with."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, sync_playwright

ROOT = Path(__file__).parent.parent
ADDRESS = re.compile(r"page: (http://127\.0\.0\.1:\d+/)")
SMALL = ("loop.steps=2", "tasks.heldout=6", "loop.tasks_per_step=3", "loop.group_size=4", "loop.eval_every=0")
START_S, TRAIN_S = 120.0, 300.0
"""Longest start of a process, and longest training; both on a busy machine."""


def train(recipe: str, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start to train a recipe for two small steps."""
    command = [sys.executable, "-m", "lightningrl", "train", str(ROOT / "recipes" / recipe / "recipe.toml"), *SMALL]
    return subprocess.Popen(
        [*command, *arguments, "--run-dir", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def address_of(process: "subprocess.Popen[str]") -> str:
    """The address of the page that the process prints."""
    assert process.stdout is not None
    printed: list[str] = []
    for line in process.stdout:
        printed.append(line)
        if found := ADDRESS.search(line):
            return found[1]
    raise AssertionError("".join(printed))


@contextmanager
def served(*runs: Path) -> Iterator[str]:
    """The address of the page of these runs, served by `lightningrl ui`."""
    command = [sys.executable, "-m", "lightningrl", "ui", *map(str, runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield address_of(process)
    finally:
        process.terminate()
        process.communicate(timeout=START_S)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine; hint: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A browser window that keeps every complaint: errors of scripts, of the console, and of answers."""

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", self._raised)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{self.page.url}: {message.text}")

    def _raised(self, error: Error) -> None:
        self.complaints.append(f"{self.page.url}: {error.message}")

    def settle(self) -> None:
        """Wait until the view has its data. Raises `AssertionError` if it shows an error."""
        self.page.wait_for_selector("main h1, main [role=alert]", timeout=START_S * 1000)
        shown = self.page.locator("main [role=alert]")
        assert shown.count() == 0, f"{self.page.url}: {shown.first.inner_text()}"

    def open(self, address: str) -> Page:
        self.page.goto(address)
        self.settle()
        return self.page


@pytest.fixture
def window(chromium: Browser) -> Iterator[Watched]:
    """A window of a laptop. The test fails if anything complained."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    watched = Watched(context)
    yield watched
    context.close()
    assert watched.complaints == []


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the SQL recipe and one of the team of three policies."""
    folder = tmp_path_factory.mktemp("runs")
    for recipe, name in (("sql_langgraph", "sql"), ("multi_agent", "team")):
        process = train(recipe, folder / name, "--no-ui")
        printed, _ = process.communicate(timeout=TRAIN_S)
        assert process.returncode == 0, printed
    return folder


@pytest.fixture(scope="session")
def site(runs: Path) -> Iterator[str]:
    """The address of the page of both runs."""
    with served(runs) as address:
        yield address
