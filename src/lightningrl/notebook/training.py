"""Trains a recipe from Python in a process of its own, with the same weights as on the command line.

    notebook or script            child process (child.py)
    orders on stdin          →    `lightningrl train`
    errors are raised        ←    result or error on stdout, progress on stderr

In a process of its own, training reads the recipe's Python files anew, does not meet the notebook's event loop, threads
or settings of torch, and leaves no memory behind. It ends when this process ends.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from lightningrl import errors
from lightningrl.cli.extras import require
from lightningrl.cli.folder import RunFolder, new_folder, resumed_folder
from lightningrl.errors import LightningError
from lightningrl.notebook.orders import overrides_of
from lightningrl.notebook.run import Run
from lightningrl.notebook.screen import Cell, Lines
from lightningrl.recipe import load_config

REFRESH_S = 1.0
"""A notebook's output is drawn anew this often."""
COLOURS = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables that make rich draw a live panel into a pipe. A notebook's kernel sets the first."""
KINDS = {kind.__name__: kind for kind in (errors.UserError, errors.AgentError, errors.GraderError, errors.EngineError)}
"""Errors that keep their class on the way from the training process."""


def train(
    recipe: str | Path,
    *,
    steps: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Train the model inside a recipe's agent, wait for the end, and return the run.

    It does what `lightningrl train` does, in a process of its own, and shows the progress on the terminal or in the
    notebook. An interrupt (Ctrl-C, or a notebook's stop button) ends the training in order and is raised again; the run
    can be resumed.

    Args:
        recipe: path of a recipe.toml, or of its folder
        steps: number of training steps, in place of the recipe's
        overrides: settings in place of the recipe's, such as `{"loop.group_size": 8}`
        run_dir: the run's folder; None: a new one under `runs/`
        resume: continue an interrupted run: that in `run_dir`, or the latest run of this recipe
        quiet: show nothing

    Raises:
        UserError: the recipe, a setting or the machine does not allow the run; it has a hint
        LightningError: the run cannot continue
    """
    require("train")
    given = overrides_of({**(overrides or {}), **({} if steps is None else {"loop.steps": steps})})
    config = load_config(Path(recipe), given)
    path = None if run_dir is None else Path(run_dir)
    folder = resumed_folder(config, path) if resume else new_folder(config, path)
    lines = Lines()
    cell = Cell(folder, lines, steps=config.loop.steps) if Console().is_jupyter and not quiet else None
    process = _start(piped=quiet or cell is not None)
    orders = {"recipe": str(recipe), "overrides": given, "run_dir": str(folder.path), "resume": resume}
    _follow(process, orders, cell=cell, lines=lines, folder=folder)
    return Run(folder.path)


def _start(*, piped: bool) -> subprocess.Popen[str]:
    """Start the training process. Without `piped`, its progress goes where ours goes."""
    kept = {name: value for name, value in os.environ.items() if not piped or name not in COLOURS}
    return subprocess.Popen(
        [sys.executable, "-m", "lightningrl.notebook.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if piped else None,
        env=kept,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # an interrupt reaches this process alone, which passes it on once
    )


def _follow(
    process: subprocess.Popen[str], orders: Mapping[str, Any], *, cell: Cell | None, lines: Lines, folder: RunFolder
) -> None:
    """Send the orders, show the progress until the end, and raise the error that the training ended with."""
    answer = Lines()
    with process:
        readers = [_reading(process.stdout, answer), _reading(process.stderr, lines)]
        try:
            _send(process, orders)
            _wait(process, cell)
        except KeyboardInterrupt as interrupt:
            if folder.config.exists():
                resume = f'lightningrl.train("{folder.config}", run_dir="{folder.path}", resume=True)'
                interrupt.add_note(f"finished steps are kept; continue with: {resume}")
            raise
        finally:
            _end(process)
            for reader in readers:
                reader.join()
            if cell is not None:
                cell.draw(ended=True)
    _raise_error(process.returncode, answer.last(1), lines)


def _reading(pipe: Any, lines: Lines) -> threading.Thread:
    """A thread that reads a pipe until its end; None: nothing is piped."""

    def read() -> None:
        for text in pipe or ():
            lines.add(text)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _send(process: subprocess.Popen[str], orders: Mapping[str, Any]) -> None:
    """The pipe stays open: its end tells the process that this one is gone."""
    assert process.stdin is not None, "it is piped"
    os.write(process.stdin.fileno(), json.dumps(orders).encode() + b"\n")


def _wait(process: subprocess.Popen[str], cell: Cell | None) -> None:
    while True:
        if cell is not None:
            cell.draw()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=REFRESH_S)
            return


def _end(process: subprocess.Popen[str]) -> None:
    """Let the process end in order, if it has not ended. A second interrupt ends it at once."""
    if process.poll() is not None:
        return
    process.terminate()  # not SIGINT: it may be ignored here, and the process inherits that
    try:
        process.wait()
    except KeyboardInterrupt:
        process.kill()
        process.wait()


def _raise_error(code: int, answer: list[str], lines: Lines) -> None:
    """Raise the error that the process has told of. An exit code without such an error is one, too."""
    if code == 0:
        return
    try:
        told = json.loads(answer[0]) if answer else {}
    except ValueError:
        told = {}
    if "error" in told:
        raise KINDS.get(told["error"], LightningError)(told["message"], hint=told["hint"])
    said = "\n".join(lines.last(20)) or "see what it wrote above"
    raise LightningError(f"the training process has ended with exit code {code}: {said}")
