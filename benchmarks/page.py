"""What does the page cost: its viewer in a browser, and a run that is being watched?

`paints`: Chromium opens the page of a run with 100,000 rollouts and 1,000,000 calls (`ui.py` writes it). Milliseconds
from the click, or from the navigation, until the frame after the one that has the content. `cold_…`: a new server, and
a browser without the page's files. `first_…`: asked for the first time, or the first rollout of its step. The rest is
warm. The machine's other work counts, too, so `load_average` is kept.

`watched`: a run of errands while one tab shows the curves, then the table of rollouts, then the page is closed. CPU
time of the page's process / CPU time of the run's other processes, both in the same windows of time. Its start, with
the imports and the first view, is apart.

    python benchmarks/page.py paints [--rounds 5] [--steps 200] [--run-dir DIR] [--json benchmarks/results/paints.json]
    python benchmarks/page.py watched [--rounds 3] [--window-s 20] [--json benchmarks/results/watched.json]
"""

import argparse
import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright
from ui import serving, write_run

RECIPE = Path(__file__).parents[1] / "recipes" / "errands" / "recipe.toml"
SETTINGS = ("tasks.heldout=8", "loop.eval_every=0", "loop.steps=10000")
ADDRESS = re.compile(r"page: (http://127\.0\.0\.1:\d+/)")
TICKS = os.sysconf("SC_CLK_TCK")
WAIT_S = 30.0

CLOCK = """
window.painted = (test) => new Promise((done) => {
  const then = () => requestAnimationFrame(() => done(performance.now()));
  const look = () => requestAnimationFrame(() => (test() ? then() : look()));
  look();
});
window.act = async (action, test) => {
  const began = performance.now();
  action();
  return (await painted(test)) - began;
};
window.total = () => document.querySelector("main .turn .soft")?.textContent ?? "";
window.rows = () => !document.querySelector("main .stale") && document.querySelectorAll("main tbody tr").length;
window.buttons = () => [...document.querySelectorAll("main button")];
window.click = (words) => buttons().find((one) => one.textContent.startsWith(words)).click();
window.bars = () => document.querySelectorAll("main .bar");
window.press = (bar) => bar.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
window.calls = () => document.querySelectorAll("main .call").length;
window.all = (words) => [...document.querySelectorAll("main tbody tr")].every((row) => row.textContent.includes(words));
"""
"""Helpers in the page. `painted`: the time of the frame after the first one in which a test holds."""


@contextmanager
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program is not None, "no Chromium on this machine"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Browser) -> Page:
    """A window with an empty cache."""
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    page.set_default_timeout(WAIT_S * 1000)
    page.add_init_script(CLOCK)
    return page


def first_paint(page: Page, address: str) -> dict[str, float]:
    """Open the table of rollouts."""
    page.goto(address)
    shown = page.evaluate("painted(() => rows() > 0)")
    [contentful] = page.evaluate(
        "performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)"
    )
    return {"contentful_paint": contentful, "row": shown}


def table(page: Page) -> dict[str, float]:
    """Filters and sorting, from the click until the table shows the answer."""
    page.evaluate("painted(() => rows() > 0 && total() && !total().includes('being read'))")
    found: dict[str, float] = {}
    for name, click, test in (
        ("filter_status", "click('failed')", "all('failed') && total() !== before"),
        ("filter_status_off", "click('all')", "!all('failed') && bars().length > 0"),
        ("filter_reward", "press(bars()[10])", "total() !== before && location.hash.includes('reward')"),
        (
            "filter_reward_off",
            "document.querySelector('.chosen button').click()",
            "total() !== before && !location.hash.includes('reward')",
        ),
        ("sort_reward", "click('reward')", "document.querySelector('th[aria-sort]').textContent.startsWith('reward')"),
        ("sort_off", "click('rollout')", "document.querySelector('th[aria-sort]').textContent.startsWith('rollout')"),
    ):
        page.wait_for_timeout(500)
        page.evaluate("window.before = total()")
        found[name] = page.evaluate(f"act(() => {click}, () => rows() > 0 && {test})")
    return found


def long_rollout(page: Page, *, run: str, steps: int) -> dict[str, float]:
    """A rollout of 50 calls that sample 4,000 tokens each, from the address until its conversation is painted, then its
    last call until its tokens are.
    """
    found: dict[str, float] = {}
    address = f"#/run/{run}/rollout/train-{steps:05d}-000-0"
    for name, member, call in (("first_long", 0, 49), ("long", 1, 50)):
        there = f"calls() >= 50 && document.querySelector('h1').textContent.includes('-0{member}')"
        found[f"{name}_rollout"] = page.evaluate(f"act(() => (location.hash = '{address}{member}'), () => {there})")
        tokens = "document.querySelectorAll('[data-token]').length >= 4000"
        found[f"{name}_call"] = page.evaluate(
            f"act(() => (location.hash = '{address}{member}/call/{call}'), () => {tokens})"
        )
    return found


