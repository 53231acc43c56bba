"""Curves, comparisons and the exported file of small runs whose metrics are written by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from lightningrl.ui.export import exported
from tests.test_health import HEALTHY
from tests.ui.conftest import make_run, write_rows
from tests_page.conftest import Watched, served
from tests_page.test_hostile import awaited

BEGAN = {"kind": "began", "step": 0, "at": 100.0}
REFUSED: dict[str, Any] = {"status": 400, "json": {"error": {"message": "it is damaged", "hint": None}}}
TINTED = """canvas => {
  const line = canvas.getContext("2d").getImageData(Math.round(canvas.width * 0.3), 0, 1, canvas.height).data;
  const alphas = Array.from({length: canvas.height}, (_, y) => line[4 * y + 3]);
  return alphas.filter(alpha => alpha > 20 && alpha < 60).length;
}"""
"""Number of the pixels above a step that has no exam which a band covers, with 15 % of its colour."""


def exam(step: int, reward: float) -> dict[str, Any]:
    found = {"kind": "exam", "step": step, "mode": "sampled", "reward/mean": reward}
    return found | {"reward/low": reward - 0.2, "reward/high": reward + 0.2, "tasks": 20, "at": 100.0 + step}


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": number, "at": 110.0 + number, **HEALTHY} for number in numbers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: `one` with exams before and after four steps, `new` with one before its first step."""
    folder = tmp_path_factory.mktemp("runs")
    write_rows(awaited(make_run(folder / "one")), [BEGAN, exam(0, 0.3), *steps(0, 1, 2, 3), exam(4, 0.6)])
    write_rows(awaited(make_run(folder / "new")), [BEGAN, exam(0, 0.3)])
    return folder


@pytest.fixture(scope="module")
def home(folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


def test_a_band_goes_on_between_two_exams(window: Watched, home: str) -> None:
    page = window.open(f"{home}#/run/one")
    assert page.locator("#chart-reward canvas").evaluate(TINTED) > 10


def test_a_click_on_a_curve_shows_the_rollouts_that_the_step_learnt_from(window: Watched, home: str) -> None:
    page = window.open(f"{home}#/run/one")
    page.locator("#chart-reward .u-over").click()
    page.wait_for_url("**/rollouts?step=*&split=train")
    window.settle()


def test_an_exam_before_training_is_no_progress(window: Watched, home: str) -> None:
    page = window.open(f"{home}#/run/new")
    expect(page.locator("dl.tiles")).to_contain_text("0.300before training")
    assert "so far" not in page.inner_text("main")


def test_a_run_is_asked_for_once_by_all_parts_of_the_page(window: Watched, home: str) -> None:
    asked: list[str] = []
    window.page.on("request", lambda request: asked.append(request.url.removeprefix(home)))
    window.open(f"{home}#/run/one").locator(".health details").wait_for()
    assert asked.count("api/runs/one") == 1


def test_health_that_cannot_be_computed_says_why(chromium: Browser, home: str) -> None:
    page = chromium.new_page()
    page.route("**/health", lambda route: route.fulfill(**REFUSED))
    page.goto(f"{home}#/run/one")
    expect(page.get_by_role("alert")).to_contain_text("it is damaged")
    page.close()


def test_compared_runs_say_what_is_missing_and_why(chromium: Browser, home: str) -> None:
    page = chromium.new_page()
    page.route("**/api/**/metrics*", lambda route: route.fulfill(**REFUSED))
    page.goto(f"{home}#/compare?runs=one,new")
    expect(page.get_by_role("alert")).to_contain_text("it is damaged")
    assert "None of these runs" not in page.inner_text("main")
    page.goto(f"{home}#/compare?runs=a%25b")
    expect(page.get_by_role("alert")).to_contain_text("there is no run `a%b` here".replace("`", ""))
    page.close()


def test_an_exported_file_links_to_what_it_holds_alone(window: Watched, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_bytes(awaited(exported(folder / "one")))
    todo, seen = [f"{file.as_uri()}#/run/one"], set[str]()
    while todo:
        address = todo.pop()
        seen.add(address)
        page = window.open(address)
        links: list[str] = page.eval_on_selector_all("a[href^='#/']", "links => links.map(link => link.href)")
        todo += sorted({*links} - seen - {*todo})
    assert len(seen) > 8 and not any("status=" in address for address in seen)
    page = window.open(f"{file.as_uri()}#/run/one/rollouts")
    expect(page.locator(".whole")).to_contain_text("the best rollout train-00000-000-00, the worst rollout")
    page = window.open(f"{file.as_uri()}#/run/one")
    page.locator("#chart-reward .u-over").click()
    page.wait_for_timeout(200)
    assert page.url.endswith("#/run/one")
