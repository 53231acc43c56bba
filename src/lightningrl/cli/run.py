"""`lightningrl run -- CMD …`: any program, led to a gateway of its own; then, what was captured."""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightningrl.chat import ChatTemplate
from lightningrl.cli.console import say
from lightningrl.cli.folder import RUNS
from lightningrl.cli.stop import Interrupted, run
from lightningrl.config import Config, RouteConfig
from lightningrl.engines import make_engines, model_paths
from lightningrl.errors import Stopped, UserError
from lightningrl.gateway.assembly import make_gateway, opened
from lightningrl.gateway.routing import FROZEN
from lightningrl.gateway.scripted import PLAIN
from lightningrl.gateway.server import bound
from lightningrl.gateway.visitors import Guests
from lightningrl.look.census import CAPTURES, Census
from lightningrl.plugins import names
from lightningrl.recipe import load_config, make_config
from lightningrl.runner.environment import EVERYTHING, make_codex_home, process_environment
from lightningrl.runner.foreground import run_foreground
from lightningrl.store import Store, open_store

SCRIPT_LENGTH = 1_000_000
"""Tokens that fit before a script: what it says is up to it."""
EMBEDDED = {"slots": 2, "max_length": 4096}
"""For one agent at a time: 3.7 GB of keys and values for a model of Qwen3-0.6B's shape in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a person has typed."""

    engine: str | None
    model: str | None
    urls: Sequence[str]
    recipe: Path | None
    overrides: Sequence[str]
    routes: Sequence[str]
    run_dir: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a command has done, as `--json` prints it (see docs/gateway.md)."""

    exit_code: int
    seconds: float
    census: Census
    attempts: int
    errors: Mapping[str, int]
    """Requests that were refused: status and code → how often."""
    complaints: Mapping[str, str]
    """The same → what was said the first time."""
    store: Path

    def as_json(self) -> str:
        census = self.census
        return json.dumps(
            {
                "exit_code": self.exit_code,
                "calls": census.calls,
                **{capture: census.captures[capture] for capture in CAPTURES},
                "partly_reasons": {why: reason.calls for why, reason in census.partly_reasons.items()},
                "fork_reasons": {why: reason.calls for why, reason in census.fork_reasons.items()},
                "incomplete_reasons": {why: reason.calls for why, reason in census.incomplete_reasons.items()},
                "sampled_tokens": census.sampled_tokens,
                "prompt_tokens": census.prompt_tokens,
                "reused_tokens": census.reused_tokens,
                "dialects": census.dialects,
                "agents": census.agents,
                "attempts": self.attempts,
                "errors": self.errors,
                "complaints": self.complaints,
                "seconds": round(self.seconds, 3),
                "store": str(self.store.resolve()),
            }
        )


def run_command(command: Sequence[str], options: RunOptions) -> Captured:
    """Run it, and count. Raises `UserError` for what keeps it from starting."""
    sys.path.insert(0, str(Path.cwd()))  # scripts are imported from where they are named
    config = _config(command, options)
    folder = _folder(options.run_dir)
    try:
        return run(_run(command, config, folder))
    except Interrupted as stop:
        hint = f"what was captured until then: lightningrl rollouts {shlex.quote(str(folder))} --report"
        raise Stopped(f"stopped by {stop.signal.name}", hint=hint, exit_code=stop.exit_code) from None


def show(captured: Captured, console: Console) -> None:
    """A small table: how the calls came about, and whatever a person should look at."""
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
            table.add_row(capture, Text(f"{reason.calls} × {why}", style="yellow"))
    for said, times in captured.errors.items():
        table.add_row("refused", Text(f"{times} × {said}: {captured.complaints[said]}", style="red"))
    new = census.prompt_tokens - census.reused_tokens
    table.add_row("tokens", f"{census.sampled_tokens:,} sampled · {census.prompt_tokens:,} read, {new:,} of them new")
    for title, counts in (("dialects", census.dialects), ("agents", census.agents)):
        if counts:
            table.add_row(
                title, Text(" · ".join(f"{name or '(no name)'} {times}" for name, times in counts.most_common(8)))
            )
    table.add_row("records", Text(f"lightningrl rollouts {captured.store.parent} --report"))
    console.print()
    say(console, ("captured", "bold"))
    console.print(table)
    if not census.calls:
        say(
            console,
            ("hint: ", "yellow"),
            "it never called the model: does it take its base URL from the environment? (docs/gateway.md)",
        )


async def _run(command: Sequence[str], config: Config, folder: Path) -> Captured:
    began = time.monotonic()
    path = folder / "store.sqlite"
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(config.gateway))
        template = ChatTemplate.load(_model_folder(config, config.model.path))
        _check_routes(config)
        folders = {path: _model_folder(config, path) for path in set(model_paths(config).values())}
        engines = make_engines(config, folders, template=template, root=Path.cwd())
        for engine in engines.values():
            stack.push_async_callback(engine.close)
        store = await open_store(f"sqlite://{path.resolve()}", exclusive=True)
        stack.push_async_callback(store.close)
        guests = Guests(store)
        attempt = await guests.attempt()
        gateway = make_gateway(config, store=store, template=template, engines=engines, visitors=guests)
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
        census = await _count(store, [guest.id for guest in guests.attempts.values()])
    return Captured(
        exit_code=code,
        seconds=time.monotonic() - began,
        census=census,
        attempts=len(guests.attempts),
        errors=gateway.refusals,
        complaints=gateway.complaints,
        store=path,
    )


async def _count(store: Store, attempt_ids: Sequence[str]) -> Census:
    census = Census()
    for attempt_id in attempt_ids:
        census.add(await store.calls([attempt_id]))
    return census


def _config(command: Sequence[str], options: RunOptions) -> Config:
    """The recipe's settings, or plain ones; over them the overrides, over them what has a flag of its own."""
    flags: list[str] = []
    if options.engine is not None:
        flags.append(f"engine.name={json.dumps(options.engine)}")
    if options.model is not None:
        flags.append(f"model.path={json.dumps(options.model)}")
    if options.urls:
        flags.append(f"engine.urls={json.dumps(list(options.urls))}")
    if options.recipe is not None:
        config = load_config(options.recipe, [*options.overrides, *flags])
    else:
        config = make_config(
            _plain_tree(command, options), [*options.overrides, *flags], folder=Path.cwd(), where="--set"
        )
    routes = [_route(text) for text in options.routes]
    return config.model_copy(update={"routes": [*routes, *config.routes]}) if routes else config


