"""The commands of `lightningrl` with their options, and `main`, which turns errors into messages and exit codes."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import lightningrl
from lightningrl.cli.console import make_console, say
from lightningrl.cli.extras import extra_of, install, require
from lightningrl.cli.options import (
    AcceptDifferences,
    Answer,
    Answering,
    At,
    AttemptNumber,
    Backend,
    CaFile,
    Calls,
    Checkpoint,
    CompletionTokens,
    Count,
    Cpus,
    DryRun,
    Estimate,
    Every,
    Gpu,
    Json,
    JsonEvents,
    KeyFile,
    Labels,
    Listen,
    NoEngine,
    NoUi,
    On,
    Overrides,
    PerHour,
    PromptTokens,
    RayAddress,
    RecipeCopy,
    Resume,
    RunDir,
    Samples,
    Shared,
    TokenColours,
)
from lightningrl.cli.stop import Interrupted, listening
from lightningrl.config import Config
from lightningrl.errors import LightningError, Stopped, UserError
from lightningrl.recipe import dump_config, load_config

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lightningrl {lightningrl.__version__}")
        raise typer.Exit


@app.callback(help=lightningrl.__doc__)
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", is_eager=True, callback=_print_version, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def demo(
    overrides: Overrides = None,
    run_dir: RunDir = None,
    no_ui: NoUi = False,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Watch a LangGraph text-to-SQL agent learn, on this machine, in minutes."""
    from lightningrl.cli.new import shipped

    if not dry_run:
        require("train", "recipes")
    recipe = shipped("sql_langgraph") / "recipe.toml"
    train(recipe, overrides, run_dir=run_dir, no_ui=no_ui, as_json=as_json, dry_run=dry_run)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder; the agent gets its name.")],
    as_json: Json = False,
) -> None:
    """Make a folder with an agent that learns, for you to change."""
    from lightningrl.cli.new import lay_out, show

    made = lay_out(folder)
    show(made, make_console(stderr=as_json))
    if as_json:
        typer.echo(_json(made))


@app.command()
def warmstart(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of a recipe.toml.")],
    overrides: Overrides = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Demonstrations: a JSONL file of conversations, or a run's folder. Default: the recipe's."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The folder to write. Default: `model.path` in the recipe's folder."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time limit for training.")] = math.inf,
    order: Annotated[
        int | None,
        typer.Option("--order", help="Seed for the order of demonstrations. Default: `seed` of the recipe."),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            "--threads", help="Threads for a matrix product. With 1, weights are bit-identical on any number of cores."
        ),
    ] = 1,
    run_dir: RunDir = None,
    as_json: Json = False,
) -> None:
    """Train the first model of a recipe from demonstrations."""
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
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of a recipe.toml.")],
    overrides: Overrides = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    listen: Listen = None,
    no_ui: NoUi = False,
    as_json: Json = False,
    dry_run: DryRun = False,
    estimate: Estimate = False,
    gpu: Gpu = None,
    per_hour: PerHour = None,
    calls: Calls = None,
    prompt_tokens: PromptTokens = None,
    completion_tokens: CompletionTokens = None,
) -> None:
    """Train the model inside a recipe's agent."""
    from lightningrl.cli.folder import new_folder, resumed_folder
    from lightningrl.cli.listen import listen_overrides

    config = _known(load_config(recipe, [*(overrides or []), *listen_overrides(listen)]))
    tokens = {"calls": calls, "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    _check_options(
        estimate,
        needing={
            "--gpu": gpu,
            "--per-hour": per_hour,
            **{f"--{name.replace('_', '-')}": n for name, n in tokens.items()},
        },
        excluded={"--resume": resume, "--dry-run": dry_run},
    )
    if estimate:
        _estimate(config, gpu=gpu, per_hour=per_hour, run_dir=run_dir, tokens=tokens, as_json=as_json)
        return
    if dry_run:
        resolved = _resolved(config)
        typer.echo(resolved.model_dump_json() if as_json else dump_config(resolved), nl=as_json)
        return
    require("train")
    from lightningrl.cli.train import train as run

    folder = resumed_folder(config, run_dir) if resume else new_folder(config, run_dir)
    result = run(config, folder, console=make_console(stderr=as_json), ui=not no_ui)
    if as_json:
        typer.echo(_json(result))


