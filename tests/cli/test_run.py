"""A whole run from the command line: its files, and the same weights for the same seed, also after a kill."""

import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lightningrl.data.taught import load_taught
from lightningrl.look.runs import state_of
from tests.conftest import SmallRecipe


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_run_is_running_from_its_start_to_its_result(small_recipe: SmallRecipe) -> None:
    run, states = small_recipe.folder / "run", list[str]()
    with ThreadPoolExecutor() as pool:
        training = pool.submit(small_recipe.train, "--run-dir", "run", "loop.steps=1")
        while not training.done():
            if (run / "store.sqlite").exists():
                states.append(state_of(run))
            time.sleep(0.005)
        training.result()
    assert set(states) <= {"running", "complete"} and states[0] == "running" and state_of(run) == "complete"
    assert not (run / "process.json").exists()


def test_a_run_writes_all_its_files_and_eval_reproduces_its_results(small_recipe: SmallRecipe) -> None:
    result = small_recipe.train("--run-dir", "run", "loop.eval_every=1", "tasks.heldout=8")
    run = small_recipe.folder / "run"
    for name in (
        "config.toml",
        "metrics.jsonl",
        "store.sqlite",
        "checkpoints",
        "curve.png",
        "result.json",
        "model/config.json",
        "model/tokenizer.json",
        "model/README.md",
    ):
        assert (run / name).exists(), name
    assert (
        result["rollouts"] == 2 * 2 * 4 + 2 * 2 * 8 + 8
    )  # steps · tasks · group + (before, after) · modes · held-out + one exam on the way
    assert {
        "heldout_before",
        "heldout_after",
        "heldout_greedy_before",
        "heldout_greedy_after",
        "seconds",
        "steps",
        "run_dir",
    } <= result.keys()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [0, 1]
    assert all(row["policy/logprob_gap"] < 1e-4 for row in rows if row["kind"] == "step")
    for part, seconds in result["cpu_s"].items():
        each = [row[f"cpu/{part}_s"] for row in rows if row["kind"] == "step"]
        assert len(each) == 2 and sum(each) <= seconds + 0.1, part
        assert all(spent > 0 or part == "rest" for spent in each), part  # the curve may be drawn during a step
    assert result["cpu_s"]["rest"] > 0.1, "it has loaded the model"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
    assert model.config.model_type == "qwen3" and tokenizer.chat_template

    done = small_recipe.cli("eval", str(small_recipe.path), "--checkpoint", "run", "--json", "tasks.heldout=8")
    assert done.returncode == 0, done.stderr
    score = json.loads(done.stdout.splitlines()[-1])
    assert (score["heldout"], score["heldout_greedy"]) == (result["heldout_after"], result["heldout_greedy_after"])


def test_same_seed_gives_the_same_weights_bit_for_bit_also_across_kill_and_resume(small_recipe: SmallRecipe) -> None:
    arguments = ("loop.steps=4", "loop.group_size=6")
    small_recipe.train("--run-dir", "first", *arguments)
    small_recipe.train("--run-dir", "second", *arguments)
    start = load_file(small_recipe.folder / "model" / "model.safetensors")
    end = load_file(small_recipe.folder / "first" / "model" / "model.safetensors")
    assert any((start[name] != end[name]).any() for name in start), "nothing was learnt, so nothing was compared"
    assert weights(small_recipe.folder / "first") == weights(small_recipe.folder / "second")

    run = small_recipe.folder / "killed"
    command = [sys.executable, "-m", "lightningrl", "train", str(small_recipe.path), "--run-dir", "killed", *arguments]
    killed = subprocess.Popen(command, cwd=small_recipe.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 150
    while not (run / "metrics.jsonl").exists() or '"step": 1' not in (run / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (run / "model").exists(), "it was over before it was killed"
    small_recipe.train("--run-dir", "killed", "--resume", *arguments)
    assert weights(run) == weights(small_recipe.folder / "first")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [0, 1, 2, 3], "every step is reported once"
    assert [row["step"] for row in rows if row["kind"] == "exam"] == [0, 0, 4, 4]
    starts = [row["step"] for row in rows if row["kind"] == "began"]
    assert len(starts) == 2 and starts[0] == 0 and starts[1] >= 2, "step 1 was complete"
    taught = {folder: sorted((small_recipe.folder / folder / "taught").iterdir()) for folder in ("first", "killed")}
    assert len(taught["first"]) == 4
    assert [by_rollout(file) for file in taught["first"]] == [by_rollout(file) for file in taught["killed"]]


def by_rollout(file: Path) -> dict[str, list[tuple[str, object]]]:
    """What a step taught. Attempts that were running at the kill were made again, so their number differs."""
    taught = load_taught(file)
    assert taught is not None and taught.entropies and taught.logprobs_after
    parts = {"values": taught.values, "entropies": taught.entropies, "logprobs_after": taught.logprobs_after}
    return {
        name: [(re.sub(r"\.\d+/", "/", call_id), np.asarray(found).tolist()) for call_id, found in part.items()]
        for name, part in parts.items()
    }


def test_an_agent_that_is_a_program_is_trained_too(small_recipe: SmallRecipe) -> None:
    main = "\n\nif __name__ == '__main__':\n    import json, sys\n    print(json.dumps(run(json.load(sys.stdin))))\n"
    small_recipe.rewrite_agent(lambda text: text + main)
    recipe = small_recipe.path.read_text().replace('entry = "agent:run"', 'command = ["python", "agent.py"]')
    small_recipe.path.write_text(recipe)
    small_recipe.train("--run-dir", "run", "loop.steps=1", "tasks.heldout=1", "loop.group_size=2")
    rows = [json.loads(line) for line in (small_recipe.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if row["kind"] == "step"]
    assert step["rollouts/succeeded"] == 4 and step["calls/per_rollout"] == 2 and step["calls/bridged"] == 4
    assert weights(small_recipe.folder / "run") != (small_recipe.folder / "model" / "model.safetensors").read_bytes()


def test_an_agent_that_narrows_its_sampling_is_trained(small_recipe: SmallRecipe) -> None:
    small_recipe.rewrite_agent(
        lambda text: text.replace(
            "max_tokens=6", "max_tokens=6, temperature=0, top_p=0.5, seed=1, extra_body={'top_k': 2}"
        )
    )
    small_recipe.train("--run-dir", "run", "loop.steps=1", "tasks.heldout=1")
    rows = [json.loads(line) for line in (small_recipe.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if row["kind"] == "step"]
    assert step["tokens/trained"] == step["tokens/sampled"] > 0
    assert step["groups/equal_rewards"] < 2, "a seed of the agent's own does not make a group draw alike"
