"""Whole runs at a real server: a recipe learns by settings alone, ends and goes on, and its weights can be used."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lightningrl.hosted.adapters import WEIGHTS
from lightningrl.hosted.kept import read_saved
from tests.command import run_command
from tests_tinker.proxy import Fault, proxied
from tests_tinker.server import MODEL, Server

RECIPE = MODEL.parent
RUN_S = 3600.0
NEAR = 1e-4
"""Of the weights of two runs. An update moves a weight by up to 4e-3."""
TASKS, GROUP, HELDOUT = 4, 8, "tasks.heldout=4"
SETTINGS = (
    "model.lora_rank=8",
    "trainer.learning_rate=4e-3",
    "trainer.minibatches=1",
    "loop.steps=2",
    f"loop.tasks_per_step={TASKS}",
    f"loop.group_size={GROUP}",
    HELDOUT,
    "agent.timeout_s=900",  # the first answers wait for compilations
)


def at(url: str, model: Path, *settings: str) -> list[str]:
    """The settings that bring a recipe to a service, and make it small."""
    return ["backend=tinker", f"service.url={url}", f"service.model={model}", *SETTINGS, *settings]


def recipe_in(folder: Path) -> Path:
    """A copy of the recipe, which has never heard of a service."""
    shutil.copytree(RECIPE, folder / "recipe", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    return folder / "recipe" / "recipe.toml"


def started(recipe: Path, run: Path, *settings: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lightningrl", "train", str(recipe), *settings, "--run-dir", str(run), "--no-ui"]
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, cwd=recipe.parent, stdout=log, stderr=log)


def rows_in(run: Path, kind: str) -> list[dict[str, Any]]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def weights_in(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / WEIGHTS)


def wait_for_step(run: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the first step is in the records, and the second has begun."""
    deadline = time.monotonic() + RUN_S
    while not rows_in(run, "step"):
        assert process.poll() is None, run.with_suffix(".log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_recipe_trains_by_settings_alone_and_its_weights_answer_there_and_here(
    service_url: str, service_model: Path, tmp_path: Path
) -> None:
    recipe, run = recipe_in(tmp_path), tmp_path / "run"
    hosted, call = at(service_url, service_model), {"cwd": tmp_path, "timeout_s": RUN_S}
    trained = result_of(run_command("train", str(recipe), *hosted, "--run-dir", str(run), "--json", **call))
    assert all(row["optim/steps"] == row["step"] + 1 for row in rows_in(run, "step"))
    assert all(row["policy/logprob_gap"] < 1e-4 for row in rows_in(run, "step"))
    assert all(row["rollouts/succeeded"] == TASKS * GROUP for row in rows_in(run, "step")), "agents ran as they are"
    assert all(trained["service"][kind] > 0 for kind in ("prefill", "sample", "train"))
    exported = read_saved(run / "model")
    assert exported is not None and exported.steps == 2
    there = [
        result_of(run_command("eval", str(recipe), *hosted, "--checkpoint", str(folder), "--json", **call))
        for folder in (run, run / "checkpoints" / "step-00002")
    ]
    here = result_of(run_command("eval", str(recipe), HELDOUT, f"model.path={run / 'model'}", "--json", **call))
    greedy = [found["heldout_greedy"] for found in (*there, here)]
    assert greedy == [trained["heldout_greedy_after"]] * 3


