"""axe-core finds nothing serious in any view, in either look, on a laptop and on a phone.

`make test-page` installs axe-core from npm. Its licence is MPL-2.0. It is loaded here only, and is no part
of the wheel.
"""

from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page

from tests_page.conftest import Watched
from tests_page.test_views import views

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
SERIOUS = ("serious", "critical")
WIDTHS = (1280, 390)
LOOKS: tuple[Literal["light", "dark"], ...] = ("light", "dark")
CHECK = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  return violations.map(({ id, impact, help, nodes }) => ({
    id, impact, help, nodes: nodes.slice(0, 3).map(({ html, failureSummary }) => `${html}: ${failureSummary}`),
  }));
}"""


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed; hint: install Node.js 20 or newer, then `make test-page`")
    return AXE.read_text(encoding="utf-8")


def findings(page: Page, axe: str) -> list[dict[str, Any]]:
    """What axe finds serious or critical in the view as it is shown now."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(axe)
    return [found for found in page.evaluate(CHECK) if found["impact"] in SERIOUS]


@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing_serious(chromium: Browser, site: str, axe: str, width: int) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 900})
    window = Watched(context)
    window.open(site)
    found: list[tuple[str, str, dict[str, Any]]] = []
    for view in views(site):
        page = window.open(site + view)
        for look in LOOKS:
            page.emulate_media(color_scheme=look)
            found += [(view, look, each) for each in findings(page, axe)]
    context.close()
    assert (found, window.complaints) == ([], [])


def test_axe_would_find_a_picture_without_words(window: Watched, site: str, axe: str) -> None:
    page = window.open(site)
    page.evaluate("document.querySelector('main').append(document.createElement('img'))")
    assert [each["id"] for each in findings(page, axe)] == ["image-alt"]