def _plain_tree(command: Sequence[str], options: RunOptions) -> dict[str, Any]:
    if options.engine is None and options.model is None:
        hint = "`--engine pkg.module:attr` (a script or an engine), or `--model FOLDER` for the embedded engine"
        raise UserError("nobody is there to answer: neither `--engine` nor `--model` was given", hint=hint)
    engine: dict[str, Any] = {"max_length": SCRIPT_LENGTH}
    if (options.engine or "embedded") in names("engine"):
        if options.model is None:
            raise UserError(
                f"engine `{options.engine}` needs a model",
                hint="`--model FOLDER`: its tokenizer and chat template are read there",
            )
        engine = {"max_length": _context(options.model)}
    if options.engine in (None, "embedded"):
        engine = {**EMBEDDED, "max_length": min(engine["max_length"], EMBEDDED["max_length"])}
    nothing = "nothing:here"  # no rewards, no tasks: a command is run once, and not graded
    return {
        "name": "run",
        "agent": {"command": list(command), "reward": nothing},
        "tasks": {"source": nothing},
        "model": {"path": options.model or str(PLAIN)},
        "engine": engine,
        "gateway": {"strict": True},  # nothing is trained from a single command
    }


def _route(text: str) -> RouteConfig:
    """`model=checker,policy=frozen`"""
    pairs = [pair.partition("=") for pair in text.split(",")]
    known = RouteConfig.model_fields
    for name, equals, _ in pairs:
        if not equals or name.strip() not in known:
            raise UserError(
                f"route `{text}`: `{name}` is no part of one",
                hint=f"`model=checker,policy=frozen`; parts: {', '.join(known)}",
            )
    return RouteConfig.model_validate({name.strip(): value.strip() for name, _, value in pairs})


def _model_folder(config: Config, path: str) -> Path:
    beside = config.root / Path(path).expanduser()
    if beside.is_dir():
        return beside
    from lightningrl.models.load import local_folder  # loads torch; knows the hub

    return Path(local_folder(path, root=config.root))


def _check_routes(config: Config) -> None:
    known = [*config.learners(), FROZEN, *(f"upstreams.{name}" for name in config.upstreams)]
    for route in config.routes:
        if route.policy not in known:
            hint = f"known: {', '.join(known)}; an upstream is set by `--set upstreams.NAME.url=…`"
            raise UserError(f"a route leads to `{route.policy}`, which is nobody", hint=hint)


def _context(model: str) -> int:
    """Tokens that the model was made for, as its folder says; many where it does not."""
    try:
        settings = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 32768
    limit = settings.get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit >= 16 else 32768


def _folder(path: Path | None) -> Path:
    """A new one under `runs/`, or an empty one of the person's choice."""
    if path is not None:
        if (path / "store.sqlite").exists():
            raise UserError(f"`{path}` holds a run already", hint="give another `--run-dir`")
        path.mkdir(parents=True, exist_ok=True)
        return path
    stem = f"run-{time.strftime('%Y%m%d-%H%M%S')}"
    RUNS.mkdir(exist_ok=True)
    for number in range(1, 1000):
        path = RUNS / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:  # another run of this second
            continue
        return path
    raise UserError(f"`{RUNS}` is full of runs of this second", hint="give a `--run-dir`")
