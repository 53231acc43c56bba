"""The notebook for newcomers runs from top to bottom in a new kernel. It is committed with the outputs of a run."""

import re
import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir

import nbformat

from tests.docs.blocks import ROOT

NOTEBOOK = ROOT / "docs" / "first_run.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> dict[str, list[nbformat.NotebookNode]]:
    """The outputs of each cell with code, by its id."""
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def kinds(found: list[nbformat.NotebookNode]) -> list[tuple[str, list[str]]]:
    return [(output.output_type, sorted(output.get("data", {}))) for output in found]


def test_the_notebook_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "docs_site.notebook", str(tmp_path / "run.ipynb")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr
    fresh = outputs(nbformat.read(tmp_path / "run.ipynb", as_version=4))
    html = {
        name: found[0].data["text/html"] for name, found in fresh.items() if "text/html" in found[0].get("data", {})
    }

    assert "async def run(" in fresh["new"][-1].text
    before, after = re.findall(r"held-out reward ([\d.]+) → ([\d.]+)", html["trains"])[0]
    assert float(before) + 0.3 < float(after) and "5 of 5 steps" in html["trains"]
    assert "<svg" in html["curve"] and html["curve"].count("<tr>") == 1 + 5 + 4
    assert 2 <= html["rollouts"].count("<tr>") <= 6 and "train-00000-" in html["rollouts"]
    assert "reward 0" in html["rollout"] and "call 1" in html["rollout"] and "task · question" in html["rollout"]
    assert "advantage -" in html["advantage"] and "rgba(234,118,0" in html["advantage"], "less likely, so orange"
    assert "logprob -" in html["logprob"]
    assert re.match(r"Token\(id=\d+, text='", fresh["record"][0].data["text/plain"])

    committed = outputs(nbformat.read(NOTEBOOK, as_version=4))
    assert {name: kinds(found) for name, found in committed.items()} == {
        name: kinds(found) for name, found in fresh.items()
    }, "run it again: make notebook"


def test_the_committed_notebook_is_one_run_from_top_to_bottom() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run it again: make notebook"
    text = NOTEBOOK.read_text()
    assert len(text) < 100_000 and "Traceback" not in text
    places = [str(ROOT), str(Path.home()), gettempdir()]
    assert [place for place in places if f"{place}/" in text] == [], "paths of the machine that ran it"


def test_its_links_lead_to_pages() -> None:
    prose = "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type != "code")
    links = re.findall(r"\]\(([^)#]+)", prose)
    assert links and all((ROOT / "docs" / link).is_file() for link in links)
