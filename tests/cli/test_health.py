"""`lightningrl health`: metrics at the beginning and at the end of a run, and warnings."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lightningrl.cli.health import HealthWatcher, show
from lightningrl.errors import UserError
from lightningrl.look.checkup import checkup, checkup_of
from lightningrl.recipe import dump_config, load_config
from tests.conftest import RECIPE, SmallRecipe
from tests.test_health import HEALTHY

POLICIES = '[policies.solver]\n[policies.critic]\n[[routes]]\npolicy = "solver"\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose last updates were skipped."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "config.toml").write_text(dump_config(load_config(tmp_path / "recipe.toml")))
    rows = [{"kind": "exam", "step": 0, "mode": "sampled", "reward/mean": 0.3, "tasks": 4}]
    rows += [
        {"kind": "step", "step": t, **HEALTHY, "reward/final": 0.3 + t / 100, "optim/skipped": float(t > 20)}
        for t in range(24)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def health(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightningrl", "health", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_report_has_metrics_and_warnings(run: Path) -> None:
    told = json.loads(health(str(run), "--json").stdout)
    assert told["steps"] == 24
    signals = {signal["name"]: signal for signal in told["signals"]}
    reward = signals["reward `final`"]
    assert (reward["first"], reward["last"]) == (pytest.approx(0.32), pytest.approx(0.51))
    assert signals["groups that teach nothing"]["last"] == pytest.approx(0.25)
    assert signals["tokens left out: `stale`"]["kind"] == "share"
    assert [(found["step"], "not finite" in found["warning"]) for found in told["raised"]] == [(21, True)]
    assert len(told["warnings"]) == 1

    shown = health(str(run)).stdout
    assert "Signal health, 24 steps" in shown and "were skipped" in shown and "hint:" in shown


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (0, "too short to tell: no step is finished"),
        (4, "too short to tell: most checks look at 5 steps"),
        (5, "no warnings: the run is healthy"),
    ],
)
def test_a_short_run_is_inconclusive(run: Path, steps: int, said: str) -> None:
    found = checkup(
        [{"kind": "step", "step": step, **HEALTHY} for step in range(steps)], load_config(run / "config.toml")
    )
    console = Console(record=True, width=100, file=io.StringIO())
    show(found, console)
    shown = " ".join(console.export_text().split())
    assert said in shown
    assert ("the run is healthy" in shown) == found.conclusive == (steps == 5)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    refused = health(str(tmp_path / "nowhere"))
    assert refused.returncode == 2 and "holds no run" in refused.stderr and "hint:" in refused.stderr


def test_the_folder_of_captured_calls_has_no_training_metrics(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").touch()
    with pytest.raises(UserError, match="has no training metrics") as refused:
        checkup_of(tmp_path)
    assert f"lightningrl rollouts {tmp_path} --report" in (refused.value.hint or "")


def test_metrics_of_several_policies_are_shown_by_policy(run: Path) -> None:
    (run / "recipe.toml").write_text(RECIPE + POLICIES)
    row = {"kind": "step", "step": 0, "reward/final": 0.5, "solver/policy/entropy": 0.7, "critic/policy/entropy": 0.2}
    found = checkup([row], load_config(run / "recipe.toml"))
    assert [(signal.policy, signal.name, signal.last) for signal in found.signals] == [
        ("", "reward `final`", 0.5),
        ("solver", "entropy (nats a token)", 0.7),
        ("critic", "entropy (nats a token)", 0.2),
    ]


def test_a_watcher_warns_when_it_happens_and_not_again_after_a_restart(run: Path) -> None:
    console = Console(record=True, width=100)
    config = load_config(run / "config.toml")
    skipped = HEALTHY | {"optim/skipped": 1.0}
    watcher = HealthWatcher(console, config)
    for step, metrics in enumerate([HEALTHY, skipped, skipped]):
        watcher.stepped(step, metrics)
    assert console.export_text().count("step 2: warning:") == 1

    HealthWatcher(console, config, before=[{"kind": "step", "step": 1, **skipped}]).stepped(2, skipped)
    assert console.export_text() == ""


def test_void_branches_are_shown_with_their_latest_example(run: Path) -> None:
    row = HEALTHY | {"forks/branches": 4.0, "forks/void": 2.0}
    before = [{"kind": "void", "step": 0, "why": "`a.1` is void: no"}, {"kind": "step", "step": 0, **row}]
    rows = [*before, {"kind": "void", "step": 1, "why": "`b.1` is void: why"}, {"kind": "step", "step": 1, **row}]
    found = checkup(rows, load_config(run / "config.toml"))
    console = Console(record=True, width=200, file=io.StringIO())
    show(found, console)
    shown = console.export_text()
    assert "branches that are void │ 50.0% │ 50.0%" in " ".join(shown.split())
    assert "warning: `50%` of the branches are void" in shown and "a void branch: `b.1` is void: why" in shown
    assert found.as_json()["void"] == "`b.1` is void: why"
    none = checkup([{"kind": "step", "step": 0, **HEALTHY}], load_config(run / "config.toml"))
    assert none.void is None and all("branches" not in signal.name for signal in none.signals)


def test_a_watcher_tells_of_the_first_void_branch_only(run: Path) -> None:
    console, config = Console(record=True, width=100), load_config(run / "config.toml")
    watcher = HealthWatcher(console, config)
    watcher.voided(1, "`a.1` is void: a clock")
    watcher.voided(2, "`b.1` is void: another clock")
    assert console.export_text().splitlines() == ["step 2: void branch: `a.1` is void: a clock"]
    HealthWatcher(console, config, before=[{"kind": "void", "step": 1, "why": "x"}]).voided(2, "y")
    assert console.export_text() == ""


def test_training_prints_warnings_and_a_report_at_its_end(small_recipe: SmallRecipe) -> None:
    """The agent limits answers to six tokens, which cuts off nearly every answer of an untrained model."""
    done = small_recipe.cli(
        "train", str(small_recipe.path), "--run-dir", "run", "loop.steps=6", "tasks.heldout=1", "algorithm.audit=exact"
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "step 1: warning: `algorithm.audit` names the reward `exact`" in said
    assert "step 5: warning: `" in said and "of the calls reached their token limit" in said
    assert "Signal health, 6 steps" in said and said.count("reached their token limit") == 2, (
        "once when it happens, once in the end"
    )
