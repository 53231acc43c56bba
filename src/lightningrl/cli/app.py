"""The command line: `lightningrl demo | new | warmstart | train | eval | run | rollouts | show | health | doctor |
settings`.

Errors a person can mend end with exit code 2 and a hint.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import lightningrl
from lightningrl.cli.console import make_console, say
from lightningrl.cli.extras import extra_of, install, require
from lightningrl.cli.stop import Interrupted, listening
from lightningrl.config import Config
from lightningrl.errors import LightningError, Stopped, UserError
from lightningrl.recipe import dump_config, load_config

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings over the recipe's, e.g. `trainer.learning_rate=1e-4`."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object last on stdout; everything else goes to stderr.")
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="The run's folder. Default: a new one under `runs/`.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", help="A model folder, a run's, or `URL#model` of a server. Default: the recipe's `model.path`."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and stop.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a run that was cut off: `--run-dir`, or the newest of this recipe.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lightningrl {lightningrl.__version__}")
        raise typer.Exit


@app.callback(help=lightningrl.__doc__)
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and stop.")
    ] = False,
) -> None:
    """What may stand before a command."""


TokenColours = Literal["none", "logprob", "advantage"]


@app.command()
def demo(overrides: Overrides = None, run_dir: RunDir = None, as_json: Json = False, dry_run: DryRun = False) -> None:
    """Watch a LangGraph text-to-SQL agent learn, on this very machine, in minutes."""
    from lightningrl.cli.new import shipped

    if not dry_run:
        require("train", "recipes")
    train(shipped("sql_langgraph") / "recipe.toml", overrides, run_dir=run_dir, as_json=as_json, dry_run=dry_run)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="A folder to make; its name is the agent's.")], as_json: Json = False
) -> None:
    """Begin an agent of your own: a folder that learns as it is, to be changed."""
    from lightningrl.cli.new import lay_out, show

    made = lay_out(folder)
    show(made, make_console(stderr=as_json))
    if as_json:
        typer.echo(_json(made))


@app.command()
def warmstart(
    recipe: Annotated[Path, typer.Argument(help="Path of a recipe.toml.")],
    overrides: Overrides = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A JSONL file of conversations, or a run's folder, in place of what the recipe says."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The folder to write. Default: `model.path`, below the recipe's folder."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Stop after this much time of training.")] = math.inf,
    order: Annotated[
        int | None,
        typer.Option("--order", help="Seed of the order of the demonstrations. Default: the recipe's `seed`."),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", help="With 1, weights are the same bit for bit on any number of cores.")
    ] = 1,
    run_dir: RunDir = None,
    as_json: Json = False,
) -> None:
    """Make the model that a recipe starts from, out of demonstrations."""
    config = _known(load_config(recipe, overrides or []))
    from lightningrl.cli.warmstart import warmstart as run  # loads torch
    from lightningrl.warmstart.making import Pace

    pace = Pace(seconds=seconds, order=order, threads=threads)
    result = run(config, source=source, out=out, pace=pace, run_dir=run_dir, console=make_console(stderr=as_json))
    if as_json:
        typer.echo(_json(result))
    if config.warmstart.steer and result.reason:
        raise typer.Exit(1)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="Path of a recipe.toml.")],
    overrides: Overrides = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Train the model inside a recipe's agent."""
    from lightningrl.cli.folder import new_folder, resumed_folder

    config = _known(load_config(recipe, overrides or []))
    if dry_run:
        resolved = _resolved(config)
        typer.echo(resolved.model_dump_json() if as_json else dump_config(resolved), nl=as_json)
        return
    require("train")
    from lightningrl.cli.train import train as run

    folder = resumed_folder(config, run_dir) if resume else new_folder(config, run_dir)
    result = run(config, folder, console=make_console(stderr=as_json))
    if as_json:
        typer.echo(_json(result))


