"""Invalid input ends with a message, a hint and exit code 2, and nothing is lost."""

import json
import shutil
import socket
import sqlite3
from pathlib import Path

import pytest

from tests.conftest import SmallRecipe


def refused(recipe: SmallRecipe, *arguments: str) -> str:
    done = recipe.cli("train", str(recipe.path), "--run-dir", "run", *arguments)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback (most recent call last)" not in done.stderr.split("hint:")[-1]
    assert "error:" in done.stderr and "hint:" in done.stderr, done.stderr
    return " ".join(done.stderr.split())


def test_an_unknown_key_is_refused_with_the_one_that_was_meant(small_recipe: SmallRecipe) -> None:
    message = refused(small_recipe, "trainer.learning_rte=1")
    assert "unknown key `trainer.learning_rte`" in message and "did you mean `learning_rate`?" in message


def test_a_missing_recipe_is_refused(small_recipe: SmallRecipe) -> None:
    done = small_recipe.cli("train", "nowhere.toml")
    assert done.returncode == 2 and "no recipe at `nowhere.toml`" in done.stderr


def test_a_recipe_can_be_given_by_its_folder(small_recipe: SmallRecipe) -> None:
    assert small_recipe.cli("train", str(small_recipe.folder), "--dry-run").returncode == 0


def test_tasks_that_cannot_be_made_are_refused_before_anything_runs(small_recipe: SmallRecipe) -> None:
    small_recipe.rewrite_agent(
        lambda text: text.replace("    return [{", "    raise OSError('no data here')\n    return [{")
    )
    assert "`agent:tasks` failed on split `heldout`: OSError: no data here" in refused(small_recipe)


def test_a_run_without_a_trained_policy_is_refused(small_recipe: SmallRecipe) -> None:
    assert "no call can be trained: `agent` 16 times" in refused(
        small_recipe, "routes=[{train=false}]", "tasks.heldout=2"
    )


def test_a_missing_model_folder_is_refused(small_recipe: SmallRecipe) -> None:
    assert "nowhere" in refused(small_recipe, "model.path=nowhere")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_a_missing_gpu_is_refused_before_a_model_is_looked_for(small_recipe: SmallRecipe) -> None:
    message = refused(small_recipe, "trainer.device=cuda", "model.path=nobody/has-this-model")
    assert "`trainer.device` is `cuda`, but" in message and "nobody/has-this-model" not in message


def test_a_missing_agent_module_is_refused(small_recipe: SmallRecipe) -> None:
    assert "no module `agnet`" in refused(small_recipe, "agent.entry=agnet:run")


def test_a_model_without_a_chat_template_is_refused(small_recipe: SmallRecipe, model_folder: Path) -> None:
    (small_recipe.folder / "model").unlink()
    shutil.copytree(model_folder, small_recipe.folder / "model")
    (small_recipe.folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    settings = small_recipe.folder / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}))
    assert "chat template" in refused(small_recipe)


def test_a_port_in_use_is_refused(small_recipe: SmallRecipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused(small_recipe, f"gateway.port={port}")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    return answer\n", "    raise ValueError('no luck today')\n", "AgentError: ValueError: no luck today"),
        (
            "    return answer\n",
            "    import time; time.sleep(60)\n    return answer\n",
            "AgentError: timed out, no answer within 3 s",
        ),
        ("len(answer) % 5 / 4", "float('nan')", "GraderError"),
        ("len(answer) % 5 / 4", "1 / 0", "GraderError: ZeroDivisionError"),
    ],
    ids=["agent raises", "agent hangs", "reward is NaN", "reward raises"],
)
def test_failing_user_code_ends_the_run_with_its_error(
    small_recipe: SmallRecipe, old: str, new: str, said: str
) -> None:
    small_recipe.rewrite_agent(lambda text: text.replace(old, new))
    message = refused(small_recipe, "agent.timeout_s=3.0", "agent.max_attempts=1", "tasks.heldout=2")
    assert said in message and "all 2 rollouts" in message
    with sqlite3.connect(small_recipe.folder / "run" / "store.sqlite") as records:
        assert records.execute("select count(*) from attempts where error is not null").fetchone() == (3,), (
            "the failures are on record"
        )


