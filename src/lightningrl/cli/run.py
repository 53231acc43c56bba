"""`lightningrl run -- CMD …`: runs any program with a gateway in place of its model, and reports what was captured."""

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightningrl.branches import DIFFERS
from lightningrl.chat import ChatTemplate
from lightningrl.cli.console import make_console, say
from lightningrl.cli.folder import RUNS, dated
from lightningrl.cli.played import Played, played
from lightningrl.cli.ready import check_servers
from lightningrl.cli.recording import Cassette, calls_of, cassette_at, save_recording
from lightningrl.cli.rollouts import tally
from lightningrl.cli.stop import Interrupted, run
from lightningrl.config import Config, RouteConfig
from lightningrl.engine.base import Engine
from lightningrl.engines import make_engines, model_paths
from lightningrl.errors import Stopped, UserError
from lightningrl.gateway.assembly import make_gateway, opened
from lightningrl.gateway.scripted import MAX_LENGTH, PLAIN
from lightningrl.gateway.server import bound
from lightningrl.gateway.visitors import Guests
from lightningrl.look.census import CAPTURES, Census
from lightningrl.plugins import names
from lightningrl.recipe import load_config, make_config
from lightningrl.runner.environment import EVERYTHING, make_codex_home, process_environment
from lightningrl.runner.foreground import run_foreground
from lightningrl.store import open_store
from lightningrl.types import Call

EMBEDDED = {"slots": 2, "max_length": 4096}
"""For one agent at a time: a KV cache of 3.7 GB for a model of Qwen3-0.6B's shape in float32."""
NOWHERE = "lightningrl.gateway.scripted:no_model"
"""The engine if there are only routes to other servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of the command line."""

    engine: str | None
    model: str | None
    urls: Sequence[str]
    recipe: Path | None
    overrides: Sequence[str]
    routes: Sequence[str]
    run_dir: Path | None
    replay: Path | None = None
    """A recorded run that answers in place of a model; None: an engine answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The result of a command, as `--json` prints it (docs/gateway.md)."""

    exit_code: int
    seconds: float
    census: Census
    attempts: int
    errors: Mapping[str, int]
    """Refused requests: status and code → count."""
    complaints: Mapping[str, str]
    """Refused requests: status and code → message of the first one."""
    store: Path
    played: Played | None = None
    """What a recording answered; None: an engine answered."""

    @property
    def ended_with(self) -> int:
        """The command's exit code, or 1 if it succeeded although the recording lacked an answer."""
        return self.exit_code or int(bool(self.played and self.played.unknown))

    def as_json(self) -> str:
        census = self.census
        return json.dumps(
            {
                "exit_code": self.exit_code,
                **({} if self.played is None else self.played.as_json()),
                **census.counts(),
                "partly_reasons": {why: reason.calls for why, reason in census.partly_reasons.items()},
                "fork_reasons": {why: reason.calls for why, reason in census.fork_reasons.items()},
                "incomplete_reasons": {why: reason.calls for why, reason in census.incomplete_reasons.items()},
                "attempts": self.attempts,
                "errors": self.errors,
                "complaints": self.complaints,
                "seconds": round(self.seconds, 3),
                "store": str(self.store.resolve()),
            }
        )


def run_command(command: Sequence[str], options: RunOptions) -> Captured:
    """Run a command and count its calls. Raises `UserError` if it cannot start."""
    sys.path.insert(0, str(Path.cwd()))  # scripts are imported from the current folder
    recording = None if options.replay is None else _recording(options.replay, options)
    config = _config(command, options) if recording is None else recording.config
    check_servers(config)
    cassette = [] if recording is None else asyncio.run(calls_of(recording))
    folder = _folder(options.run_dir)
    try:
        return run(_run(command, config, folder, recording, cassette))
    except Interrupted as stop:
        hint = f"see what was captured: lightningrl rollouts {shlex.quote(str(folder))} --report"
        raise Stopped(f"stopped by {stop.signal.name}", hint=hint, exit_code=stop.exit_code) from None


