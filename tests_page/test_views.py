"""Every view of the page opens in a real browser, every link leads somewhere, and nothing complains."""

import json
import math
import re
import urllib.request
from collections.abc import Iterator
from itertools import product
from typing import Any
from urllib.parse import urldefrag

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests_page.conftest import Watched

KINDS = re.compile(r"[\w.-]*\d[\w.~-]*")
"""A part of an address that names one of many, such as a step, a rollout or a call."""
EACH = 2
"""Links of one kind that are followed."""


def ask(site: str, path: str) -> Any:
    """What the API answers, once it has read all the records."""
    with urllib.request.urlopen(f"{site}api/{path}", timeout=60) as answer:
        told = json.load(answer)
    return told if told.get("complete", True) else ask(site, path)


def rollout_of(site: str, run: str) -> dict[str, Any]:
    """The training rollout with the most calls."""
    return ask(site, f"runs/{run}/rollouts?split=train&sort=-calls&limit=1")["rows"][0]


class Gate:
    """Holds the answers at some addresses back until it is opened."""

    def __init__(self, page: Page, pattern: str) -> None:
        self._held: list[Route] = []
        self._is_open = False
        page.route(pattern, self._pass)

    def _pass(self, route: Route) -> None:
        if self._is_open:
            route.continue_()
        else:
            self._held.append(route)

    def open(self) -> None:
        self._is_open = True
        for route in self._held:
            route.continue_()


def unequal_group(site: str) -> str:
    """A group of training whose rollouts all have a reward, and not all the same one."""
    rewards: dict[str, set[float | None]] = {}
    for row in ask(site, "runs/sql/rollouts?split=train&limit=100")["rows"]:
        rewards.setdefault(row["group"], set()).add(row["reward"])
    return next(group for group, found in rewards.items() if len(found) > 1 and None not in found)


def go(page: Page, view: str) -> None:
    """Change the address as a link does, without loading the page again."""
    page.evaluate("hash => { location.hash = hash }", view)


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


def test_quick_brackets_lead_one_sibling_further_each_while_the_answers_are_slow(window: Watched, site: str) -> None:
    siblings = sorted(m["id"] for m in ask(site, f"runs/sql/groups/{rollout_of(site, 'sql')['group']}")["members"])
    page = window.open(f"{site}#/run/sql/rollout/{siblings[0]}")
    gate = Gate(page, "**/rollouts/*")
    for sibling in siblings[1:4]:
        page.keyboard.press("]")
        expect(page.locator(".crumbs [aria-current=page]")).to_have_text(sibling)
    gate.open()
    expect(page.get_by_role("heading", level=1)).to_contain_text(siblings[3])


WRONG = {
    "group/{group}": "group/nothing",
    "rollout/{id}": "rollout/nothing",
    "rollout/{id}?attempt=1": "rollout/{id}?attempt=99",
    "rollout/{id}/call/1": "rollout/{id}/call/99",
}
"""Addresses, and one beside each that nothing has."""


