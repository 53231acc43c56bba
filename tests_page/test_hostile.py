"""Whatever an agent writes is shown as text, and pages of other origins read nothing."""

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from lightningrl.recipe import dump_config, load_config
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Call, Reward, Rollout, Span, Task
from lightningrl.ui.export import exported
from tests.cli.test_rollouts import call
from tests.conftest import RECIPE
from tests.test_health import HEALTHY
from tests_page.conftest import Watched, served
from tests_page.payloads import LONG, PAYLOADS

NAME = "<img src=x onerror=window.pwned=1>"
"""The name of the run's folder."""
SHORT = 200
"""Characters of an id, at most: it is a part of addresses."""
OF_GROUP = 10
CALL = re.compile(r"/api/runs/([^/]+)/rollouts/([^/]+)/calls/(\d+)")
VIEWS = {
    "": "^<img",
    "/rollouts": "^Rollouts",
    "/rollouts?text=onerror": "^Rollouts",
    "/rollouts?error=script": "^Rollouts",
    "/workers": "^Workers",
    "/settings": "^Settings",
}
"""View of the run → how its heading begins."""
ELEMENTS = (
    "iframe, object, embed, base, form, meta[http-equiv=refresh], video, audio, math, animate, style:not(head style), "
    "[onerror], [onload], [ontoggle], [onfocus], [onbegin], [src*=evil], [data*=evil], "
    "link[href*=evil], [style*=evil], #page script"
)
"""What the page itself never has."""


Made = TypeVar("Made")


