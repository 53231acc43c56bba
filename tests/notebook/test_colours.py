"""A token has the same shade in a notebook and on the page."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from playwright._impl._driver import compute_driver_executable

import lightningrl.ui
from lightningrl.notebook.colours import Colour, heats

PAGE = Path(lightningrl.ui.__file__).parent / "page"
SCRIPT = """
import { SCALES, toneOf } from "./page/parts/colours.js";
const [name, values] = JSON.parse(process.argv[2]);
const bound = SCALES[name].bound(values);
const shades = values.map((value) => toneOf(SCALES[name], value, bound));
console.log(JSON.stringify(shades.map(({ tone, share }) => (tone === "down" ? -share : share))));
"""
VALUES: dict[Colour, list[list[float]]] = {
    "advantage": [[-0.54, 0.0, 0.25], [-3.0, 2.0]],
    "logprob": [[-0.0001, -1.5, -9.0]],
    "ratio": [[1.0, 0.95, 1.1], [0.5, 3.0]],
    "entropy": [[0.0, 0.4], [1.5, 3.0]],
}


@pytest.mark.parametrize("colour", VALUES)
def test_the_scales_are_those_of_the_page(colour: Colour, tmp_path: Path) -> None:
    node, _ = compute_driver_executable()
    shutil.copytree(PAGE, tmp_path / "page")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "shades.mjs").write_text(SCRIPT)
    for values in VALUES[colour]:
        command = [node, "shades.mjs", json.dumps([colour, values])]
        shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True).stdout
        assert heats(values, colour=colour) == pytest.approx(json.loads(shown))