@pytest.mark.parametrize(("right", "wrong"), WRONG.items())
def test_a_wrong_address_shows_its_error_in_place_of_the_view_before(
    chromium: Browser, site: str, right: str, wrong: str
) -> None:
    context = chromium.new_context()
    window = Watched(context)
    rollout = rollout_of(site, "sql")
    page = window.open(f"{site}#/run/sql/{right.format_map(rollout)}")
    go(page, f"#/run/sql/{wrong.format_map(rollout)}")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.locator("main h1")).to_have_count(0)
    go(page, f"#/run/sql/{right.format_map(rollout)}")
    expect(page.locator("main h1")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    context.close()


@pytest.mark.parametrize("view", ["group/{group}", "rollout/{id}", "rollout/{id}/call/1"])
def test_what_belongs_to_another_address_is_dim_until_the_answer_is_here(window: Watched, site: str, view: str) -> None:
    rows = ask(site, "runs/sql/rollouts?split=train")["rows"]
    other = next(row for row in rows if row["group"] != rows[0]["group"])
    page = window.open(f"{site}#/run/sql/{view.format_map(rows[0])}")
    dim = page.locator("main .stale")
    expect(dim).to_have_count(0)
    gate = Gate(page, "**/api/runs/sql/**")
    go(page, f"#/run/sql/{view.format_map(other)}")
    expect(dim).to_be_visible()
    gate.open()
    expect(dim).to_have_count(0)


def test_the_table_filters_by_what_is_in_its_address(window: Watched, site: str) -> None:
    view = f"{site}#/run/sql/rollouts?step=2&split=train"
    page = window.open(view)
    total = ask(site, "runs/sql/rollouts?step=2&split=train")["total"]
    expect(page.get_by_text(re.compile(f"^{total} match"))).to_be_visible()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(total)
    assert all("train-00001-" in row for row in rows.all_inner_texts())
    for back in ("key", "crumb"):
        rows.first.get_by_role("link").click()
        expect(page).to_have_url(re.compile("/rollout/"))
        page.keyboard.press("u") if back == "key" else page.locator(".crumbs").get_by_text("Rollouts").click()
        expect(page).to_have_url(view)


def test_a_field_keeps_what_is_typed_and_gives_the_keys_back(window: Watched, site: str) -> None:
    page = window.open(f"{site}#/run/sql/rollouts")
    expect(page.locator("tbody tr").first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("task ")
    expect(page.get_by_role("button", name="said: task")).to_be_visible()
    page.wait_for_timeout(50)  # an effect that writes the field again would run now
    page.keyboard.type("id")
    field = page.locator("#search")
    expect(page.get_by_role("button", name="said: task id")).to_be_visible()
    for key in ("Enter", "Escape"):
        field.focus()
        page.keyboard.press(key)
        page.keyboard.press("j")
        expect(field).not_to_be_focused()
        expect(field).to_have_value("task id")


def test_a_key_compares_the_runs_that_the_mouse_chose(window: Watched, site: str) -> None:
    page = window.open(site)
    for run in ("sql", "team"):
        page.get_by_role("checkbox", name=f"Compare {run}").check()
    page.keyboard.press("c")
    expect(page).to_have_url(re.compile("compare[?]runs="))


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
    members = ask(site, f"runs/sql/groups/{unequal_group(site)}")["members"]
    backgrounds = "tokens => tokens.map(token => getComputedStyle(token).backgroundColor)"
    best, worst = (choose(members, key=lambda member: member["reward"])["id"] for choose in (max, min))
    mixed = "tokens => tokens.map(token => token.style.getPropertyValue('--share'))"
    pushed: dict[str, set[str]] = {}
    for rollout in (best, worst):
        page = window.open(f"{site}#/run/sql/rollout/{rollout}/call/1?color=advantage")
        told = ask(site, f"runs/sql/rollouts/{rollout}/calls/1")["tokens"]["sampled"]
        expect(page.get_by_text(f"{len(told['ids'])} tokens sampled")).to_be_visible()
        tokens = page.locator("[data-token]")
        pushed[rollout] = set(tokens.evaluate_all(backgrounds))
        page.get_by_role("button", name="probability").click()
        expect(page).to_have_url(re.compile("color=logprob"))
        expect(page.get_by_text("How likely was each token?")).to_be_visible()
        shares = [min(1, -logprob / math.log(100)) for logprob in told["logprobs"]]
        assert tokens.evaluate_all(mixed) == [f"{round(42 * share)}%" for share in shares]
    assert pushed[best].isdisjoint(pushed[worst]), "what was pushed up and what was pushed down look the same"


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_the_chosen_token_is_not_covered(chromium: Browser, site: str, width: int, height: int) -> None:
    context = chromium.new_context(viewport={"width": width, "height": height})
    window = Watched(context)
    page = window.open(f"{site}#/run/sql/rollout/{rollout_of(site, 'sql')['id']}/call/1?color=logprob")
    visible = """() => {
        const token = [...CSS.highlights.get("token")][0].getBoundingClientRect();
        const card = document.querySelector(".token-card").getBoundingClientRect();
        return token.height > 0 && token.top >= 0 && token.bottom <= Math.min(card.top, innerHeight);
    }"""
    for _ in range(20):
        page.keyboard.press("ArrowRight")
        page.wait_for_function("() => CSS.highlights.has('token')")
        assert page.evaluate(visible)
    context.close()
    assert window.complaints == []


def test_an_unknown_address_says_so_with_a_hint(chromium: Browser, site: str) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{site}#/run/sql/rollout/nothing")
    expect(page.get_by_role("alert")).to_contain_text("nothing")
    context.close()
