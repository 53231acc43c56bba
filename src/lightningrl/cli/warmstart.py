"""`lightningrl warmstart recipe.toml`: trains the model in `model.path` from demonstrations, as a start for reward."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console

from lightningrl.cli.console import advise, say
from lightningrl.cli.folder import RunFolder, dated, new_folder
from lightningrl.cli.ready import check_tasks
from lightningrl.cli.report import near
from lightningrl.cli.stop import Interrupted, run
from lightningrl.config import Config
from lightningrl.errors import Stopped, UserError
from lightningrl.policies import set_up_devices
from lightningrl.progress import Exam
from lightningrl.types import Task
from lightningrl.warmstart.demonstrations import Demonstrations, load_demonstrations, read_run
from lightningrl.warmstart.making import Made, Pace, is_replaceable, make
from lightningrl.warmstart.steering import HIGH, LOW, PASSES, Look
from lightningrl.warmstart.tryout import Trial, play, split_tasks

WITHOUT = """set a teacher in the recipe, for example
  [warmstart]
  teacher = "teacher:teacher"     # a function that answers in place of the model: docs/tutorial.md"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a warm start, as `--json` prints it."""

    model: str
    """Path of the model folder."""
    success: float
    """Mean reward on training tasks at temperature 1, scaled from `agent.reward_range` to [0, 1]."""
    success_interval: tuple[float, float]
    """95 %, bootstrap over tasks."""
    reached: bool
    """Whether success is between 0.2 and 0.5."""
    reason: str
    """Likeliest reason why success is too low; "" if it is not."""
    tasks: int
    failed: int
    """Number of rollouts without a reward; they count as 0."""
    demonstrations: int
    steps: int
    loss: float | None
    """Final loss in nats a token; None if no step was taken."""
    parameters: int
    tokens: int
    """Size of the vocabulary."""
    seconds: float
    run_dir: str
    """Folder with the records of the trials and of the teacher."""


class Narrator:
    """Shows the progress on the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None

    def __enter__(self) -> "Narrator":
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def now(self, what: str) -> None:
        if self._status:
            self._status.update(what)

    def fact(self, name: str, text: str) -> None:
        say(self._console, (f"{name:<16}", "dim"), text)

    # events of a loop

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        self.now(f"running the agent: {done} of {total} rollouts" if total else what)

    def voided(self, step: int, why: str) -> None:
        """Never called: nothing branches here."""

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Never called: nothing learns from reward here."""

    def examined(self, exam: Exam) -> None:
        """Nothing to show: `looked` has more details."""

    # events of `make`

    def started(self, *, parameters: int, tokens: int) -> None:
        self.fact("model", f"{parameters:,} parameters, {tokens:,} tokens")
        self.now("learning from the demonstrations")

    def read(self, step: int, loss: float) -> None:
        self.fact(f"reading {step}", f"loss {loss:.3f}")

    def looked(self, look: Look) -> None:
        success = f"   success {_figure(look.trial)}" if look.trial else ""
        self.fact(f"step {look.step}", f"loss {look.loss:.3f}{success}")
        self.now("learning from the demonstrations")


def warmstart(
    config: Config, *, source: Path | None, out: Path | None, pace: Pace, run_dir: Path | None, console: Console
) -> Result:
    """Make the model and show the progress. `source`: a run or a file, in place of the recipe's demonstrations."""
    began = time.monotonic()
    set_up_devices(config)
    if source is not None:
        own = {"teacher": "", "demonstrations": str(source.resolve())}
        config = config.model_copy(update={"warmstart": config.warmstart.model_copy(update=own)})
    if not (config.warmstart.teacher or config.warmstart.demonstrations):
        raise UserError(
            f"`{config.name}` has no demonstrations: neither `warmstart.teacher` nor `warmstart.demonstrations` is set",
            hint=WITHOUT,
        )
    target = _target(config, out)
    check_tasks(config, ("train",), console=console)
    folder = new_folder(config, run_dir or dated(f"{config.name}-warmstart"))
    folder.make(config)
    try:
        with Narrator(console) as narrator:
            shown, tasks = _shown(config, folder, narrator)
            narrator.fact("demonstrations", shown.source)
            made = run(make(config, shown, tasks, folder=folder.path, out=target, pace=pace, narrator=narrator))
    except Interrupted as stop:
        said = f"stopped by {stop.signal.name}; no model was written"
        raise Stopped(said, hint=f"the records so far are in {folder.path}", exit_code=stop.exit_code) from None
    result = _result(made, target, shown, seconds=time.monotonic() - began, run_dir=folder.path)
    _conclude(result, made, config, console)
    return result


