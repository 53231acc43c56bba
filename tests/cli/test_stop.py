"""Signals to a real process: it ends in order, says how to continue, leaves nothing behind, and sets its exit code."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SmallRecipe

ENDLESS = """
import time
from pathlib import Path

from lightningrl.trainer.local import LocalTrainer


class Endless(LocalTrainer):
    def forward_backward(self, forest):
        Path("learning").touch()
        time.sleep(600)
"""


def start(recipe: SmallRecipe, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lightningrl", *arguments],
        cwd=recipe.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear,
    )


def hear() -> None:
    """A job in a shell's background ignores SIGINT, one under `nohup` SIGHUP, and their children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_until(running: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not happened():
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.02)


def children(running: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()


def stopped(running: subprocess.Popen[str], number: signal.Signals) -> str:
    """The output until its end."""
    running.send_signal(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 128 + number, said
    assert "Traceback" not in said and "Exception ignored" not in said
    return said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stopped_run_says_how_to_continue_and_leaves_no_process(
    small_recipe: SmallRecipe, number: signal.Signals
) -> None:
    running = start(
        small_recipe, "train", str(small_recipe.path), "--run-dir", "run", "loop.steps=200", "tasks.heldout=1"
    )
    metrics = small_recipe.folder / "run" / "metrics.jsonl"
    wait_until(running, lambda: metrics.exists() and '"exam"' in metrics.read_text())
    workers = children(running)
    said = stopped(running, number)
    assert f"stopped by {number.name}" in said
    assert "hint: continue with: lightningrl train run/config.toml --run-dir run --resume" in said
    assert workers and not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_run_can_be_stopped_while_it_still_loads(small_recipe: SmallRecipe) -> None:
    running = start(small_recipe, "train", str(small_recipe.path), "--run-dir", "run")
    wait_until(running, (small_recipe.folder / "run" / "config.toml").exists)
    assert "--run-dir run --resume" in stopped(running, signal.SIGTERM)


def test_a_second_signal_ends_a_run_at_once(small_recipe: SmallRecipe) -> None:
    """The first signal waits for work that cannot be cancelled: here an update that takes ten minutes."""
    (small_recipe.folder / "endless.py").write_text(ENDLESS)
    overrides = ("trainer.name=endless:Endless", "tasks.heldout=1")
    running = start(small_recipe, "train", str(small_recipe.path), "--run-dir", "run", *overrides)
    wait_until(running, (small_recipe.folder / "learning").exists)
    workers = children(running)
    running.send_signal(signal.SIGINT)
    time.sleep(1.2)  # an earlier second signal would count as the same key press
    assert running.poll() is None
    said = stopped(running, signal.SIGINT)
    assert said.endswith("stopped at once\n")
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stopped_evaluation_says_that_it_keeps_no_results(small_recipe: SmallRecipe) -> None:
    small_recipe.rewrite_agent(
        lambda text: text.replace("    global client", "    global client\n    open('asked', 'w').close()")
    )
    running = start(small_recipe, "eval", str(small_recipe.path), "tasks.heldout=5000")
    wait_until(running, (small_recipe.folder / "asked").exists)
    assert "stopped by SIGTERM; an evaluation keeps no partial results" in stopped(running, signal.SIGTERM)


def test_a_command_gets_the_signal_and_its_captured_calls_are_shown(small_recipe: SmallRecipe) -> None:
    (small_recipe.folder / "script.py").write_text("def answer(request):\n    return 'hello'\n")
    command = ["sh", "-c", "touch started; exec sleep 600"]
    running = start(small_recipe, "run", "--engine", "script:answer", "--run-dir", "run", "--", *command)
    wait_until(running, (small_recipe.folder / "started").exists)
    said = stopped(running, signal.SIGTERM)
    assert "captured" in said and "exit code  143" in said


def test_signals_that_the_parent_ignores_stay_ignored(small_recipe: SmallRecipe) -> None:
    """Ignored signals are inherited, as after `nohup`."""
    script = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    code = (
        "import os, signal\n"
        "from lightningrl.cli import main\n"
        "kill = lambda number: os.kill(os.getpid(), number)\n"
        "main(lambda: (kill(signal.SIGHUP), print('lives on', flush=True), kill(signal.SIGTERM)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "-c", code],
        cwd=small_recipe.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "lives on\n", "stopped\n")