def test_a_run_that_is_killed_while_it_learns_goes_on_and_makes_each_update_once(
    service_url: str, service_model: Path, tmp_path: Path
) -> None:
    recipe, run, calm = recipe_in(tmp_path), tmp_path / "run", tmp_path / "calm"
    undisturbed = ("train", str(recipe), *at(service_url, service_model), "--run-dir", str(calm), "--json")
    result_of(run_command(*undisturbed, cwd=tmp_path, timeout_s=RUN_S))
    with proxied(service_url) as proxy:
        hosted = at(proxy.url, service_model)
        process = started(recipe, run, *hosted)
        try:
            wait_for_step(run, process)
            fault = Fault(path="optim_step", breaks="hang", hang_s=5.0)
            proxy.faults = [fault]
            deadline = time.monotonic() + RUN_S
            while fault.times:
                assert process.poll() is None and time.monotonic() < deadline, run.with_suffix(".log").read_text()
                time.sleep(0.05)
            time.sleep(2.0)  # the service has made the update, and the run does not know
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        assert len(rows_in(run, "step")) == 1
        again = run_command(
            "train", str(recipe), *hosted, "--run-dir", str(run), "--resume", "--json", cwd=tmp_path, timeout_s=RUN_S
        )
        result_of(again)
    assert [row["optim/steps"] for row in rows_in(run, "step")] == [1, 2]
    for name, found in tensors_in(run / "model").items():
        np.testing.assert_allclose(found, tensors_in(calm / "model")[name], atol=NEAR, err_msg=name)


def test_a_server_that_dies_ends_the_run_which_goes_on_with_its_checkpoints(own_server: Server, tmp_path: Path) -> None:
    recipe, run = recipe_in(tmp_path), tmp_path / "run"
    hosted = at(own_server.url, own_server.model, "service.timeout_s=180", "agent.max_attempts=1")
    process = started(recipe, run, *hosted)
    try:
        wait_for_step(run, process)
        own_server.kill()
        assert process.wait(RUN_S) in (1, 2), "an update failed, or all agents"
    finally:
        process.kill()
    said = run.with_suffix(".log").read_text()
    assert f"`{own_server.url}`" in said and "hint:" in said, said
    kept, away = own_server.folder / "kept", own_server.folder / "away"
    kept.rename(away)
    own_server.start()
    resume = ("train", str(recipe), *hosted, "--run-dir", str(run), "--resume", "--json")
    lost = run_command(*resume, cwd=tmp_path, timeout_s=RUN_S)
    assert lost.returncode == 1 and "continue from `tinker://" in lost.stderr and "hint:" in lost.stderr, lost.stderr
    shutil.rmtree(kept, ignore_errors=True)
    away.rename(kept)
    result_of(run_command(*resume, cwd=tmp_path, timeout_s=RUN_S))
    assert [row["optim/steps"] for row in rows_in(run, "step")] == [1, 2]


TEAM = """
import os

from openai import OpenAI


def run(task):
    client, answer = OpenAI(), ""
    for model in ("asker", "teller"):
        messages = [{"role": "user", "content": f"what is the city of {task['who']}? {answer}"}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4).choices[0].message.content
    return answer


def reward(task, answer):
    return len(answer or "") % 3 / 2


def tasks(split, *, seed, count):
    return [{"id": f"{split}-{seed}-{i}", "input": {"who": ["ann", "ben"][i % 2]}} for i in range(count)]
"""


def test_two_policies_learn_with_an_adapter_each(service_url: str, service_model: Path, tmp_path: Path) -> None:
    recipe, run = recipe_in(tmp_path), tmp_path / "run"
    (recipe.parent / "team.py").write_text(TEAM)
    team = [
        "agent.entry=team:run",
        "agent.reward=team:reward",
        "tasks.source=team:tasks",
        'routes=[{model="asker",policy="asker"},{model="teller",policy="teller"}]',
        "policies.asker.trainer.learning_rate=4e-3",
        "policies.teller.trainer.learning_rate=2e-3",
    ]
    done = run_command(
        "train",
        str(recipe),
        *at(service_url, service_model, *team),
        "--run-dir",
        str(run),
        "--json",
        cwd=tmp_path,
        timeout_s=RUN_S,
    )
    result_of(done)
    saved = {name: read_saved(run / "checkpoints" / "step-00002" / name / "trainer") for name in ("asker", "teller")}
    states = [found.state for found in saved.values() if found is not None]
    assert len({state.removeprefix("tinker://").partition("/")[0] for state in states}) == 2, states
    assert weights_in(run / "model" / "asker") != weights_in(run / "model" / "teller")
    assert [row["teller/optim/steps"] for row in rows_in(run, "step")] == [1, 2]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress bars, and no page."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert "TINKER_API_KEY" in os.environ
