"""Fixtures that many tests share: a tiny model, and a small recipe whose agent a test can change."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.command import run_command
from tests.postgres import Postgres, binaries, running

TEXTS = [
    "say a word",
    "the word is blue",
    "red green blue yellow",
    "you pick one colour and say it",
    "again : pick another one",
]

AGENT = '''
"""The smallest agent with two turns: its second request has the first answer in the history."""
from openai import OpenAI

client = None


def run(task):
    global client
    client = client or OpenAI()
    messages = [{"role": "user", "content": task["question"]}]
    for follow_up in ("again : pick another one", None):
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        answer = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
    return answer


def reward(task, answer):
    return len(answer) % 5 / 4


def tasks(split, *, seed, count):
    return [{"id": f"{split}-{seed}-{i}",
             "input": {"question": ["say a word", "pick one colour"][i % 2], "split": split}} for i in range(count)]
'''

RECIPE = """
name = "small"
[agent]
entry = "agent:run"
reward = "agent:reward"
workers = 1
concurrency = 8
timeout_s = 20.0
[tasks]
source = "agent:tasks"
heldout = 4
[model]
path = "model"
[engine]
slots = 8
max_length = 128
[trainer]
threads = 1
minibatches = 2
learning_rate = 1e-3
[loop]
steps = 2
tasks_per_step = 2
group_size = 4
eval_every = 0
"""


def pytest_configure() -> None:
    """How slow the machine is says nothing of the code."""
    import hypothesis  # suites with venvs of their own do without, and import this module for its fixtures

    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("patient")


@dataclass(frozen=True)
class SmallRecipe:
    """A recipe in its own folder, and the command line that runs it."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "recipe.toml"

    def rewrite_agent(self, change: Callable[[str], str]) -> None:
        file = self.folder / "agent.py"
        before = file.read_text()
        after = change(before)
        assert after != before
        file.write_text(after)

    def cli(self, *arguments: str, timeout_s: float = 500.0) -> subprocess.CompletedProcess[str]:
        return run_command(*arguments, cwd=self.folder, timeout_s=timeout_s)

    def train(self, *arguments: str) -> dict[str, Any]:
        """Run `train`, which must succeed; return its JSON result."""
        done = self.cli("train", str(self.path), "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server of the tests."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Qwen3 of a few thousand parameters."""
    from lightningrl.models.load import export_folder
    from lightningrl.models.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(TEXTS, vocab_size=300)
    model = build_model(
        len(tokenizer),
        hidden=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_size=16,
        intermediate=64,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    export_folder(model, folder, tokenizer=tokenizer)
    return folder


@pytest.fixture
def small_recipe(tmp_path: Path, model_folder: Path) -> SmallRecipe:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "model").symlink_to(model_folder)
    return SmallRecipe(tmp_path)