def show(captured: Captured, console: Console) -> None:
    """Print a table of what was captured, with reasons and refused requests."""
    census = captured.census
    colour = "green" if captured.exit_code == 0 else "red"
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column(style="dim", justify="right")
    table.add_column()
    table.add_row("exit code", Text(str(captured.exit_code), style=colour))
    captures = [f"{census.captures[capture]} {capture}" for capture in CAPTURES if census.captures[capture]]
    table.add_row("calls", Text(f"{census.calls}" + (f"   {' · '.join(captures)}" if captures else "")))
    for capture, reasons in census.reasons().items():
        for why, reason in reasons.items():
            if captured.played is not None and why.startswith(DIFFERS):
                continue  # the row `unknown` has it
            table.add_row(capture, Text(f"{reason.calls} × {why}", style="yellow"))
    if captured.played is not None:
        captured.played.add_rows(table)
    for error, times in captured.errors.items():
        if captured.played is not None and error.endswith(" replay_differs"):
            continue  # so does it have this
        table.add_row("refused", Text(f"{times} × {error}: {captured.complaints[error]}", style="red"))
    read = f"{census.prompt_tokens:,} read, {census.new_tokens:,} of them new"
    table.add_row("tokens", f"{census.sampled_tokens:,} sampled · {read}")
    for title, counts in (("dialects", census.dialects), ("agents", census.agents)):
        if counts:
            table.add_row(title, tally(counts, most=8))
    table.add_row("records", Text(f"lightningrl rollouts {captured.store.parent} --report"))
    console.print()
    say(console, ("captured", "bold"))
    console.print(table)
    if not census.calls:
        why = "it never called the model; check that it reads its base URL from the environment (docs/gateway.md)"
        say(console, ("hint: ", "yellow"), why)


async def _run(
    command: Sequence[str], config: Config, folder: Path, recording: Cassette | None, cassette: list[Call]
) -> Captured:
    began = time.monotonic()
    path = folder / "store.sqlite"
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(config.gateway))
        source = _model_folder(config, config.model.path) if recording is None else recording.template
        save_recording(config, folder, template=source)
        template = ChatTemplate.load(source)
        engines = await _engines(stack, config, folder, template) if recording is None else {}
        store = await open_store(f"sqlite://{path.resolve()}", exclusive=True)
        stack.push_async_callback(store.close)
        guests = Guests(store)
        attempt = await guests.attempt()
        gateway = make_gateway(
            config, store=store, template=template, engines=engines, visitors=guests, cassette=cassette
        )
        async with opened(gateway, sock) as base_url:
            codex_home = make_codex_home(folder / "codex", gateway=base_url)
            env = process_environment(
                base_url,
                key=attempt.token,
                inherit=EVERYTHING,
                secrets=config.secrets(),
                wishes=config.agent.env,
                codex_home=codex_home,
            )
            code = await run_foreground(command, env)
        for guest in guests.attempts.values():
            error = None if code == 0 else f"AgentError: `{command[0]}` exited with code {code}"
            await store.finish(guest.id, "failed" if code else "succeeded", error=error)
        calls = await store.calls([guest.id for guest in guests.attempts.values()])
    return Captured(
        exit_code=code,
        seconds=time.monotonic() - began,
        census=_census(calls),
        attempts=len(guests.attempts),
        errors=gateway.refusals,
        complaints=gateway.complaints,
        store=path,
        played=played(calls, recorded=len(cassette)) if cassette else None,
    )


async def _engines(stack: AsyncExitStack, config: Config, folder: Path, template: ChatTemplate) -> Mapping[str, Engine]:
    """The engine of each policy. The stack closes them."""
    folders = {path: _model_folder(config, path) for path in set(model_paths(config).values())}
    fleet = None
    if config.engine.owns_vllm:
        from lightningrl.servers import owned_fleet  # loads torch

        serving = owned_fleet(config, folders, folder, say=_waiting_for, training=False)
        fleet = await stack.enter_async_context(serving)
    engines = make_engines(config, folders, template=template, fleet=fleet, root=Path.cwd())
    for engine in engines.values():
        stack.push_async_callback(engine.close)
    return engines


def _census(calls: Sequence[Call]) -> Census:
    """Counts over the calls of all attempts. `calls`: attempt by attempt."""
    census = Census()
    for _, own in groupby(calls, key=lambda call: call.attempt_id):
        census.add(list(own))
    return census


