"""Runs docs/tutorial.md from the wheel in a fresh venv, and checks the results: `make road`.

Blocks of `bash` are run. Blocks of `python` with a file name are written to that file. The last block of `python` runs
on the trained model.
"""

import json
import re
import shlex
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.road.fresh import ROOT, build_wheel, install, run

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)


def walk(folder: Path, env: Mapping[str, str]) -> None:
    """Run all commands of the tutorial, in order."""
    place = folder
    for line in (line for block in blocks("bash") for line in block.splitlines()):
        words = shlex.split(line, comments=True)
        if not words or words[0] == "pip":
            continue
        if words[0] == "cd":
            place = place / words[1]
            write_files(place)
        elif words[:2] == ["lightningrl", "warmstart"]:
            check_warmstart(json.loads(run(*words, "--json", cwd=place, env=env).splitlines()[-1]))
        elif words[:2] == ["lightningrl", "train"]:
            check_training(json.loads(run(*words, "--json", cwd=place, env=env).splitlines()[-1]))
        else:
            run(*words, cwd=place, env=env)
    run("python", "-c", blocks("python")[-1] + GENERATES, cwd=place, env=env)


def write_files(folder: Path) -> None:
    for block in blocks("python"):
        if name := re.match(r"# (\S+\.py)\n", block):
            (folder / name[1]).write_text(block, encoding="utf-8")


def check_warmstart(made: Mapping[str, Any]) -> None:
    assert made["reached"] and 0.2 <= made["success"] <= 0.5, made
    assert made["demonstrations"] == 2000, "the teacher does every task"


def check_training(result: Mapping[str, Any]) -> None:
    before, after, tasks = result["heldout_before"], result["heldout_after"], result["heldout_tasks"]
    z = (after - before) / ((before * (1 - before) + after * (1 - after)) / tasks) ** 0.5
    assert z > 2, f"held-out reward did not rise beyond noise: {before:.3f} → {after:.3f}"


GENERATES = """
asked = [{"role": "system", "content": "Name the gate."}, {"role": "user", "content": "ann sees off ben: where?"}]
prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
said = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1]:]
print(tokenizer.decode(said))
assert len(said) > 0
"""


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lightningrl-road-") as name:
        folder = Path(name)
        env = install(build_wheel(folder), "[train]", folder=folder / "venv")
        ready = time.monotonic()
        walk(folder, env)
        print(f"walked the road in {time.monotonic() - ready:.0f} s, after {ready - began:.0f} s of installing")


if __name__ == "__main__":
    main()