@app.command("eval")
def evaluate(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of a recipe.toml.")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            help="Also measure this model folder, run or `URL#model`, and compare it with `--checkpoint`; "
            "may be repeated.",
        ),
    ] = None,
    key_env: Annotated[
        str, typer.Option("--key-env", help="Environment variable with the API key of the servers; empty: no key.")
    ] = "OPENAI_API_KEY",
    as_json: Json = False,
) -> None:
    """Measure a model, or any OpenAI-compatible server, on a recipe's held-out tasks."""
    require("train")
    from lightningrl.cli.evaluate import contestant
    from lightningrl.cli.evaluate import evaluate as run

    config = _known(load_config(recipe, overrides or []))
    contestants = [contestant(config, model, key_env=key_env) for model in (checkpoint, *(against or ()))]
    found = run(contestants, console=make_console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(found.as_json()))


@app.command()
def worker(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, as its run prints it.")],
    overrides: Overrides = None,
    key_file: KeyFile = Path("worker.key"),
    recipe: RecipeCopy = Path("."),
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Attempts that run at once. Default: the recipe's.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes that run agents. Default: the recipe's.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Shown by the server. Default: the host's name.")] = None,
    label: Labels = None,
    max_attempts: Annotated[int | None, typer.Option("--max-attempts", min=1, help="End after so many.")] = None,
    ca_file: CaFile = None,
    accept_differences: AcceptDifferences = False,
    as_json: JsonEvents = False,
    on: On = None,
    count: Count = None,
    cpus: Cpus = None,
    ray_address: RayAddress = None,
    shared: Shared = False,
) -> None:
    """Run agents on this machine for a training run on another one. The first Ctrl-C or SIGTERM lets them end."""
    from lightningrl.cli.worker import WorkerFlags
    from lightningrl.cli.worker import worker as run
    from lightningrl.cli.worker_on_ray import ray_flags, worker_on_ray

    flags = WorkerFlags(
        key_file=key_file,
        recipe=recipe,
        overrides=overrides or [],
        concurrency=concurrency,
        processes=processes,
        name=name,
        labels=label or [],
        max_attempts=max_attempts,
        ca_file=ca_file,
        accept_differences=accept_differences,
    )
    ray = ray_flags(on, count=count, cpus=cpus, address=ray_address, shared=shared)
    if ray is None:
        run(url, flags, console=make_console(stderr=as_json), as_json=as_json)
    else:
        worker_on_ray(url, flags, ray, console=make_console(stderr=as_json), as_json=as_json)


@app.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] --")
def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="A program and its arguments.")],
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="The engine: a script or engine class (`pkg.module:attr`), `embedded`, `vllm` or `relay`.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="A Hugging Face folder. A script uses only its tokenizer and chat template."),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            help="Base URL of a server for `vllm` or `relay`; may be repeated. `vllm` without it starts a server.",
        ),
    ] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Take settings from a recipe.toml.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
    ] = None,
    route: Annotated[
        list[str] | None,
        typer.Option("--route", help="Add a route, e.g. `model=checker,policy=frozen`; may be repeated."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="RUN",
            help="Answer from the records of this run, offline. A request that it lacks is refused, and exits with 1.",
        ),
    ] = None,
    run_dir: RunDir = None,
    as_json: Json = False,
) -> None:
    """Run any program with a gateway in place of its model, and report what was captured."""
    from lightningrl.cli.run import RunOptions, run_command, show

    options = RunOptions(
        engine=engine,
        model=model,
        urls=url or [],
        recipe=recipe,
        overrides=overrides or [],
        routes=route or [],
        run_dir=run_dir,
        replay=replay,
    )
    captured = run_command(command, options)
    show(captured, make_console(stderr=True))
    if as_json:
        typer.echo(f"\n{captured.as_json()}")  # a line of its own, even if the command printed no newline
    raise typer.Exit(captured.ended_with)