def test_rewards_outside_of_their_declared_range_are_not_trained(
    small_recipe: SmallRecipe,
) -> None:
    small_recipe.rewrite_agent(lambda text: text.replace("len(answer) % 5 / 4", "[0.25, 7][len(answer) % 2]"))
    small_recipe.train(
        "--run-dir", "run", "agent.reward_range=[0, 1]", "agent.max_attempts=1", "tasks.heldout=8", "loop.steps=1"
    )
    with sqlite3.connect(small_recipe.folder / "run" / "store.sqlite") as records:
        assert records.execute("select distinct value from rewards").fetchall() == [(0.25,)]
        errors = {
            error.splitlines()[0] for (error,) in records.execute("select error from attempts where status = 'failed'")
        }
    assert errors == {"GraderError: reward `final` is `7.0`, outside its range `[0, 1]`"}


def test_an_agent_that_never_calls_the_model_is_named(small_recipe: SmallRecipe) -> None:
    small_recipe.rewrite_agent(
        lambda text: text.replace("    global client\n", "    return 'blue'\n    global client\n")
    )
    message = refused(small_recipe, "tasks.heldout=9")
    assert "the agent never called the model: it answered `'blue'`" in message and "OPENAI_BASE_URL" in message
    with sqlite3.connect(small_recipe.folder / "run" / "store.sqlite") as records:
        assert records.execute("select count(*) from attempts").fetchone() == (3,), (
            "reported after three tasks, before any exam"
        )


def test_an_agent_with_a_hard_coded_address_is_reported_in_two_lines(small_recipe: SmallRecipe) -> None:
    small_recipe.rewrite_agent(
        lambda text: text.replace("OpenAI(", "OpenAI(base_url='http://127.0.0.1:9/v1', max_retries=0, ")
    )
    message = refused(small_recipe, "tasks.heldout=9")
    assert (
        "the agent never called the model: AgentError: APIConnectionError" in message and "OPENAI_BASE_URL" in message
    )
    assert "Traceback" not in message


def test_a_program_whose_logs_are_graded_gets_a_hint(
    small_recipe: SmallRecipe,
) -> None:
    (small_recipe.folder / "program.py").write_text(
        "import agent, json, sys\nprint('thinking')\nprint(agent.run(json.load(sys.stdin)))\n"
    )
    (small_recipe.folder / "grader.py").write_text("def reward(task, answer):\n    return float(answer == 'blue')\n")
    recipe = small_recipe.path.read_text()
    program = recipe.replace('entry = "agent:run"', 'command = ["python", "program.py"]').replace(
        '"agent:reward"', '"grader:reward"'
    )
    small_recipe.path.write_text(program)
    done = small_recipe.cli(
        "train", str(small_recipe.path), "--run-dir", "run", "loop.steps=1", "tasks.heldout=1", "loop.group_size=2"
    )
    assert done.returncode == 0, done.stderr
    assert "`LIGHTNINGRL_OUTPUT`" in " ".join((done.stdout + done.stderr).split())


def test_a_run_resumes_after_the_agent_is_mended(small_recipe: SmallRecipe) -> None:
    broken = ("    return answer\n", "    raise ValueError('no luck today')\n")
    small_recipe.rewrite_agent(lambda text: text.replace(broken[0], broken[1]))
    assert "no luck today" in refused(small_recipe, "tasks.heldout=2", "loop.steps=1")
    small_recipe.rewrite_agent(lambda text: text.replace(broken[1], broken[0]))
    result = small_recipe.train("--run-dir", "run", "--resume", "tasks.heldout=2", "loop.steps=1")
    assert result["steps"] == 1
