"""One file with the page of a run: curves, health, and three rollouts with their calls and groups. It opens anywhere.

files of the page ─┐
                   ├→ `exported` → one HTML file
answers of the API ┘

A page that is a file may not load others. So each module of the page becomes a `data:` URL of an import map, and the
answers are JSON that scripts read. The policy admits these scripts alone, by their hashes.
"""

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from lightningrl.look.columns import KINDS, Columns
from lightningrl.look.selection import SORTS, Query, select
from lightningrl.look.table import Table
from lightningrl.ui.ask import Ask
from lightningrl.ui.files import PAGE
from lightningrl.ui.routes import API
from lightningrl.ui.shelf import Book, Shelf

IMPORT = re.compile(r'\b(from|import)\s*"(\.\.?/[^"]+)"')
STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">\n?')
ENTRY = '<script type="module" src="app.js"></script>'
ICON = "icon.svg"
START = 'import("page/app.js");'
UNESCAPED = "!*'()"
"""What `encodeURIComponent` leaves as it is, besides what `quote` does."""
LIMIT = 100
"""Rows of a table's page, as `views/rollouts.js` asks for them."""


async def exported(folder: Path) -> bytes:
    """The file. Raises `UserError` if the run has no records."""
    shelf = Shelf([folder])
    try:
        [book] = shelf.books().values()
        table = await book.table()
        while not table.complete:
            await table.refresh()
        whole = chosen_rollouts(table.columns)
        return assembled(await answers(shelf, book, whole), whole=whole)
    finally:
        await shelf.close()


async def answers(shelf: Shelf, book: Book, whole: Sequence[str]) -> dict[str, Any]:
    """Address → what the API answers there: all that the exported page holds. `whole`: rollouts with their calls."""
    found: dict[str, Any] = {}

    async def ask(route: str, *, attempt: int | None = None, **names: Any) -> Any:
        """Keep one answer, and return it."""
        given = {"run": book.name, **{name: str(value) for name, value in names.items()}}
        address = route.format_map({name: quote(value, safe=UNESCAPED) for name, value in given.items()})
        query = {} if attempt is None else {"attempt": str(attempt)}
        answer = await API[route](Ask(shelf=shelf, names=given, query=query))
        return found.setdefault(address + (f"?attempt={attempt}" if attempt is not None else ""), answer)

    for route in ("/api/runs", "/api/runs/{run}", "/api/runs/{run}/metrics", "/api/runs/{run}/workers"):
        await ask(route)
    if book.config is not None:
        await ask("/api/runs/{run}/health")
    table, shown = await book.table(), dict[str, None]()
    for chosen in whole:
        view = await ask("/api/runs/{run}/rollouts/{rollout}", rollout=chosen)
        for attempt in (None, *(attempt["number"] for attempt in view["attempts"])):
            tried = await ask("/api/runs/{run}/rollouts/{rollout}", attempt=attempt, rollout=chosen)
            for number in range(1, len(tried["calls"]) + 1):
                route = "/api/runs/{run}/rollouts/{rollout}/calls/{call}"
                await ask(route, attempt=attempt, rollout=chosen, call=number)
        await ask("/api/runs/{run}/groups/{group}", group=view["group"]["id"])
        for sibling in view["siblings"]:
            await ask("/api/runs/{run}/rollouts/{rollout}", rollout=sibling["id"])
            shown[sibling["id"]] = None
    return found | tables(table, list(shown), address=f"/api/runs/{quote(book.name, safe=UNESCAPED)}/rollouts")


def chosen_rollouts(columns: Columns) -> list[str]:
    """Ids of the best, the worst and the median rollout of the last training step, from groups that differ if there are
    any. Of a run without training: of all rollouts. Fewer, if there are no three with a reward; the latest if none has.
    """
    rows = columns.rows
    if np.isnan(rows["reward"]).all():
        return [columns.ids[place] for place in np.argsort(rows["place"])[-1:]]
    known = np.flatnonzero(~np.isnan(rows["reward"]))
    trained = known[rows["kind"][known] == KINDS.index("train")]
    if len(trained):
        known = trained[rows["step"][trained] == rows["step"][trained].max()]
    groups, rewards = rows["group"][known], rows["reward"][known]
    differ = [len(np.unique(rewards[groups == group])) > 1 for group in groups]
    known = known[differ] if any(differ) else known
    order = known[np.lexsort((-rows["place"][known], rows["reward"][known]))]
    return [columns.ids[order[place]] for place in dict.fromkeys((len(order) - 1, 0, len(order) // 2))]


def tables(table: Table, shown: Sequence[str], *, address: str) -> dict[str, Any]:
    """Address → the table of these rollouts, in each order."""
    columns, found = table.columns, dict[str, Any]()
    indices = [index for rollout in shown if (index := columns.index(rollout)) is not None]
    places = columns.rows["place"][indices].tolist()
    for name in SORTS:
        for descending in (False, True):
            answer = select(columns, Query(sort=(name, descending), limit=LIMIT), tasks=places).as_json()
            answer |= {"cursor": table.cursor, "complete": True, "searched": None}
            found[f"{address}?sort={'-' if descending else ''}{name}&limit={LIMIT}"] = answer
    return found | {f"{address}?limit={LIMIT}": found[f"{address}?sort=-queue&limit={LIMIT}"]}


def assembled(answers: Mapping[str, Any], *, whole: Sequence[str] = ()) -> bytes:
    """The file with the page and these answers. `whole`: the rollouts that it names, as it has all of their calls."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    icon = data_url("image/svg+xml", (PAGE / ICON).read_text(encoding="utf-8"))
    styles = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in STYLE.findall(page))
    imports = {f"page/{name}": data_url("text/javascript", text.replace(ICON, icon)) for name, text in modules()}
    scripts = [msgspec.json.encode({"imports": imports}).decode(), START]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))} data:; style-src {_hash(styles)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = msgspec.json.encode({"answers": answers, "whole": whole}).decode().replace("<", "\\u003c")
    head = f'<meta http-equiv="content-security-policy" content="{policy}">\n<style>{styles}</style>\n'
    body = (
        f'<script type="application/json" id="embedded">{data}</script>\n'
        f'<script type="importmap">{scripts[0]}</script>\n<script>{scripts[1]}</script>\n'
    )
    page = STYLE.sub("", page).replace(ICON, icon).replace(ENTRY + "\n", "")
    return page.replace("<title>", head + "<title>").replace("</body>", body + "</body>").encode()


def modules() -> list[tuple[str, str]]:
    """(name, text) of each module. What it imports is named from the page's folder on, as in an import map."""
    files = sorted(file for file in PAGE.rglob("*") if file.suffix in (".js", ".mjs"))
    found: list[tuple[str, str]] = []
    for file in files:
        name = file.relative_to(PAGE)
        text = file.read_text(encoding="utf-8")
        found.append((name.as_posix(), IMPORT.sub(lambda match, at=name.parent: _import(match, at.as_posix()), text)))
    return found


def data_url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{b64encode(text.encode()).decode()}"


def _import(found: re.Match[str], at: str) -> str:
    parts: list[str] = []
    for part in PurePosixPath("page", at, found[2]).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return f'{found[1]} "{"/".join(parts)}"'


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