def _recording(path: Path, options: RunOptions) -> Cassette:
    """The run that answers. Raises `UserError` for an option that names something else."""
    others = {"--engine": options.engine, "--model": options.model, "--url": options.urls, "--recipe": options.recipe}
    others |= {"--set": options.overrides, "--route": options.routes}
    given = [name for name, value in others.items() if value]
    if given:
        hint = f"leave out {' and '.join(f'`{name}`' for name in given)}: the recording has the settings of its run"
        raise UserError(f"`--replay` answers in place of a model, so `{given[0]}` has no effect", hint=hint)
    return cassette_at(path)


def _config(command: Sequence[str], options: RunOptions) -> Config:
    """The settings: the recipe's or plain ones, then overrides, then options of the command line."""
    flags: list[str] = []
    if options.engine is not None:
        flags.append(f"engine.name={json.dumps(options.engine)}")
    if options.model is not None:
        flags.append(f"model.path={json.dumps(options.model)}")
    if options.urls:
        flags.append(f"engine.urls={json.dumps(list(options.urls))}")
    overrides = [*options.overrides, *flags]
    if options.recipe is not None:
        config = load_config(options.recipe, overrides)
    else:
        config = make_config(_plain_tree(command, options), overrides, folder=Path.cwd(), where="--set")
    if not options.routes:
        return config
    routes = [*map(_route, options.routes), *config.routes]
    return Config.model_validate({**config.model_dump(), "routes": [route.model_dump() for route in routes]})


def _plain_tree(command: Sequence[str], options: RunOptions) -> dict[str, Any]:
    name = options.engine
    if name is None and options.model is None:
        if not any("policy=upstreams." in route for route in options.routes):
            hint = "give `--engine pkg.module:attr` (a script), `--model FOLDER`, or `--route policy=upstreams.NAME`"
            raise UserError("there is no model to call: neither `--engine` nor `--model` was given", hint=hint)
        name = NOWHERE
    engine: dict[str, Any] = {"name": name or "embedded", "max_length": MAX_LENGTH}
    if engine["name"] in names("engine"):
        if options.model is None:
            raise UserError(
                f"engine `{engine['name']}` needs a model",
                hint="give `--model FOLDER`; its tokenizer and chat template are used",
            )
        engine["max_length"] = _context(options.model)
    if engine["name"] == "embedded":
        engine |= EMBEDDED | {"max_length": min(engine["max_length"], EMBEDDED["max_length"])}
    return {
        "name": "run",
        "agent": {"command": list(command)},
        "model": {"path": options.model or str(PLAIN)},
        "engine": engine,
        "gateway": {"strict": True},  # strict calls are not trained, and nothing is trained here
    }


def _waiting_for(what: str) -> None:
    """Tell what the start of an engine waits for; the command starts afterwards."""
    if what:
        say(make_console(stderr=True), what)


def _route(text: str) -> RouteConfig:
    """`model=checker,policy=frozen`"""
    pairs = [pair.partition("=") for pair in text.split(",")]
    known = RouteConfig.model_fields
    for name, equals, _ in pairs:
        if not equals or name.strip() not in known:
            raise UserError(
                f"route `{text}` has no part `{name}`",
                hint=f"write it as `model=checker,policy=frozen`; parts: {', '.join(known)}",
            )
    return RouteConfig.model_validate({name.strip(): value.strip() for name, _, value in pairs})


def _model_folder(config: Config, path: str) -> Path:
    beside = config.root / Path(path).expanduser()
    if beside.is_dir():
        return beside
    from lightningrl.models.load import local_folder  # loads torch; knows the hub

    return Path(local_folder(path, root=config.root))


def _context(model: str) -> int:
    """Context length of the model, from its config.json; 32768 if that does not say."""
    try:
        settings = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 32768
    limit = settings.get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit >= 16 else 32768


def _folder(path: Path | None) -> Path:
    """The folder `path`, which must hold no run; None: a new one under `runs/`."""
    if path is not None:
        if (path / "store.sqlite").exists():
            raise UserError(f"`{path}` holds a run already", hint="give another `--run-dir`")
        path.mkdir(parents=True, exist_ok=True)
        return path
    first = dated("run")
    RUNS.mkdir(exist_ok=True)
    for number in range(1, 1000):
        path = first if number == 1 else first.with_name(f"{first.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:  # another run began in the same second
            continue
        return path
    raise UserError(f"`{RUNS}` has too many runs of this second", hint="give a `--run-dir`")
