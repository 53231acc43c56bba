"""What agents said is text in a notebook, never markup: a parser finds nothing but our own elements and attributes."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightningrl.cli.folder import RunFolder
from lightningrl.errors import UserError
from lightningrl.notebook import open
from lightningrl.notebook.colours import MEANING, coloured
from lightningrl.notebook.curve import curve_of, points_of
from lightningrl.notebook.html import LONG, figure, frame, heading, said, table, turn
from lightningrl.notebook.rows import Rows, frame_of
from lightningrl.notebook.screen import Cell, Lines
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Rollout, Task
from tests.cli.test_rollouts import call

PAYLOADS = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "'\"><svg onload=alert(1)>",
    '" onmouseover=alert(1) x="',
    "' onfocus='alert(1)' autofocus='",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    '<a href="javascript:alert(1)">x</a>',
    "<math><mi xlink:href='javascript:alert(1)'>x",
    "</pre></bdi></div><script>alert(1)</script>",
    "</title></textarea></style><script>alert(1)</script>",
    "<style>*{background:url(javascript:alert(1))}</style>",
    "red;background:url(javascript:alert(1))",
    "<!--><script>alert(1)</script>-->",
    "<![CDATA[<script>alert(1)</script>]]>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;alert(1)&#60;/script&#62;",
    "<details open ontoggle=alert(1)>",
    "<input autofocus onfocus=alert(1)>",
    "<base href=//evil>",
    "<meta http-equiv=refresh content='0;url=javascript:alert(1)'>",
    "<object data=javascript:alert(1)>",
    "<form><button formaction=javascript:alert(1)>x",
    "$\\href{javascript:alert(1)}{x}$",
    "{0.__class__} {} %s {{7*7}}",
    "\u202egnitset\u202c <b>",
    "<script\x00>alert(1)</script>",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16") + "<img src=x>",
]
TAGS = {"div", "b", "span", "pre", "bdi", "details", "summary", "table", "tr", "th", "td", "svg", "path", "circle"} | {
    "title",
    "text",
}
ATTRIBUTES = {"style", "class", "title", "viewbox", "role", "aria-label", "d", "fill", "stroke", "stroke-width"} | {
    "cx",
    "cy",
    "r",
    "x",
    "y",
    "font-size",
    "text-anchor",
}


class Read(HTMLParser):
    """The text of a piece of HTML, and the names of what is in it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.titles, self.open = "", list[str](), list[str]()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS and {name for name, _ in attrs} <= ATTRIBUTES, (tag, attrs)
        values = {name: value or "" for name, value in attrs}
        assert "url" not in values.get("style", "") and "expression" not in values.get("style", "")
        self.titles += [values["title"]] if "title" in values else []
        self.open += [tag] if tag not in ("path",) else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open += [] if tag == "path" else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "elements are closed in order"

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(decl)

    def handle_pi(self, data: str) -> None:
        raise AssertionError(data)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_hostile_text_stays_text(payload: str) -> None:
    everywhere = frame(
        heading(payload, payload), said(payload), turn(payload, said(payload)), table([payload], [[payload], [None]])
    )
    read = Read(str(everywhere))
    assert read.text.count(payload) == 7 and not read.open


@pytest.mark.parametrize("colour", MEANING)
def test_hostile_tokens_stay_text(colour: str) -> None:
    values = [0.5 if index % 2 else -0.5 for index in range(len(PAYLOADS))]
    read = Read(str(coloured(PAYLOADS, values, colour=colour)))  # type: ignore[arg-type]
    assert all(payload in read.text for payload in PAYLOADS) and len(read.titles) == len(PAYLOADS)


