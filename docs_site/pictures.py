"""Takes the pictures of the page in docs/, in light and dark, from a run of each of two recipes.

    lightningrl train recipes/sql_langgraph/recipe.toml --run-dir runs/sql
    lightningrl train recipes/multi_agent/recipe.toml --run-dir runs/team
    python -m docs_site.pictures runs/sql runs/team

The rollouts are chosen by what they show: calls that differ in their advantage, tokens that a step changed most.
"""

import json
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests_page.conftest import served

DOCS = Path(__file__).parent.parent / "docs"
WIDTH, SCALE = 1200, 2
COLOURS = 128
"""Of a picture: text and flat areas need few, and the file is a quarter as large."""


def ask(site: str, path: str) -> Any:
    with urllib.request.urlopen(f"{site}api/runs/{path}", timeout=120) as answer:
        return json.load(answer)


def measured(run: Path) -> list[str]:
    """Ids of training rollouts with a call whose tokens were measured."""
    found: dict[str, None] = {}
    for file in sorted((run / "taught").glob("step-*.npz")):
        with np.load(file) as taught:
            found |= dict.fromkeys(name.removeprefix("chatcmpl-").rpartition(".")[0] for name in taught["after_ids"])
    return list(found)


def most_changed(site: str, run: str, rollouts: list[str]) -> tuple[str, int]:
    """(rollout, call) whose tokens the step pushed furthest apart, up and down."""
    best, chosen = -1.0, ("", 0)
    for rollout in rollouts:
        for call in ask(site, f"{run}/rollouts/{rollout}")["calls"]:
            tokens = ask(site, f"{run}/rollouts/{rollout}/calls/{call['number']}")["tokens"]["sampled"]
            ratios = tokens["ratios"] or [1.0]
            spread = min(max(ratios) - 1, 1 - min(ratios))
            if spread > best:
                best, chosen = spread, (rollout, call["number"])
    return chosen


def most_different(site: str, run: str, rollouts: list[str]) -> dict[str, Any]:
    """The rollout whose calls differ most in their advantage."""

    def spread(rollout: dict[str, Any]) -> float:
        known = [call["advantage"] for call in rollout["calls"] if call["advantage"] is not None]
        return max(known, default=0) - min(known, default=0)

    return max((ask(site, f"{run}/rollouts/{rollout}") for rollout in rollouts), key=spread)


def take(browser: Browser, address: str, name: str, *, height: int, dark: bool, width: int = WIDTH) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=SCALE,
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("main h1")
    page.wait_for_timeout(1500)
    path = DOCS / f"{name}{'-dark' if dark else ''}.png"
    page.screenshot(path=path)
    context.close()
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(path, f"{path.stat().st_size / 1000:.0f} kB")


def main(sql: Path, team: Path) -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with served(sql, team) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        rollout, call = most_changed(site, sql.name, measured(sql))
        earned = most_different(site, team.name, measured(team))
        for dark in (False, True):
            take(browser, f"{site}#/run/{sql.name}", "page-curves", height=1000, dark=dark)
            address = f"{site}#/run/{sql.name}/rollout/{rollout}/call/{call}?color=ratio"
            take(browser, address, "page-call", height=800, dark=dark)
            address = f"{site}#/run/{team.name}/rollout/{earned['rollout']}"
            take(browser, address, "page-rollout", height=1000, dark=dark)
        take(browser, f"{site}#/run/{team.name}/group/{earned['group']['id']}", "page-group", height=1000, dark=False)
        take(browser, f"{site}#/run/{sql.name}/rollouts", "page-rollouts", height=700, dark=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