@app.command()
def rollouts(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run, or its store.sqlite.")],
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward", metavar="N", help="Only rollouts with this reward, e.g. `0`, or a range, e.g. `0..0.5`."
        ),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", metavar="", help="Only failed rollouts, which have no accepted attempt.")
    ] = False,
    task: Annotated[
        str, typer.Option("--task", metavar="TEXT", help="Only tasks that have this text in their id or input.")
    ] = "",
    step: Annotated[int | None, typer.Option("--step", min=1, help="Only this training step; the first is 1.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="Only this split, e.g. `train` or `heldout`.")] = None,
    report: Annotated[
        bool,
        typer.Option("--report", metavar="", help="Also report how calls were captured, and why. Reads every call."),
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Show the latest N rollouts; 0: all.")] = 40,
    before: Annotated[
        str | None,
        typer.Option("--before", metavar="ROLLOUT", help="Only rollouts enqueued before this one, to page backwards."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the rollouts of a run, finished or not."""
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
            help="Its id, or the beginning of it. Default: the latest one with a reward below its group's mean.",
        ),
    ] = None,
    tokens: Annotated[
        TokenColours,
        typer.Option("--tokens", help="Colour each sampled token by its probability or by its advantage."),
    ] = "none",
    full: Annotated[bool, typer.Option("--full", metavar="", help="Do not shorten long messages.")] = False,
    as_json: Json = False,
) -> None:
    """Show one rollout: its conversation, tools, rewards, and what it taught."""
    from lightningrl.cli.show import read
    from lightningrl.cli.show import show as print_view

    view = read(run_dir, rollout)
    print_view(view, make_console(stderr=as_json), run_dir=run_dir, tokens=tokens, full=full)
    if as_json:
        typer.echo(json.dumps(view.as_json()))


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or its store.sqlite.")],
    rollout: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROLLOUT KEY=VALUE",
            help="Id of a rollout, or the beginning of it; and settings of the run to override.",
        ),
    ] = None,
    at: At = None,
    answer: Answer = None,
    samples: Samples = None,
    checkpoint: Answering = None,
    no_engine: NoEngine = False,
    attempt: AttemptNumber = None,
    every: Every = False,
    split: Annotated[str | None, typer.Option("--split", help="With `--all`: only this split, e.g. `heldout`.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="With `--all`: only this training step.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="With `--all`: only the latest N.")] = None,
    as_json: Json = False,
) -> None:
    """Run a recorded agent again on its recorded answers: does it go the same way? What if one answer were another?"""
    from lightningrl.cli import replay as replays

    given = rollout or []
    names = [text for text in given if "=" not in text]
    if len(names) > 1:
        raise UserError(f"`{names[1]}` is no setting", hint="give one rollout, and settings as `KEY=VALUE`")
    options = replays.ReplayOptions(
        run_dir=run_dir,
        rollout=names[0] if names else None,
        overrides=[text for text in given if "=" in text],
        attempt=attempt,
        at=at,
        answer=answer,
        samples=samples,
        checkpoint=checkpoint,
        no_engine=no_engine,
        every=every,
        split=split,
        step=step,
        limit=limit,
    )
    console = make_console(stderr=as_json)
    result = replays.replay_command(options, console=console)
    replays.show(result, console)
    if as_json:
        typer.echo(replays.as_json(result))
    raise typer.Exit(replays.exit_code(result))


@app.command()
def health(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")], as_json: Json = False
) -> None:
    """Check the health of a run, finished or not: metrics and warnings."""
    from lightningrl.cli.health import show
    from lightningrl.look.checkup import checkup_of

    found = checkup_of(run_dir)
    show(found, make_console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(found.as_json()))


@app.command()
def ui(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Folders of runs, or folders that hold them. Default: `runs`."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Default: the first free one from 8790 to 8799, or any other."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. All but loopback addresses need a key, which is made.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--open", metavar="", help="Open it in a browser.")] = False,
    to: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write the page of one run into a file that opens anywhere."),
    ] = None,
    descriptor: Annotated[int | None, typer.Option("--fd", hidden=True)] = None,
) -> None:
    """Look at runs, finished or not, on a page in the browser."""
    from lightningrl.cli.ui import export, serve, serve_given

    if descriptor is not None:
        serve_given(runs or [], descriptor)
    elif to is not None:
        export(runs or [], to, console=make_console(stderr=False))
    else:
        serve(runs or [], host=host, port=port, browser=browser, console=make_console(stderr=False))


@app.command()
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe.toml, for its `engine.python`, its service and its models."),
    ] = None,
    overrides: Overrides = None,
    backend: Backend = None,
    as_json: Json = False,
) -> None:
    """Check that this machine, or a service in its place, has everything that a run needs."""
    from lightningrl.cli.doctor import checks, examined, show

    console = make_console(stderr=as_json)
    config = examined(recipe, overrides or [], backend=backend)
    with console.status("looking at this machine"):
        found = list(checks(config))
    show(found, console)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in found]))
    if any(check.ok is False for check in found):
        raise typer.Exit(1)


@app.command()
def settings() -> None:
    """Print the reference of all recipe settings, as Markdown."""
    from lightningrl.cli.settings import settings_page

    typer.echo(settings_page(), nl=False)


def _estimate(
    config: Config,
    *,
    gpu: str | None,
    per_hour: float | None,
    run_dir: Path | None,
    tokens: Mapping[str, float | None],
    as_json: bool,
) -> None:
    require("train")
    from lightningrl.cli import bill
    from lightningrl.cli.estimate import Wishes, estimate_recipe
    from lightningrl.cli.estimate import as_json as written

    console = make_console(stderr=as_json)
    given = {name: count for name, count in tokens.items() if count is not None}
    wishes = Wishes(gpu=gpu, per_hour=per_hour, run_dir=run_dir, tokens=given)
    found = estimate_recipe(config, wishes, console=console)
    bill.show(found, console)
    if as_json:
        typer.echo(json.dumps(written(found)))


def _check_options(estimate: bool, *, needing: Mapping[str, Any], excluded: Mapping[str, bool]) -> None:
    """Raises `UserError` for an option that needs `--estimate` and lacks it, or that does not go with it."""
    lone = next((name for name, value in needing.items() if value is not None), None)
    if lone and not estimate:
        raise UserError(f"`{lone}` needs `--estimate`", hint=f"add `--estimate`, or leave out `{lone}` to train")
    other = next((name for name, wanted in excluded.items() if wanted), None)
    if other and estimate:
        raise UserError(f"`{other}` does not go with `--estimate`", hint="leave out one of them")


def _known(config: Config) -> Config:
    """The recipe, after a check that everything it names exists."""
    from lightningrl.cli.ready import check_names

    check_names(config)
    return config


def _resolved(config: Config) -> Config:
    """The recipe with all settings of each policy, if there are several."""
    if not config.policies:
        return config
    policies = {name: learner.model_dump(mode="json") for name, learner in config.learners().items()}
    return config.model_copy(update={"policies": policies})


def _json(result: Any) -> str:
    return json.dumps(asdict(result))


def main(command: Callable[[], object] = app) -> None:
    """Run `command`; turn errors and signals into a message and an exit code.

    Errors that the user can fix end with a hint and exit code 2.
    """
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
    with suppress(OSError):  # the terminal may be closed
        label = "" if isinstance(error, Stopped) else "error: "
        say(console, (label, "bold red"), error.message)
        if error.hint:
            say(console, ("hint: ", "yellow"), error.hint)