async def test_a_hostile_run_is_inert(tmp_path: Path) -> None:
    """Hostile in the task, the messages, the agent's name, its output, its error and the reward's name."""
    everything = "".join(PAYLOADS)
    store = await SQLiteStore.open(tmp_path / "store.sqlite")
    task = Task(id=everything, input={everything: everything}, split="train")
    await store.enqueue([Rollout(id="<b>r</b>", group_id="<i>g</i>", task=task, max_attempts=1)])
    [(_, attempt)] = await store.claim("<u>worker</u>", limit=1, lease_s=60)
    body = {"model": "m", "messages": [{"role": "user", "content": everything}], "tools": []}
    await store.append(
        call(attempt, 0, prompt=[1], said=[2, 3], system=False, request=body, agent=everything, capture_reason="<hr>")
    )
    await store.finish(attempt.id, "failed", error=f"AgentError: {everything}", output=everything)
    await store.close()
    run = open(tmp_path)
    rollout = run.rollout("<b>r</b>")
    pieces = (run, run.rollouts(failed=True), rollout, rollout.calls[0], rollout.calls[0].tokens)
    texts = [Read(piece._repr_html_()).text for piece in pieces]
    assert everything in texts[2] and everything in texts[3] and "[2]" in texts[4]
    assert texts[2].count(PAYLOADS[3]) >= 5 and "AgentError" in texts[1]


def test_a_cell_links_to_the_page_of_its_run_while_it_goes_on(tmp_path: Path) -> None:
    lines = Lines()
    cell = Cell(RunFolder(tmp_path), lines, steps=3)
    for text in ("loading", "page: http://127.0.0.1:8123/\n", "page: javascript:alert(1)", "page: http://evil/", "<b>"):
        lines.add(text)
    shown = cell.html(ended=False)._repr_html_()
    assert re.findall('href="(.*?)"', shown) == ["http://127.0.0.1:8123/"] and "<b></bdi>" not in shown
    assert "href" not in cell.html(ended=True)._repr_html_(), "the page ends with the run"
    assert "0 of 3 steps" in shown and "all 5 lines" in shown


def test_the_rest_of_a_long_text_is_folded() -> None:
    read = Read(str(said("x" * LONG + "y" * 1000)))
    assert read.text.startswith("x" * LONG + "1,000 more characters") and read.text.endswith("y" * 1000)


def test_the_curve_is_a_picture_with_intervals() -> None:
    rows = [
        {"kind": "began", "step": 0, "at": 1.0},
        {"kind": "exam", "step": 0, "mode": "sampled", "reward/mean": 0.25, "reward/low": 0.2, "reward/high": 0.3},
        {"kind": "step", "step": 0, "at": 2.0, "reward/mean": 0.5, "policy/entropy": 1.5},
    ]
    curve = curve_of(points_of(rows, intervals={1: (0.4, 0.6)}), steps=2)
    assert (curve[1].step, curve[1].low, curve[1].metrics["policy/entropy"]) == (1, 0.4, 1.5)
    read = Read(curve._repr_html_())
    assert "after 0 steps: 0.250 [0.200, 0.300]" in read.text and "0.500" in read.text and "mode" in read.text
    assert "no step is finished yet" in curve_of((), steps=2)._repr_html_()


def test_rows_are_a_sequence_and_become_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([1, 2, 3], plain=lambda n: {"n": n, "half": n / 2, "none": None}, shown=("n", "none"), empty="nothing")
    assert len(rows) == 3 and rows[1] == 2 and list(rows[1:]) == [2, 3] and isinstance(rows[:1], Rows)
    assert repr(rows[:2]) == "n\n1\n2" and repr(rows[:0]) == "nothing"
    assert list(rows.to_pandas().columns) == ["n", "half", "none"]
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError, match="`pandas` is not installed") as missing:
        frame_of([{"n": 1}])
    assert missing.value.hint == "pip install pandas"


def test_figures_are_short() -> None:
    assert [figure(value) for value in (None, 0.0, 0.00123, 0.5, 1234567, "x")] == [
        "", "0.000", "0.0012", "0.500", "1,234,567", "x",
    ]  # fmt: skip