def awaited(work: Coroutine[Any, Any, Made]) -> Made:
    """What the coroutine returns. It runs in a thread: Playwright keeps an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def short(payload: str) -> str:
    return payload[:SHORT]


def spoken(attempt: Attempt, index: int, payload: str) -> tuple[Call, Span]:
    """A call and a tool in which everything that an agent chooses is the payload."""
    arguments = json.dumps({payload: payload})
    asked = {"id": payload, "type": "function", "function": {"name": short(payload), "arguments": arguments}}
    messages = [
        {"role": "system", "content": payload},
        {"role": "user", "content": payload, "name": short(payload)},
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": payload, "content": f"Error: {payload}"},
    ]
    tool = {"type": "function", "function": {"name": short(payload), "description": payload, "parameters": {}}}
    answer = {"role": "assistant", "content": payload, "reasoning": payload, "tool_calls": [asked]}
    made = call(
        attempt,
        index,
        prompt=[1, 2],
        said=[3, 4],
        agent=short(payload),
        request={"model": payload, "messages": messages, "tools": [tool], payload: payload},
        response={"choices": [{"index": 0, "message": answer, "finish_reason": "stop"}]},
        capture="forked",
        capture_reason=payload,
        started_at=float(index),
        ended_at=index + 0.5,
    )
    span = Span(
        id=f"{index:016x}",
        attempt_id=attempt.id,
        call_id=made.id,
        kind="tool",
        name=payload,
        status="error",
        error=payload,
        input=payload,
        output=payload,
        trace_id=attempt.id,
        attributes={payload: payload},
    )
    return made, span


async def write_store(folder: Path) -> None:
    """A rollout for each payload. The first of each group has a call for each payload of the group."""
    store = await SQLiteStore.open(folder / "store.sqlite")
    for number, payload in enumerate(PAYLOADS):
        first = number // OF_GROUP * OF_GROUP
        task = Task(id=short(PAYLOADS[first]), input={payload: payload}, split=short(PAYLOADS[first]))
        rollout = Rollout(id=f"train-00000-{number}-{short(payload)}", group_id=short(PAYLOADS[first]), task=task)
        await store.enqueue([rollout])
        [(_, attempt)] = await store.claim(short(payload), limit=1, lease_s=60)
        for index, said in enumerate(PAYLOADS[first : first + OF_GROUP] if number == first else [payload]):
            await store.append(*spoken(attempt, index, said))
        if number % 3 == 1:
            await store.finish(attempt.id, "failed", error=f"{payload}\nTraceback\n{payload}")
            continue
        rewards = [
            Reward(attempt_id=attempt.id, value=0.1 * (number % 5)),
            Reward(attempt_id=attempt.id, value=0.5, name=short(payload), source="agent"),
        ]
        await store.finish(attempt.id, "succeeded", rewards=rewards, output={payload: [payload]})
    task = Task(id=short(LONG), input={LONG: LONG}, split="train")
    await store.enqueue([Rollout(id="waits", group_id="w", task=task, labels=tuple(map(short, PAYLOADS)))])
    await store.close()


def write_run(folder: Path) -> Path:
    """A run whose records, settings, metrics and logs are hostile."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE)
    config = load_config(folder / "recipe.toml")
    agent = config.agent.model_copy(update={"env": {short(payload): payload for payload in PAYLOADS}})
    (folder / "config.toml").write_text(dump_config(config.model_copy(update={"agent": agent})))
    (folder / "result.json").write_text(
        json.dumps({"heldout_after": 0.5, "learnt": "no"} | dict(zip(PAYLOADS, PAYLOADS, strict=True)))
    )
    metrics = {f"reward/{short(payload)}": 0.5 for payload in PAYLOADS}
    rows: list[dict[str, Any]] = [{"kind": "began", "step": 0, "at": 100.0}]
    rows += [{"kind": "step", "step": step, "at": 110.0 + step, **HEALTHY, **metrics} for step in range(4)]
    rows += [{"kind": "exam", "step": 4, "mode": PAYLOADS[4], "reward/mean": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agents.log").write_text("\n".join(PAYLOADS))
    awaited(write_store(folder))
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / NAME)


@contextmanager
def guarded(browser: Browser, home: str, *, width: int = 1280) -> Iterator[Watched]:
    """A window that fails on a dialog, a complaint, and any request that does not go to `home`."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    watched = Watched(context)
    foreign: list[str] = []
    context.on("request", lambda request: foreign.append(request.url) if not at_home(request.url, home) else None)
    watched.page.on("dialog", lambda dialog: foreign.append(dialog.message))
    context.on("page", lambda page: foreign.append(page.url))
    yield watched
    context.close()
    assert (foreign, watched.complaints) == ([], [])


def at_home(url: str, home: str) -> bool:
    return url.startswith((home, "data:", "blob:"))


def inert(page: Page, home: str) -> None:
    """Nothing that came from a payload has become a part of the page, nor has it run."""
    where = page.url
    assert page.evaluate("[typeof window.pwned, typeof ({}).pwned]") == ["undefined", "undefined"], where
    assert page.eval_on_selector_all(ELEMENTS, "found => found.map(each => each.outerHTML)") == [], where
    links = page.eval_on_selector_all("a[href]", "links => links.map(link => link.href)")
    assert [link for link in links if not link.startswith(home)] == [], where
    assert page.eval_on_selector_all("script[src]", "found => found.map(each => each.src)") in ([], [f"{home}app.js"])
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), where
    assert page.evaluate("getComputedStyle(document.getElementById('main')).display") == "block", where


def opened(window: Watched, address: str, *, heading: str = ".") -> Page:
    """The view with this heading, a regular expression, and with everything unfolded."""
    page = window.open(address)
    expect(page.get_by_role("heading", level=1)).to_contain_text(re.compile(heading))
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    return page


def legible(payload: str) -> str:
    """The part of a payload that is shown as it is: without characters that are shown by name, and not folded."""
    start = payload.lstrip("\u202e\u2066")[:30]
    return start.partition("\u2069")[0]


def rollout_of(number: int) -> str:
    return f"train-00000-{number}-{short(PAYLOADS[number])}"


def encoded(part: str) -> str:
    """As `encodeURIComponent` of a well-formed string."""
    return quote(part.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), safe="!*'()")


@pytest.mark.parametrize("width", [390, 1280])
def test_every_view_shows_what_agents_said_as_text(chromium: Browser, hostile: Path, width: int) -> None:
    run = f"#/run/{encoded(NAME)}"
    with served(hostile) as site, guarded(chromium, site, width=width) as window:
        for view, heading in VIEWS.items():
            page = opened(window, site + run + view, heading=heading)
            expect(page.locator("body")).to_contain_text(NAME)
            inert(page, site)
        inert(opened(window, site, heading="Runs"), site)
        inert(opened(window, f"{site}#/compare?runs={encoded(encoded(NAME))}", heading="Compare"), site)
        for first in range(0, len(PAYLOADS), OF_GROUP):
            opened(window, f"{site}{run}/group/{encoded(short(PAYLOADS[first]))}", heading="of one task")
            inert(window.page, site)
            page = opened(window, f"{site}{run}/rollout/{encoded(rollout_of(first))}", heading=f"^train-00000-{first}-")
            inert(page, site)
            told = page.text_content("main") or ""
            missing = [each for each in PAYLOADS[first : first + OF_GROUP] if legible(each) not in told]
            assert missing == []


def test_every_call_and_every_failure_shows_what_was_said_as_text(chromium: Browser, hostile: Path) -> None:
    run = f"#/run/{encoded(NAME)}"
    with served(hostile) as site, guarded(chromium, site) as window:
        for number, payload in enumerate(PAYLOADS):
            first = number // OF_GROUP * OF_GROUP
            at = number - first + 1
            views = {f"{run}/rollout/{encoded(rollout_of(first))}/call/{at}": rf"^Call {at}\b"}
            if number % 3 == 1:  # it has failed
                views[f"{run}/rollout/{encoded(rollout_of(number))}"] = f"^train-00000-{number}-"
            for address, heading in views.items():
                page = opened(window, site + address, heading=heading)
                assert legible(payload) in (page.text_content("main") or ""), address
                inert(page, site)


def test_the_exported_file_shows_it_as_text(chromium: Browser, hostile: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_bytes(awaited(exported(hostile)))
    home = file.as_uri()
    with guarded(chromium, home) as window:
        page = opened(window, f"{home}#/run/{encoded(NAME)}/rollouts")
        inert(page, home)
        rollouts = page.eval_on_selector_all("tbody a.open", "links => links.map(link => link.href)")
        held: list[str] = page.evaluate(
            "Object.keys(JSON.parse(document.getElementById('embedded').textContent).answers)"
        )
        calls = [found for path in held if (found := CALL.fullmatch(path))]
        assert len(rollouts) > OF_GROUP and len(calls) >= 3
        for address in rollouts[:: OF_GROUP // 2]:
            inert(opened(window, address), home)
        for found in calls:
            inert(opened(window, f"{home}#/run/{found[1]}/rollout/{found[2]}/call/{found[3]}"), home)


ATTACK = """
<!doctype html><title>another page</title><script>
const target = decodeURIComponent(location.hash.slice(1)), got = [];
const soon = (name, ask) => Promise.race([ask(), new Promise(after => setTimeout(after, 4000))])
  .then(text => text && got.push(`${name}: ${text}`), () => {});
const element = (tag, name, url) => () => new Promise(after => {
  const made = Object.assign(document.createElement(tag), { [name]: url, rel: "stylesheet" });
  made.onload = () => after(tag === "iframe" ? read(made) : "loaded"); made.onerror = () => after("");
  document.body.append(made);
});
const read = frame => { try { return frame.contentDocument.body.textContent; } catch { return ""; } };
const events = url => () => new Promise(after => {
  const source = new EventSource(url);
  source.onopen = () => after("opened"); source.onerror = () => { source.close(); after(""); };
});
async function attack() {
  const asked = [`${target}api/runs`, `${target}app.js`, target];
  await Promise.all(asked.flatMap(url => [
    soon(`fetch ${url}`, () => fetch(url).then(answer => answer.text())),
    soon(`fetch with cookies ${url}`, () => fetch(url, { credentials: "include" }).then(answer => answer.text())),
    soon(`blind fetch ${url}`, () => fetch(url, { mode: "no-cors" }).then(answer => answer.text())),
    soon(`iframe ${url}`, element("iframe", "src", url)),
    soon(`script ${url}`, element("script", "src", url)),
    soon(`module ${url}`, () => import(url).then(() => "loaded")),
    soon(`image ${url}`, element("img", "src", url)),
    soon(`style ${url}`, element("link", "href", url)),
  ]).concat(soon("events", events(`${target}api/runs/sql/events`))));
  return got;
}
</script><body>
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with a page that attacks."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "attack.html").write_text(ATTACK)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def stolen(browser: Browser, page: str, target: str) -> list[str]:
    """What a web page could read of the page of runs."""
    context = browser.new_context()
    window = context.new_page()
    window.goto(f"{page}#{quote(target, safe='')}")
    found = window.evaluate("attack()")
    context.close()
    return found


@pytest.mark.parametrize("ours", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("theirs", ["127.0.0.1", "localhost"])
def test_a_page_of_another_origin_reads_nothing(
    chromium: Browser, site: str, elsewhere: int, ours: str, theirs: str
) -> None:
    target = f"http://{ours}:{urlsplit(site).port}/"
    assert stolen(chromium, f"http://{theirs}:{elsewhere}/attack.html", target) == []


def test_the_attack_reads_what_is_not_guarded(chromium: Browser, elsewhere: int) -> None:
    page = f"http://127.0.0.1:{elsewhere}/attack.html"
    found = stolen(chromium, page, page)
    assert any(each.startswith("fetch") for each in found) and any(each.startswith("iframe") for each in found)


def test_a_name_that_was_rebound_to_this_machine_reads_nothing(chromium: Browser, site: str) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    rebound = chromium.browser_type.launch(
        executable_path=program, args=["--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    )
    page = rebound.new_page()
    for path in ("", "api/runs", "app.js"):
        answer = page.goto(f"http://evil.example:{urlsplit(site).port}/{path}")
        assert answer is not None and answer.status == 421, path
        told = page.evaluate("fetch('/api/runs').then(answer => answer.status, () => 0)")
        assert told in (0, 421), path
    rebound.close()
