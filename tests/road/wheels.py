"""The wheel works at each level of extras, each in a fresh venv: `make wheels`.

lightningrl                  the gateway captures calls without torch, the page shows them; `train` says what to install
lightningrl[train]           an agent that `lightningrl new` lays out trains one step
lightningrl[train,recipes]   the demo trains one step
"""

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.road.fresh import build_wheel, install, run

SCRIPT = """
def script(prompt, messages, tools):
    return "blue"
"""
AGENT = """
import json, os, urllib.request

body = {"model": "any", "messages": [{"role": "user", "content": "Which colour?"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
with urllib.request.urlopen(request, timeout=30) as response:
    print(json.load(response)["choices"][0]["message"]["content"])
"""
ONE_STEP = ("loop.steps=1", "loop.tasks_per_step=4", "loop.group_size=4", "tasks.heldout=8", "--json")


def bare(folder: Path, env: Mapping[str, str]) -> None:
    run("python", "-c", "import lightningrl; print(lightningrl.__version__)", cwd=folder, env=env)
    assert "train" in run("lightningrl", "--help", cwd=folder, env=env)
    (folder / "my_script.py").write_text(SCRIPT)
    (folder / "agent.py").write_text(AGENT)
    command = ("lightningrl", "run", "--engine", "my_script:script", "--json", "--", "python", "agent.py")
    said = run(*command, cwd=folder, env=env).splitlines()
    assert said[0] == "blue", said
    assert json.loads(said[-1])["calls"] == 1, said
    [captured] = (folder / "runs").iterdir()
    run("lightningrl", "ui", str(captured), "--export", "page.html", cwd=folder, env=env)
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "page/views/call.js" in page and "page/vendor/preact.mjs" in page and "Which colour?" in page
    run("python", "-c", "import torch", cwd=folder, env=env, exit_code=1)
    run("lightningrl", "new", "mine", cwd=folder, env=env)
    refused = run("lightningrl", "train", "recipe.toml", cwd=folder / "mine", env=env, exit_code=2)
    assert 'pip install "lightningrl[train]"' in refused, refused


def train(folder: Path, env: Mapping[str, str]) -> None:
    run("lightningrl", "new", "mine", cwd=folder, env=env)
    trained(run("lightningrl", "train", "recipe.toml", *ONE_STEP, cwd=folder / "mine", env=env))


def recipes(folder: Path, env: Mapping[str, str]) -> None:
    trained(run("lightningrl", "demo", *ONE_STEP, cwd=folder, env=env))


def trained(said: str) -> None:
    result = json.loads(said.splitlines()[-1])
    assert result["steps"] == 1, result


LEVELS = {"": bare, "[train]": train, "[train,recipes]": recipes}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lightningrl-wheels-") as name:
        wheel = build_wheel(Path(name))
        for number, (extras, check) in enumerate(LEVELS.items()):
            began = time.monotonic()
            folder = Path(name) / str(number)
            folder.mkdir()
            check(folder, install(wheel, extras, folder=folder / "venv"))
            print(f"lightningrl{extras} works ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