@app.command("eval")
def evaluate(
    recipe: Annotated[Path, typer.Argument(help="Path of a recipe.toml.")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    against: Annotated[
        list[str] | None, typer.Option("--against", help="Another one, on the same tasks; may be repeated.")
    ] = None,
    key_env: Annotated[
        str, typer.Option("--key-env", help="Environment variable with the servers' key; empty: they need none.")
    ] = "OPENAI_API_KEY",
    as_json: Json = False,
) -> None:
    """Measure a model, or any OpenAI-compatible server, on a recipe's held-out tasks."""
    require("train")
    from lightningrl.cli.evaluate import contestant
    from lightningrl.cli.evaluate import evaluate as run

    config = _known(load_config(recipe, overrides or []))
    found = run(
        [contestant(config, what, key_env=key_env) for what in (checkpoint, *(against or ()))],
        console=make_console(stderr=as_json),
    )
    if as_json:
        typer.echo(json.dumps(found.as_json()))


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="Any program, and its arguments.")],
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="`pkg.module:attr` (a script or an engine), `embedded`, `vllm` or `relay`."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="A Hugging Face folder; for a script only its tokenizer and chat template."),
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option("--url", help="Base URL of a server behind `vllm` or `relay`; may be repeated.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Take settings from a recipe.toml.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting; may be repeated.")
    ] = None,
    route: Annotated[
        list[str] | None, typer.Option("--route", help="`model=checker,policy=frozen`; may be repeated.")
    ] = None,
    run_dir: RunDir = None,
    as_json: Json = False,
) -> None:
    """Run any command against a gateway of its own, and say what was captured."""
    from lightningrl.cli.run import RunOptions, run_command, show

    options = RunOptions(
        engine=engine,
        model=model,
        urls=url or [],
        recipe=recipe,
        overrides=overrides or [],
        routes=route or [],
        run_dir=run_dir,
    )
    captured = run_command(command, options)
    show(captured, make_console(stderr=True))
    if as_json:
        typer.echo(f"\n{captured.as_json()}")  # whatever the command has printed last, this is a line of its own
    raise typer.Exit(captured.exit_code)


@app.command()
def rollouts(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run, or its store.sqlite.")],
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="N", help="Only with this reward, e.g. `0`, or in a range, `0..0.5`."),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed: no attempt was accepted.")] = False,
    task: Annotated[str, typer.Option("--task", metavar="TEXT", help="Only with this text in the task.")] = "",
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Only of this training step; the first is 1.")
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="Only of this split, e.g. `train` or `heldout`.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Also say how calls were captured, and why. Reads every call.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Show the latest N rollouts; 0: all.")] = 40,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="ROLLOUT", help="Only those enqueued before this one: the next page."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find rollouts and see how they went, also while the run is going on."""
    from lightningrl.cli.rollouts import read, show, where_of

    where = where_of(reward=reward, failed=failed, task=task, step=step, split=split)
    listing = read(run_dir, where=where, before=before, limit=limit or None, report=report, conversations=as_json)
    show(listing, make_console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(listing.as_json()))


@app.command()
def show(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run, or its store.sqlite.")],
    rollout: Annotated[
        str | None,
        typer.Argument(
            metavar="ROLLOUT",
            help="Its id, or how only this id begins. Default: the latest that did worse than its group.",
        ),
    ] = None,
    tokens: Annotated[
        TokenColours,
        typer.Option("--tokens", help="Colour each sampled token by its probability, or by its advantage."),
    ] = "none",
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long messages.")] = False,
    as_json: Json = False,
) -> None:
    """Show one rollout: what was said, which tools ran, what it was rewarded for, and what it taught."""
    from lightningrl.cli.show import read
    from lightningrl.cli.show import show as print_view

    view = read(run_dir, rollout)
    print_view(view, make_console(stderr=as_json), run_dir=run_dir, tokens=tokens, full=full)
    if as_json:
        typer.echo(json.dumps(view.as_json()))


@app.command()
def health(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")], as_json: Json = False
) -> None:
    """Say whether what a run learns from is healthy, also while it is going on."""
    from lightningrl.cli.health import read, show

    found = read(run_dir)
    show(found, make_console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(found.as_json()))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check that this machine has what a run needs."""
    from lightningrl.cli.doctor import checks, show

    found = list(checks())
    show(found, make_console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in found]))
    if any(check.ok is False for check in found):
        raise typer.Exit(1)


@app.command()
def settings() -> None:
    """Print every setting of a recipe, as Markdown."""
    from lightningrl.cli.settings import settings_page

    typer.echo(settings_page(), nl=False)


def _known(config: Config) -> Config:
    """A recipe that names only what is there."""
    from lightningrl.cli.ready import check_names

    check_names(config)
    return config


def _resolved(config: Config) -> Config:
    """With every setting of every policy, if there are several."""
    if not config.policies:
        return config
    policies = {name: learner.model_dump(mode="json") for name, learner in config.learners().items()}
    return config.model_copy(update={"policies": policies})


def _json(result: Any) -> str:
    return json.dumps(asdict(result))


def main(command: Callable[[], object] = app) -> None:
    """Run it; turn errors and signals into a message and an exit code."""
    try:
        with listening():
            command()
    except Interrupted as stop:
        _complain(Stopped("stopped", exit_code=stop.exit_code))
        raise SystemExit(stop.exit_code) from None
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        _complain(UserError(f"`{error.name}` is not installed", hint=install(extra)))
        raise SystemExit(2) from None
    except LightningError as error:
        _complain(error)
        raise SystemExit(error.exit_code) from None


def _complain(error: LightningError) -> None:
    console = make_console(stderr=True)
    with suppress(OSError):  # the terminal may be gone
        say(console, *(() if isinstance(error, Stopped) else (("error: ", "bold red"),)), error.message)
        if error.hint:
            say(console, ("hint: ", "yellow"), error.hint)
