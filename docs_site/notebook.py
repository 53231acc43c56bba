"""Run the notebook docs/first_run.ipynb in a new folder, and keep its outputs: `make notebook`.

    python -m docs_site.notebook             writes them into docs/first_run.ipynb
    python -m docs_site.notebook FILE        writes the notebook with its outputs elsewhere

It is committed with its outputs, so that it reads well without being run.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "docs" / "first_run.ipynb"
CELL_S = 300
"""Timeout for one cell. Training takes half a minute on two idle cores."""


def executed(file: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in a new kernel and an empty folder. Raises if a cell raises."""
    notebook = nbformat.read(file, as_version=4)
    with TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", record_timing=False, resources=place)
        client.execute()
    notebook.metadata.language_info = {"name": "python"}  # not the version of Python that ran it
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(NOTEBOOK), Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK)