def page_bytes(browser: Browser, address: str) -> dict[str, int]:
    """What the server sends for the page itself: raw, over the wire, and each file compressed with gzip."""
    page, bodies, wire = opened(browser), list[bytes](), list[int]()

    def received(response: Any) -> None:
        if "/api/" not in response.url:
            bodies.append(response.body())
            wire.append(response.request.sizes()["responseBodySize"])

    page.on("requestfinished", lambda request: received(request.response()))
    page.goto(address)
    page.evaluate("painted(() => document.querySelector('h1') !== null)")
    page.wait_for_load_state("load")
    page.wait_for_timeout(500)
    page.context.close()
    packed = sum(len(gzip.compress(body, 9)) for body in bodies)
    return {
        "page_files": len(bodies),
        "page_bytes": sum(map(len, bodies)),
        "page_bytes_sent": sum(wire),
        "page_bytes_gzip": packed,
    }


def paints(browser: Browser, folder: Path, *, rounds: int, steps: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for _ in range(rounds):
        with serving(folder) as viewer:
            address = f"http://127.0.0.1:{viewer.port}/"
            at = f"{address}#/run/{folder.name}/rollouts"
            page = opened(browser)
            measured = {f"cold_{name}": value for name, value in first_paint(page, at).items()}
            measured |= {f"first_{name}": value for name, value in table(page).items()} | table(page)
            measured |= long_rollout(page, run=folder.name, steps=steps)
            page.goto("about:blank")
            measured |= first_paint(page, at)  # the files are in the cache
            page.context.close()
            sizes = page_bytes(browser, address)
        for name, value in measured.items():
            found.setdefault(name, []).append(value)
    for name, values in found.items():
        print(f"{name:32} {median(values):8.0f} ms   ({min(values):.0f} to {max(values):.0f})")
    print(sizes)
    return {f"{name}_ms": round(median(values)) for name, values in found.items()} | sizes


def processes() -> dict[int, tuple[int, float, str]]:
    """Process → (parent, CPU seconds of it and of the children that it has waited for, command)."""
    found: dict[int, tuple[int, float, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()  # proc(5), from the third on
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS, command
    return found


def spent(run: int) -> tuple[float, float, int]:
    """(CPU seconds of the page, of the rest of the run, number of the page's processes)."""
    table = processes()
    page, rest, pages = 0.0, 0.0, 0
    for pid, (_, seconds, _) in table.items():
        line: list[int] = [pid]
        while line[-1] != run and line[-1] in table:
            line.append(table[line[-1]][0])
        if line[-1] != run:
            continue
        if any(" ui --fd " in table[one][2] for one in line):
            page, pages = page + seconds, pages + 1
        else:
            rest += seconds
    return page, rest, pages


def watched(browser: Browser, folder: Path, *, rounds: int, window_s: float) -> dict[str, Any]:
    """View → share of CPU time that the page costs, as the median of windows, and the CPU seconds."""
    command = [sys.executable, "-m", "lightningrl", "train", str(RECIPE), *SETTINGS, "--run-dir", str(folder)]
    found: dict[str, list[tuple[float, float]]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            assert run.stdout is not None
            address = next(match[1] for line in run.stdout if (match := ADDRESS.search(line)))
            metrics = folder / "metrics.jsonl"
            while not metrics.exists() or '"step"' not in metrics.read_text():
                time.sleep(1)
            assert spent(run.pid)[2] == 0, "a page runs without a viewer"
            page = opened(browser)
            page.goto(f"{address}#/run/{folder.name}")
            page.wait_for_selector("main h1")
            start_s = spent(run.pid)[0]
            for _ in range(rounds):
                for view, ready in (("", "main .charts"), ("/rollouts", "main tbody tr")):
                    page.evaluate(f"location.hash = '#/run/{folder.name}{view}'")
                    page.wait_for_selector(ready)
                    page.wait_for_timeout(1000)
                    before = spent(run.pid)
                    page.wait_for_timeout(window_s * 1000)
                    after = spent(run.pid)
                    found.setdefault(view.strip("/") or "curves", []).append(
                        (after[0] - before[0], after[1] - before[1])
                    )
            steps = len(metrics.read_text().splitlines())
        finally:
            run.terminate()
            run.communicate()
    results: dict[str, Any] = {"start_cpu_s": round(start_s, 2), "steps_seen": steps, "window_s": window_s}
    for view, windows in found.items():
        page_s, run_s = (sum(column) for column in zip(*windows, strict=True))
        shares = [100 * ours / theirs for ours, theirs in windows]
        results |= {f"{view}_page_cpu_s": round(page_s, 2), f"{view}_run_cpu_s": round(run_s, 1)}
        results[f"{view}_percent"] = round(median(shares), 2)
        each = ", ".join(f"{share:.2f}" for share in shares)
        print(f"{view:10} {median(shares):.2f} % ({each}): {page_s:.2f} s of {run_s:.1f} s")
    print(results)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("paints", "watched"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of 500 rollouts each")
    parser.add_argument("--run-dir", type=Path, help="where the large run is, or is written to; default: a new folder")
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, chromium() as browser:
        folder = arguments.run_dir or Path(temporary) / "run"
        if arguments.what == "watched":
            results = watched(browser, folder, rounds=arguments.rounds, window_s=arguments.window_s)
        else:
            if not folder.exists():
                write_run(folder, steps=arguments.steps)
            results = paints(browser, folder, rounds=arguments.rounds, steps=arguments.steps)
    about = {"rounds": arguments.rounds, "load_average": round(os.getloadavg()[0], 1), "cpus": os.cpu_count()}
    if arguments.json:
        arguments.json.write_text(json.dumps(results | about | {"machine": platform.machine()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