def _shown(config: Config, folder: RunFolder, narrator: Narrator) -> tuple[Demonstrations, list[Task]]:
    """(demonstrations, training tasks for trials)"""
    taught, tried = split_tasks(config, teach=config.warmstart.count)
    if not config.warmstart.teacher:
        return load_demonstrations(config), tried
    narrator.now(f"`{config.warmstart.teacher}` solves training tasks")
    run(play(config, folder.path / "teacher", taught, narrator))
    return read_run(folder.path / "teacher", reward=config.warmstart.reward), tried


def _target(config: Config, out: Path | None) -> Path:
    """The folder to write: `out` or `model.path`. Raises `UserError` for a folder that this command has not made."""
    folder = _own_folder(config) if out is None else out.resolve()
    if config.warmstart.base and (config.root / config.warmstart.base).resolve() == folder:
        hint = "give `--out FOLDER`, so that the base is not replaced"
        raise UserError(f"`warmstart.base` is `{folder}`, the folder to write", hint=hint)
    if folder.exists() and not is_replaceable(folder):
        hint = "move it away, or give another folder with `--out`"
        raise UserError(f"`{folder}` was not made by `lightningrl warmstart`: it will not be replaced", hint=hint)
    return folder


def _own_folder(config: Config) -> Path:
    path = config.model.path
    folder = (config.root / Path(path).expanduser()).resolve()
    if (
        Path(path).is_absolute()
        or not folder.is_relative_to(config.root)
        or folder == config.root
        or _on_the_hub(path, folder)
    ):
        hint = 'give `--out FOLDER`, or set `model.path` to a folder inside the recipe, such as "warmstart"'
        raise UserError(f"`model.path` is `{path}`, which is outside the recipe: it will not be replaced", hint=hint)
    return folder


def _on_the_hub(path: str, folder: Path) -> bool:
    """Whether `path` is a hub id like `Qwen/Qwen3-0.6B`. A new folder of this form is written `./models/mine`."""
    return path.count("/") == 1 and not path.startswith((".", "~")) and not folder.exists()


def _result(made: Made, out: Path, shown: Demonstrations, *, seconds: float, run_dir: Path) -> Result:
    trial, losses = made.arrival.trial, made.arrival.losses
    return Result(
        model=near(out),
        success=trial.mean,
        success_interval=trial.interval,
        reached=made.arrival.reached,
        reason=made.reason,
        tasks=len(trial.success),
        failed=trial.failed,
        demonstrations=len(shown.answers),
        steps=made.arrival.steps,
        loss=losses[-1] if losses and not math.isnan(losses[-1]) else None,
        parameters=made.parameters,
        tokens=made.tokens,
        seconds=round(seconds, 1),
        run_dir=str(run_dir),
    )


def _conclude(result: Result, made: Made, config: Config, console: Console) -> None:
    """Print the success, whether it is enough, and the next commands."""
    said = f"success {_figure(made.arrival.trial)} on {result.tasks} training tasks, sampled at T = 1"
    say(console, "\n", (said, "bold"))
    if result.success < LOW:
        passes = f" in {PASSES} times `warmstart.steps`" if config.warmstart.steer else ""
        reason = f"learning from reward needs a success of {LOW}, which was not reached{passes}: {made.reason}"
        advise(console, "warning", "bold yellow", f"{reason}; hint: {made.hint}")
    elif result.success > HIGH:
        hint = "use harder tasks, or a lower `warmstart.steps`"
        advise(console, "warning", "bold yellow", f"there is little left to learn from reward; hint: {hint}")
    else:
        say(console, "good enough to learn from reward: some attempts succeed and some fail")
    written = f"written to {result.model} after {result.steps} steps, {result.seconds:.0f} s"
    say(console, f"\n{written}\n\n", ("Next", "bold"))
    say(console, f"  learn from reward       lightningrl train {near(config.root / 'recipe.toml')}")
    say(console, f"  see the attempts        lightningrl rollouts {result.run_dir}")


def _figure(trial: Trial) -> str:
    """Success with its interval: `0.31 [0.22, 0.40]`."""
    low, high = trial.interval
    return f"{trial.mean:.2f} [{low:.2f}, {high:.2f}]" + (f", {trial.failed} failed" if trial.failed else "")
