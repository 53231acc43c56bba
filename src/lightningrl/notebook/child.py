"""The process in which `lightningrl.train` trains: `python -m lightningrl.notebook.child`, with its orders on stdin.

stdin:  {"recipe": PATH, "overrides": [KEY=VALUE, …], "run_dir": PATH, "resume": BOOL}, a newline; it stays open
stdout: the last line is the result, as `lightningrl train --json` prints it, or {"error": …, "message": …, "hint": …}

When its stdin ends, the process that asked for the training is gone. The training then stops as after a SIGTERM.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import typer

from lightningrl.cli.app import main, train
from lightningrl.errors import LightningError


def run(orders: dict[str, Any]) -> None:
    """Train as `lightningrl train` does. An error is told on stdout, for the other process to raise it."""
    try:
        train(
            Path(orders["recipe"]),
            orders["overrides"],
            run_dir=Path(orders["run_dir"]),
            resume=orders["resume"],
            as_json=True,
        )
    except LightningError as error:
        typer.echo(json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint}))
        raise SystemExit(error.exit_code) from None


def stop_with_stdin() -> None:
    """Wait for the end of stdin, then stop this process in order."""
    os.read(sys.stdin.fileno(), 1)  # nothing more is written to it, so this returns when it is closed
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    given = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=stop_with_stdin, daemon=True).start()
    main(lambda: run(given))
