"""Every view of the page opens in a real browser, every link leads somewhere, and nothing complains."""

import json
import re
import urllib.request
from collections.abc import Iterator
from itertools import product
from typing import Any
from urllib.parse import urldefrag

import pytest
from playwright.sync_api import Browser, Page, expect

from tests_page.conftest import Watched

KINDS = re.compile(r"[\w.-]*\d[\w.~-]*")
"""A part of an address that names one of many, such as a step, a rollout or a call."""
EACH = 2
"""Links of one kind that are followed."""


def ask(site: str, path: str) -> Any:
    with urllib.request.urlopen(f"{site}api/{path}", timeout=60) as answer:
        return json.load(answer)


def rollout_of(site: str, run: str) -> dict[str, Any]:
    """The training rollout with the most calls."""
    return ask(site, f"runs/{run}/rollouts?split=train&sort=-calls&limit=1")["rows"][0]


def views(site: str) -> list[str]:
    """An address of each view."""
    found = ["#/", "#/compare?runs=sql,team"]
    for run in ("sql", "team"):
        rollout = rollout_of(site, run)
        found += [f"#/run/{run}{view}" for view in ("", "/rollouts", "/workers", "/settings")]
        found += [f"#/run/{run}/group/{rollout['group']}", f"#/run/{run}/rollout/{rollout['id']}"]
        colours = ("logprob", "advantage", "ratio", "entropy")
        found += [f"#/run/{run}/rollout/{rollout['id']}/call/1?color={colour}" for colour in colours]
    return found


def links(page: Page) -> Iterator[str]:
    for address in page.eval_on_selector_all("a[href]", "links => links.map(link => link.href)"):
        yield str(address)


def test_every_link_of_every_view_leads_to_a_view(window: Watched, site: str) -> None:
    waiting = [site + view for view in views(site)]
    seen, kinds = set[str](), dict[str, int]()
    while waiting:
        address = waiting.pop()
        kind = KINDS.sub("N", urldefrag(address).fragment)
        if address in seen or (kind in kinds and kinds[kind] >= EACH):
            continue
        seen.add(address)
        kinds[kind] = kinds.get(kind, 0) + 1
        window.open(address)
        found = list(links(window.page))
        assert all(link.startswith(site) for link in found), found
        waiting += [link for link in found if "#/" in link]
    assert len(kinds) >= 8 and len(seen) > 20, kinds


@pytest.mark.parametrize(("width", "theme"), list(product((390, 1280), ("light", "dark"))))
def test_no_view_is_wider_than_the_screen(chromium: Browser, site: str, width: int, theme: Any) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 844}, color_scheme=theme)
    window = Watched(context)
    wide: list[str] = []
    for view in views(site):
        page = window.open(site + view)
        page.wait_for_load_state("networkidle") if view == "#/" else page.wait_for_timeout(150)
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            wide.append(view)
    context.close()
    assert (wide, window.complaints) == ([], [])


def test_one_comes_from_the_runs_to_a_token_by_keys_alone(window: Watched, site: str) -> None:
    page = window.open(site)
    page.get_by_role("link", name="sql", exact=True).press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("sql")
    page.get_by_role("link", name="Rollouts").press("Enter")
    expect(page.locator("tbody tr").first).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/rollout/"))
    window.settle()
    first = page.url
    page.keyboard.press("u")
    expect(page).not_to_have_url(first)
    page.go_back()
    expect(page).to_have_url(first)
    window.settle()
    page.get_by_role("link", name=re.compile("call 1", re.IGNORECASE)).first.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Call 1 of")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).not_to_be_visible()


def test_brackets_lead_through_the_siblings_of_a_group(window: Watched, site: str) -> None:
    siblings = [m["id"] for m in ask(site, f"runs/sql/groups/{rollout_of(site, 'sql')['group']}")["members"]]
    siblings.sort()
    page = window.open(f"{site}#/run/sql/rollout/{siblings[0]}")
    for sibling in siblings[1:]:
        page.keyboard.press("]")
        expect(page).to_have_url(re.compile(sibling))
        expect(page.get_by_role("heading", level=1)).to_contain_text(sibling)
    page.keyboard.press("[")
    expect(page).to_have_url(re.compile(siblings[-2]))


def test_the_table_filters_by_what_is_in_its_address(window: Watched, site: str) -> None:
    page = window.open(f"{site}#/run/sql/rollouts?step=2&split=train")
    total = ask(site, "runs/sql/rollouts?step=2&split=train")["total"]
    expect(page.get_by_text(re.compile(f"^{total} match"))).to_be_visible()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(total)
    assert all("train-00001-" in row for row in rows.all_inner_texts())


def test_the_look_changes_and_stays(window: Watched, site: str) -> None:
    page = window.open(site)
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.get_by_role("button", name=re.compile("look|theme|dark", re.IGNORECASE)).first.click()
    after = page.evaluate(colour)
    assert after != before
    page.reload()
    window.settle()
    assert page.evaluate(colour) == after


def test_the_tokens_of_a_call_have_the_colour_of_what_is_asked(window: Watched, site: str) -> None:
    rollout = rollout_of(site, "sql")["id"]
    page = window.open(f"{site}#/run/sql/rollout/{rollout}/call/1?color=logprob")
    told = ask(site, f"runs/sql/rollouts/{rollout}/calls/1")["tokens"]["sampled"]
    expect(page.get_by_text(f"{len(told['ids'])} tokens sampled")).to_be_visible()
    page.get_by_role("button", name="entropy").or_(page.get_by_role("link", name="entropy")).first.click()
    expect(page).to_have_url(re.compile("color=entropy"))


def test_an_unknown_address_says_so_with_a_hint(chromium: Browser, site: str) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{site}#/run/sql/rollout/nothing")
    expect(page.get_by_role("alert")).to_contain_text("nothing")
    context.close()
