"""Do tools of real frameworks run once, and does the model read the same, if a branch plays their results back?"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from .conftest import HERE, ROOT
from .test_matrix import interpreter

TWO = sorted(["pay ann 5", "mail ann", "pay bob 7"])
TIMEOUT_S = 60.0


def ran(framework: str, folder: Path) -> dict[str, Any]:
    """What `twice.py` says. The frameworks' environment lacks one package that ours needs."""
    (folder / "tomli_w").symlink_to(Path(tomli_w.__file__).parent)
    paths = os.pathsep.join([str(ROOT / "src"), str(folder)])
    done = subprocess.run(
        [interpreter("agents"), HERE / "agents" / "twice.py", framework],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("framework", ["langchain", "openai_agents", "autogen", "autogen_core", "pydantic_ai"])
def test_recorded_results_take_the_place_of_tools_and_the_model_reads_the_same(framework: str, tmp_path: Path) -> None:
    said = ran(framework, tmp_path)
    assert sorted(said["trunk"]["done"]) == TWO
    assert json.dumps(said["again"]["asked"]) == json.dumps(said["trunk"]["asked"]) and said["again"]["done"] == []
    assert said["fresh"]["done"] == ["pay bob 7"]
    assert sorted(said["plain"]["done"]) == sorted(said["safe"]["done"]) == TWO
    if "failing" in said:
        assert said["failing"]["done"] == ["fail bob"] and said["failing again"]["done"] == []
        assert json.dumps(said["failing again"]["asked"]) == json.dumps(said["failing"]["asked"])
    if "withheld" in said:
        assert "must not run again, and its result cannot be played back: it is not known" in said["withheld"]
